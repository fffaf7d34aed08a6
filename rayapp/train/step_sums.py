"""Sum a step's losses and counts over all ranks: one all-reduce that overlaps the backward pass.

summing = StepSums(losses, engine.take_sums(), engine.take_counts())
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
    named: dict[str, float]
    counts: Tensor | None
    """Tokens that each expert was given, fp64 [layers, experts]; None without experts."""
    imbalance: float | None
    """The busiest expert's tokens over the mean, in the layer where this is the most."""


class StepSums:
    """The all-reduce while it is under way."""

    def __init__(
        self, losses: Sequence[Tensor], named: dict[str, Tensor], counts: Tensor | None
    ) -> None:
        self._names, self._shape = list(named), None if counts is None else counts.shape
        whole = torch.stack([torch.stack(list(losses)).double().sum(), *named.values()])
        if counts is not None:
            whole = torch.cat([whole, counts.double().flatten()])
        self._whole = whole
        self._work = dist.all_reduce(whole, async_op=True)

    def wait(self) -> Sums:
        """Wait for all ranks, and read the sums from the device at once."""
        assert self._work is not None, "every rank is in the group"
        self._work.wait()
        numbers, counts = self._whole, None
        if self._shape is not None:
            few = 1 + len(self._names)
            counts = self._whole[few:].view(self._shape)
            most = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
            numbers = torch.cat([self._whole[:few], most.amax()[None]])
        loss, *others = numbers.tolist()
        imbalance = others.pop() if counts is not None else None
        return Sums(loss, dict(zip(self._names, others, strict=True)), counts, imbalance)
