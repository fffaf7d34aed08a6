"""The optimizers: their names, what each keeps and moves for a parameter, and defaults of its own.

    OPTIMIZERS["muon"].moment_bytes           # of each parameter that Muon itself updates

`rayapp/train/optimizer.py` makes them; the plan of memory and time is made of these figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, model_validator

from rayapp.config.fields import OptionalInt, Section, StepSlice

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

    max_steps: OptionalInt = Field(default=None, ge=0)
    """Number of optimizer steps; none: computed from epochs."""
    epochs: OptionalInt = Field(default=None, ge=1)
    """Passes over the data if max_steps is none; if both are none, 1 pass."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate schedule after warm-up. wsd: stay at the peak, then decay at the end."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """Fraction of the steps, 0-1, over which the wsd schedule decays."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps of linear warm-up from a learning rate of 0."""
    schedule_from: int = Field(default=0, ge=0)
    """Step at which the schedule begins. When you extend a run, this gives the remaining steps a
    schedule with its own warm-up and end."""
    on_spike: Literal["none", "skip", "stop"] = "none"
    """Action if the loss of a step is a spike, NaN or infinite. none: only NaN or infinity ends the
    run. skip: discard the update; 8 similar high losses in a row become the new normal; 16 such
    steps in a row end the run. stop: end the run at once. skip and stop log the step's rows."""
    spike_sigmas: float = Field(default=6.0, gt=0)
    """A loss this many standard deviations above the mean of the last 64 steps is a spike."""
    profile_steps: StepSlice = None
    """Steps of which rank 0 records a trace (and on GPUs its memory) into the run's folder, counted
    from 1: `20:23` records the steps 20, 21 and 22. none: no profile."""

    @property
    def profiled(self) -> range:
        """Return the steps to record, from 1; empty without any."""
        return range(*map(int, (self.profile_steps or "0:0").split(":")))

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_optimizer(cls, values: Any) -> Any:
        chosen = OPTIMIZERS.get(str(values.get("optimizer"))) if isinstance(values, dict) else None
        return values if chosen is None else {**chosen.defaults, **values}
