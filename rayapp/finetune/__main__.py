"""python -m rayapp.finetune [CONFIG.yaml] [--section.field=value ...]"""

from __future__ import annotations

import sys
import time

from rich.console import Console

from rayapp import arguments
from rayapp.config import ConfigError, fields
from rayapp.credentials import SecretError
from rayapp.storage import StorageError

STARTED = time.time()
DONE, FAILED, BAD_CONFIG, STOPPED = 0, 1, 2, 3


def main(argv: list[str], started: float | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 failed, 2 bad config, 3 stopped."""
    if "--help" in argv or "-h" in argv:
        print(__doc__, *(f"  --{name}: {text}" for name, text in fields().items()), sep="\n")
        return DONE
    try:
        config, _ = arguments.read(argv, {})
    except ConfigError as error:
        return _refuse(error)
    from rayapp.finetune.driver import RunFailed, finetune  # seconds of imports, only now needed

    try:
        result = finetune(config, Console(), started)
    except ConfigError as error:
        return _refuse(error)
    except (RunFailed, SecretError, StorageError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    return DONE if result["status"] == "done" else STOPPED


def _refuse(error: ConfigError) -> int:
    for problem in error.problems:
        print(problem, file=sys.stderr)
    return BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], STARTED))
