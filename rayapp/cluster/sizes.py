"""What a head or worker gets of its machine, and how many machines a config asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayapp.config import RunConfig
from rayapp.hardware import Instance

HOST_CPUS = 2  # left to the operating system, the agents of ECS or Kubernetes, and CloudWatch's
HOST_MEMORY_SHARE, HOST_MEMORY_GIB = 0.04, 4.0  # kernel and firmware; agents, kubelet's reserve
OBJECT_STORE_SHARE = 0.3  # Ray's own default
OBJECT_STORE_MAX_BYTES = 200_000_000_000  # Ray's own limit
NCCL_SHARED_MEMORY_MIB = 8192  # NCCL's and PyTorch's part of /dev/shm, on top of Ray's
# 5128 pages of 2 MiB on EKS's accelerated AMIs where the node has EFA; a pod asks for its 5 GiB of
# them, as AWS's EFA samples do.
HUGEPAGES_HOST_MIB, HUGEPAGES_POD_MIB = 10256, 5120
WORKER_DISK_GIB, HEAD_DISK_GIB = 200, 100  # an image of some 20 GiB, Ray's spilled objects


@dataclass(frozen=True)
class Node:
    """What one container gets that has a machine to itself."""

    instance: Instance
    cpus: int
    memory_mib: int
    object_store_bytes: int
    shared_memory_mib: int
    interfaces: tuple[str, ...]
    """Kind of each network card's interface, in order: interface, efa or efa-only."""

    @property
    def efa(self) -> int:
        """EFA interfaces."""
        return sum(kind.startswith("efa") for kind in self.interfaces)


@dataclass(frozen=True)
class Fleet:
    """The machines of a config."""

    worker: Node
    workers_per_node: int
    min_nodes: int
    max_nodes: int


def node(one: Instance, efa: bool, reserved_cpus: int = 0, reserved_mib: int = 0) -> Node:
    """Return what a container may have of a machine, beside what else runs there."""
    cpus = one.vcpus - min(HOST_CPUS, one.vcpus // 4) - reserved_cpus
    memory_gib = one.memory_gib * (1 - HOST_MEMORY_SHARE) - HOST_MEMORY_GIB
    memory_mib = math.floor(memory_gib * 1024) - reserved_mib
    store = min(math.floor(memory_mib * OBJECT_STORE_SHARE) * 2**20, OBJECT_STORE_MAX_BYTES)
    shared_mib = math.ceil(store / 2**20) + min(NCCL_SHARED_MEMORY_MIB, memory_mib // 5)
    return Node(one, cpus, memory_mib, store, shared_mib, _interfaces(one, efa))


def _interfaces(one: Instance, efa: bool) -> tuple[str, ...]:
    """Return the kind of interface on each network card, IP traffic on card 0.

    >>> from rayapp.hardware import instance
    >>> _interfaces(instance("p4d.24xlarge"), efa=True)
    ('efa', 'efa-only', 'efa-only', 'efa-only')
    >>> _interfaces(instance("p6-b300.48xlarge"), efa=True)[:2]
    ('interface', 'efa-only')
    """
    if not efa or one.efa_interfaces == 0:
        return ("interface",)
    first = ("efa",) if one.first_efa_card == 0 else ("interface",)
    rest = one.efa_interfaces - (1 if one.first_efa_card == 0 else 0)
    return first + ("efa-only",) * rest


def fleet(config: RunConfig, worker: Node, problems: list[str]) -> Fleet | None:
    """Return how many machines the config's workers need; add to `problems` what cannot be placed.

    A worker needs a CPU, a GPU where there are any, and `cluster.resources`; one CPU in all stays
    with Ray Data.
    """
    one, asked = worker.instance, config.cluster.resources
    gpus = one.gpus if config.cluster.gpu != "false" else 0
    if config.cluster.gpu == "true" and one.gpus == 0:
        problems.append(
            f"cluster.gpu=true is impossible: {one.name} has no GPU. Set cluster.instance to one "
            "that has, e.g. g5.12xlarge"
        )
        return None
    have = {"CPU": float(worker.cpus), "memory": worker.memory_mib * 2.0**20}
    have |= {"object_store_memory": float(worker.object_store_bytes)}
    need = {"CPU": 1.0, **asked}
    if gpus:
        have["GPU"] = float(one.gpus)
        need.setdefault("GPU", 1.0)
    if one.gpu is not None:
        have[f"accelerator_type:{one.gpu.name.split('-')[0]}"] = 1.0  # as Ray calls it
    for name, amount in need.items():
        if amount > have.get(name, 0.0):
            problems.append(
                f"cluster.resources.{name}={amount:g} is too much: a worker on {one.name} can have "
                f"{have.get(name, 0.0):g}. Lower it, or set a larger cluster.instance"
            )
    if problems:
        return None
    fits = {name: math.floor(have[name] / amount) for name, amount in need.items() if amount > 0}
    per_node = min(fits.values())
    least = math.ceil(config.cluster.min_workers / per_node)
    most = math.ceil(config.cluster.max_workers / per_node)
    if config.cluster.max_workers * need["CPU"] > most * worker.cpus - 1:
        most += 1  # all CPUs taken by workers: Ray Data would starve
    return Fleet(worker, per_node, least, max(most, 1))
