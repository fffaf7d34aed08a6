"""How long a step takes: matrices, attention, memory traffic, and communication that is not hidden.

    time = step_time(Job(layout, machine, context=mean_context([4096]), micro_batches=4))
    time.total_s, time.compute_s, time.exposed_s

The model is physical and has one set of constants (below) for all systems. Each block's forward
and backward takes the time of its matrix products (at the rate that large products were measured
to reach, times MATRICES), of attention, and of the bytes that everything elementwise moves; or, if
that is longer, the time that the host needs to launch its kernels. A block's gather runs beside the
block before it, and what is longer than that block is exposed; gradients leave the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.formulas import (
    Flops,
    backward_flops,
    forward_flops,
    recomputed_flops,
)
from rayapp.formulas.memory import FP32, Layout, kept_linears
from rayapp.hardware import Gpu, Instance

# Share of the measured rate of large products that the products of a step reach.
MATRICES = 0.80
# Where no product was measured: the share of the peak taken in its place.
UNMEASURED = 0.75
# Flash attention's forward and backward (with its recomputation), as shares of MATRICES' rate.
ATTENTION_FORWARD = 0.45
ATTENTION_BACKWARD = 0.35
# Share of memory bandwidth that elementwise kernels reach.
TRAFFIC = 0.75
# Shares of the links' rates that collectives reach, and seconds a hop of a ring takes.
NVLINK, PCIE, EFA, TCP = 0.75, 0.35, 0.75, 0.6
HOP_S, NODE_HOP_S = 2e-6, 15e-6
# What a collective beside it takes of a block's compute: SMs and memory bandwidth.
CONTENTION = 0.12
# Seconds the host needs for a kernel, and kernels of a block's forward.
LAUNCH_S = 6e-6
KERNELS_EAGER, KERNELS_PLAIN, KERNELS_COMPILED = 60, 25, 15
# Seconds of FSDP's hooks, each block and direction; of a step outside its micro-batches.
HOOKS_S, STEP_S = 2e-4, 5e-3


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
class Job:
    """What a step does."""

    layout: Layout
    machine: Machine
    context: float
    """Tokens that a token attends to on average."""
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
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """The sum."""
        return sum(vars(self).values())


def matmul_rate(gpu: Gpu, precision: str) -> float:
    """Return FLOP/s that a step's matrix products reach.

    Raises:
        ValueError: the GPU cannot compute so.
    """
    peak = gpu.flops.get(precision)  # fp32: PyTorch multiplies without tensor cores by default
    if peak is None:
        known = ", ".join(name for name, value in gpu.flops.items() if value and name != "tf32")
        raise ValueError(
            f"train.precision={precision} is not available: {gpu.name} has no {precision} "
            f"arithmetic. Set train.precision to one of {known}"
        )
    measured = gpu.measured_flops.get(precision, UNMEASURED * peak)
    return MATRICES * measured


def step_time(job: Job) -> StepTime:
    """Return how long a step takes.

    Raises:
        ValueError: the GPU cannot compute in this precision.
    """
    layout, shape, gpu = job.layout, job.layout.shape, job.machine.gpu
    tokens = layout.tokens
    forward = forward_flops(shape, job.context, layout.lora_rank, layout.lora_targets)
    backward = backward_flops(forward, frozen=layout.lora_rank is not None)
    again = recomputed_flops(shape, forward, layout.checkpointing, _kept_share(layout))
    products = forward + backward + again
    rate = matmul_rate(gpu, layout.precision)
    plain = matmul_rate(gpu, "bf16" if layout.precision == "fp8" else layout.precision)

    def matrices(flops: Flops) -> float:
        blocks = flops.linears / (rate if layout.precision == "fp8" else plain)
        return tokens * (blocks + (flops.adapters + flops.head) / plain)

    def attention(flops: Flops, share: float) -> float:
        return tokens * flops.attention / (share * plain)

    traffic = TRAFFIC * gpu.memory_bytes_per_s
    passes = {"none": 3.0, "selective": 4.0, "full": 4.0}[layout.checkpointing]
    block_traffic = tokens * block_traffic_bytes(layout) / traffic
    elementwise = passes * shape.layers * block_traffic
    loss = tokens * loss_traffic_bytes(layout) / traffic
    gathered = shape.layers * shape.block_parameters + shape.root_parameters
    sharded = job.machine.ranks > 1
    # Copies in and out of the buffers of collectives: bf16 twice a gather, and the reduction.
    copies = gathered * layout.element * (2 * 2 if _frees(layout) else 2) + 6 * layout.trainable
    copying = copies / traffic if sharded else 0.0

    flash = attention(forward, ATTENTION_FORWARD)
    flash_again = attention(again, ATTENTION_FORWARD)
    flash_back = attention(backward, ATTENTION_BACKWARD) * 1.25  # scores are computed again
    compute = matrices(products) + flash + flash_again + flash_back + elementwise
    kernels = _kernels(layout)
    directions = 2 + (1 if layout.checkpointing != "none" else 0)
    host = shape.layers * (
        LAUNCH_S * kernels * (1 + directions) + (2 * HOOKS_S if sharded else 0.0)
    )
    waiting = max(0.0, host - compute)
    forward_s = matrices(forward) + flash + block_traffic * shape.layers
    backward_s = compute - forward_s
    exposed = _exposed(job, forward_s + waiting / 3, backward_s + waiting * 2 / 3)
    count = job.micro_batches
    return StepTime(
        matrices_s=count * matrices(products),
        attention_s=count * (flash + flash_again + flash_back),
        traffic_s=count * (elementwise + loss + copying),
        host_s=count * waiting,
        exposed_s=count * exposed,
        optimizer_s=_optimizer_s(layout, gpu) + STEP_S,
    )


def block_traffic_bytes(layout: Layout) -> float:
    """Return bytes that the elementwise kernels of a block's forward move for one token.

    Eager, as transformers writes them: an fp32 RMSNorm is 7 kernels (36 H), LayerNorm is one; a
    residual sum reads two and writes one; rotary positions copy and turn q and k; a gated
    activation reads and writes five times. Compiled, each becomes one kernel.
    """
    shape, half = layout.shape, layout.element / 2
    hidden = shape.hidden
    turned = shape.rotary * (shape.heads + shape.kv_heads) * shape.head_dim
    inner = shape.intermediate * shape.active_experts
    if layout.compiled:
        return half * (16 * hidden + 4 * turned + (6 if shape.gated else 4) * inner)
    norms = 72 * hidden if shape.fp32_norms else 8 * hidden
    moved = norms + 12 * hidden + 20 * turned + (10 if shape.gated else 4) * inner
    routed = 16 * hidden * shape.active_experts if shape.experts > 1 else 0
    adapters = 0.0
    if layout.lora_rank is not None:  # peft adds a scaled result to that of each linear
        adapters = 8.0 * sum(one.outputs + one.inputs for one in shape.linears if one.module)
    return half * (moved + routed) + adapters


def loss_traffic_bytes(layout: Layout) -> float:
    """Return bytes that the loss moves for one token: logits and what becomes of them."""
    return layout.shape.vocabulary * (26.0 if layout.plain_loss else 18.0)


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


def _frees(layout: Layout) -> bool:
    return layout.strategy in ("full_shard", "hybrid_shard")


def _kept_share(layout: Layout) -> float:
    """Return what share of a block's matrix FLOPs selective checkpointing does not do again."""
    names = kept_linears(layout.shape) if layout.kept is None else layout.kept
    last = layout.shape.linears[-1].name  # never done again: nothing after it needs its result

    work = {one.name: one.active * one.inputs * one.outputs for one in layout.shape.linears}
    return sum(size for name, size in work.items() if name in names or name == last) / sum(
        work.values()
    )


