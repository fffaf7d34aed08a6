"""The node groups of infra/eks and the pods' groups of the rendered RayCluster.

Where cluster.instance is a list, each of its choices has a node group, which is an Auto Scaling
group, and a group of pods of the same name. Both are empty until `capacity` chooses them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayapp.cluster.connect import (
    NotReachable,
    activities_of,
    kubectl,
    refusal,
    scaling_group,
    wait_until_complete,
)

PREFERRED = re.compile(r"[0-9]-")  # the number is the choice's place in the list

Client = Callable[[str], Any]


def node_groups(name: str, client: Client) -> list[NodeGroup]:
    """Return the groups of a list; none where one type is rendered.

    Raises:
        NotReachable: kubectl finds no Ray cluster.
    """
    stack = f"{name}-eks"
    hosts = _hosts(stack, client)
    pods = {spec["groupName"]: spec.get("replicas", 0) for spec in _specs()}
    groups = list[NodeGroup]()
    for group in (group for group in hosts if PREFERRED.match(group)):
        if group not in pods:
            raise NotReachable(
                f"the Ray cluster has no group {group}, which {stack} has nodes for: they are of "
                "two lists. Run `make up-eks` again"
            )
        nodes = int(scaling_group(hosts[group], client)["DesiredCapacity"])
        groups.append(NodeGroup(group, hosts[group], max(nodes, pods[group]), client))
    return groups


@dataclass(frozen=True)
class NodeGroup:
    """A node group, by its Auto Scaling group as the cluster autoscaler does, and its pods."""

    name: str
    hosts: str
    wanted: int
    client: Client

    def want(self, most: int) -> None:
        """Ask for nodes; pods follow when all of them have come."""
        asked = {"AutoScalingGroupName": self.hosts, "DesiredCapacity": most}
        self.client("autoscaling").set_desired_capacity(**asked, HonorCooldown=False)

    def running(self, most: int) -> int:
        """Return how many of its pods are ready."""
        instances = scaling_group(self.hosts, self.client)["Instances"]
        if sum(one["LifecycleState"] == "InService" for one in instances) >= most:
            _set_pods(self.name, most)
        return _ready(f"ray.io/group={self.name}")

    def end(self) -> None:
        """End its pods, which get time to save, and its nodes, which EKS drains."""
        _set_pods(self.name, 0)
        self.want(0)


def wait_for_pods(name: str, client: Client, seconds: float, say: Callable[[str], None]) -> None:
    """Wait until all workers of the Ray cluster are ready; say each new reason that they are not.

    Raises:
        NotReachable: some are not after so many seconds.
    """
    wait_until_complete(lambda: _missing_pods(name, client), seconds, say)


def _missing_pods(name: str, client: Client) -> list[str]:
    """Return a line if workers are not ready, with EC2's reason if there is one."""
    wanted = sum(spec.get("replicas", 0) for spec in _specs())
    ready = _ready("ray.io/node-type=worker")
    if ready >= wanted:
        return []
    hosts = _hosts(f"{name}-eks", client).values()
    reasons = [refusal(activities_of(group, client, 1)) for group in hosts]
    why = next(filter(None, reasons), "its nodes or their images are on the way")
    return [f"the Ray cluster is incomplete: {ready} of {wanted} workers are ready, {why}"]


def _hosts(stack: str, client: Client) -> dict[str, str]:
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
    """Return the pods' groups of the RayCluster."""
    cluster = json.loads(kubectl("get", "raycluster", "rayapp", "--output=json"))
    return list(cluster["spec"]["workerGroupSpecs"])


def _set_pods(group: str, pods: int) -> None:
    """Set how many pods a group has, unless it has so many."""
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
    return sum(
        "deletionTimestamp" not in pod["metadata"]
        and any(
            one["type"] == "Ready" and one["status"] == "True"
            for one in pod["status"].get("conditions", [])
        )
        for pod in pods
    )
