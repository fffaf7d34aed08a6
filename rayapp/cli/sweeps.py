"""rayapp sweep: runs that differ in some fields of their config, under one budget."""

from __future__ import annotations

import json
import sys

from rayapp.cli import documented
from rayapp.config import arguments
from rayapp.observe.run_folder import DONE, FAILED, Exit

SWEEP = """rayapp sweep SWEEP.yaml [--option=value ...]

Tries values of the fields of a config, each in a run of its own, and names the best. The same
command goes on after a stop or a kill, or with a larger budget (docs/sweep.md).

  --json   print the result as JSON
  --name, --storage, --config, --trials, --seed, --scheduler, --metric, --mode, --max_usd,
  --max_hours, --concurrency   in place of the file's

Exit code 1: a trial has failed; 3: the budget or a user has stopped trials."""

FIELDS = "name storage config trials seed scheduler metric mode max_usd max_hours concurrency"


@documented(SWEEP, words=True)
def sweep(argv: list[str]) -> int:
    """Run a sweep; see SWEEP."""
    known = dict.fromkeys([*FIELDS.split(), "json"], "")
    path, asked = arguments.read_plain(arguments.flags(argv, {"json"}), "SWEEP.yaml", known)
    from rayapp import finetune
    from rayapp.observe.plain import Console

    as_json = asked.pop("json") == "true"
    console = Console(file=sys.stderr if as_json else None, force_jupyter=False)
    changes = {name: value for name, value in asked.items() if value}
    result = finetune.sweep(path, console, **changes)
    from rayapp.finetune import sweeping

    print(json.dumps(result, indent=2)) if as_json else sweeping.show_result(console, result)
    states = {row["state"] for row in result["trials"]}
    if FAILED in states:
        return Exit.FAILED
    return Exit.DONE if states <= {DONE, sweeping.ASHA} else Exit.STOPPED
