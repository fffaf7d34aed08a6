"""rayapp submit, preflight, resume, watch, logs and stop: Ray jobs and what they train."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import cast

import yaml

from rayapp.cli import Command, documented
from rayapp.config import ConfigError, arguments, parse_yaml
from rayapp.jobs import SubmitOptions
from rayapp.jobs.find import job
from rayapp.jobs.handle import Job
from rayapp.jobs.remote import Again
from rayapp.observe.run_folder import EXIT_CODES, Exit

RUN = "RUN (a run's folder, or its name with --storage or on the cluster)"
WHERE = {"storage": "none", "address": "none"}

SUBMIT = """rayapp submit [CONFIG.yaml] [--section.field=value ...]

  --address=URL         dashboard of the cluster; by default RAY_API_SERVER_ADDRESS or port 8265
  --working_dir=FOLDER  folder to upload and to run in; nothing is uploaded by default
  --pip=LIST            comma-separated pinned requirements that the image lacks
  --env='{A: b}'        environment variables; everybody who sees the job sees them
  --secrets='{A: ARN}'  environment variables from Secrets Manager or SSM, by reference
  --driver_cpus=N       CPUs reserved for the driver; --driver_memory_gib=N
  --tags='{A: b}'       tags that are shown with the job
  --follow              print the driver's output; return the run's exit code
  --wait                wait until the run ends; return the run's exit code"""

RESUME = """rayapp resume RUN [--storage=URL] [--address=URL] [--follow] [--wait]

  --working_dir=FOLDER, --pip, --env, --secrets   as for submit: give each again, or `none`; they
                        are not read from the run's folder, because others may be able to write it
  --code=LIST           comma-separated list of your functions that the folder's config names"""

LOGS = """rayapp logs RUN [--storage=URL] [--address=URL] [--follow]

  --follow      print new output until the run ends; return the run's exit code
  --attempt=N   print the log of attempt N in the run's folder; by default the newest log
  --rank=R      print the error and traceback of rank R, if rank R failed in that attempt"""

PREFLIGHT = """rayapp preflight [CONFIG.yaml] [--section.field=value ...]

  --json               print everything as JSON
  --min_gbit_per_s=N   required rate of a link between two nodes; default: by cluster.instance
  --timeout_s=180      maximum seconds to wait for each answer

--address, --working_dir, --pip, --env, --secrets, --driver_cpus and --tags: as for submit"""

EXPLAINED = {  # what many commands take
    "--storage": "--storage=URL  folder or s3:// prefix of runs; by default `runs`, if it exists",
    "--address": "--address=URL  cluster's dashboard; default: RAY_API_SERVER_ADDRESS or port 8265",
    "--json": "--json         print everything as JSON",
    "--follow": "--follow       print the driver's output; return the run's exit code",
    "--wait": "--wait         wait until the run ends; return the run's exit code",
    "--wait_s": "--wait_s=600   seconds to wait until the run has saved and ended; 0 does not wait",
}

SHIPPED = {"working_dir": "none", "pip": "", "env": "{}", "secrets": "{}", "tags": "{}"}
SHIPPED |= {"driver_cpus": "0", "driver_memory_gib": "0", "address": "none"}


def command(text: str) -> Callable[[Command], Command]:
    """Print the text if help is asked for.

    An option of the text's first line that no other line explains is explained as in EXPLAINED.
    """
    usage, _, rest = text.partition("\n")
    options = re.findall(r"--\w+(?![\w.])", usage)
    lines = [f"  {EXPLAINED[option]}" for option in options if f"  {option}" not in rest]
    if " RUN" in usage:
        lines.insert(0, f"  RUN            {RUN.partition(' ')[2].strip('()')}")
    return documented("\n\n".join(filter(None, [usage, "\n".join(lines), rest.strip("\n")])))


@command(SUBMIT)
def submit(argv: list[str]) -> int:
    """Send a run; see SUBMIT."""
    known = {**SHIPPED, "follow": "false", "wait": "false"}
    config, asked = arguments.read(arguments.flags(argv, {"follow", "wait"}), known)
    return _after(Job.send(config, _submit_options(asked), or_none(asked["address"])), asked)


