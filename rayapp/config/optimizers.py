"""The optimizers: their names, what each keeps and moves for a parameter, and defaults of its own.

    OPTIMIZERS["muon"].moment_bytes           # of each parameter that Muon itself updates

`rayapp/train/optimizer.py` makes them; the plan of memory and time is made of these figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import model_validator

from rayapp.config.fields import Section

OptimizerName = Literal["adamw", "adamw8bit", "muon"]
ImageOptimizerName = Literal["sgd", "lars", "adamw"]
Updates = Literal["all", "all but embeddings", "hidden matrices"]


@dataclass(frozen=True)
class Optimizer:
    """Bytes are for one parameter."""

    moment_bytes: float
    """What it keeps of a parameter that it updates, between two steps."""
    moved_bytes: float
    """What its step reads and writes; Muon's products are included as the time of bytes."""
    updates: Updates = "all"
    """AdamW updates the other parameters."""
    saved_bytes: float | None = None
    """The moments in a checkpoint; None: as in memory."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Fields of `train` and their values where the user sets none; else the fields' own defaults
    hold, which are AdamW's for language models and SGD's for images."""


# fp32 moments, updates of fp32 weights: gradient read, weight and moments read and written. The
# figures of adamw8bit and muon are estimates. 8-bit moments have an fp32 scale per 256 values
# (torchao), and are saved as fp32 values, because any number of ranks can shard those.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(8, 28),
    "adamw8bit": Optimizer(2 * (1 + 4 / 256), 14, "all but embeddings", saved_bytes=8),
    "muon": Optimizer(4, 48, "hidden matrices"),
    "sgd": Optimizer(4, 20),
    "lars": Optimizer(4, 20),
}


class TrainSection(Section):
    """The `train` section of either kind of run."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_optimizer(cls, values: Any) -> Any:
        chosen = OPTIMIZERS.get(str(values.get("optimizer"))) if isinstance(values, dict) else None
        return values if chosen is None else {**chosen.defaults, **values}
