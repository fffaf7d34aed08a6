"""Seconds of a step of an image classifier: convolutions, memory traffic, communication.

Links are modelled in planner/times.py. Each convolution takes the time of its multiply-adds or of
its memory traffic, whichever is longer; batch-norm, activations, sums and gates take the time of
their memory traffic. Where the host needs longer to launch a micro-batch's kernels, the micro-batch
takes that long. With DDP, the all-reduce of the gradients overlaps with the backward pass of the
step's last micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rayapp.config.optimizers import OPTIMIZERS
from rayapp.hardware import Gpu
from rayapp.planner import times
from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.image_shape import Convolution
from rayapp.planner.memory import FP32

# The eight shares below are fitted to the 38 counted image runs of docs/plan.md (NVIDIA
# DeepLearningExamples and timm, read 2026-11-22): one set for all, not checked on other runs.
# Fraction of peak FLOP/s that convolutions reach: of tensor cores in bf16; of TF32, which cuDNN
# uses for fp32 where the GPU has it; of plain fp32. Then the fraction of memory bandwidth that they
# reach where bandwidth bounds them.
CONVOLUTIONS = {"bf16": 0.75, "tf32": 0.25, "fp32": 0.85}
CONVOLUTIONS_TRAFFIC = 0.49
# A depthwise convolution does not use tensor cores: fraction of the plain fp32 peak FLOP/s, keyed
# by bytes per number (2: bf16, 4: fp32), and of memory bandwidth.
DEPTHWISE = {2: 0.055, 4: 0.0225}
DEPTHWISE_TRAFFIC = 0.38
# Fraction of memory bandwidth that batch-norm and elementwise kernels reach for the bytes counted
# here. It is high because a kernel may read from the cache what the previous one wrote.
ELEMENTWISE = 0.90
# Batch-norm's reads and writes of each element: forward, backward. Counted, not fitted. For
# synchronized batch-norm in fp32, bytes per element. Estimates: not measured on a GPU.
NORM_FORWARD, NORM_BACKWARD = 3, 5
SYNCHRONIZED_FORWARD, SYNCHRONIZED_BACKWARD = 44, 70
# Kernels that a batch-norm launches for its statistics. Estimate.
NORM_KERNELS = 6
# Bytes of gradients in one DDP bucket: PyTorch's default of 25 MiB. Compute does not hide the last.
BUCKET_BYTES = 25 * 2**20
# vCPU seconds to decode and augment a photograph of 500 x 375 pixels: a constant, and a part per
# pixel of the model's input. One core of this project's machine took 2.1 ms at 224 pixels and
# 6.6 ms at 600, with two operations of RandAugment (docs/plan.md); a vCPU counts as half a core.
DECODE_S, DECODE_PIXEL_S = 4.0e-3, 3.0e-8


def image_step_time(job: times.Workload[ImageLayout]) -> times.StepTime:
    """Return the seconds of a step, split by cause.

    Raises:
        ValueError: the GPU cannot compute in this precision.
    """
    layout, machine = job.layout, job.machine
    gpu, images = machine.gpu, layout.micro_batch
    rate = _convolution_rate(gpu, layout.precision)
    bandwidth = ELEMENTWISE * gpu.memory_bytes_per_s
    passes = [_convolution_s(layer, layout, rate, gpu) for layer in layout.shape.layers]
    convolutions = images * (3 * sum(passes) - passes[0])  # pixels need no gradient
    forward, backward = _moved_bytes(layout)
    moved = images * (forward + backward) / bandwidth
    waiting = max(0.0, _host_s(layout) - convolutions - moved)
    backward_s = images * (2 * sum(passes) - passes[0] + backward / bandwidth) + waiting * 2 / 3
    behind = times.SPREAD * math.sqrt(2 * math.log(machine.ranks))
    count = job.micro_batches
    return times.StepTime(
        matrices_s=count * convolutions,
        attention_s=0.0,
        traffic_s=count * moved,
        host_s=count * waiting,
        exposed_s=_exposed_s(layout, machine, count, backward_s),
        stragglers_s=count * behind * (convolutions + moved),
        optimizer_s=_optimizer_s(layout, gpu) + times.STEP_S,
    )


def _convolution_rate(gpu: Gpu, precision: str) -> float:
    peak = gpu.flops.get(precision)
    if peak is None:
        raise times.no_precision(gpu, precision)
    if precision == "fp32" and gpu.flops["tf32"] is not None:  # torch.backends.cudnn.allow_tf32
        return CONVOLUTIONS["tf32"] * gpu.flops["tf32"]
    return CONVOLUTIONS[precision] * peak


def _convolution_s(layer: Convolution, layout: ImageLayout, rate: float, gpu: Gpu) -> float:
    """Return the seconds of one pass of a layer over one image; a backward counts as two passes."""
    moved = layout.element * (layer.read + layer.written) / gpu.memory_bytes_per_s
    if layer.groups > 1:
        plain = gpu.flops["fp32"]
        assert plain is not None, gpu.name
        return max(2 * layer.macs / plain / DEPTHWISE[layout.element], moved / DEPTHWISE_TRAFFIC)
    return max(2 * layer.macs / rate, moved / CONVOLUTIONS_TRAFFIC)


def _moved_bytes(layout: ImageLayout) -> tuple[float, float]:
    """Return the bytes that everything but convolutions moves per image, (forward, backward).

    Compiled, the elementwise operations after a batch-norm are fused into its last pass.
    """
    shape, element = layout.shape, layout.element
    normed = sum(layer.written for layer in shape.normed)
    forward, backward = element * NORM_FORWARD, element * NORM_BACKWARD
    if layout.synchronized:
        forward, backward = SYNCHRONIZED_FORWARD, SYNCHRONIZED_BACKWARD
    share = 0.4 if layout.compiled else 1.0  # of the bytes that fusion leaves; estimate
    return (
        float(forward * normed + share * element * shape.moved.forward),
        float(backward * normed + share * element * shape.moved.backward),
    )


def _host_s(layout: ImageLayout) -> float:
    """Return the seconds that the host takes to launch the kernels of one micro-batch."""
    # A synchronized batch-norm launches some 20 kernels more (docs/decisions.md). Compiling halves
    # the others' number; estimate.
    norms = len(layout.shape.normed) * (NORM_KERNELS + (20 if layout.synchronized else 0))
    share = 0.5 if layout.compiled else 1.0
    return times.LAUNCH_S * (3 * share * layout.shape.moved.kernels + norms)


def _exposed_s(layout: ImageLayout, machine: times.Machine, count: int, backward_s: float) -> float:
    """Return the seconds per step of communication that compute does not hide.

    Hidden communication slows compute down: CONTENTION of its seconds count as exposed too.
    """
    ranks = machine.ranks
    if ranks == 1:
        return 0.0
    exposed = 0.0
    if layout.synchronized:  # all-gather and all-reduce of each layer's statistics: latency
        latency = (ranks - machine.nodes) * times.HOP_S + (machine.nodes - 1) * times.NODE_HOP_S
        exposed += count * 2 * len(layout.shape.normed) * 2 * latency
    size = float(FP32 * layout.trainable)
    if layout.strategy == "ddp":
        whole = 2 * times.collective_s(machine, ranks, size)
        last = 2 * times.collective_s(machine, ranks, min(size, BUCKET_BYTES))
    else:  # per micro-batch: two all-gathers of weights, one reduce-scatter of gradients
        whole = count * 3 * times.collective_s(machine, layout.shards, size)
        if layout.shards < ranks:
            across = replace(machine, gpus=1)
            whole += 2 * times.collective_s(across, machine.nodes, size)
        last = times.collective_s(machine, layout.shards, min(size, BUCKET_BYTES))
        backward_s = count * 1.5 * backward_s
    hidden = min(max(0.0, whole - last), backward_s)
    return exposed + whole - hidden + times.CONTENTION * hidden


def _optimizer_s(layout: ImageLayout, gpu: Gpu) -> float:
    each = OPTIMIZERS[layout.optimizer].moved_bytes + (3 * FP32 if layout.averaged else 0)
    moved = each * layout.trainable / layout.shards
    return moved / (times.TRAFFIC * gpu.memory_bytes_per_s)


def feeding_problem(size: int, cpus: int, per_s: float) -> str | None:
    """Return a warning if `cpus` may not decode and augment `per_s` images fast enough."""
    each, least = per_s / cpus, 1 / (DECODE_S + DECODE_PIXEL_S * size**2)
    if each <= least:
        return None
    return (
        f"each of {cpus} CPUs must decode and augment {each:,.0f} images/s, and may not reach "
        f"{least:,.0f}: the GPUs would wait. Store smaller images, or set a cluster.instance with "
        "more CPUs"
    )
