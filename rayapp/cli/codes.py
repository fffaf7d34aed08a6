"""Exit codes of all commands."""

DONE, FAILED, BAD_CONFIG, STOPPED = 0, 1, 2, 3
