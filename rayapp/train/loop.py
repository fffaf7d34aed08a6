"""The training loop: model, optimizer and rows in, records out. It knows torch and no cluster.

    for record in train(engine, steps): log.write(record)

Runs wherever a process group does: in Ray Train workers and under torchrun alike. A step is one
optimizer step over the whole global batch: every rank runs its micro-batches, the loss is divided
by the weight of all of them (loss-bearing tokens, or images), and the gradients are summed. One
small all-reduce in host memory, behind the first forward pass, carries all that the ranks must
agree on (agreement.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rayapp.config.units import TOKENS, Unit
from rayapp.observe.metrics import StepRecord
from rayapp.observe.records import HeldOut
from rayapp.train.loss_spikes import Spikes
from rayapp.train.memory_peaks import Peaks
from rayapp.train.optimizer import set_lr
from rayapp.train.step_sync import STAY, Agreement

logger = logging.getLogger("rayapp.train.loop")

MAX_SKIPS = 16  # bad steps in a row before the run ends
CLIP_EPS = 1e-6  # what PyTorch adds to a norm before it divides by it


class BadLoss(RuntimeError):
    """The loss or the gradient is not finite, or a spike; the message names the step and rows."""

    def __init__(self, message: str, step: int, rows: list[int]) -> None:
        super().__init__(message)
        self.step, self.rows = step, rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.step, self.rows)


class Batch(Protocol):
    """What a rank takes of a step: m micro-batches of b rows."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """int64 [m, b], number of the row in the data set, EMPTY where there is none."""

    def sums(self) -> tuple[int, ...]:
        """Return what is summed over ranks; first, the weight that the loss is divided by."""

    def digest(self) -> int:
        """Return the sum of the rows' digests, whatever rank they are on."""

    def weight(self, i: int, j: int) -> int:
        """Return by what the loss of one row is divided."""

    def inputs(self, i: int, rows: slice = slice(None)) -> Mapping[str, object]:
        """Return what the model takes of a micro-batch, arrays and numbers by name."""


@dataclass
class Engine:
    """What a step needs; `model(**inputs(...))` returns sums: (objective, cross-entropy, ...)."""

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
    """Save after this many steps. Called on all ranks together; may read the weights meanwhile."""
    settle: Callable[[], None] = field(default=lambda: None)
    """Wait until the last save has read the weights."""
    being_read: bool = False
    """A save was made, and `settle` was not called since."""
    stalls: list[float] = field(default_factory=list)
    """For each save the seconds that steps stood still for it, in `save` and in `settle`."""
    save_due: Callable[[int], bool] = field(default=lambda step: False)
    leave_due: Callable[[], int] = field(default=lambda: STAY)
    """STAY, STOP or MOVE; on rank 0, for all, and STAY on the others."""
    look_due: Callable[[], bool] = field(default=lambda: False)
    """Whether to call `look` in this step; on rank 0, for all, and False on the others."""
    look: Callable[[], int] = field(default=lambda: STAY)
    """STAY, STOP or MOVE, the same on all ranks, which call it together."""
    left: int = STAY
    """Why the loop ended before its steps did."""
    spikes: Spikes | None = None
    """None: only what is not finite is bad."""
    skip_bad: bool = False
    """Leave the weights as they are after a bad step and go on, instead of raising BadLoss."""
    skips: int = 0
    """Bad steps in a row until now; the MAX_SKIPS-th one raises BadLoss all the same."""
    unit: Unit = TOKENS
    record: Callable[[dict[str, Any], tuple[int, ...], float, float], StepRecord] | None = None
    """Make a step's record of what all have, the batch's sums, the sum of losses, and seconds."""
    last_of_step: Callable[[bool], None] = field(default=lambda last: None)
    """Told before each micro-batch whether it is the step's last on this rank."""
    updated: Callable[[bool], None] = field(default=lambda skipped: None)
    """Called on all ranks together when the weights are updated, or were left as they are."""
    evaluate: Callable[[], HeldOut] | None = None
    """Return figures of the held-out data, named as in a record."""
    eval_due: Callable[[int], bool] = field(default=lambda step: False)
    peaks: Peaks = field(init=False)

    def __post_init__(self) -> None:
        self.peaks = Peaks(self.device)


class Update(NamedTuple):
    """What a step has done to the weights; the same on all ranks, but for the seconds."""

    loss_sum: float
    """In nats, over all ranks."""
    grad_norm: float
    """Before clipping."""
    skipped: bool
    """The step was bad, and the weights are as they were."""
    waited_s: float
    """How long the weights had to wait for a save that was reading them."""


