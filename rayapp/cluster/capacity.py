"""Start the workers of infra/ecs or infra/eks where EC2 has room, and say why where it has none.

start("ecs", "rayapp", client, 1800, print)     # client(service) returns a boto3 client
wait_for_workers("ecs", "rayapp", client, 1800, print)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rayapp.cluster.connect import NotReachable
from rayapp.cluster.hosts import (
    Client,
    NodeGroup,
    Service,
    groups_of_list,
    missing_pods,
    missing_tasks,
    refusal,
)

POLL_S = 15.0

Say = Callable[[str], None]


def start(home: str, name: str, client: Client, seconds: float, say: Say) -> str | None:
    """Start the first group of a list that can be had whole; return its name.

    A group that EC2 refuses a host for, or whose workers do not run after so many seconds, is ended
    before the next one starts. A group that is wanted already is the first to be tried. Returns
    None if the cluster is not rendered for a list.

    Raises:
        NotReachable: none can be had, with each reason.
    """
    found = groups_of_list(home, name, client)
    groups = sorted(found, key=lambda one: (-one.wanted, one.name))
    reasons = list[str]()
    for number, group in enumerate(groups):
        why = _try(group, seconds)
        if why is None:
            say(f"{group.name} is up")
            for other in groups[number + 1 :]:
                if other.wanted:
                    other.end()
            return group.name
        group.end()
        reasons.append(f"{group.name} cannot be had: {why}")
        say(reasons[-1])
    if not groups:
        return None
    raise NotReachable(
        f"no group of cluster.instance can be had: {'; '.join(reasons)}. Run the same again later, "
        "or add an instance type, a market or a zone"
    )


def _try(group: Service | NodeGroup, seconds: float) -> str | None:
    """Start all workers of a group; return why they do not run, None if they do."""
    most = int(group.scaling_group()["MaxSize"])
    before = [one["ActivityId"] for one in group.activities()]
    known = before[1:] if group.wanted else before  # its newest may be why it is not complete
    group.want(most)
    until = time.monotonic() + seconds
    while (running := group.running(most)) < most:
        new = [one for one in group.activities() if one["ActivityId"] not in known]
        if why := refusal(new):
            return why
        if time.monotonic() > until:
            return f"{running} of {most} workers run after {seconds:.0f} s"
        time.sleep(POLL_S)
    return None


def wait_for_workers(home: str, name: str, client: Client, seconds: float, say: Say) -> None:
    """Wait until all tasks or pods run; say each reason why some do not, once while it lasts.

    Raises:
        NotReachable: some do not after so many seconds.
    """
    missing = missing_tasks if home == "ecs" else missing_pods
    until, before = time.monotonic() + seconds, list[str]()
    while lines := missing(name, client):
        for line in lines:
            if line not in before:
                say(line)
        before = lines
        if time.monotonic() > until:
            raise NotReachable(
                f"{lines[0]}. rayapp has waited {seconds:.0f} s. Take another cluster.instance, "
                "zone or market"
            )
        time.sleep(POLL_S)