def _kernels(layout: Layout) -> int:
    if layout.compiled:
        return KERNELS_COMPILED
    shape = layout.shape
    return (KERNELS_EAGER if shape.fp32_norms else KERNELS_PLAIN) + 10 * (shape.experts > 1)


def _optimizer_s(layout: Layout, gpu: Gpu) -> float:
    """Return seconds of clipping and of a fused step: each number is read and written once."""
    bytes_each = {"adamw": 40, "adamw8bit": 26, "muon": 60}[layout.optimizer]
    shard = layout.trainable / layout.shards
    if layout.cpu_offload:  # over PCIe and back, gradients out and parameters in, plus the host's
        return shard * (2 * FP32) / gpu.pcie_bytes_per_s + shard * bytes_each / 100e9
    return shard * bytes_each / (TRAFFIC * gpu.memory_bytes_per_s)


def _exposed(job: Job, forward_s: float, backward_s: float) -> float:
    """Return seconds of a micro-batch in which nothing but communication goes on."""
    layout, machine, shape = job.layout, job.machine, job.layout.shape
    shards, replicas = layout.shards, machine.ranks // layout.shards
    frozen = layout.lora_rank is not None
    reduced = layout.trainable / shape.layers if frozen else shape.block_parameters
    gather = collective_s(machine, shards, layout.element * shape.block_parameters)
    scatter = collective_s(machine, shards, FP32 * reduced)
    if replicas > 1:  # and an all-reduce of the shards over replicas, which lie on other nodes
        across = Machine(machine.gpu, 1, replicas, machine.network_bits_per_s, machine.efa)
        together = min(shards, machine.gpus)  # ranks of a node that share its network
        sent = FP32 * reduced / shards * together
        scatter += 2 * collective_s(across, replicas, sent)
    root = collective_s(machine, shards, layout.element * shape.root_parameters)
    if not frozen:
        root += collective_s(machine, shards, FP32 * shape.root_parameters)
    each_forward = forward_s / shape.layers
    each_backward = backward_s / shape.layers
    behind = gather + scatter if _frees(layout) else scatter
    exposed = shape.layers * (max(0.0, gather - each_forward) + max(0.0, behind - each_backward))
    hidden = shape.layers * (min(gather, each_forward) + min(behind, each_backward))
    first_and_last = gather + scatter
    return exposed + first_and_last + root + CONTENTION * hidden
