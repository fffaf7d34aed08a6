"""Detect a step whose loss is far above the losses of the steps before it.

    spikes = Spikes(sigmas=6.0)
    if spikes.is_spike(loss): ...      # else the loss joins those before it

LEVEL spikes in a row that lie close together are a new level (the data have changed, say): the last
of them is no spike, and later losses are compared with the new level. A run that diverges rises
again soon, so there is no second new level before RECENT more steps without a spike.

All ranks have the same losses and so decide alike. Checkpoints hold all fields, so that a resumed
run decides like one that was never interrupted.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

RECENT = 64  # losses that a step is compared with
FEWEST = 16  # with fewer, no finite loss is a spike
SMALLEST_SPREAD = 1e-3  # of the mean, so that nearly equal losses make no spike of a small rise
LEVEL = 8  # spikes in a row that may be a new level


class Spikes:
    """The losses of the last RECENT steps that were not spikes, in nats per token or image."""

    def __init__(
        self,
        sigmas: float,
        losses: Iterable[float] = (),
        in_a_row: Iterable[float] = (),
        at_level: int = RECENT,
    ) -> None:
        self.sigmas = sigmas
        self.losses = deque(losses, RECENT)
        self.in_a_row = deque(in_a_row, LEVEL)
        """The losses of the spikes just before."""
        self.at_level = at_level
        """Steps without a spike since the last new level, at most RECENT."""

    def is_spike(self, loss: float) -> bool:
        """Say whether a loss is a spike (always, if not finite); if not, add it to the losses.

        >>> spikes = Spikes(6.0, [2.0, 2.1] * 8)
        >>> spikes.is_spike(2.3), spikes.is_spike(3.1), len(spikes.losses)
        (False, True, 17)
        """
        if not math.isfinite(loss):
            self.in_a_row.clear()
            return True
        if loss > self.threshold():
            self.in_a_row.append(loss)
            if not self._are_a_level():
                return True
            rise = statistics.fmean(self.in_a_row) - statistics.fmean(self.losses)
            self.losses = deque((each + rise for each in self.losses), RECENT)
            self.at_level = -1
        self.in_a_row.clear()
        self.losses.append(loss)
        self.at_level = min(self.at_level + 1, RECENT)
        return False

    def threshold(self) -> float:
        """Return the loss above which a step is a spike; infinity with fewer than FEWEST losses."""
        if len(self.losses) < FEWEST:
            return math.inf
        return statistics.fmean(self.losses) + self._margin()

    def _margin(self) -> float:
        mean = statistics.fmean(self.losses)
        spread = statistics.pstdev(self.losses, mean)
        return self.sigmas * max(spread, SMALLEST_SPREAD * abs(mean))

    def _are_a_level(self) -> bool:
        """Say whether the spikes in a row are within a band as wide as the threshold is high."""
        if len(self.in_a_row) < LEVEL or self.at_level < RECENT:
            return False
        return max(self.in_a_row) - min(self.in_a_row) <= self._margin()
