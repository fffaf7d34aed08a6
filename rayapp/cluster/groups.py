"""The groups of a cluster's machines: workers, one for each type of cluster.instance, and data.

Each group has hosts of its own in Terraform, and a task definition or a group of pods. Where
cluster.instance is a list, the workers' groups are empty until `rayapp capacity` has chosen one,
and Ray's nodes have their type and market as labels, by which a run knows what it costs. The nodes
of the group `data` have the label that the tasks of a preparation ask for (rayapp.data.ray_tasks);
they are bought on demand, are up before the workers of a list, and an alarm lets them go when their
CPUs are idle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import yaml

from rayapp.cluster.options import Options
from rayapp.cluster.sizes import DATA_DISK_GIB, WORKER_DISK_GIB, Fleet, machine_variables
from rayapp.config import DATA_LABEL, INSTANCE_LABEL, MARKET_LABEL

Files: TypeAlias = dict[str, str]
CLUSTER, FOLDER = "base/raycluster.yaml", "cluster/kustomization.yaml"


@dataclass(frozen=True)
class MachineGroup:
    """A group of machines of one type."""

    name: str
    """In Terraform; of a list it begins with the place there, which `rayapp capacity` reads."""
    task: str
    """The name of its task definition's file: worker, worker-1, data."""
    fleet: Fleet
    options: Options
    """Those of the cluster, with its own market."""
    variables: dict[str, object]
    """Terraform's."""
    values: dict[str, Any]
    """Of the placeholders of its pods, where they differ from those of one group of workers."""
    labels: dict[str, str]
    """Of its Ray nodes."""

    @property
    def suffix(self) -> str:
        """What tells its pods' components from those of one group of workers, which have none."""
        return f"-{self.task.removeprefix('worker-')}" if self.task != "worker" else ""


def groups_of(
    platform: str, options: Options, fleets: Sequence[Fleet], data: Fleet | None
) -> list[MachineGroup]:
    """Return the groups of workers, and last that of the hosts for data."""
    ecs, groups = platform == "ecs", list[MachineGroup]()
    for number, fleet in enumerate(fleets, start=1):
        kind, market = fleet.choice.place
        variables = machine_variables(fleet.worker, WORKER_DISK_GIB)
        if len(fleets) == 1:
            autoscaled = "autoscaling" in options.components
            variables |= {
                "nodes": 0 if autoscaled else fleet.max_nodes,
                "max_nodes": fleet.max_nodes,
                "market": options.market,
                "reservation_id": options.reservation,
                **({} if ecs else {"autoscaled": autoscaled}),
            }
            name = options.market if ecs else "workers"
            groups.append(MachineGroup(name, "worker", fleet, options, variables, {}, {}))
            continue
        name, task = f"{number}-{kind.replace('.', '-')}-{market}", f"worker-{number}"
        variables |= {"nodes": 0, "max_nodes": fleet.max_nodes, "market": market}
        variables |= {"reservation_id": None, "preferred": True, **({"task": task} if ecs else {})}
        values = {"group": name, "group_index": number - 1, "replicas": 0, "min_nodes": 0}
        labels, own = {INSTANCE_LABEL: kind, MARKET_LABEL: market}, replace(options, market=market)
        groups.append(MachineGroup(name, task, fleet, own, variables, values, labels))
    if data is not None:
        label, name = DATA_LABEL
        variables = machine_variables(data.worker, DATA_DISK_GIB)
        variables |= {"nodes": data.max_nodes, "max_nodes": data.max_nodes, "placed": False}
        variables |= {"task": name} if ecs else {}
        values = {"group": name, "group_index": len(fleets), "min_nodes": data.max_nodes}
        components = tuple(name for name in options.components if name == "lustre")
        own = replace(options, market="on-demand", components=components)
        groups.append(MachineGroup(name, name, data, own, variables, values, {label: name}))
    return groups


def tasks(each: Sequence[Files], groups: Sequence[MachineGroup]) -> Files:
    """Return the task definitions of ECS; `each` holds what is rendered for each group alone."""
    files = {"head.json": each[0]["head.json"]}
    for rendered, group in zip(each, groups, strict=True):
        definition = json.loads(rendered["worker.json"])
        definition["family"] = definition["family"].removesuffix("worker") + group.task
        if group.labels:
            labels = ",".join(f"{name}={value}" for name, value in group.labels.items())
            definition["containerDefinitions"][0]["command"].append(f"--labels={labels}")
        files[f"{group.task}.json"] = json.dumps(definition, indent=2) + "\n"
    return files


def pods(each: Sequence[Files], groups: Sequence[MachineGroup]) -> Files:
    """Return the folders `common` and `cluster`, and `job` where all workers have one type.

    `each` holds what is rendered for each group alone. The folder `job` has the groups of its
    cluster, but not the components of the second: with a list it would stay without workers.
    """
    first, rest = each[0], groups[1:]
    if not rest:
        return first
    kept = ("common/", "base/") if groups[0].suffix else ("",)
    files = {path: text for path, text in first.items() if path.startswith(kept)}
    cluster, folder = yaml.safe_load(first[CLUSTER]), yaml.safe_load(first[FOLDER])
    specs, components = list[Any](), list[str]()
    for rendered, group in zip(each, groups, strict=True):
        (spec,) = yaml.safe_load(rendered[CLUSTER])["spec"]["workerGroupSpecs"]
        specs.append({**spec, "labels": group.labels} if group.labels else spec)
        for component in yaml.safe_load(rendered[FOLDER])["components"]:
            if group is groups[0] or not component.endswith("-head"):  # there is one head
                path = f"{component.removeprefix('../')}/kustomization.yaml"
                files[path.replace("/kust", f"{group.suffix}/kust")] = rendered[path]
                components.append(f"{component}{group.suffix}")
    cluster["spec"]["workerGroupSpecs"], folder["components"] = specs, components
    files[CLUSTER] = yaml.safe_dump(cluster, sort_keys=False)
    files[FOLDER] = yaml.safe_dump(folder, sort_keys=False)
    return files
