"""What the training loop works on: the engine of a run and the batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from rayapp.config.fields import TOKENS, Unit
from rayapp.observe.activity import Phases
from rayapp.observe.metrics import HeldOut, MetricsLine
from rayapp.observe.records import LoopState
from rayapp.order import StepCounts
from rayapp.train.best import BestSoFar
from rayapp.train.loss_spikes import RECENT, Spikes
from rayapp.train.memory_peaks import Peaks
from rayapp.train.own_time import OwnTime
from rayapp.train.step_sums import Sums
from rayapp.train.step_sync import CONTINUE, ENOUGH


class Batch(Protocol):
    """One rank's part of a step: m micro-batches of b rows."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """int64 [m, b]: the number of each row in the data set, EMPTY where there is no row."""

    def counts(self) -> StepCounts:
        """Return the counts to sum over ranks."""

    def digest(self) -> int:
        """Return the sum of the rows' digests, to be summed over ranks."""

    def weights(self) -> np.ndarray[Any, Any]:
        """Return what divides the loss of each row alone, int64 [m, b]."""

    def inputs(self, i: int, rows: slice = slice(None)) -> Mapping[str, object]:
        """Return the model's inputs (arrays and numbers) for micro-batch i or some of its rows."""


@dataclass
class Engine:
    """What a step needs. `model(**inputs(...))` returns (objective, cross-entropy, ...) as sums.

    Where `by_source`, the third is the cross-entropy of each source of the rows, fp64 [sources].
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    lr_at: Callable[[int], float]
    device: torch.device
    grad_clip: float | None
    control: Any
    """A gloo process group for small messages in host memory."""
    attempt: int = 1
    rows_per_epoch: int = 1
    rows_per_step: int = 1
    save: Callable[[int], None] = field(default=lambda step: None)
    """Save a checkpoint of so many steps. All ranks call it together; it may return while it still
    reads the weights."""
    settle: Callable[[], None] = field(default=lambda: None)
    """Wait until the last save has read the weights."""
    being_read: bool = False
    """Whether a save was started and `settle` has not been called since."""
    stalls: list[float] = field(default_factory=list)
    """Of each save, the seconds that training waited for it in `save` and in `settle`."""
    save_due: Callable[[int], bool] = field(default=lambda step: False)
    leave_due: Callable[[], int] = field(default=lambda: CONTINUE)
    """Whether to leave after this step, CONTINUE, STOP or RESTART; but for rank 0, CONTINUE."""
    poll_due: Callable[[], bool] = field(default=lambda: False)
    """Whether all ranks call `poll` in this step: rank 0 decides, other ranks answer False."""
    poll: Callable[[], int] = field(default=lambda: CONTINUE)
    """Return CONTINUE, STOP or RESTART, the same on all ranks, which call it together."""
    left: int = CONTINUE
    """Why the loop ended before the last step (STOP, RESTART or ENOUGH), else CONTINUE."""
    best: BestSoFar = field(default_factory=lambda: BestSoFar(None))
    before: HeldOut = field(default_factory=HeldOut)
    """Figures before the first step."""
    take_sums: Callable[[], dict[str, torch.Tensor]] = field(default=dict)
    """Return this rank's further sums of the step's micro-batches, by name; the same names on all
    ranks. `figures` makes those of the step's line."""
    take_expert_tokens: Callable[[], torch.Tensor | None] = field(default=lambda: None)
    """Return the tokens that each expert was given in the step's micro-batches on this rank,
    [layers, experts]; None without experts."""
    by_source: bool = False
    experts: torch.Tensor | None = None
    """The sum of `take_expert_tokens` over ranks and the steps of this attempt."""
    spikes: Spikes | None = None
    """What tells a spike; None: a step is bad only if its loss or gradient norm is not finite."""
    skip_bad: bool = False
    """Skip the update of a bad step and go on, instead of raising BadLoss."""
    skips: int = 0
    """Bad steps in a row so far; the MAX_SKIPS-th one raises BadLoss even with `skip_bad`."""
    own_loss: str | None = None
    """The user's function that makes the objective (`train.loss`), by its name."""
    eval_owed: bool = False
    """Whether the last evaluation that was due was left out or given up."""
    unit: Unit = TOKENS
    record: Callable[[dict[str, Any], StepCounts, Sums, float], MetricsLine] | None = None
    """Make a step's line of metrics.jsonl from (fields common to all kinds, counts over all ranks,
    sums of the losses, seconds without checkpoint stalls and evaluation)."""
    ready: Callable[[Any], Any] = field(default=lambda batch: batch)
    """Return the batch that the step is trained on. All ranks call it together, before the step's
    first micro-batch."""
    figures: Callable[[Mapping[str, float], float], dict[str, float]] = field(
        default=lambda sums, weight: {name: sum / weight for name, sum in sums.items()}
    )
    """Return the figures of a step's line, of (`take_sums` over all ranks, weight)."""
    last_of_step: Callable[[bool], None] = field(default=lambda last: None)
    """Called before each micro-batch with whether it is the last of the step on this rank."""
    updated: Callable[[bool], None] = field(default=lambda skipped: None)
    """Called on all ranks after the update with whether the step was bad and left the weights."""
    evaluate: Callable[[int], HeldOut] | None = None
    """Evaluate the model after so many steps; return figures named as in a record.

    All ranks call it together. If `interruptible`, it raises loop.Interrupted on all of them."""
    may_wait: Callable[[Any], bool] = field(default=lambda batch: False)
    """Whether the rows after this batch may still be being prepared, so that the ranks agree to go
    on or to leave while they wait; the same on all ranks."""
    interruptible: bool = False
    """Whether an evaluation is given up when the ranks agree to leave."""
    eval_due: Callable[[int], bool] = field(default=lambda step: False)
    phases: Phases = field(default_factory=Phases)
    """Says what this rank does."""
    blocks: Sequence[nn.Module] = ()
    """Modules that run one after another, in whose forward passes no rank waits for another."""
    peaks: Peaks = field(init=False)
    own_time: OwnTime = field(init=False)

    def __post_init__(self) -> None:
        self.peaks = Peaks(self.device)
        self.own_time = OwnTime(self.blocks, self.device)

    def state(self) -> LoopState:
        """Return what a checkpoint holds of the loop."""
        state: LoopState = {"skips": self.skips, "evaluate": self.eval_owed, "losses": []}
        if self.spikes is not None:
            state |= {
                "losses": list(self.spikes.losses),
                "spikes": list(self.spikes.in_a_row),
                "at_level": self.spikes.at_level,
            }
        if self.before:
            state["before"] = self.before
        if self.best.best is not None:
            state["best"] = self.best.best
        return state

    def resume(self, state: LoopState) -> None:
        """Go on from the state of a checkpoint, {} without one."""
        self.skips, self.eval_owed = state.get("skips", 0), state.get("evaluate", False)
        self.before = state.get("before", HeldOut())
        self.best.resume(state.get("best"))
        if self.best.enough:
            self.left = ENOUGH
        if self.spikes is not None:
            level = state.get("losses", ()), state.get("spikes", ()), state.get("at_level", RECENT)
            self.spikes = Spikes(self.spikes.sigmas, *level)


def inputs(
    batch: Batch, i: int, device: torch.device, rows: slice = slice(None)
) -> dict[str, object]:
    """Return the model's inputs for micro-batch i (or some of its rows), arrays on the device."""
    return {
        name: torch.from_numpy(value).to(device, non_blocking=True)
        if isinstance(value, np.ndarray)
        else value
        for name, value in batch.inputs(i, rows).items()
    }