def train(engine: Engine, steps: Iterable[Batch]) -> Iterator[StepRecord]:
    """Run every step of `steps` and yield its record; end early to leave.

    A save that was asked for is made after its step. Who leaves saves without evaluating before,
    sets `engine.left`, and as the last thing yields the record of the step it saved.

    Raises:
        BadLoss: before the optimizer has used what is not finite, or a spike; where such steps are
            skipped, after MAX_SKIPS of them in a row.
    """
    world = dist.get_world_size()
    clock = time.perf_counter()
    iterator = iter(steps)
    while True:
        waited = time.perf_counter()
        batch = next(iterator, None)
        data_wait_s = time.perf_counter() - waited
        if batch is None:
            return
        agreement = agree(engine, batch)
        update = train_step(engine, batch, agreement)
        totals = agreement.wait()
        leave = totals.leave or (engine.look() if totals.look else STAY)
        peaks = engine.peaks.take()
        done = batch.step + 1
        evaluated = time.perf_counter()
        held_out: HeldOut = {}
        # Who leaves has no time for it: a node that is taken away stays for minutes at most.
        if engine.evaluate is not None and not leave and engine.eval_due(done):
            held_out = engine.evaluate()
        eval_s = time.perf_counter() - evaluated
        stall_s, called = update.waited_s, time.perf_counter()
        if engine.stalls:
            engine.stalls[-1] += update.waited_s
        if totals.save or leave:
            engine.save(done)
            engine.being_read = True
            engine.stalls.append(time.perf_counter() - called)
            stall_s += engine.stalls[-1]
        now = time.perf_counter()
        step_s, clock = now - clock, now
        facts = {
            "step": done,
            "epoch": done * engine.rows_per_step / engine.rows_per_epoch,
            "loss": update.loss_sum / totals.weight,
            "grad_norm": update.grad_norm,
            "lr": engine.lr_at(batch.step),
            "step_s": step_s,
            "data_wait_s": data_wait_s,
            "checkpoint_stall_s": stall_s,
            "eval_s": eval_s,
            "skipped": update.skipped,
            "peak_gib": engine.peaks.highest_gib,
            **{f"peak_{name}_gib": peaks[name] for name in ("forward", "backward", "optimizer")},
            "workers": world,
            "attempt": engine.attempt,
            "batch_digest": totals.digest,
            "time": time.time(),
            **held_out,
        }
        assert engine.record is not None, "this engine was made for single steps"
        busy_s = max(step_s - stall_s - eval_s, 1e-9)
        yield engine.record(facts, totals.sums, update.loss_sum, busy_s)
        if leave:
            engine.left = leave
            return


def agree(engine: Engine, batch: Batch) -> Agreement:
    """Begin to sum over ranks what the step must know."""
    return Agreement(
        batch.sums(),
        batch.digest(),
        save=engine.save_due(batch.step + 1),
        leave=engine.leave_due(),
        look=engine.look_due(),
        group=engine.control,
    )


def train_step(engine: Engine, batch: Batch, agreement: Agreement) -> Update:
    """Update the weights once, unless the step is bad and such are skipped."""
    losses, summing, last = [], None, len(batch.rows) - 1
    for i in range(last + 1):
        engine.last_of_step(i == last)
        with engine.peaks.phase("forward"):
            objective, loss, *_ = engine.model(**inputs(batch, i, engine.device))
        losses.append(loss.detach())
        if i == last:  # behind the last backward pass
            whole = torch.stack(losses).double().sum()
            summing = dist.all_reduce(whole, async_op=True)
        with engine.peaks.phase("backward"):
            # Gradients of all ranks are summed, never averaged: this division is the only one.
            (objective / agreement.wait().weight).backward()
        del objective, loss  # or the next forward pass would hold this one's graph
    with engine.peaks.phase("optimizer"):
        grad_norm = clip(engine.model, engine.grad_clip)
        assert summing is not None, "a step has a micro-batch, and every rank is in the group"
        summing.wait()
        loss_sum = float(whole)
        waited_s = settle(engine)
        bad = is_bad(engine, loss_sum / agreement.wait().weight, grad_norm)
        if bad:
            engine.skips += 1
            report_bad(engine, batch, loss_sum, grad_norm)
        else:
            engine.skips = 0
            set_lr(engine.optimizers, engine.lr_at(batch.step))
            for optimizer in engine.optimizers:
                optimizer.step()
        for optimizer in engine.optimizers:
            optimizer.zero_grad(set_to_none=True)
        engine.updated(bad)
    return Update(loss_sum, grad_norm, bad, waited_s)


