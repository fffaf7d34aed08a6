"""rayapp render, capacity and connect: a cluster's files, its hosts, and the way into it."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from rayapp.cli import documented
from rayapp.config import ConfigError
from rayapp.observe.run_folder import Exit

RENDER = """rayapp render ecs|kuberay [CONFIG.yaml] [--section.field=value ...]

  --out=FOLDER         the folder to write to; build/ecs or build/kuberay by default
  --account=ID         AWS account; by default the account of the credentials
  --name=NAME          the name given to infra/base; rayapp by default
  --region=NAME        AWS region; us-west-2 by default
  --tag=TAG            tag of the image; by default the one that `make image` pushes
  --head=INSTANCE      instance type of the head; m6i.2xlarge by default
  --data_nodes=0       number of hosts without GPUs to prepare data; --data_instance=m6i.8xlarge
  --market=MARKET      on-demand, spot or capacity-block (which needs --reservation=ID)
  --efa=auto           true: require Elastic Fabric Adapters; false: do not use them
  --components=LIST    KubeRay: autoscaling,kueue,lustre,spot or some of them; --lustre=JSON
                       (autoscaling: nodes are added by a cluster autoscaler that you install)
  --api_cidrs=LIST     KubeRay: comma-separated networks that may reach EKS's API server
  --prometheus=URL     your Prometheus, as the head reaches it
  --grafana=URL        your Grafana; with both, Ray's dashboard shows their charts
  --queue=TYPE:NODES   KubeRay: quota of Kueue's queue, for all nodes of the platform
  --retries=2          KubeRay: how many new clusters a RayJob may start after losing one"""


@documented(RENDER, words=True)
def render(argv: list[str]) -> int:
    """Render a cluster's files; see RENDER."""
    from rayapp.cluster import Options, cost, paths_of_this_machine, render, write
    from rayapp.config import arguments

    platform, names = argv[0], {field.name: field.default for field in fields(Options)}
    texts = {"components": "", "api_cidrs": ""}
    known = {name: "none" if value is None else str(value) for name, value in names.items()}
    config, asked = arguments.read(argv[1:], {**known, **texts, "out": f"build/{platform}"})
    out = asked.pop("out")
    values: dict[str, Any] = {n: None if v.lower() == "none" else v for n, v in asked.items()}
    for name in ("retries", "data_nodes"):
        if not asked[name].isdigit():
            raise ConfigError([f"--{name}={asked[name]} is not valid: it must be a count"])
        values[name] = int(asked[name])
    for name in ("components", "api_cidrs"):
        values[name] = tuple(filter(None, asked[name].split(",")))
    values["account"] = values["account"] or _account(asked["region"])
    options = Options(**values)
    write(render(platform, config, options), Path(out))
    print(f"written to {out}")
    print(cost(platform, config, options))
    if out == f"build/{platform}":  # not of `make up-*`
        target = {"ecs": "up-ecs", "kuberay": "up-eks"}[platform]
        print(f"next: make {target} CONFIG=FILE, which renders, shows the cost, asks, and applies")
    for path in paths_of_this_machine(config) if platform == "kuberay" else []:
        print(f"the folder job: {path}")
    return Exit.DONE


def _account(region: str) -> str | None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return str(boto3.client("sts", region_name=region).get_caller_identity()["Account"])
    except (BotoCoreError, ClientError) as error:
        print(f"no account from credentials: {error}", file=sys.stderr)
        return None


CAPACITY = """rayapp capacity ecs|eks [--name=rayapp] [--region=us-west-2] [--wait_s=1800]

  --name=NAME    the name given to infra/base and `make up-*`; --region=NAME
  --wait_s=S     maximum seconds until the workers of a group run

Waits until the head and the workers run, and says why hosts do not start. If cluster.instance is a
list, the command starts the first entry for which EC2 has capacity (on ECS in the first zone with
capacity): it ends a group without capacity and starts the next. EKS: in kubectl's context."""


