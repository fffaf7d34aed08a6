"""Start the workers of infra/ecs or infra/eks where EC2 has room, and say why where it has none.

    start("ecs", "rayapp", client, 1800, print)     # client(service) returns a boto3 client

Where cluster.instance is a list, each of its choices has groups of hosts that are empty at first.
ECS: a service in each zone of the VPC, whose capacity provider starts hosts by an Auto Scaling
group. EKS: a node group (`node_groups`). EC2's own words for a launch that failed are in the
activities of the Auto Scaling group.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayapp.cluster.connect import (
    NotReachable,
    activities_of,
    described,
    refusal,
    scaling_group,
    services_of,
)
from rayapp.cluster.node_groups import node_groups

POLL_S = 15.0
ACTIVITIES = 20  # the newest of a group that are looked at
UNPROTECTED = 50  # the most instances in one request
PREFERRED = re.compile(r"worker-[0-9]-")  # the number is the choice's place in the list

Client = Callable[[str], Any]
Say = Callable[[str], None]


class HostGroup(Protocol):
    """A group of workers with the Auto Scaling group of its hosts."""

    @property
    def name(self) -> str:
        """What it is called; begins with the choice's place in the list."""

    @property
    def wanted(self) -> int:
        """Its workers that were wanted when it was looked at."""

    @property
    def hosts(self) -> str:
        """The name of its Auto Scaling group."""

    def want(self, most: int) -> None:
        """Ask for so many workers, or first for their hosts."""

    def running(self, most: int) -> int:
        """Return how many of its workers run; ask for them where their hosts came first."""

    def end(self) -> None:
        """End its workers and hosts."""


def start(home: str, name: str, client: Client, seconds: float, say: Say) -> str | None:
    """Start the first group of a list that can be had whole; return its name.

    A group that EC2 refuses a host for, or whose workers do not run after so many seconds, is ended
    before the next one starts. A group that is wanted already is the first to be tried. Returns
    None if the cluster is not rendered for a list.

    Raises:
        NotReachable: none can be had, with each reason.
    """
    found: Sequence[HostGroup] = (_services if home == "ecs" else node_groups)(name, client)
    groups = sorted(found, key=lambda one: (-one.wanted, one.name))
    reasons = list[str]()
    for number, group in enumerate(groups):
        why = _try(group, client, seconds)
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


def _try(group: HostGroup, client: Client, seconds: float) -> str | None:
    """Start all workers of a group; return why they do not run, None if they do."""

    def activities() -> list[Any]:
        return activities_of(group.hosts, client, ACTIVITIES)

    most = int(scaling_group(group.hosts, client)["MaxSize"])
    before = [one["ActivityId"] for one in activities()]
    known = before[1:] if group.wanted else before  # its newest may be why it is not complete
    group.want(most)
    until = time.monotonic() + seconds
    while True:
        running = group.running(most)
        if running >= most:
            return None
        new = [one for one in activities() if one["ActivityId"] not in known]
        if why := refusal(new):
            return why
        if time.monotonic() > until:
            return f"{running} of {most} workers run after {seconds:.0f} s"
        time.sleep(POLL_S)


def _services(name: str, client: Client) -> list[_Service]:
    stack = f"{name}-ecs"
    found = [one for one in services_of(stack, client) if PREFERRED.match(one["serviceName"])]
    return [_Service(stack, one["serviceName"], one["desiredCount"], client) for one in found]


@dataclass(frozen=True)
class _Service:
    """A service of ECS with the Auto Scaling group of its hosts."""

    stack: str
    name: str
    wanted: int
    client: Client

    @property
    def hosts(self) -> str:
        return f"{self.stack}-{self.name}"

    def want(self, most: int) -> None:
        """Ask for tasks; ECS starts hosts for them."""
        asked = {"cluster": self.stack, "service": self.name}
        self.client("ecs").update_service(**asked, desiredCount=most)

    def running(self, most: int) -> int:
        (told,) = described(self.stack, [self.name], self.client)
        return int(told["runningCount"])

    def end(self) -> None:
        """End its tasks and hosts: ECS alone would keep the hosts for a quarter of an hour."""
        self.want(0)
        scaling, ids = self.client("autoscaling"), [i["InstanceId"] for i in self._instances()]
        for first in range(0, len(ids), UNPROTECTED):
            scaling.set_instance_protection(
                AutoScalingGroupName=self.hosts,
                InstanceIds=ids[first : first + UNPROTECTED],
                ProtectedFromScaleIn=False,
            )
        scaling.set_desired_capacity(
            AutoScalingGroupName=self.hosts, DesiredCapacity=0, HonorCooldown=False
        )

    def _instances(self) -> list[Any]:
        states = ("InService", "Pending")  # the protection of others cannot be changed
        told = scaling_group(self.hosts, self.client)["Instances"]
        return [one for one in told if one["LifecycleState"] in states]