def settle(engine: Engine) -> float:
    """Wait until the last save has read the weights; return the seconds of that."""
    if not engine.being_read:
        return 0.0
    asked = time.perf_counter()
    engine.settle()
    engine.being_read = False
    return time.perf_counter() - asked


def is_bad(engine: Engine, loss: float, grad_norm: float) -> bool:
    """Say whether the optimizer must not use this step: the same on all ranks."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return True
    return engine.spikes is not None and engine.spikes.is_spike(loss)


def inputs(
    batch: Batch, i: int, device: torch.device, rows: slice = slice(None)
) -> dict[str, object]:
    """Return what the model takes of a micro-batch (or of some of its rows), on the device."""
    return {
        name: torch.from_numpy(value).to(device, non_blocking=True)
        if isinstance(value, np.ndarray)
        else value
        for name, value in batch.inputs(i, rows).items()
    }


def clip(model: nn.Module, limit: float | None) -> float:
    """Clip the gradient to a global norm over all shards and return the norm before.

    As nn.utils.clip_grad_norm_, but gradients that are short enough are not read again.
    """
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm(each.grad for each in parameters if each.grad is not None)
    length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if limit is not None and length > limit - CLIP_EPS:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return length


def report_bad(engine: Engine, batch: Batch, loss_sum: float, grad_norm: float) -> None:
    """Say which step and rows are bad: in the log of rank 0 if such are skipped, else by raising.

    Raises:
        BadLoss: on all ranks.
    """
    rows, unit = worst_rows(engine, batch), f"nats/{engine.unit.one}"
    broken = sorted(row for loss, row in rows if not math.isfinite(loss))
    shown = ", ".join(map(str, broken[:8])) + (" ..." if len(broken) > 8 else "")
    finite = math.isfinite(loss_sum) and math.isfinite(grad_norm)
    if finite:
        assert engine.spikes is not None
        highest = ", ".join(f"{row} ({loss:.2f} {unit})" for loss, row in rows[:3])
        what = f"is a spike (above {engine.spikes.threshold():.3f} {unit})"
        cause = f"highest are rows {highest} of the prepared data"
    else:
        what = "is not finite"
        cause = (
            f"rows {shown} of the prepared data give it"
            if broken
            else "each row alone gives a finite loss"
        )
    message = (
        f"step {batch.step + 1}: loss sum {loss_sum}, gradient norm {grad_norm} {what}; {cause}. "
        "The weights are as before the step"
    )
    if not engine.skip_bad:
        raise BadLoss(
            f"{message}; lower train.lr, or mend or remove those rows", batch.step + 1, broken
        )
    if engine.skips >= MAX_SKIPS:
        fix = (
            "Raise train.spike_sigmas or set train.on_spike=none, and run the same command"
            if finite
            else "Lower train.lr, in a run of another run.name"
        )
        said = f"it is the bad step number {engine.skips} in a row, so those rows are not the cause"
        raise BadLoss(f"{message}; {said}. {fix}", batch.step + 1, broken)
    if dist.get_rank() == 0:
        logger.warning("%s, and training goes on", message)


@torch.no_grad()
def worst_rows(engine: Engine, batch: Batch) -> list[tuple[float, int]]:
    """Run the forward pass row by row on all ranks; return (loss, row), worst first."""
    found = []
    for (i, j), row in np.ndenumerate(batch.rows):
        _, loss, *_ = engine.model(**inputs(batch, i, engine.device, slice(j, j + 1)))
        if row >= 0:
            found.append((float(loss) / max(batch.weight(i, j), 1), int(row)))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found, group=engine.control)
    rows = [pair for part in gathered for pair in part]
    return sorted(rows, key=lambda pair: (math.isfinite(pair[0]), -pair[0], pair[1]))


@torch.no_grad()
def evaluate(
    engine: Engine,
    batches: Iterable[Any],
    measure: Callable[[Any, int, Any], Sequence[float]],
) -> list[float]:
    """Return sums over all ranks' batches of what `measure(batch, i, output)` gives."""
    engine.model.eval()
    sums = []
    for batch in batches:
        for i in range(len(batch.rows)):
            output = engine.model(**inputs(batch, i, engine.device))
            sums.append(torch.tensor(measure(batch, i, output), dtype=torch.float64))
    engine.model.train()
    whole = torch.stack(sums).sum(0)
    dist.all_reduce(whole, group=engine.control)
    return list(whole.tolist())
