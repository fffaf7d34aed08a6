"""What a step's time is reckoned with, of whatever kind: machines, their shares, collectives.

collective_s(machine_of(instance("p4d.24xlarge"), 3), ranks=24, sent=1e9)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from rayapp.hardware import Gpu, Instance
from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.memory import Layout

LayoutType = TypeVar("LayoutType", bound=Layout | ImageLayout)

# Share of memory bandwidth that elementwise kernels reach.
TRAFFIC = 0.75
# Shares of the links' rates that collectives reach, and seconds a hop of a ring takes.
NVLINK, PCIE, EFA, TCP = 0.75, 0.35, 0.75, 0.6
# Share of PCIe that copies between pinned host memory and a GPU reach.
PINNED = 0.4
HOP_S, NODE_HOP_S = 2e-6, 15e-6
# What a collective beside it takes of a block's compute: SMs and memory bandwidth.
CONTENTION = 0.12
# Spread of GPUs' speed (standard deviation over mean): all wait for the slowest. 5 % and more
# between the fastest and the slowest of a node are usual (ml-engineering's table of products).
SPREAD = 0.015
# Seconds the host needs for a kernel.
LAUNCH_S = 6e-6
# Seconds of a step outside its micro-batches.
STEP_S = 5e-3


@dataclass(frozen=True)
class Machine:
    """Nodes of one kind, with a rank on each GPU."""

    gpu: Gpu
    gpus: int
    """GPUs of a node that have a rank."""
    nodes: int
    network_bits_per_s: float
    efa: bool

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.gpus * self.nodes


def machine_of(one: Instance, nodes: int, gpus: int | None = None) -> Machine:
    """Return the machine that `nodes` instances of a kind make."""
    assert one.gpu is not None, one.name
    used = one.gpus if gpus is None else gpus
    return Machine(one.gpu, used, nodes, one.network_bits_per_s, one.efa_interfaces > 0)


@dataclass(frozen=True)
class Workload(Generic[LayoutType]):
    """What a step does."""

    layout: LayoutType
    machine: Machine
    context: float = 0.0
    """Tokens that a token attends to on average; of images none."""
    micro_batches: int = 1
    """Of one rank in a step."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what takes them."""

    matrices_s: float
    attention_s: float
    traffic_s: float
    host_s: float
    """Waiting for the host to launch kernels."""
    exposed_s: float
    """Communication that is not behind compute, and what it slows compute by."""
    stragglers_s: float
    """Waiting for the slowest GPU."""
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """The sum."""
        return sum(vars(self).values())


def no_precision(gpu: Gpu, precision: str) -> ValueError:
    """Return the error that says what a GPU can compute in instead."""
    known = ", ".join(name for name, value in gpu.flops.items() if value and name != "tf32")
    return ValueError(
        f"train.precision={precision} is not available: {gpu.name} has no {precision} "
        f"arithmetic. Set train.precision to one of {known}"
    )


def collective_s(machine: Machine, ranks: int, sent: float) -> float:
    """Return seconds of an all-gather or reduce-scatter of `sent` bytes in all over `ranks`.

    A ring: each rank receives all but its own part; a node's network is shared by its GPUs' rings.
    """
    if ranks <= 1:
        return 0.0
    inside = min(ranks, machine.gpus)
    nodes = -(-ranks // machine.gpus)
    if machine.gpu.nvlink_bytes_per_s is not None:
        link = NVLINK * machine.gpu.nvlink_bytes_per_s
    else:
        link = PCIE * machine.gpu.pcie_bytes_per_s
    crossing = sent * (ranks - 1) / ranks
    slowest = crossing / link if inside > 1 else 0.0
    if nodes > 1:
        network = machine.network_bits_per_s / 8 * (EFA if machine.efa else TCP)
        slowest = max(slowest, crossing / network)
    return slowest + (ranks - nodes) * HOP_S + (nodes - 1) * NODE_HOP_S
