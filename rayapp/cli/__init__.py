"""What `rayapp COMMAND` does, a function each: argv in, exit code out.

first.py     init, completion
data.py      data, prepare
plans.py     plan, presets
clusters.py  render, capacity, connect
jobs.py      preflight, submit, resume, watch, logs, stop
runs.py      list, status
models.py    report, generate, check, merge, publish
space.py     du, rm, prune
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import wraps

from rayapp.observe.run_folder import Exit
from rayapp.storage import StorageError

Command = Callable[[list[str]], int]

COMMANDS = {  # name: module and function
    "init": "cli.first.init",
    "completion": "cli.first.completion",
    "finetune": "finetune.__main__.main",
    "vision": "vision.__main__.main",
    "data": "cli.data.data",
    "prepare": "cli.data.prepare",
    "plan": "cli.plans.plan",
    "presets": "cli.plans.presets",
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

RUN = "RUN (a run's folder, or its name with --storage or on the cluster)"
EXPLAINED = {  # what many commands take
    "--storage": "--storage=URL  folder or s3:// prefix of runs; by default `runs`, if it exists",
    "--address": "--address=URL  cluster's dashboard; default: RAY_API_SERVER_ADDRESS or port 8265",
    "--json": "--json         print everything as JSON",
    "--follow": "--follow       print the driver's output; return the run's exit code",
    "--wait": "--wait         wait until the run ends; return the run's exit code",
    "--wait_s": "--wait_s=600   seconds to wait until the run has saved and ended; 0 does not wait",
    "--hard": "--hard=true    end the job through Ray if it still runs then; false: do not",
}


def command(text: str, words: bool = False) -> Callable[[Command], Command]:
    """Print the text if help is asked for, and say in one line what a cluster or storage says.

    With `words`, the text is also printed where none are given. RUN and the options of the text's
    first line that no other line explains are explained as in RUN and EXPLAINED.
    """
    usage, _, rest = text.partition("\n")
    found = re.findall(r"--\w+(?![\w.])", usage)
    lines = [
        f"  {EXPLAINED[each]}" for each in found if each in EXPLAINED and f" {each}" not in rest
    ]
    if " RUN [--storage" in usage:
        lines.insert(0, f"  RUN            {RUN.partition(' ')[2].strip('()')}")
    whole = "\n\n".join(filter(None, [usage, "\n".join(lines), rest.strip("\n")]))

    def decorate(function: Command) -> Command:
        @wraps(function)
        def run(argv: list[str]) -> int:
            own = argv[: argv.index("--")] if "--" in argv else argv  # the rest is another command
            if "--help" in own or "-h" in own or (words and not own):
                print(whole)
                return Exit.DONE if own else Exit.REFUSED
            try:
                return function(argv)
            except (LookupError, OSError, RuntimeError) as error:
                return _told(error)

        return run

    return decorate


def command_of_words(text: str) -> Callable[[Command], Command]:
    """Make a command as `command` does; without words, it prints the text."""
    return command(text, words=True)


def _told(error: Exception) -> int:
    """Print what a cluster or storage says, or that a folder holds no run; raise another error."""
    from rayapp.cluster.connect import NotReachable
    from rayapp.jobs.client import JobError
    from rayapp.observe.status import NoRun

    if isinstance(error, NoRun):
        print(error, file=sys.stderr)
        return Exit.REFUSED
    if isinstance(error, JobError | NotReachable | StorageError):
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED
    raise error
