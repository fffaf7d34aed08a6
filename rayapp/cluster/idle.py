"""Find the clusters of an AWS account that are paid for while no run trains on them.

It only reads: EC2's instances with the tags of infra/ecs and infra/eks, and the runs' folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rayapp.hardware import UnknownInstance, instance
from rayapp.observe.status import NoRun, summary
from rayapp.storage import Storage

NOT_WORKERS = ("-head", "-system")  # ends of the names of hosts that stay


def idle_clusters(
    account: str, region: str, client: Callable[[str], Any], folder: Callable[[str], Storage]
) -> list[str]:
    """Return a line for each cluster whose workers' hosts run and whose runs all have ended.

    `client(service)` returns a boto3 client, `folder(url)` the storage of a cluster's runs, to
    which alone its role lets a run write.
    """
    lines = list[str]()
    for stack, hosts in sorted(worker_hosts(client, "*-ecs", "*-eks").items()):
        name, _, home = stack.rpartition("-")
        url = f"s3://{name}-{account}-{region}/runs"
        if _trains(folder(url)):
            continue
        counts = Counter(host["InstanceType"] for host in hosts)
        what = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
        prices = [_usd_per_hour(host, region) for host in hosts]
        known = [price for price in prices if price is not None]
        price = f"{sum(known):.2f} USD/h" if len(known) == len(prices) else "price not known"
        since = min(host["LaunchTime"] for host in hosts)
        lines.append(
            f"{stack} in {region} stands idle: {what} ({price}) since {since:%Y-%m-%d %H:%M} UTC, "
            f"and no run in {url} is under way. `make down-{home} NAME={name}` ends it"
        )
    return lines


def worker_hosts(client: Callable[[str], Any], *stacks: str) -> dict[str, list[Any]]:
    """Return {stack: its workers' hosts that run or start}, of stacks by name or pattern."""
    filters = [
        {"Name": "tag:Project", "Values": list(stacks)},
        {"Name": "instance-state-name", "Values": ["pending", "running"]},
    ]
    found = dict[str, list[Any]]()
    for page in client("ec2").get_paginator("describe_instances").paginate(Filters=filters):
        for host in (one for each in page["Reservations"] for one in each["Instances"]):
            tags = {tag["Key"]: tag["Value"] for tag in host["Tags"]}
            stack = tags["Project"]
            mine = tags.get("Name", "").startswith(f"{stack}-")  # as our templates name them
            if mine and not tags["Name"].endswith(NOT_WORKERS):
                found.setdefault(stack, []).append(host)
    return found


def _trains(runs: Storage) -> bool:
    """Return whether a driver works on one of the runs."""
    for name in runs.dirs():
        try:
            if summary(runs / name).live:
                return True
        except NoRun:
            continue
    return False


def _usd_per_hour(host: Any, region: str) -> float | None:
    """Return the list price of a host on demand; None of spot, which has none."""
    if host.get("InstanceLifecycle") == "spot":
        return None
    try:
        return instance(host["InstanceType"], "host").usd_per_hour.get(region)
    except UnknownInstance:
        return None
