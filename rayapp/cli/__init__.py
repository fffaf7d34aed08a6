"""What `rayapp COMMAND` does, a function each: argv in, exit code out."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import TypeAlias

from rayapp.observe.run_folder import Exit
from rayapp.storage import StorageError

Command: TypeAlias = Callable[[list[str]], int]

COMMANDS = {  # name: module and function
    "init": "cli.first.init",
    "completion": "cli.first.completion",
    "finetune": "finetune.__main__.main",
    "vision": "vision.__main__.main",
    "data": "cli.data.data",
    "prepare": "cli.data.prepare",
    "plan": "cli.plans.plan",
    "presets": "cli.plans.presets",
    "sweep": "cli.plans.sweep",
    "preflight": "cli.jobs.preflight",
    "submit": "cli.jobs.submit",
    "resume": "cli.jobs.resume",
    "list": "cli.runs.runs",
    "status": "cli.runs.status",
    "watch": "cli.jobs.watch",
    "logs": "cli.jobs.logs",
    "stop": "cli.jobs.stop",
    "render": "cli.clusters.render",
    "capacity": "cli.clusters.capacity",
    "connect": "cli.clusters.connect",
    "report": "cli.models.report",
    "generate": "cli.models.generate",
    "check": "cli.models.check",
    "merge": "cli.models.merge",
    "publish": "cli.models.publish",
    "du": "cli.space.du",
    "rm": "cli.space.rm",
    "prune": "cli.space.prune",
}


def documented(text: str, words: bool = False) -> Callable[[Command], Command]:
    """Print the text if help is asked for, or where a command that needs `words` has none.

    What a storage or a cluster says is printed in one line.
    """

    def decorate(function: Command) -> Command:
        @wraps(function)
        def run(argv: list[str]) -> int:
            if "--help" in argv or "-h" in argv or (words and not argv):
                print(text)
                return Exit.DONE if argv or not words else Exit.REFUSED
            from rayapp.jobs import JobError
            from rayapp.observe.status import NoRun

            try:
                return function(argv)
            except (StorageError, JobError) as error:
                print(f"failed: {error}", file=sys.stderr)
                return Exit.FAILED
            except NoRun as error:
                print(error, file=sys.stderr)
                return Exit.REFUSED

        return run

    return decorate
