"""python -m rayapp.finetune [CONFIG.yaml] [--section.field=value ...]"""

from __future__ import annotations

import sys
import time

import fire
from rich.console import Console

from rayapp.config import Config, ConfigError, fields, load
from rayapp.storage import StorageError

STARTED = time.time()
DONE, FAILED, BAD_CONFIG, STOPPED = 0, 1, 2, 3


def read_arguments(argv: list[str]) -> Config:
    """Turn the command line into a Config; fire reads it, every value stays a string.

    Raises:
        ConfigError: with every problem.
    """

    @fire.decorators.SetParseFn(str)
    def collect(*paths: str, **overrides: str) -> tuple[tuple[str, ...], dict[str, str]]:
        return paths, overrides

    paths, overrides = fire.Fire(collect, command=argv, serialize=lambda _: None)
    if len(paths) > 1:
        raise ConfigError(
            [
                f"{' '.join(paths[1:])} is unexpected: one config file is read. "
                "Write --section.field=value"
            ]
        )
    return load(paths[0] if paths else None, overrides)


def main(argv: list[str], started: float | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 failed, 2 bad config, 3 stopped."""
    if "--help" in argv or "-h" in argv:
        print(__doc__, *(f"  --{name}: {text}" for name, text in fields().items()), sep="\n")
        return DONE
    try:
        config = read_arguments(argv)
    except ConfigError as error:
        return _refuse(error)
    from rayapp.finetune.driver import RunFailed, finetune  # seconds of imports, only now needed

    try:
        result = finetune(config, Console(), started)
    except ConfigError as error:
        return _refuse(error)
    except (RunFailed, StorageError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    return DONE if result["status"] == "done" else STOPPED


def _refuse(error: ConfigError) -> int:
    for problem in error.problems:
        print(problem, file=sys.stderr)
    return BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], STARTED))
