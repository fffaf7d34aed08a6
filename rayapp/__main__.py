"""python -m rayapp COMMAND [CONFIG.yaml] [--section.field=value ...] [--option=value ...]

An installed rayapp has the same as `rayapp COMMAND`. `--version` prints the version,
`COMMAND --help` the options of a command.

finetune  train a language model on Ray;   vision    train an image classifier
plan      will it fit, how long will it take, what will it cost
stage     copy images to where they are trained on, verified
preflight check the cluster before money is spent: GPUs, network, limits, storage
submit    send a run to a cluster as a Ray job;   resume    send it again
list      the runs of a folder or of a cluster;   status    how one is getting on
watch     the same, live;   logs    what its driver prints
stop      save and leave
render    the files of a cluster on ECS or KubeRay, and what it costs
connect   forward a cluster's dashboard and Jobs API to this machine
report    report.html of a run, or one page that compares several
generate  let a run's model write

Exit codes: 0 done (or still going on), 1 failed, 2 not possible as asked, 3 stopped on request.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version

from rayapp.config import ConfigError
from rayapp.observe.run_folder import Exit

COMMANDS = {  # name: module and function in rayapp
    "finetune": "finetune.__main__.main",
    "vision": "vision.__main__.main",
    "plan": "cli.planning.plan",
    "stage": "cli.staging.stage",
    "preflight": "cli.jobs.preflight",
    "submit": "cli.jobs.submit",
    "resume": "cli.jobs.resume",
    "list": "cli.jobs.runs",
    "status": "cli.jobs.status",
    "watch": "cli.jobs.watch",
    "logs": "cli.jobs.logs",
    "stop": "cli.jobs.stop",
    "render": "cli.clusters.render",
    "connect": "cli.clusters.connect",
    "report": "cli.results.report",
    "generate": "cli.results.generate",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command, by default the one this process was started with; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(f"rayapp {version('rayapp')}")
        return Exit.DONE
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(__doc__)
        return Exit.DONE if argv else Exit.REFUSED
    if argv[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Set one of {', '.join(COMMANDS)}"
        print(f"command={argv[0]} is unknown: there is no such command. {hint}", file=sys.stderr)
        return Exit.REFUSED
    module, _, function = COMMANDS[argv[0]].rpartition(".")
    command = getattr(importlib.import_module(f"rayapp.{module}"), function)
    try:
        return int(command(argv[1:]))
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return Exit.REFUSED


if __name__ == "__main__":
    sys.exit(main())
