"""rayapp finetune [CONFIG.yaml] [--section.field=value ...]

Runs CONFIG until it is done; the same command resumes it. `--help SECTION`
shows one section of these fields. `python -m rayapp.finetune` is the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rayapp.config import Config
from rayapp.driver import main as command_line

STARTED = time.time()


def main(argv: list[str], started: float | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 failed, 2 bad config, 3 stopped."""
    return command_line.main(argv, str(__doc__).strip(), Config, _load, started)


def _load() -> Callable[..., Mapping[str, Any]]:
    from rayapp.finetune.run import finetune

    return finetune


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], STARTED))
