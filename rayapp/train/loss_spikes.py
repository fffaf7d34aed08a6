"""Tell a step whose loss is far above those before it.

    spikes = Spikes(sigmas=6.0)
    if spikes.is_spike(loss): ...      # else the loss joins those before it

Every rank has the same losses and so decides the same. The losses are state of the run: they go
into checkpoints, so that a resumed run decides as one that was never interrupted.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 64  # losses that a step is compared with
FEWEST = 16  # with fewer, nothing is a spike
SMALLEST_SPREAD = 1e-3  # of the mean: losses that hardly differ make no spike of a small step


class Spikes:
    """The losses of the last steps that were not spikes, in nats per token."""

    def __init__(self, sigmas: float, losses: Iterable[float] = ()) -> None:
        self.sigmas = sigmas
        self.losses = deque(losses, WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Compare a step's loss with those before it; what is not finite is a spike always.

        >>> spikes = Spikes(6.0, [2.0, 2.1] * 8)
        >>> spikes.is_spike(2.3), spikes.is_spike(3.1), len(spikes.losses)
        (False, True, 17)
        """
        if not math.isfinite(loss) or loss > self.threshold():
            return True
        self.losses.append(loss)
        return False

    def threshold(self) -> float:
        """Return the loss from which on a step is a spike; infinity while there are too few."""
        if len(self.losses) < FEWEST:
            return math.inf
        mean = statistics.fmean(self.losses)
        spread = statistics.pstdev(self.losses, mean)
        return mean + self.sigmas * max(spread, SMALLEST_SPREAD * abs(mean))
