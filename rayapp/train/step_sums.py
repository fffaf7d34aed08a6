"""Sum a step's losses and counts over all ranks: one all-reduce that overlaps the backward pass.

summing = StepSums(losses, by_source, engine.take_sums(), engine.take_expert_tokens())
summing.wait().loss
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Sums(NamedTuple):
    """The sums of a step over all ranks."""

    loss: float
    """Cross-entropy in nats."""
    by_source: list[float]
    """The losses of each source, if there are several."""
    named: dict[str, float]
    expert_tokens: Tensor | None
    """Tokens that each expert was given, fp64 [layers, experts]; None without experts."""
    imbalance: float | None
    """The busiest expert's tokens over the mean, in the layer where this is the most."""


class StepSums:
    """The all-reduce while it is under way."""

    def __init__(
        self,
        losses: Sequence[Tensor],
        by_source: Sequence[Tensor],
        named: dict[str, Tensor],
        expert_tokens: Tensor | None,
    ) -> None:
        """Start the all-reduce of each micro-batch's loss, and of its losses by source."""
        self._names = list(named)
        self._shape = None if expert_tokens is None else expert_tokens.shape
        whole = torch.stack([torch.stack(list(losses)).double().sum(), *named.values()])
        self._sources = len(by_source[0]) if by_source else 0
        if by_source:
            whole = torch.cat([whole, torch.stack(list(by_source)).sum(0)])
        if expert_tokens is not None:
            whole = torch.cat([whole, expert_tokens.double().flatten()])
        self._whole = whole
        self._work = dist.all_reduce(whole, async_op=True)

    def wait(self) -> Sums:
        """Wait for all ranks, and read the sums from the device at once."""
        assert self._work is not None, "every rank is in the group"
        self._work.wait()
        numbers, counts = self._whole, None
        if self._shape is not None:
            few = 1 + len(self._names) + self._sources
            counts = self._whole[few:].view(self._shape)
            most = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
            numbers = torch.cat([self._whole[:few], most.amax()[None]])
        loss, *others = numbers.tolist()
        imbalance = others.pop() if counts is not None else None
        named = dict(zip(self._names, others, strict=False))
        return Sums(loss, others[len(named) :], named, counts, imbalance)
