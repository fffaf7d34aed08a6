"""Start the workers of infra/ecs or infra/eks where EC2 has room, and say why where it has none.

ECS: services, whose capacity providers start the hosts. EKS: node groups, each an Auto Scaling
group, and the groups of pods of the same names in the rendered RayCluster. Where cluster.instance
is a list, each of its choices has groups that are empty until `rayapp capacity` chooses one; on ECS
one in each zone. EC2's own words for a launch that failed are in the activities of the Auto Scaling
group.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayapp.cluster.connect import NotReachable, kubectl

ACTIVITIES = 20  # the newest of a group that are looked at
DESCRIBED = 10  # the most services in one request
UNPROTECTED = 50  # the most instances in one request
PREFERRED = re.compile(r"(worker-)?[0-9]-")  # the number is the choice's place in the list

POLL_S = 15.0

Client = Callable[[str], Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class HostGroup:
    """A group of workers with the Auto Scaling group of its hosts."""

    name: str
    """What it is called; of a list it begins with the choice's place there."""
    hosts: str
    """The name of its Auto Scaling group."""
    wanted: int
    """Its workers that were wanted when it was looked at."""
    client: Client

    def scaling_group(self) -> Any:
        """Return its Auto Scaling group, as Auto Scaling describes it."""
        asked = {"AutoScalingGroupNames": [self.hosts]}
        answer = self.client("autoscaling").describe_auto_scaling_groups(**asked)
        (told,) = answer["AutoScalingGroups"]
        return told

    def want(self, most: int) -> None:
        """Ask for hosts: of EKS nodes, whose pods follow when all of them have come."""
        asked = {"AutoScalingGroupName": self.hosts, "DesiredCapacity": most}
        self.client("autoscaling").set_desired_capacity(**asked, HonorCooldown=False)


@dataclass(frozen=True)
class Service(HostGroup):
    """A service of ECS."""

    cluster: str

    def want(self, most: int) -> None:
        """Ask for tasks; ECS starts hosts for them."""
        asked = {"cluster": self.cluster, "service": self.name}
        self.client("ecs").update_service(**asked, desiredCount=most)

    def running(self, most: int) -> int:
        """Return how many of its tasks run."""
        (told,) = _described(self.cluster, [self.name], self.client)
        return int(told["runningCount"])

    def end(self) -> None:
        """End its tasks and hosts: ECS alone would keep the hosts for a quarter of an hour."""
        self.want(0)
        states = ("InService", "Pending")  # the protection of others cannot be changed
        hosts = [h for h in self.scaling_group()["Instances"] if h["LifecycleState"] in states]
        ids = [host["InstanceId"] for host in hosts]
        asked = {"AutoScalingGroupName": self.hosts, "ProtectedFromScaleIn": False}
        for first in range(0, len(ids), UNPROTECTED):
            some = ids[first : first + UNPROTECTED]
            self.client("autoscaling").set_instance_protection(InstanceIds=some, **asked)
        super().want(0)


@dataclass(frozen=True)
class NodeGroup(HostGroup):
    """A node group of EKS, sized by its Auto Scaling group as the autoscaler does, and its pods."""

    def running(self, most: int) -> int:
        """Return how many of its pods are ready; ask for them when its nodes are there."""
        instances = self.scaling_group()["Instances"]
        if sum(one["LifecycleState"] == "InService" for one in instances) >= most:
            _set_pods(self.name, most)
        return _ready(f"ray.io/group={self.name}")

    def end(self) -> None:
        """End its pods, which get time to save, and its nodes, which EKS drains."""
        _set_pods(self.name, 0)
        self.want(0)


def start(home: str, name: str, client: Client, seconds: float, say: Say) -> str | None:
    """Start the first group of a list that can be had whole; return its name.

    A group that EC2 refuses a host for, or whose workers do not run after so many seconds, is ended
    before the next one starts. A group that is wanted already is the first to be tried. Returns
    None if the cluster is not rendered for a list.

    Raises:
        NotReachable: none can be had, with each reason.
    """
    groups = _groups_of_list(home, name, client)
    groups.sort(key=lambda one: (-one.wanted, one.name))
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
    before = [one["ActivityId"] for one in activities_of(group.hosts, group.client)]
    known = before[1:] if group.wanted else before  # its newest may be why it is not complete
    group.want(most)
    until = time.monotonic() + seconds
    while (running := group.running(most)) < most:
        seen = activities_of(group.hosts, group.client)
        if why := refusal([one for one in seen if one["ActivityId"] not in known]):
            return why
        if time.monotonic() > until:
            return f"{running} of {most} workers run after {seconds:.0f} s"
        time.sleep(POLL_S)
    return None


