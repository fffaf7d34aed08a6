"""Seconds of a step: matrix products, attention, memory traffic, and exposed communication.

The model follows the hardware and uses one set of constants (below and in times.py) for all
systems. The forward and the backward pass of the blocks each take the sum of three times: matrix
products (at MATRICES times the rate measured for large products), attention, and the memory traffic
of elementwise kernels. Where the host needs longer to launch a pass's kernels, the pass takes that
long. The all-gather of a block overlaps with the block before it; only what outlasts that block is
exposed. Reduce-scatters of gradients overlap in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rayapp.config.optimizers import OPTIMIZERS
from rayapp.hardware import Gpu
from rayapp.planner import times
from rayapp.planner.flops import Flops, backward_flops, forward_flops, recomputed_flops
from rayapp.planner.memory import FP32, Layout, kept_bytes
from rayapp.planner.shape import kept_linears

# Fraction of a GPU's measured FLOP/s of large products (hardware.measured_flops) that a step's
# products reach. Fitted by a grid of MATRICES and the two attention fractions over the 56 published
# runs of docs/plan.md (read 2026-11-21): flat around these round numbers (docs/decisions.md).
MATRICES = 0.80
# Fraction of the data sheet's FLOP/s that stands in for a rate that was not measured. Estimate.
UNMEASURED = 0.75
# Flash attention's forward, and its backward with the recomputed scores, as fractions of the rate
# of matrix products (matmul_rate). Fitted together with MATRICES.
ATTENTION_FORWARD = 0.45
ATTENTION_BACKWARD = 0.35
# Rate of fp8 products over bf16's in models narrower than FP8_WIDTH: the casts take more time than
# the products save. Fitted to one run at width 2,048 on an H100; from 4,096 on runs are published.
FP8_WIDTH, NARROW_FP8 = 4096, 0.7
# Kernels of a block's forward: eager with fp32 norms, eager without, compiled. Estimates.
KERNELS_EAGER, KERNELS_PLAIN, KERNELS_COMPILED = 60, 25, 15
# Host memory bandwidth of one rank in bytes/s, for an optimizer on the CPU. Estimate.
HOST_BYTES_PER_S = 20e9
# Bytes that clipping reads and writes for a trainable parameter: the norm, then the scaling.
CLIP_BYTES = 12
# Seconds of FSDP's hooks per block and direction (forward, backward). Estimate.
HOOKS_S = 2e-4


def matmul_rate(gpu: Gpu, precision: str) -> float:
    """Return the FLOP/s that the matrix products of a step reach.

    Raises:
        ValueError: the GPU cannot compute so.
    """
    peak = gpu.flops.get(precision)  # fp32: PyTorch multiplies without tensor cores by default
    if peak is None:
        raise times.no_precision(gpu, precision)
    measured = gpu.measured_flops.get(precision, UNMEASURED * peak)
    return MATRICES * measured


def step_time(job: times.Workload[Layout]) -> times.StepTime:
    """Return the seconds of a step, split by cause.

    Raises:
        ValueError: the GPU cannot compute in this precision.
    """
    layout, gpu = job.layout, job.machine.gpu
    compute = _compute(job)
    passes, host = _passes(layout), _host_s(job)
    forward_s = max(compute.forward_s, host / passes)
    backward_s = max(compute.total_s - compute.forward_s, host * (passes - 1) / passes)
    waiting = forward_s + backward_s - compute.total_s
    exposed = _exposed_s(job, forward_s, backward_s)
    loss = layout.tokens * loss_traffic_bytes(layout) / (times.TRAFFIC * gpu.memory_bytes_per_s)
    moved = compute.elementwise_s + loss + _copies_s(job)
    # The slowest of n normal draws is about sqrt(2 ln n) standard deviations behind the mean.
    behind = times.SPREAD * math.sqrt(2 * math.log(job.machine.ranks))
    count = job.micro_batches
    return times.StepTime(
        matrices_s=count * compute.matrices_s,
        attention_s=count * compute.attention_s,
        traffic_s=count * moved,
        host_s=count * waiting,
        exposed_s=count * (exposed + _transfers_s(job)),
        stragglers_s=count * behind * (compute.matrices_s + compute.attention_s + moved),
        optimizer_s=_optimizer_s(layout, gpu) + times.STEP_S,
    )


@dataclass(frozen=True)
class _Compute:
    """Compute seconds of the blocks and the head in one micro-batch, both passes."""

    matrices_s: float
    attention_s: float
    elementwise_s: float
    forward_s: float
    """The share of the forward pass in all three."""

    @property
    def total_s(self) -> float:
        return self.matrices_s + self.attention_s + self.elementwise_s


def _compute(job: times.Workload[Layout]) -> _Compute:
    layout, shape, gpu = job.layout, job.layout.shape, job.machine.gpu
    tokens = layout.tokens
    adapters = layout.lora_rank, layout.lora_targets, layout.lora_experts
    forward = forward_flops(shape, layout.context, *adapters)
    backward = backward_flops(forward, frozen=layout.lora_rank is not None)
    recomputed = recomputed_flops(shape, forward, layout.checkpointing, _kept_share(layout))
    rate = matmul_rate(gpu, layout.precision)
    # Only the blocks' linear layers run in fp8; head, adapters and attention stay in bf16.
    plain = matmul_rate(gpu, "bf16") if layout.precision == "fp8" else rate
    if layout.precision == "fp8" and shape.hidden < FP8_WIDTH:
        rate = NARROW_FP8 * plain

    def matrices(flops: Flops) -> float:
        return tokens * (flops.linears / rate + (flops.adapters + flops.head) / plain)

    flash = tokens * forward.attention / (ATTENTION_FORWARD * plain)
    flash_again = tokens * recomputed.attention / (ATTENTION_FORWARD * plain)
    # The backward recomputes the scores: it costs 2.5 forwards, of which backward_flops counts 2.
    flash_back = 1.25 * tokens * backward.attention / (ATTENTION_BACKWARD * plain)
    once = shape.layers * tokens * block_traffic_bytes(layout)
    once /= times.TRAFFIC * gpu.memory_bytes_per_s
    passes, forwards = _passes(layout), 2 if layout.reference else 1
    return _Compute(
        matrices_s=matrices(forward + backward + recomputed) + (forwards - 1) * matrices(forward),
        attention_s=forwards * flash + flash_again + flash_back,
        elementwise_s=passes * once,
        forward_s=forwards * (matrices(forward) + flash + once),
    )


def _host_s(job: times.Workload[Layout]) -> float:
    layout = job.layout
    kernels_s = times.LAUNCH_S * _kernels(layout) * _passes(layout)
    return layout.shape.layers * (kernels_s + 2 * HOOKS_S)


def _copies_s(job: times.Workload[Layout]) -> float:
    """Return the seconds of FSDP's copies, on one GPU too, per micro-batch."""
    layout = job.layout
    gathers = 2 if layout.frees else 1
    held = layout.trainable if layout.plain_base else layout.shape.text_parameters
    gathered = 2 * layout.element * held * gathers
    reduced = (layout.element + FP32) * layout.trainable
    return (gathered + reduced) / (times.TRAFFIC * job.machine.gpu.memory_bytes_per_s)


