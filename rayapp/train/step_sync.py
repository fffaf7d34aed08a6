"""Agree on a step's totals across ranks: one small all-reduce that overlaps the first forward pass.

    agreement = Agreement(batch.counts(), digest, save=due, leave=CONTINUE, poll=False, group=gloo)
    ...
    agreement.wait().counts  # over all ranks

The message is 5 int64 and the counts, in host memory; now and then also each rank's own time. Only
rank 0 decides whether to save, leave or poll; the other ranks send zeros there, so that the sum is
rank 0's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rayapp import order
from rayapp.order import StepCounts

CONTINUE, STOP, RESTART = 0, 1, 2  # after this step: go on, end the run, leave to be started again
ENOUGH = 3  # end the run as if this step were the last


@dataclass(frozen=True)
class Totals:
    """The sums over all ranks of a step, and what to do after it."""

    counts: StepCounts
    digest: str
    """Of all rows of the step; it does not depend on how the ranks share them."""
    save: bool
    leave: int
    """CONTINUE, STOP or RESTART."""
    poll: bool
    own_us: Sequence[int] = ()
    """Of each rank, where the ranks tell it."""

    @property
    def weight(self) -> int:
        """The divisor of the loss, at least 1."""
        return max(self.counts.weight, 1)


class Agreement:
    """The all-reduce of a step's totals, while it is under way."""

    def __init__(
        self,
        counts: StepCounts,
        digest: int,
        own_us: Sequence[int] = (),
        *,
        save: bool,
        leave: int,
        poll: bool,
        group: Any,
    ) -> None:
        """Start the all-reduce; `digest` is the sum of this rank's row digests, `group` is gloo.

        `own_us` has this rank's microseconds at its place among zeros, on all ranks or on none.
        """
        digest %= 2**64
        # The digest is sent in halves, so that sums over ranks cannot overflow an int64.
        parts = [digest >> 32, digest & 0xFFFFFFFF, int(save), leave, int(poll)]
        self._message = torch.tensor([*parts, *own_us, *counts.flat()], dtype=torch.int64)
        self._ranks = len(own_us)
        self._work = dist.all_reduce(self._message, group=group, async_op=True)
        self._totals: Totals | None = None

    def wait(self) -> Totals:
        """Wait until all ranks have sent their parts, and return the totals."""
        if self._totals is None:
            assert self._work is not None, "every rank is in the group"
            self._work.wait()
            high, low, save, leave, poll, *rest = self._message.tolist()
            whole, own_us = order.combine([high << 32, low]), rest[: self._ranks]
            counts = StepCounts.of_flat(rest[self._ranks :])
            self._totals = Totals(counts, whole, save > 0, leave, poll > 0, own_us)
        return self._totals
