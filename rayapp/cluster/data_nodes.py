"""Add hosts without GPUs to what is rendered: they prepare data beside the workers.

Their Ray nodes have a label that the tasks of a preparation ask for (rayapp.data.ray_tasks). They
are bought on demand, are up before the workers of a list, and an alarm lets them go when their CPUs
are idle.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from rayapp.cluster.options import Options
from rayapp.cluster.sizes import DATA_DISK_GIB, Fleet, machine_variables, node
from rayapp.config import DATA_LABEL, Choice
from rayapp.hardware import PRICE_DATE, UnknownInstance, instance

LABEL, GROUP = DATA_LABEL


def data_fleet(options: Options, problems: list[str]) -> Fleet | None:
    """Return the hosts that `options` asks for, or None; add to `problems` what is impossible."""
    if options.data_nodes == 0:
        return None
    name = options.data_instance
    try:
        machine = instance(name, "data_instance")
    except UnknownInstance as error:
        problems.append(str(error))
        return None
    each = node(machine, efa=False)
    why = {
        "it has GPUs, which preparing data does not use. Set one without": machine.gpus > 0,
        "the image is for x86_64. Set another": "x86_64" not in machine.architectures,
        f"{each.memory_mib} MiB are left for Ray. Set a larger one": each.memory_mib < 4096,
    }
    problems += [
        f"data_instance={name} is impossible: {reason}, e.g. m6i.8xlarge"
        for reason, wrong in why.items()
        if wrong
    ]
    return Fleet(each, options.data_nodes, options.data_nodes, Choice(name))


def refuse_without_gpus(gpus: int, problems: list[str]) -> None:
    """Add to `problems` that workers without GPUs would train on these hosts too."""
    if gpus == 0:
        problems.append(
            "data_nodes is impossible: workers without GPUs would train on these hosts too. "
            "Leave it out: such workers' hosts prepare data as well"
        )


def values(fleet: Fleet, number: int) -> dict[str, Any]:
    """Return the values of the placeholders of the group of pods, by its place among the groups."""
    return {"group": GROUP, "group_index": number, "min_nodes": fleet.max_nodes}


def variables(fleet: Fleet) -> dict[str, object]:
    """Return Terraform's variables of the group."""
    return {
        **machine_variables(fleet.worker, DATA_DISK_GIB),
        "nodes": fleet.max_nodes,
        "max_nodes": fleet.max_nodes,
        "placed": False,
    }


def add_task(files: dict[str, str], of_data: dict[str, str]) -> None:
    """Add to a rendered ECS cluster the task definition data.json.

    `of_data` holds what is rendered for the hosts as if they were the workers.
    """
    definition = json.loads(of_data["worker.json"])
    definition["family"] = definition["family"].removesuffix("-worker") + f"-{GROUP}"
    definition["containerDefinitions"][0]["command"].append(f"--labels={LABEL}={GROUP}")
    files[f"{GROUP}.json"] = json.dumps(definition, indent=2) + "\n"


def add_pods(files: dict[str, str], of_data: dict[str, str]) -> None:
    """Add to a rendered RayCluster a group of pods and its volume of Lustre."""
    path = "base/raycluster.yaml"
    cluster = yaml.safe_load(files[path])
    (spec,) = yaml.safe_load(of_data[path])["spec"]["workerGroupSpecs"]
    cluster["spec"]["workerGroupSpecs"].append({**spec, "labels": {LABEL: GROUP}})
    files[path] = yaml.safe_dump(cluster, sort_keys=False)
    lustre = "components/lustre/kustomization.yaml"
    if lustre in of_data:
        files[lustre.replace("/kust", f"-{GROUP}/kust")] = of_data[lustre]
        folder = yaml.safe_load(files["cluster/kustomization.yaml"])
        folder["components"].append(f"../components/lustre-{GROUP}")
        files["cluster/kustomization.yaml"] = yaml.safe_dump(folder, sort_keys=False)


def cost_line(fleet: Fleet, region: str) -> str:
    """Return a line with what the hosts cost while they are up."""
    name = fleet.worker.instance.name
    price = fleet.worker.instance.usd_per_hour.get(region)
    what = f"data: {fleet.max_nodes} x {name} beside the workers"
    if price is None:
        return f"{what}: no on-demand price known in {region}"
    return (
        f"{what}, {fleet.max_nodes * price:.2f} USD/h more ({price:g} each, on demand), "
        f"{region}, {PRICE_DATE}"
    )