def _transfers_s(job: times.Workload[Layout]) -> float:
    """Return the seconds of host-GPU copies for offloading per micro-batch; compute hides none."""
    layout, rate = job.layout, times.PINNED * job.machine.gpu.pcie_bytes_per_s
    moved = 0.0
    if layout.activation_offload:
        kept = kept_bytes(replace(layout, activation_offload=False))
        moved += 2 * kept * layout.shape.layers * layout.tokens
    if layout.cpu_offload:  # fp32 shards go to the GPU for each gather, gradients come back
        gathers = 2 if layout.frees else 1
        moved += FP32 * (gathers * layout.shape.text_parameters + layout.trainable) / layout.shards
    return moved / rate


def block_traffic_bytes(layout: Layout) -> float:
    """Return the bytes that the elementwise kernels of a block's forward move per token.

    Eager, as transformers writes it: an fp32 RMSNorm is 7 kernels (36 H bytes in bf16), a LayerNorm
    is one; a residual sum reads two tensors and writes one; rotary embeddings copy and rotate q and
    k; a gated activation makes five reads and writes. Compiled, each of these is one kernel.
    """
    shape, half = layout.shape, layout.element / 2
    if shape.measured:  # compiled: each result of a product is written once and read once
        measured = shape.measured
        return (2 * measured.results if layout.compiled else measured.traffic) / shape.layers
    hidden = shape.hidden
    turned = shape.rotary * (shape.heads + shape.kv_heads) * shape.head_dim
    inner = shape.intermediate * shape.active_experts
    if layout.compiled:
        return half * (16 * hidden + 4 * turned + (6 if shape.gated else 4) * inner)
    norms = 72 * hidden if shape.fp32_norms else 8 * hidden
    moved = norms + 12 * hidden + 20 * turned + (10 if shape.gated else 4) * inner
    routed = 16 * hidden * shape.active_experts if shape.experts > 1 else 0
    adapters = 0.0
    if layout.lora_rank is not None:  # peft adds a scaled result to the output of each linear
        adapters = 8.0 * sum(each.outputs + each.inputs for each in shape.linears if each.module)
    return half * (moved + routed) + adapters