@documented(CAPACITY, words=True)
def capacity(argv: list[str]) -> int:
    """Start the workers where there is room, and wait for them; see CAPACITY."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    from rayapp.cluster.connect import NotReachable
    from rayapp.cluster.hosts import start, wait_for_workers
    from rayapp.config import arguments

    home, asked, problems = _asked(argv, {"wait_s": "1800"})
    if problems:
        raise ConfigError(problems)
    seconds = arguments.number("wait_s", asked["wait_s"])
    client, say = partial(boto3.client, region_name=asked["region"]), partial(print, flush=True)
    try:
        start(home, asked["name"], client, seconds, say)
        wait_for_workers(home, asked["name"], client, seconds, say)
    except (NotReachable, BotoCoreError, ClientError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED
    return Exit.DONE


def _asked(argv: list[str], known: dict[str, str]) -> tuple[str, dict[str, str], list[str]]:
    """Return ecs or eks, the options of a command that begins with it, and their problems."""
    from rayapp.cluster.options import malformed
    from rayapp.config import arguments

    if argv[0] not in ("ecs", "eks"):
        raise ConfigError([f"{argv[0]} is unknown: there is no such cluster. Set ecs or eks"])
    _, asked = arguments.read(argv[1:], {"name": "rayapp", "region": "us-west-2", **known})
    return argv[0], asked, malformed({name: asked[name] for name in ("name", "region")})


CONNECT = """rayapp connect ecs|eks [--name=rayapp] [--region=us-west-2] [--port=PORT] [-- COMMAND]

  --name=NAME      the name given to infra/base and `make up-*`; --region=NAME
  --port=PORT      port on this machine; a free port by default
  --job=NAME       EKS: connect to the cluster of this RayJob (see `kubectl get rayjob`)

Forwards the cluster's dashboard and Jobs API to http://127.0.0.1:PORT until Ctrl-C, and keeps the
cluster's token in ~/.rayapp meanwhile. Run the printed lines in the shell in which you submit.
With COMMAND, rayapp runs it with these variables set and returns its exit code."""


def connect(argv: list[str]) -> int:
    """Forward a cluster's port; see CONNECT."""
    split = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:split], argv[split + 1 :]
    if "--help" in own or "-h" in own or not own:
        print(CONNECT)
        return Exit.DONE if own else Exit.REFUSED
    from rayapp.cluster.connect import NotReachable

    before = {number: signal.signal(number, _leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        return _connect(own, command)
    except NotReachable as error:
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED
    except FileNotFoundError as error:
        print(f"failed: {error.filename} is not installed. Install it", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        return Exit.DONE
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: Any) -> None:
    """End with the forwarding, and without the token's file."""
    sys.exit(128 + number)


def _connect(argv: list[str], command: list[str]) -> int:
    import boto3

    from rayapp.cluster import connect as way_in

    home, asked, problems = _asked(argv, {"port": "0", "job": "none"})
    name, region, job = asked["name"], asked["region"], asked["job"]
    if not asked["port"].isdecimal() or int(asked["port"]) > 65535:
        problems.append(f"--port={asked['port']} is not valid: it must be a port number")
    if job != "none" and home == "ecs":
        problems.append(f"--job={job} is impossible: ECS has no RayJob. Remove it")
    if problems:
        raise ConfigError(problems)
    port = int(asked["port"]) or way_in.free_port()
    if home == "ecs":
        way = way_in.to_ecs(name, region, port, partial(boto3.client, region_name=region))
    else:
        way = way_in.to_eks(port, None if job == "none" else job)
    token = Path.home() / ".rayapp" / f"{name}-{home}-{region}-{port}.token"
    forwarding = way_in.Forwarding(way, port, token)
    try:
        if command:
            return way_in.through(forwarding, command)
        forwarding.open_in_time()
        for variable, value in forwarding.variables.items():
            print(f"export {variable}={value}", flush=True)
        while not forwarding.closed():
            time.sleep(way_in.FORWARD_POLL_S)
    finally:
        forwarding.end()
    print(f"failed: `{way.command[0]}` has ended. Run the same command again", file=sys.stderr)
    return Exit.FAILED
