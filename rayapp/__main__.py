"""python -m rayapp COMMAND [CONFIG.yaml] [--section.field=value ...] [--option=value ...]

plan      will it fit, how long will it take, what will it cost
render    the files of a cluster on ECS or KubeRay, and what it costs
connect   forward a cluster's dashboard and Jobs API to this machine
report    report.html of a run, or one page that compares several
generate  let a run's model write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayapp.config import Config, ConfigError
from rayapp.formulas.memory import Layout

DONE, FAILED, BAD_CONFIG = 0, 1, 2

PLAN = """python -m rayapp plan [CONFIG.yaml | RUN FOLDER] [--section.field=value ...]

  --json               print everything as JSON
  --deadline_hours=H   find the cheapest machines that are done in H hours
  --budget_usd=D       find the cheapest machines for at most D dollars
  --region=NAME        AWS region of the prices; us-west-2 by default
  --usd_per_hour=D     price of one instance, e.g. spot, instead of the list's
  --trace              also run the real step on fake tensors (imports torch; seconds to minutes)"""


def plan(argv: list[str]) -> int:
    """Plan a run; see PLAN."""
    if "--help" in argv or "-h" in argv:
        print(PLAN)
        return DONE
    from rich.console import Console

    from rayapp import arguments, planner
    from rayapp.planner.report import show

    flags = {"json", "trace"}
    argv = [f"{word}=true" if word.removeprefix("--") in flags else word for word in argv]
    steps = None
    for number, word in enumerate(argv):
        if not word.startswith("-") and (Path(word) / "config.yaml").is_file():
            steps = planner.steps_of_run(word)
            argv[number] = str(Path(word) / "config.yaml")
    known = {
        "json": "false",
        "trace": "false",
        "region": "us-west-2",
        "deadline_hours": "none",
        "budget_usd": "none",
        "usd_per_hour": "none",
    }
    config, options = arguments.read(argv, known)
    limits = {name: _number(name, options[name]) for name in ("deadline_hours", "budget_usd")}
    found = planner.plan(
        config,
        region=options["region"],
        usd_per_hour=_number("usd_per_hour", options["usd_per_hour"]),
        steps=steps,
    )
    best = None
    if any(value is not None for value in limits.values()):
        best = planner.cheapest(found.question, **limits)
    others, table = planner.suggestions(found.question), planner.scaling(found.question)
    traced = _trace(config, found.question.layout) if options["trace"] == "true" else None
    if options["json"] == "true":
        values = planner.as_dict(found, others, table, best) | {"traced": traced}
        print(json.dumps(values, indent=2))
        return DONE
    show(Console(), found, others, table, best)
    if traced is not None:
        print(
            f"trace     {traced['peak_gib']:.2f} GiB by the real step on fake tensors, "
            f"{traced['planned_gib']:.2f} planned (both without slack)"
        )
    return DONE


def _trace(config: Config, layout: Layout) -> dict[str, float]:
    """Run the real step on fake tensors; return its peak and the plan's, both without slack."""
    from rayapp import trace
    from rayapp.formulas.memory import peak_memory

    found = trace.trace_config(config, layout)
    planned = peak_memory(replace(layout, on_cpu=True)).total
    return {"peak_gib": found.peak_bytes / 2**30, "planned_gib": planned / 2**30}


RENDER = """python -m rayapp render ecs|kuberay [CONFIG.yaml] [--section.field=value ...]

  --out=FOLDER         where to; build/ecs or build/kuberay by default
  --account=ID         AWS account; by default that of the credentials
  --name=NAME          that of infra/base; rayapp by default
  --region=NAME        us-west-2 by default
  --tag=TAG            of the image; rayapp's version by default
  --head=INSTANCE      m6i.2xlarge by default
  --market=MARKET      on-demand, spot or capacity-block; --reservation=ID for the last
  --efa=auto           true insists on Elastic Fabric Adapters, false leaves them out
  --launch=ec2         Fargate has no GPUs
  --components=LIST    KubeRay: autoscaling, kueue, lustre, spot, with commas; --lustre=JSON
  --retries=2          KubeRay: new clusters that a RayJob may start"""


def render(argv: list[str]) -> int:
    """Render a cluster's files; see RENDER."""
    if "--help" in argv or "-h" in argv or not argv:
        print(RENDER)
        return DONE if argv else BAD_CONFIG
    from rayapp import arguments
    from rayapp.cluster import Options, cost, render, write

    platform, names = argv[0], {field.name: field.default for field in fields(Options)}
    texts = {"components": "", "retries": str(names["retries"])}
    known = {name: "none" if value is None else str(value) for name, value in names.items()}
    config, asked = arguments.read(argv[1:], {**known, **texts, "out": f"build/{platform}"})
    out = asked.pop("out")
    values: dict[str, Any] = {n: None if v.lower() == "none" else v for n, v in asked.items()}
    if not asked["retries"].isdigit():
        raise ConfigError([f"--retries={asked['retries']} is not valid: a count is expected"])
    values["components"] = tuple(filter(None, asked["components"].split(",")))
    values["retries"] = int(asked["retries"])
    values["account"] = values["account"] or _account(asked["region"])
    options = Options(**values)
    write(render(platform, config, options), Path(out))
    print(f"written to {out}")
    print(cost(platform, config, options))
    return DONE


