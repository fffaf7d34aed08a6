"""Put together what is rendered for each type of cluster.instance, where it is a list.

Each type has a group of hosts, and of tasks or pods, which is empty until `rayapp capacity` has
chosen it. Ray's nodes have their type and market as labels, by which a run knows what it costs.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import yaml

from rayapp.cluster.sizes import WORKER_DISK_GIB, Fleet, machine_variables
from rayapp.config import INSTANCE_LABEL, MARKET_LABEL

Files: TypeAlias = dict[str, str]
Groups: TypeAlias = dict[str, dict[str, object]]
"""Terraform's variables of each group, by name."""


def tasks(each: list[Files], fleets: list[Fleet]) -> tuple[Files, Groups]:
    """Return the task definitions of ECS, one of workers for each type, and the groups.

    `each` holds what is rendered for a fleet.
    """
    files, groups = Files(), Groups()
    for number, (rendered, workers) in enumerate(zip(each, fleets, strict=True), start=1):
        name, market = workers.choice.place
        definition = json.loads(rendered.pop("worker.json"))
        definition["family"] += f"-{number}"
        label = f"--labels={INSTANCE_LABEL}={name},{MARKET_LABEL}={market}"
        definition["containerDefinitions"][0]["command"].append(label)
        rendered[f"worker-{number}.json"] = json.dumps(definition, indent=2) + "\n"
        files = rendered | files
        groups[_name(number, workers)] = {**_group(workers), "task": f"worker-{number}"}
    return files, groups


def pods_values(number: int, workers: Fleet) -> dict[str, Any]:
    """Return the values of the placeholders of a group of pods, by its place in the list."""
    name = _name(number, workers)
    return {"group": name, "group_index": number - 1, "replicas": 0, "min_nodes": 0}


def pods(each: list[Files], fleets: list[Fleet]) -> tuple[Files, Groups]:
    """Return the folders `common` and `cluster`, a group of pods for each type, and the groups.

    There is no folder `job`: its cluster would stay without workers.
    """
    files, groups, specs = Files(), Groups(), list[Any]()
    components = list[str]()
    for number, (rendered, workers) in enumerate(zip(each, fleets, strict=True), start=1):
        name, market = workers.choice.place
        (spec,) = yaml.safe_load(rendered["base/raycluster.yaml"])["spec"]["workerGroupSpecs"]
        specs.append({**spec, "labels": {INSTANCE_LABEL: name, MARKET_LABEL: market}})
        groups[_name(number, workers)] = _group(workers)
        for folder in yaml.safe_load(rendered["cluster/kustomization.yaml"])["components"]:
            if number == 1 or not folder.endswith("-head"):  # of the head, of which there is one
                path = f"{folder.removeprefix('../')}/kustomization.yaml"
                files[path.replace("/kust", f"-{number}/kust")] = rendered[path]
                components.append(f"{folder}-{number}")
    first = each[0]
    cluster = yaml.safe_load(first["base/raycluster.yaml"])
    cluster["spec"]["workerGroupSpecs"] = specs
    files["base/raycluster.yaml"] = yaml.safe_dump(cluster, sort_keys=False)
    path = "cluster/kustomization.yaml"
    files[path] = yaml.safe_dump({**yaml.safe_load(first[path]), "components": components})
    files["base/kustomization.yaml"] = first["base/kustomization.yaml"]
    files |= {path: text for path, text in first.items() if path.startswith("common/")}
    return files, groups


def _name(number: int, workers: Fleet) -> str:
    """Return the name of a group, by which `rayapp capacity` knows its place in the list."""
    name, market = workers.choice.place
    return f"{number}-{name.replace('.', '-')}-{market}"


def _group(workers: Fleet) -> dict[str, object]:
    return {
        **machine_variables(workers.worker, WORKER_DISK_GIB),
        "nodes": 0,
        "max_nodes": workers.max_nodes,
        "market": workers.choice.place[1],
        "reservation_id": None,
        "preferred": True,
    }
