"""Size a cluster: each head's and worker's share of its machine, the machines, USD per hour."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayapp.config import Choice, RunConfig
from rayapp.hardware import PRICE_DATE, Instance

HOST_CPUS = 2  # left to the operating system and the agents of ECS or Kubernetes and CloudWatch
HOST_MEMORY_SHARE, HOST_MEMORY_GIB = 0.04, 4.0  # kernel and firmware; agents and kubelet's reserve
OBJECT_STORE_SHARE = 0.3  # Ray's own default
OBJECT_STORE_MAX_BYTES = 200_000_000_000  # Ray's own limit
NCCL_SHARED_MEMORY_MIB = 8192  # of /dev/shm, for NCCL and PyTorch, on top of Ray's object store
# EKS's accelerated AMIs reserve 5128 pages of 2 MiB where the node has EFA; a pod requests 5 GiB of
# them, as AWS's EFA samples do.
HUGEPAGES_HOST_MIB, HUGEPAGES_POD_MIB = 10256, 5120
# An image of some 20 GiB, and Ray's spilled objects.
WORKER_DISK_GIB, HEAD_DISK_GIB, DATA_DISK_GIB = 200, 100, 200


@dataclass(frozen=True)
class Node:
    """What a container gets that has a machine to itself: CPUs, memory, network interfaces."""

    instance: Instance
    cpus: int
    memory_mib: int
    object_store_bytes: int
    shared_memory_mib: int
    interfaces: tuple[str, ...]
    """Kind of the interface on each network card in use: interface, efa or efa-only."""

    @property
    def efa(self) -> int:
        """Number of EFA interfaces."""
        return sum(kind.startswith("efa") for kind in self.interfaces)


@dataclass(frozen=True)
class Fleet:
    """The worker machines of a config."""

    worker: Node
    min_nodes: int
    max_nodes: int
    choice: Choice
    """The type and how it is bought, as cluster.instance names it."""


def node(instance: Instance, efa: bool, reserved_cpus: int = 0, reserved_mib: int = 0) -> Node:
    """Return what a container gets of a machine, less the host's share and what is reserved."""
    cpus = instance.vcpus - min(HOST_CPUS, instance.vcpus // 4) - reserved_cpus
    memory_gib = instance.memory_gib * (1 - HOST_MEMORY_SHARE) - HOST_MEMORY_GIB
    memory_mib = math.floor(memory_gib * 1024) - reserved_mib
    store = min(math.floor(memory_mib * OBJECT_STORE_SHARE) * 2**20, OBJECT_STORE_MAX_BYTES)
    shared_mib = math.ceil(store / 2**20) + min(NCCL_SHARED_MEMORY_MIB, memory_mib // 5)
    return Node(instance, cpus, memory_mib, store, shared_mib, _interfaces(instance, efa))


def _interfaces(instance: Instance, efa: bool) -> tuple[str, ...]:
    """Return the kind of interface on each network card; card 0 carries the IP traffic.

    >>> from rayapp.hardware import instance
    >>> _interfaces(instance("p4d.24xlarge"), efa=True)
    ('efa', 'efa-only', 'efa-only', 'efa-only')
    >>> _interfaces(instance("p6-b300.48xlarge"), efa=True)[:2]
    ('interface', 'efa-only')
    """
    if not efa or instance.efa_interfaces == 0:
        return ("interface",)
    first = ("efa",) if instance.first_efa_card == 0 else ("interface",)
    rest = instance.efa_interfaces - (1 if instance.first_efa_card == 0 else 0)
    return first + ("efa-only",) * rest


def machine_variables(machine: Node, disk_gib: int) -> dict[str, object]:
    """Return what Terraform needs to know of a machine."""
    return {
        "instance_type": machine.instance.name,
        "gpus": machine.instance.gpus,
        "interfaces": list(machine.interfaces),
        "disk_gib": disk_gib,
    }


def fleet(
    config: RunConfig, worker: Node, problems: list[str], *, data_elsewhere: bool = False
) -> Fleet | None:
    """Return how many machines the config's workers need; None, and `problems`, if they do not fit.

    A worker needs one CPU, one GPU if the instance has GPUs and cluster.gpu is not false, unless
    `cluster.resources` says otherwise. At least one of the machines' CPUs is left to Ray Data,
    unless other hosts prepare data.
    """
    instance, asked = worker.instance, config.cluster.resources
    gpus = instance.gpus if config.cluster.gpu != "false" else 0
    if config.cluster.gpu == "true" and instance.gpus == 0:
        problems.append(
            f"cluster.gpu=true is impossible: {instance.name} has no GPU. Set cluster.instance to "
            "one that has, e.g. g5.12xlarge"
        )
        return None
    have = {"CPU": float(worker.cpus), "memory": worker.memory_mib * 2.0**20}
    have |= {"object_store_memory": float(worker.object_store_bytes)}
    need = {"CPU": 1.0, **asked}
    if gpus:
        have["GPU"] = float(instance.gpus)
        need.setdefault("GPU", 1.0)
    if instance.gpu is not None:
        have[f"accelerator_type:{instance.gpu.name.split('-')[0]}"] = 1.0  # as Ray calls it
    for name, amount in need.items():
        if amount > have.get(name, 0.0):
            problems.append(
                f"cluster.resources.{name}={amount:g} is too much: a worker on {instance.name} can "
                f"have {have.get(name, 0.0):g}. Lower it, or set a larger cluster.instance"
            )
    if problems:
        return None
    fits = {name: math.floor(have[name] / amount) for name, amount in need.items() if amount > 0}
    per_node = min(fits.values())
    least = math.ceil(config.cluster.min_workers / per_node)
    most = math.ceil(config.cluster.max_workers / per_node)
    spare = 0 if data_elsewhere else 1
    if config.cluster.max_workers * need["CPU"] > most * worker.cpus - spare:
        most += 1  # else the workers would take all CPUs and Ray Data would starve
    return Fleet(worker, least, max(most, 1), config.cluster.choices[0])


# us-east-1 and us-west-2. Not included: data through a NAT gateway (0.045 USD per GB) or an
# interface endpoint (0.01 USD per GB), and stored logs. S3 through its endpoint is free.
# Sources, 2026-11-22: NAT, zeonedge.com "Eliminating AWS NAT Gateway Costs" (2026-04-10);
# endpoints, by zone, usage.ai "AWS network costs" (2026-05) and cloudcostkit.com's calculator; EKS,
# AWS's blog "Amazon EKS extended support for Kubernetes versions pricing", by which a version past
# its 14 months costs 0.60.
NAT_USD_PER_HOUR = 0.045
ENDPOINT_USD_PER_HOUR = 0.01
EKS_USD_PER_HOUR = 0.10
ENDPOINTS = {"ecs": 11, "kuberay": 12}  # the lists in infra/ecs/main.tf and infra/eks/main.tf


def cost_line(platform: str, fleet: Fleet, head: Instance, region: str, market: str) -> str:
    """Return a line with the cost in USD per hour: with all workers, and idle (head only)."""
    worker, price = fleet.worker.instance, fleet.choice.usd_per_hour
    market = fleet.choice.market or market
    head_usd = head.usd_per_hour.get(region)
    fixed = NAT_USD_PER_HOUR + ENDPOINTS[platform] * ENDPOINT_USD_PER_HOUR
    fixed += EKS_USD_PER_HOUR if platform == "kuberay" else 0.0
    nodes = f"{fleet.max_nodes} x {worker.name}"
    if price is None and market == "on-demand":
        price = worker.usd_per_hour.get(region)
    if price is None and market != "on-demand":
        return (
            f"cost: {nodes} ({market}: price not known here), {_idle(head, head_usd, fixed)}, "
            f"{region}, {PRICE_DATE}"
        )
    if price is None:
        return (
            f"cost: {nodes}: no on-demand price known in {region}, {_idle(head, head_usd, fixed)}"
        )
    busy = "unknown" if head_usd is None else f"{fleet.max_nodes * price + head_usd + fixed:.2f}"
    return (
        f"cost: {busy} USD/h with {nodes} ({price:g} each, {market.replace('-', ' ')}), "
        f"{_idle(head, head_usd, fixed)}, {region}, {PRICE_DATE}"
    )


def _idle(head: Instance, head_usd: float | None, fixed: float) -> str:
    if head_usd is None:
        return f"idle {fixed:.2f} USD/h and the head {head.name} of unknown price"
    return f"idle {head_usd + fixed:.2f} USD/h with the head {head.name}"
