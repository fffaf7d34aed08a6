"""Rows to train on: read, cut into tokens and packed once, and streamed from any step."""

FOLDER = ".prepared"  # beside the runs: what their data were made into
