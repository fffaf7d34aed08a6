"""What runs are counted in: tokens or images; the names of their rates follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """What a kind of run is counted in; `metrics.jsonl` names its rates after it."""

    one: str
    many: str

    @property
    def per_s(self) -> str:
        """Field of a step's rate over all workers."""
        return f"{self.many}_per_s"

    @property
    def per_s_per_gpu(self) -> str:
        """Field of a step's rate of one worker."""
        return f"{self.many}_per_s_per_gpu"

    @property
    def loss(self) -> str:
        """What a loss is in."""
        return f"nats per {self.one}"


TOKENS, IMAGES = UNITS = (Unit("token", "tokens"), Unit("image", "images"))


def unit_of(names: Iterable[str]) -> Unit:
    """Tell by the names of a line's fields, or of a result's, what the run is counted in."""
    return IMAGES if IMAGES.per_s in names else TOKENS
