"""Start the workers of infra/ecs where EC2 has room for them, and say why where it has none.

    start("rayapp", client, 1800, print)            # client(service) returns a boto3 client

Where cluster.instance is a list, each of its choices has a group in each zone of the VPC: a service
of ECS, whose capacity provider starts hosts by an Auto Scaling group. EC2's own words for a launch
that failed are in the activities of that group.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayapp.cluster.connect import NotReachable, activities_of, described, refusal, services_of

POLL_S = 15.0
ACTIVITIES = 20  # the newest of a group that are looked at
UNPROTECTED = 50  # the most instances in one request
PREFERRED = re.compile(r"worker-[0-9]-")  # the number is the choice's place in the list

Client = Callable[[str], Any]
Say = Callable[[str], None]


def start(name: str, client: Client, seconds: float, say: Say) -> str | None:
    """Start the first group of a list that can be had whole; return its service.

    A group that EC2 refuses a host for, or whose tasks do not run after so many seconds, is ended
    before the next one starts. A group that is wanted already is the first to be tried. Returns
    None if the cluster is not rendered for a list.

    Raises:
        NotReachable: none can be had, with each reason.
    """
    stack = f"{name}-ecs"
    found = [one for one in services_of(stack, client) if PREFERRED.match(one["serviceName"])]
    found.sort(key=lambda one: (-one["desiredCount"], one["serviceName"]))
    groups = [_Group(stack, one["serviceName"], one["desiredCount"], client) for one in found]
    reasons = list[str]()
    for number, group in enumerate(groups):
        why = group.start(seconds)
        if why is None:
            say(f"{group.service} is up")
            for other in groups[number + 1 :]:
                if other.wanted:
                    other.end()
            return group.service
        group.end()
        reasons.append(f"{group.service} cannot be had: {why}")
        say(reasons[-1])
    if not groups:
        return None
    raise NotReachable(
        f"no group of cluster.instance can be had: {'; '.join(reasons)}. Run the same again later, "
        "or add an instance type, a market or a zone"
    )


@dataclass(frozen=True)
class _Group:
    """A service of workers with the Auto Scaling group of its hosts."""

    stack: str
    service: str
    wanted: int
    """Its tasks that were wanted when it was looked at."""
    client: Client

    @property
    def hosts(self) -> str:
        """The name of its Auto Scaling group."""
        return f"{self.stack}-{self.service}"

    def start(self, seconds: float) -> str | None:
        """Start all its tasks; return why they do not run, None if they do."""
        most = int(self._hosts()["MaxSize"])
        before = [one["ActivityId"] for one in self._activities()]
        known = before[1:] if self.wanted else before  # its newest may be why it is not complete
        self._want(most)
        until = time.monotonic() + seconds
        while True:
            (told,) = described(self.stack, [self.service], self.client)
            if told["runningCount"] >= most:
                return None
            new = [one for one in self._activities() if one["ActivityId"] not in known]
            if why := refusal(new):
                return why
            if time.monotonic() > until:
                return f"{told['runningCount']} of {most} tasks run after {seconds:.0f} s"
            time.sleep(POLL_S)

    def end(self) -> None:
        """End its tasks and hosts: ECS alone would keep the hosts for a quarter of an hour."""
        self._want(0)
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

    def _activities(self) -> list[Any]:
        return activities_of(self.hosts, self.client, ACTIVITIES)

    def _want(self, tasks: int) -> None:
        asked = {"cluster": self.stack, "service": self.service}
        self.client("ecs").update_service(**asked, desiredCount=tasks)

    def _hosts(self) -> Any:
        asked = {"AutoScalingGroupNames": [self.hosts]}
        (told,) = self.client("autoscaling").describe_auto_scaling_groups(**asked)[
            "AutoScalingGroups"
        ]
        return told

    def _instances(self) -> list[Any]:
        states = ("InService", "Pending")  # the protection of others cannot be changed
        return [one for one in self._hosts()["Instances"] if one["LifecycleState"] in states]
