"""Measure now and then how long each rank computes by itself, and name the rank that lags.

    with own.forward(step): engine.model(...)     # of some steps, the forward passes
    own.take()                                    # this rank's part of the step's message
    own.figures(own_us_of_all_ranks)              # fields of the step's line

A slow rank makes all steps equally slow: the others wait for it in their next collective. No rank
waits inside a block of the model, whose parameters FSDP has gathered before, nor after the last
block, where the loss is computed. These passes are a rank's own time, of its host and its device.
On a GPU events in its stream give it. They are read after the host has read the step's losses.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

EVERY_STEPS = 10  # between two samples
SAMPLES = 5  # in a row, since the documents of a step differ in length
SLOW = 0.15  # above the median of the ranks

logger = logging.getLogger("rayapp.train.loop")


class OwnTime:
    """The own time of this rank, and what is known of the others'."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """`blocks` run one after another; without any, nothing is measured."""
        self.nodes: Sequence[str] = ()
        """The node of each rank, if known."""
        self._blocks, self._cuda, self._marks = blocks, device.type == "cuda", list[Any]()
        self._excess = deque[list[float]](maxlen=SAMPLES)
        self._lagging: str | None = None

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Measure a forward pass if the step (from 0) is a sample."""
        blocks = self._blocks if (step + 1) % EVERY_STEPS == 0 else ()
        # FSDP's hooks were registered before, so that these are inside of them.
        hooks = [block.register_forward_pre_hook(self._mark) for block in blocks]
        hooks += [block.register_forward_hook(self._mark, prepend=True) for block in blocks]
        yield
        if hooks:
            self._marks.append(self._marks[-1])
            self._mark()
        for hook in hooks:
            hook.remove()

    def _mark(self, *unused: Any) -> None:
        """Note when a stretch of own time begins or ends."""
        self._marks.append(
            torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        )
        if self._cuda:
            self._marks[-1].record()

    def take(self) -> list[int]:
        """Return the microseconds since the last call at this rank's place among zeros, if any."""
        marks, self._marks = self._marks, []
        pairs = zip(marks[::2], marks[1::2], strict=True)
        seconds = sum(a.elapsed_time(b) / 1000 if self._cuda else b - a for a, b in pairs)
        ranks = range(dist.get_world_size() if marks else 0)
        return [round(1e6 * seconds) * (rank == dist.get_rank()) for rank in ranks]

    def figures(self, own_us: Sequence[int]) -> dict[str, object]:
        """Take the microseconds of all ranks, if there is a sample; return fields of the line."""
        if not own_us:
            return {"lagging": self._lagging}
        usual, before = max(1, median_low(own_us)), self._lagging
        self._excess.append([each / usual - 1 for each in own_us])
        self._lagging = self._named()
        if self._lagging and not before and dist.get_rank() == 0:
            logger.warning("%s, in %d samples in a row", self._lagging, SAMPLES)
        rank_s = {str(rank): each / 1e6 for rank, each in enumerate(own_us)}
        return {"lagging": self._lagging, "rank_s": rank_s}

    def _named(self) -> str | None:
        """Name the slowest of the ranks that were slow in all of the last samples."""
        ranks = enumerate(zip(*self._excess, strict=True))
        slow = {rank: mean(each) for rank, each in ranks if min(each) > SLOW}
        if len(self._excess) < SAMPLES or not slow:
            return None
        rank = max(slow, key=slow.__getitem__)
        others = f" ({len(slow)} ranks lag)" if len(slow) > 1 else ""
        where = f" on {self.nodes[rank]}" if self.nodes else ""
        return f"rank {rank}{where} computes {slow[rank]:.0%} longer than the median rank{others}"