def _account(region: str) -> str | None:
    """Return the account of this machine's credentials; None if there are none."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return str(boto3.client("sts", region_name=region).get_caller_identity()["Account"])
    except (BotoCoreError, ClientError) as error:
        print(f"no account from credentials: {error}", file=sys.stderr)
        return None


CONNECT = """python -m rayapp connect ecs|eks [--name=rayapp] [--region=us-west-2] [--port=8265]

Forwards the cluster's dashboard and Jobs API to http://127.0.0.1:PORT until Ctrl-C, and keeps its
token in ~/.rayapp. What it prints first is for the shell in which you submit."""


def connect(argv: list[str]) -> int:
    """Forward a cluster's port; see CONNECT."""
    if "--help" in argv or "-h" in argv or not argv:
        print(CONNECT)
        return DONE if argv else BAD_CONFIG
    import subprocess

    import boto3

    from rayapp import arguments
    from rayapp.cluster.connect import HOMES, NotReachable, keep, to_ecs, to_eks, variables

    home = argv[0]
    if home not in HOMES:
        raise ConfigError([f"{home} is unknown: there is no such cluster. Set one of ecs, eks"])
    known = {"name": "rayapp", "region": "us-west-2", "port": "8265"}
    _, asked = arguments.read(argv[1:], known)
    if not asked["port"].isdigit():
        raise ConfigError([f"--port={asked['port']} is not valid: a port number is expected"])
    port, region = int(asked["port"]), asked["region"]
    try:
        if home == "ecs":
            way = to_ecs(asked["name"], region, port, partial(boto3.client, region_name=region))
        else:
            way = to_eks(port)
    except NotReachable as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    path = keep(way.token, f"{asked['name']}-{home}", Path.home() / ".rayapp")
    for name, value in variables(path, port).items():
        print(f"export {name}={value}")
    sys.stdout.flush()
    try:
        return DONE if subprocess.run(way.command).returncode == 0 else FAILED
    except FileNotFoundError:
        print(f"failed: {way.command[0]} is not installed. Install it", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return DONE


GIVE_RUN = "Give the folder of a run, <run.storage>/<run.name>"

REPORT = """python -m rayapp report RUN [RUN ...] [--out=FILE]

RUN is a run's folder or s3:// URL. One run: report.html in its folder, or FILE. Several: one page
that compares them, comparison.html or FILE."""


def report(argv: list[str]) -> int:
    """Write the report of runs; see REPORT."""
    if "--help" in argv or "-h" in argv or not argv:
        print(REPORT)
        return DONE if argv else BAD_CONFIG
    from rayapp import arguments, progress
    from rayapp import report as pages
    from rayapp.storage import StorageError, open_storage

    runs, asked = arguments.words(argv, {"out": "none"})
    if not runs:
        raise ConfigError([f"RUN=none is not valid: there is nothing to report on. {GIVE_RUN}"])
    out = None if asked["out"] == "none" else asked["out"]
    try:
        folders = [open_storage(run) for run in runs]
        if len(folders) == 1:
            print(pages.write(folders[0], out))
        else:
            print(pages.compare(folders, out or "comparison.html"))
    except progress.NoRun as error:
        raise ConfigError([f"RUN={error}. {GIVE_RUN}"]) from None
    except StorageError as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    return DONE


GENERATE = """python -m rayapp generate RUN [--prompt=TEXT] [--option=value ...]

RUN is a run's folder or s3:// URL. Without --prompt each line of the standard input is one; in a
terminal that is a conversation, which Ctrl-D ends.

  --max_tokens=256     most that it writes
  --temperature=0.7    0 takes the likeliest token each time
  --chat               through the tokenizer's chat template, as a run on chats does by itself;
                       --chat=false does not"""


def generate(argv: list[str]) -> int:
    """Let a run's model write; see GENERATE."""
    if "--help" in argv or "-h" in argv or not argv:
        print(GENERATE)
        return DONE if argv else BAD_CONFIG
    from rayapp import arguments, generation
    from rayapp.storage import StorageError

    argv = ["--chat=true" if word == "--chat" else word for word in argv]
    known = {"prompt": "", "max_tokens": "256", "temperature": "0.7", "chat": "none"}
    runs, asked = arguments.words(argv, known)
    settings = generation.settings_of(**asked)
    if len(runs) != 1:
        found = " ".join(runs) or "none"
        raise ConfigError([f"RUN={found} is not valid: one run is expected. {GIVE_RUN}"])
    try:
        with generation.load(runs[0]) as model:
            generation.talk(model, settings)
    except KeyboardInterrupt:
        print()
    except StorageError as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    return DONE


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "connect": connect,
    "generate": generate,
    "plan": plan,
    "render": render,
    "report": report,
}


def main(argv: list[str]) -> int:
    """Run a command; return the exit code: 0 done, 1 failed, 2 bad config."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(__doc__)
        return DONE if argv else BAD_CONFIG
    if argv[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Set one of {', '.join(COMMANDS)}"
        print(f"command={argv[0]} is unknown: there is no such command. {hint}", file=sys.stderr)
        return BAD_CONFIG
    try:
        return COMMANDS[argv[0]](argv[1:])
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return BAD_CONFIG


def _number(name: str, text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value <= 0:
        raise ConfigError([f"--{name}={text} is not valid: it must be a number above 0. Set one"])
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