@command(PREFLIGHT)
def preflight(argv: list[str]) -> int:
    """Check a cluster, in a job of its own; return what it finds: 0 nothing, 1 something."""
    from rayapp.cluster.preflight import OPTIONS, send

    config, asked = arguments.read(arguments.flags(argv, {"json"}), {**SHIPPED, **OPTIONS})
    own = {name: asked[name] for name in OPTIONS}
    cluster, submission_id = send(config, _submit_options(asked), or_none(asked["address"]), own)
    for text in cluster.follow(submission_id):
        print(text, end="", flush=True)
    info = cluster.wait(submission_id)
    if info.exit_code is None:
        print(f"failed: job {submission_id} {info.status}: {info.message}", file=sys.stderr)
    return Exit.FAILED if info.exit_code is None else info.exit_code


@command(RESUME)
def resume(argv: list[str]) -> int:
    """Send a run again; it goes on from its newest checkpoint; see RESUME."""
    argv = arguments.flags(argv, {"follow", "wait"})
    options = {name: SHIPPED[name] for name in Again.__annotations__}
    handle, asked = handle_of(argv, {"follow": "false", "wait": "false", "code": "", **options})
    named = arguments.split(argv)[1]
    changed = _submit_options({**SHIPPED, **asked})
    given = {name: getattr(changed, name) for name in options if name in named}
    code = asked["code"].replace(",", " ").split()
    return _after(handle.resume(or_none(asked["address"]), code=code, **cast(Again, given)), asked)


@command("rayapp watch RUN [--storage=URL] [--address=URL]")
def watch(argv: list[str]) -> int:
    """Show a run until it ends, and return what it returned."""
    from rayapp.jobs import terminal

    handle, _ = handle_of(argv, {})
    try:
        return EXIT_CODES.get(terminal.show(handle), Exit.DONE)
    except KeyboardInterrupt:  # it goes on
        return Exit.DONE


@command(LOGS)
def logs(argv: list[str]) -> int:
    """Print what a run's driver prints; followed to its end, return what it returned; see LOGS."""
    options = {"follow": "false", "attempt": "none", "rank": "none"}
    handle, asked = handle_of(arguments.flags(argv, {"follow"}), options)
    given = [name for name in ("attempt", "rank") if or_none(asked[name]) is not None]
    chosen = {name: arguments.count(name, asked[name]) for name in given}
    if asked["follow"] == "true":
        return _follow(handle)
    print(handle.logs(**chosen), end="")
    return Exit.DONE


@command("rayapp stop RUN [--storage=URL] [--address=URL] [--wait_s=600]")
def stop(argv: list[str]) -> int:
    """Have a run save and leave; its job is ended if it has not after wait_s."""
    handle, asked = handle_of(argv, {"wait_s": "600"})
    state = handle.stop(arguments.number("wait_s", asked["wait_s"], zero=True))
    print(f"{handle.name} {state}")
    return EXIT_CODES.get(state, Exit.DONE)


def _submit_options(asked: dict[str, str]) -> SubmitOptions:
    pip = tuple(filter(None, (or_none(asked["pip"]) or "").split(",")))
    env, secrets, tags = (_mapping(name, asked[name]) for name in ("env", "secrets", "tags"))
    cpus, memory_gib = (
        arguments.number(name, asked[name], zero=True)
        for name in ("driver_cpus", "driver_memory_gib")
    )
    folder = or_none(asked["working_dir"])
    return SubmitOptions(folder, pip, env, secrets, cpus, memory_gib, tags)


def handle_of(
    argv: list[str], options: dict[str, str], find: Callable[..., Job] = job
) -> tuple[Job, dict[str, str]]:
    """Return the handle of the run that a command names, and the command's options."""
    run, asked = arguments.read_plain(argv, RUN, {**WHERE, **options})
    return find(run, **{name: or_none(asked[name]) for name in WHERE}), asked


def _after(handle: Job, asked: dict[str, str]) -> int:
    if asked["follow"] == "true":
        return _follow(handle)
    return EXIT_CODES[handle.wait()] if asked["wait"] == "true" else Exit.DONE


def _follow(handle: Job) -> int:
    for text in handle.follow():
        print(text, end="", flush=True)
    return EXIT_CODES[handle.wait()]


def or_none(text: str) -> str | None:
    """Return an option's text, None for `none`."""
    return None if text.lower() == "none" else text


def _mapping(name: str, text: str) -> dict[str, str]:
    """Return names and texts, each as it was typed."""
    try:
        values = parse_yaml("{}" if text.lower() == "none" else text, texts=True)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
        why = "it must be a mapping of names to texts"
        raise ConfigError([f"--{name}={text} is not valid: {why}. Set '{{A: b}}'"])
    return values
