"""FLOPs per token: model FLOPs (for MFU), and those of recomputation.

A multiply-add is 2 FLOPs. Attention is counted causally and within documents. Others count it
without the causal mask (PaLM, appendix B, arXiv 2204.02311; torchtitan, llm-foundry): at the same
speed their MFU is higher than ours, by 12 % for 8B at 8k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import assert_never

from rayapp.config.language import Checkpointing
from rayapp.planner.shape import Shape, lora_parameters


@dataclass(frozen=True)
class Flops:
    """FLOPs per token, split by part of the model."""

    linears: float
    attention: float
    """Scores and weighted values (the S * S work), without the projections."""
    head: float
    adapters: float = 0.0

    @property
    def total(self) -> float:
        """FLOPs of all parts."""
        return self.linears + self.attention + self.head + self.adapters

    def __add__(self, other: Flops) -> Flops:
        """Add part by part."""
        return Flops(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def mean_context(lengths: Sequence[int]) -> float:
    """Return how many tokens a token attends to on average, itself included, in such documents.

    >>> mean_context([4]), mean_context([1, 1, 2])
    (2.5, 1.25)
    """
    return sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)


def context_within(context: float, window: int | None) -> float:
    """Return the mean number of tokens within a sliding window, for documents of equal length.

    >>> context_within(2.5, None), context_within(2.5, 2), mean_context([4])
    (2.5, 1.75, 2.5)
    """
    length = 2 * context - 1
    if window is None or window >= length:
        return context
    return window - window * (window - 1) / (2 * length)


def forward_flops(
    shape: Shape,
    context: float,
    lora_rank: int | None = None,
    targets: Sequence[str] = (),
    experts: Sequence[str] = (),
) -> Flops:
    """Return a token's forward FLOPs; `context` (C) is the mean number of tokens it attends to."""
    linears = 2.0 * shape.total(lambda linear: linear.macs, shape.linears)
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * context
    if shape.measured:
        linears = shape.measured.flops
        attention = sum(
            flops * context_within(context, window) for flops, window in shape.measured.attention
        )
    adapters = 0
    if lora_rank is not None:
        adapters = lora_parameters(shape, lora_rank, targets, experts=experts, active=True)
    return Flops(linears, attention, 2.0 * shape.embedding_parameters, 2.0 * adapters)


def backward_flops(forward: Flops, *, frozen: bool) -> Flops:
    """Return the backward FLOPs: gradients of inputs, and of weights unless they are frozen."""
    times, attention, adapters = 1.0 if frozen else 2.0, forward.attention, forward.adapters
    return Flops(times * forward.linears, 2 * attention, times * forward.head, 2 * adapters)


def recomputed_flops(
    shape: Shape, forward: Flops, checkpointing: Checkpointing, kept: float = 1.0
) -> Flops:
    """Return the FLOPs that activation checkpointing recomputes per token.

    "full" reruns each block up to the input of its last matrix, where PyTorch stops (early_stop).
    "selective" keeps attention's result and matrix results worth the share `kept` of their FLOPs.
    """
    match checkpointing:
        case "none":
            return Flops(0.0, 0.0, 0.0)
        case "full":  # which product is the last one of a measured block is not known
            last = 0.0 if shape.measured else 2.0 * shape.layers * shape.linears[-1].macs
            return Flops(forward.linears - last, forward.attention, 0.0, forward.adapters)
        case "selective":
            again = 1.0 - kept
            return Flops(again * forward.linears, 0.0, 0.0, again * forward.adapters)
        case _:
            assert_never(checkpointing)


def model_flops(
    shape: Shape,
    context: float,
    lora_rank: int | None = None,
    targets: Sequence[str] = (),
    experts: Sequence[str] = (),
) -> float:
    """Return the model FLOPs per training token, which MFU counts: no recomputation.

    With LoRA the frozen weights get no gradients: 4 FLOPs per weight, not 6.

    >>> from rayapp.planner.shape import shape_of
    >>> from rayapp.presets import config_of
    >>> shape = shape_of(config_of("llama3.1-8b"))
    >>> round(model_flops(shape, mean_context([8192])) / 1e9, 2)
    51.47
    >>> round(model_flops(shape, mean_context([4096]), lora_rank=16) / 1e9, 2)
    33.49
    """
    forward = forward_flops(shape, context, lora_rank, targets, experts)
    return (forward + backward_flops(forward, frozen=lora_rank is not None)).total


def mfu(
    tokens_per_s: float, flops_per_token: float, *, gpus: int, peak_flops: float | None
) -> float | None:
    """Return model FLOP/s over the peak FLOP/s of all GPUs, 0-1; None if the peak is unknown.

    `tokens_per_s` is for all GPUs, `flops_per_token` from model_flops, `peak_flops` for one GPU.

    >>> round(mfu(8 * 6667, 51.47e9, gpus=8, peak_flops=989.4e12), 3)
    0.347
    >>> mfu(1.0, 1.0, gpus=1, peak_flops=None) is None
    True
    """
    return None if peak_flops is None else tokens_per_s * flops_per_token / (peak_flops * gpus)