def _groups_of_list(home: str, name: str, client: Client) -> list[Service | NodeGroup]:
    """Return the groups of a list; none where one type is rendered."""
    stack = f"{name}-{home}"
    if home == "ecs":
        return [
            Service(one, f"{stack}-{one}", told["desiredCount"], client, stack)
            for told in _services(stack, client)
            if PREFERRED.match(one := told["serviceName"])
        ]
    hosts, groups = _node_groups(stack, client), list[Service | NodeGroup]()
    pods = {spec["groupName"]: spec.get("replicas", 0) for spec in _specs()}
    for group in (group for group in hosts if PREFERRED.match(group)):
        if group not in pods:
            raise NotReachable(
                f"the Ray cluster has no group {group}, which {stack} has nodes for: they are of "
                "two lists. Run `make up-eks` again"
            )
        nodes = int(NodeGroup(group, hosts[group], 0, client).scaling_group()["DesiredCapacity"])
        groups.append(NodeGroup(group, hosts[group], max(nodes, pods[group]), client))
    return groups


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


def missing_tasks(name: str, client: Client) -> list[str]:
    """Return a line for each service of infra/ecs that lacks tasks, with the reason if EC2 has one.

    A group of hosts for which there is no capacity stays empty, and says so in its activities.
    """
    stack, lines = f"{name}-ecs", list[str]()
    for service in _services(stack, client):
        if service["runningCount"] >= service["desiredCount"]:
            continue
        newest = activities_of(f"{stack}-{service['serviceName']}", client, 1)
        why = refusal(newest) or "its hosts are starting"
        count = f"{service['runningCount']} of {service['desiredCount']} tasks"
        lines.append(f"service {service['serviceName']} is incomplete: {count} run, {why}")
    return lines


def missing_pods(name: str, client: Client) -> list[str]:
    """Return a line if workers of the Ray cluster are not ready, with the reason if EC2 has one."""
    wanted = sum(spec.get("replicas", 0) for spec in _specs())
    ready = _ready("ray.io/node-type=worker")
    if ready >= wanted:
        return []
    hosts = _node_groups(f"{name}-eks", client).values()
    reasons = [refusal(activities_of(group, client, 1)) for group in hosts]
    why = next(filter(None, reasons), "its nodes or their images are on the way")
    return [f"the Ray cluster is incomplete: {ready} of {wanted} workers are ready, {why}"]


def activities_of(hosts: str, client: Client, most: int = ACTIVITIES) -> list[Any]:
    """Return the newest activities of an Auto Scaling group."""
    asked = {"AutoScalingGroupName": hosts, "MaxRecords": most}
    return list(client("autoscaling").describe_scaling_activities(**asked)["Activities"])


def refusal(activities: list[Any]) -> str | None:
    """Return EC2's words on the first of some activities that failed; None if none has."""
    failed = [one for one in activities if one["StatusCode"] == "Failed"]
    return str(failed[0]["StatusMessage"]) if failed else None


def _services(stack: str, client: Client) -> list[Any]:
    pages = client("ecs").get_paginator("list_services").paginate(cluster=stack)
    return _described(stack, [arn for page in pages for arn in page["serviceArns"]], client)


def _described(stack: str, services: list[str], client: Client) -> list[Any]:
    told = list[Any]()
    for first in range(0, len(services), DESCRIBED):
        some = services[first : first + DESCRIBED]
        told += client("ecs").describe_services(cluster=stack, services=some)["services"]
    return told


def _node_groups(stack: str, client: Client) -> dict[str, str]:
    """Return {group: its Auto Scaling group} of the workers' node groups."""
    eks = client("eks")
    pages = eks.get_paginator("list_nodegroups").paginate(clusterName=stack)
    hosts = dict[str, str]()
    for name in [name for page in pages for name in page["nodegroups"]]:
        answer = eks.describe_nodegroup(clusterName=stack, nodegroupName=name)["nodegroup"]
        (group,) = answer["resources"]["autoScalingGroups"]
        hosts[name.removeprefix(f"{stack}-")] = group["name"]
    hosts.pop("system", None)
    return hosts


def _specs() -> list[Any]:
    cluster = json.loads(kubectl("get", "raycluster", "rayapp", "--output=json"))
    return list(cluster["spec"]["workerGroupSpecs"])


def _set_pods(group: str, pods: int) -> None:
    specs = _specs()
    (number,) = [place for place, spec in enumerate(specs) if spec["groupName"] == group]
    if specs[number].get("replicas", 0) == pods:
        return
    place = f"/spec/workerGroupSpecs/{number}"
    patch = [
        {"op": "test", "path": f"{place}/groupName", "value": group},
        {"op": "add", "path": f"{place}/replicas", "value": pods},
    ]
    kubectl("patch", "raycluster", "rayapp", "--type=json", f"--patch={json.dumps(patch)}")


def _ready(selector: str) -> int:
    """Return how many pods of the Ray cluster are ready, and are not about to end."""
    asked = f"--selector=ray.io/cluster=rayapp,{selector}"
    pods = json.loads(kubectl("get", "pods", asked, "--output=json"))["items"]
    ready = ("Ready", "True")
    return sum(
        "deletionTimestamp" not in pod["metadata"]
        and ready in [(one["type"], one["status"]) for one in pod["status"].get("conditions", [])]
        for pod in pods
    )
