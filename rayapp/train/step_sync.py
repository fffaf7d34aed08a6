"""What all ranks of a step agree on: one small all-reduce, behind the first forward pass.

    agreement = Agreement((tokens, documents), digest, save=due, leave=STAY, look=False, group=gloo)
    ...
    agreement.wait().sums  # over all ranks

A message of 5 int64 and the sums to be taken, in host memory. What only rank 0 decides, whether to
save, leave or look, the others send as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rayapp import order

STAY, STOP, MOVE = 0, 1, 2  # leave after this step: not at all, for good, to start again elsewhere


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks of a step, and what is to be done after it."""

    sums: tuple[int, ...]
    digest: str
    """Of the rows of the step, whatever rank they are on."""
    save: bool
    leave: int
    """STAY, STOP or MOVE."""
    look: bool

    @property
    def weight(self) -> int:
        """What the loss is divided by."""
        return max(self.sums[0], 1)


class Agreement:
    """The totals of a step, on their way."""

    def __init__(
        self, sums: Sequence[int], digest: int, *, save: bool, leave: int, look: bool, group: Any
    ) -> None:
        """Send this rank's part; `digest` is the sum of its rows' digests, `group` of gloo."""
        digest %= 2**64
        # The digest in halves, so that sums over ranks cannot overflow an int64.
        parts = [digest >> 32, digest & 0xFFFFFFFF, int(save), leave, int(look), *sums]
        self._message = torch.tensor(parts, dtype=torch.int64)
        self._work = dist.all_reduce(self._message, group=group, async_op=True)
        self._totals: Totals | None = None

    def wait(self) -> Totals:
        """Return the totals when all ranks have sent theirs."""
        if self._totals is None:
            assert self._work is not None, "every rank is in the group"
            self._work.wait()
            high, low, save, leave, look, *sums = map(int, self._message)
            whole = order.combine([high << 32, low])
            self._totals = Totals(tuple(sums), whole, save > 0, leave, look > 0)
        return self._totals