def loss_traffic_bytes(layout: Layout) -> float:
    """Return the bytes that the loss moves per token: logits, log-probabilities, gradients."""
    # Bytes per logit. Estimates.
    each = 26.0 if layout.plain_loss or layout.pairs else 6.0 if layout.compiled else 18.0
    return layout.shape.vocabulary * each


def _passes(layout: Layout) -> int:
    """Return the cost of a block's kernels in forwards: backward is 2, the others 1 each."""
    return 3 + (layout.checkpointing != "none") + layout.reference


def _kept_share(layout: Layout) -> float:
    """Return the share of a block's matrix FLOPs that selective checkpointing does not repeat."""
    if layout.shape.measured:
        return layout.shape.measured.selective_share
    linears = layout.shape.linears
    names = kept_linears(layout.shape) if layout.kept is None else layout.kept
    # The result of the last one is never recomputed: no backward needs it.
    kept = [each for each in linears if each.name in {*names, linears[-1].name}]
    return sum(each.macs for each in kept) / sum(each.macs for each in linears)


def _kernels(layout: Layout) -> int:
    if layout.compiled:
        return KERNELS_COMPILED
    shape = layout.shape
    if shape.measured:
        return -(-shape.measured.kernels // shape.layers)
    return (KERNELS_EAGER if shape.fp32_norms else KERNELS_PLAIN) + 10 * (shape.experts > 1)


def _optimizer_s(layout: Layout, gpu: Gpu) -> float:
    bytes_each = CLIP_BYTES + OPTIMIZERS[layout.optimizer].moved_bytes
    shard = layout.trainable / layout.shards
    if layout.cpu_offload:
        return shard * bytes_each / HOST_BYTES_PER_S
    return shard * bytes_each / (times.TRAFFIC * gpu.memory_bytes_per_s)


def _exposed_s(job: times.Workload[Layout], forward_s: float, backward_s: float) -> float:
    """Return the seconds per micro-batch of communication that compute does not hide.

    Hidden communication slows compute down: CONTENTION of its seconds count as exposed too.
    """
    layout, machine, shape = job.layout, job.machine, job.layout.shape
    shards, replicas = layout.shards, machine.ranks // layout.shards
    frozen = layout.lora_rank is not None
    reduced = layout.trainable / shape.layers if frozen else shape.block_parameters
    gather = times.collective_s(machine, shards, layout.element * shape.block_parameters)
    scatter = times.collective_s(machine, shards, FP32 * reduced)
    if replicas > 1:  # plus an all-reduce of the shards between replicas, which are on other nodes
        across = replace(machine, gpus=1, nodes=replicas)
        together = min(shards, machine.gpus)  # ranks of a node that share its network
        sent = FP32 * reduced / shards * together
        scatter += 2 * times.collective_s(across, replicas, sent)
    root = times.collective_s(machine, shards, layout.element * shape.root_parameters)
    if not frozen:
        root += times.collective_s(machine, shards, FP32 * shape.root_parameters)
    each_forward = forward_s / shape.layers
    each_backward = backward_s / shape.layers
    behind = gather + scatter if layout.frees else scatter
    exposed = shape.layers * (max(0.0, gather - each_forward) + max(0.0, behind - each_backward))
    hidden = shape.layers * (min(gather, each_forward) + min(behind, each_backward))
    first_and_last = gather + scatter
    return exposed + first_and_last + root + times.CONTENTION * hidden
