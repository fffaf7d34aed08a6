"""Detect a step whose loss is far above the losses of the steps before it.

    spikes = Spikes(sigmas=6.0)
    if spikes.is_spike(loss): ...      # else the loss joins those before it

All ranks have the same losses and so decide alike. Checkpoints hold the losses, so that a resumed
run decides like one that was never interrupted.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 64  # losses that a step is compared with
FEWEST = 16  # with fewer, no finite loss is a spike
SMALLEST_SPREAD = 1e-3  # of the mean, so that nearly equal losses make no spike of a small rise


class Spikes:
    """The losses of the last WINDOW steps that were not spikes, in nats per token or image."""

    def __init__(self, sigmas: float, losses: Iterable[float] = ()) -> None:
        self.sigmas = sigmas
        self.losses = deque(losses, WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Say whether a loss is a spike (always, if not finite); if not, add it to the losses.

        >>> spikes = Spikes(6.0, [2.0, 2.1] * 8)
        >>> spikes.is_spike(2.3), spikes.is_spike(3.1), len(spikes.losses)
        (False, True, 17)
        """
        if not math.isfinite(loss) or loss > self.threshold():
            return True
        self.losses.append(loss)
        return False

    def threshold(self) -> float:
        """Return the loss above which a step is a spike; infinity with fewer than FEWEST losses."""
        if len(self.losses) < FEWEST:
            return math.inf
        mean = statistics.fmean(self.losses)
        spread = statistics.pstdev(self.losses, mean)
        return mean + self.sigmas * max(spread, SMALLEST_SPREAD * abs(mean))
