"""What the step-time models of text and images share: machines, efficiencies, collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from rayapp.hardware import Gpu, Instance
from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.memory import Layout

LayoutType = TypeVar("LayoutType", bound=Layout | ImageLayout)

# "Estimate": no measurement is recorded. The whole set, with that of step.py, is compared with the
# 56 published language-model runs of docs/plan.md (sources read 2026-11-21).

# Fraction of peak memory bandwidth (bytes/s) that elementwise kernels reach. Estimate.
TRAFFIC = 0.75
# Fractions of each link's peak rate that collectives reach. Estimates.
NVLINK, PCIE, EFA, TCP = 0.75, 0.35, 0.75, 0.6
# Fraction of PCIe's rate that copies between pinned host memory and a GPU reach. Estimate.
PINNED = 0.4
# Seconds of latency per hop of a ring: inside a node, and between nodes. Estimates.
HOP_S, NODE_HOP_S = 2e-6, 15e-6
# Seconds of compute lost per second that a collective overlaps with it: the collective takes SMs
# and memory bandwidth. Estimate.
CONTENTION = 0.12
# Standard deviation over mean of the speed of GPUs of one model; every step waits for the slowest.
# 5 % and more between the fastest and the slowest of a node are usual (ml-engineering's table of
# products). 0.015 is an estimate: with it 128 GPUs keep 98.6 % of 8 GPUs' speed each, where
# torchtitan published 97.7 % (docs/decisions.md).
SPREAD = 0.015
# Seconds that the host needs to launch one kernel. Estimate.
LAUNCH_S = 6e-6
# Seconds of a step outside its micro-batches and its optimizer. Estimate.
STEP_S = 5e-3


@dataclass(frozen=True)
class Machine:
    """Identical nodes, with one rank per used GPU."""

    gpu: Gpu
    gpus: int
    """GPUs used per node, one rank each."""
    nodes: int
    network_bits_per_s: float
    efa: bool

    @property
    def ranks(self) -> int:
        """Total number of ranks over all nodes."""
        return self.gpus * self.nodes


def machine_of(instance: Instance, nodes: int, gpus: int | None = None) -> Machine:
    """Return `nodes` instances of one type as a machine; `gpus` are used of each (None: all)."""
    assert instance.gpu is not None, instance.name
    used, efa = instance.gpus if gpus is None else gpus, instance.efa_interfaces > 0
    return Machine(instance.gpu, used, nodes, instance.network_bits_per_s, efa)


@dataclass(frozen=True)
class Workload(Generic[LayoutType]):
    """The work of one step: the layout, the machine, and how many micro-batches."""

    layout: LayoutType
    machine: Machine
    micro_batches: int = 1
    """Micro-batches that the busiest rank runs per step."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, split by cause."""

    matrices_s: float
    attention_s: float
    traffic_s: float
    host_s: float
    """The GPU waits for the host to launch kernels."""
    exposed_s: float
    """Communication that compute does not hide, plus the slowdown of compute by what it hides."""
    stragglers_s: float
    """The other GPUs wait for the slowest one."""
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step: the sum of all parts."""
        return sum(vars(self).values())


def no_precision(gpu: Gpu, precision: str) -> ValueError:
    """Return an error that lists the precisions that this GPU supports."""
    known = ", ".join(name for name, value in gpu.flops.items() if value and name != "tf32")
    return ValueError(
        f"train.precision={precision} is not available: {gpu.name} has no {precision} "
        f"arithmetic. Set train.precision to one of {known}"
    )


def collective_s(machine: Machine, ranks: int, sent: float) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter over `ranks` ranks.

    `sent` is the size of the whole buffer in bytes; each rank receives all of it but its own part.
    All rings of a node share its network.
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
