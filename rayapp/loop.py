"""The training loop: model, optimizer and rows in, records out. It knows torch and no cluster.

    for record in train(engine, steps): log.write(record)

Runs wherever a process group does: in Ray Train workers and under torchrun alike. A step is one
optimizer step over the whole global batch: every rank runs its micro-batches, the loss is divided
by the loss-bearing tokens of all of them, and the gradients are summed. One small all-reduce in
host memory at the start of a step carries all that the ranks must agree on: the token counts, the
digest of the batch, and whether to save or leave after it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rayapp import order, packing
from rayapp.loss import IGNORE
from rayapp.memory import Peaks
from rayapp.metrics import StepRecord
from rayapp.optim import set_lr
from rayapp.spikes import Spikes

logger = logging.getLogger("rayapp.loop")

STAY, STOP, MOVE = 0, 1, 2  # leave after this step: not at all, for good, to start again elsewhere


class BadLoss(RuntimeError):
    """The loss or the gradient is not finite, or a spike; the message names the step and rows."""

    def __init__(self, message: str, step: int, rows: list[int]) -> None:
        super().__init__(message)
        self.step, self.rows = step, rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.step, self.rows)


@dataclass
class Engine:
    """What a step needs; `model(**inputs(...))` returns (objective, cross-entropy), both sums."""

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
    save: Callable[[int], float] = field(default=lambda step: 0.0)
    """Save after this many steps; returns the seconds stalled. Called on all ranks together."""
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
    mfu: Callable[[int, int, float], float | None] = field(default=lambda tokens, pairs, s: None)
    """Model FLOP/s over the peak of all devices, from tokens, attended pairs and seconds."""
    evaluate: Callable[[], tuple[float, float | None]] | None = None
    eval_due: Callable[[int], bool] = field(default=lambda step: False)
    peaks: Peaks = field(init=False)

    def __post_init__(self) -> None:
        self.peaks = Peaks(self.device)


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks of a step, made before it runs."""

    targets: int
    tokens: int
    pairs: int
    """Pairs of tokens of which one attends to the other: n (n + 1) / 2 in a document of n."""
    target_bytes: int
    digest: str
    save: bool
    leave: int
    look: bool


def train(engine: Engine, steps: Iterable[Any]) -> Iterator[StepRecord]:
    """Run every step of `steps` (`data.rows.StepRows`) and yield its record; end early to leave.

    A save that was asked for is made after its step; who leaves saves first, sets `engine.left`,
    and as the last thing yields the record of the step it saved.

    Raises:
        BadLoss: before the optimizer has used what is not finite, or a spike.
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
        totals = agree(engine, batch)
        leave = totals.leave or (engine.look() if totals.look else STAY)
        loss_sum, grad_norm, skipped = train_step(engine, batch, totals)
        peaks = engine.peaks.take()
        done = batch.step + 1
        evaluated = time.perf_counter()
        eval_loss, eval_loss_per_byte = None, None
        if engine.evaluate is not None and engine.eval_due(done):
            eval_loss, eval_loss_per_byte = engine.evaluate()
        eval_s = time.perf_counter() - evaluated
        stall_s = engine.save(done) if totals.save or leave else 0.0
        now = time.perf_counter()
        step_s, clock = now - clock, now
        busy_s = max(step_s - stall_s - eval_s, 1e-9)
        yield StepRecord(
            step=done,
            epoch=done * engine.rows_per_step / engine.rows_per_epoch,
            loss=loss_sum / max(totals.targets, 1),
            loss_per_byte=loss_sum / totals.target_bytes if totals.target_bytes else None,
            grad_norm=grad_norm,
            lr=engine.lr_at(batch.step),
            tokens=totals.targets,
            tokens_per_s=totals.tokens / busy_s,
            tokens_per_s_per_gpu=totals.tokens / busy_s / world,
            mfu=engine.mfu(totals.tokens, totals.pairs, busy_s),
            step_s=step_s,
            data_wait_s=data_wait_s,
            checkpoint_stall_s=stall_s,
            eval_s=eval_s,
            skipped=skipped,
            peak_gib=engine.peaks.highest_gib,
            peak_forward_gib=peaks["forward"],
            peak_backward_gib=peaks["backward"],
            peak_optimizer_gib=peaks["optimizer"],
            workers=world,
            attempt=engine.attempt,
            batch_digest=totals.digest,
            time=time.time(),
            eval_loss=eval_loss,
            eval_loss_per_byte=eval_loss_per_byte,
        )
        if leave:
            engine.left = leave
            return


def agree(engine: Engine, batch: Any) -> Totals:
    """Sum over ranks what the step must know before it runs."""
    digest = sum(
        order.row_digest(int(position), batch.input_ids[i, j])
        for (i, j), position in np.ndenumerate(batch.positions)
        if position != order.EMPTY
    ) % (2**64)
    message = torch.tensor(
        [
            int((batch.labels != IGNORE).sum()),
            int((batch.segments != 0).sum()),
            packing.attended_pairs(batch.segments),
            int(batch.target_bytes.sum()),
            digest >> 32,  # in halves, so that sums over ranks cannot overflow an int64
            digest & 0xFFFFFFFF,
            int(engine.save_due(batch.step + 1)),
            engine.leave_due(),
            int(engine.look_due()),
        ],
        dtype=torch.int64,
    )
    dist.all_reduce(message, group=engine.control)
    targets, tokens, pairs, target_bytes, high, low, save, leave, look = map(int, message)
    return Totals(
        targets,
        tokens,
        pairs,
        target_bytes,
        order.combine([high << 32, low]),
        save > 0,
        leave,
        look > 0,
    )


def train_step(engine: Engine, batch: Any, totals: Totals) -> tuple[float, float, bool]:
    """Update the weights once; return (sum of losses in nats, gradient norm, skipped).

    The sum is over all ranks; the weights stay as they are after a bad step that is skipped.
    """
    losses = []
    for i in range(batch.input_ids.shape[0]):
        with engine.peaks.phase("forward"):
            objective, loss = engine.model(**inputs(batch, i, engine.device))
        with engine.peaks.phase("backward"):
            # Gradients of all ranks are summed, never averaged: this division is the only one.
            (objective / max(totals.targets, 1)).backward()
        losses.append(loss)
        del objective, loss  # or the next forward pass would hold this one's graph
    with engine.peaks.phase("optimizer"):
        grad_norm = clip(engine.model, engine.grad_clip)
        loss_sum = sum_over_ranks(engine, torch.stack(losses).double().sum().cpu())
        bad = is_bad(engine, loss_sum / max(totals.targets, 1), grad_norm)
        if bad:
            report_bad(engine, batch, loss_sum, grad_norm)
        else:
            set_lr(engine.optimizers, engine.lr_at(batch.step))
            for optimizer in engine.optimizers:
                optimizer.step()
        for optimizer in engine.optimizers:
            optimizer.zero_grad(set_to_none=True)
    return loss_sum, grad_norm, bad


def is_bad(engine: Engine, loss: float, grad_norm: float) -> bool:
    """Say whether the optimizer must not use this step: the same on all ranks."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return True
    return engine.spikes is not None and engine.spikes.is_spike(loss)


def inputs(
    batch: Any, i: int, device: torch.device, rows: slice = slice(None)
) -> dict[str, torch.Tensor | int]:
    """Return what the model takes of a micro-batch (or of some of its rows), on the device.

    Positions and boundaries are left out if no row holds more than one document: plain causal
    attention, no mask.
    """
    segments = batch.segments[i][rows]
    found = {
        "input_ids": batch.input_ids[i][rows].astype(np.int64),
        "labels": batch.labels[i][rows].astype(np.int64),
    }
    if not (segments[:, :1] == segments).all():
        found["position_ids"] = packing.position_ids(segments)
        found["boundaries"] = packing.boundaries(segments)
    moved: dict[str, torch.Tensor | int] = {
        name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in found.items()
    }
    if "boundaries" in found:
        moved["longest"] = int(np.diff(found["boundaries"]).max())
    return moved


def clip(model: nn.Module, limit: float | None) -> float:
    """Clip the gradient to a global norm over all shards and return the norm before."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def sum_over_ranks(engine: Engine, value: torch.Tensor) -> float:
    """Return the sum of a host scalar over all ranks."""
    dist.all_reduce(value, group=engine.control)
    return float(value)


def report_bad(engine: Engine, batch: Any, loss_sum: float, grad_norm: float) -> None:
    """Say which step and rows are bad: in the log of rank 0 if such are skipped, else by raising.

    Raises:
        BadLoss: on all ranks.
    """
    rows = worst_rows(engine, batch)
    broken = sorted(row for loss, row in rows if not math.isfinite(loss))
    shown = ", ".join(map(str, broken[:8])) + (" ..." if len(broken) > 8 else "")
    if math.isfinite(loss_sum) and math.isfinite(grad_norm):
        assert engine.spikes is not None
        highest = ", ".join(f"{row} ({loss:.2f} nats/token)" for loss, row in rows[:3])
        what = f"is a spike (above {engine.spikes.threshold():.3f} nats/token)"
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
    if dist.get_rank() == 0:
        logger.warning("%s, and training goes on", message)


@torch.no_grad()
def worst_rows(engine: Engine, batch: Any) -> list[tuple[float, int]]:
    """Run the forward pass row by row on all ranks; return (nats per token, row), worst first."""
    found = []
    for i in range(batch.input_ids.shape[0]):
        for j in range(batch.input_ids.shape[1]):
            _, loss = engine.model(**inputs(batch, i, engine.device, slice(j, j + 1)))
            if batch.rows[i, j] >= 0:
                targets = max(int((batch.labels[i, j] != IGNORE).sum()), 1)
                found.append((float(loss) / targets, int(batch.rows[i, j])))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found, group=engine.control)
    rows = [pair for part in gathered for pair in part]
    return sorted(rows, key=lambda pair: (math.isfinite(pair[0]), -pair[0], pair[1]))


@torch.no_grad()
def evaluate(engine: Engine, batches: Iterable[Any]) -> tuple[float, float | None]:
    """Return held-out (nats per token, nats per byte) over all ranks' batches."""
    engine.model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        for i in range(batch.input_ids.shape[0]):
            _, loss = engine.model(**inputs(batch, i, engine.device))
            targets = int((batch.labels[i] != IGNORE).sum())
            sums += torch.tensor(
                [float(loss), targets, int(batch.target_bytes[i].sum())], dtype=torch.float64
            )
    engine.model.train()
    dist.all_reduce(sums, group=engine.control)
    loss_sum, targets_sum, bytes_sum = sums.tolist()
    return loss_sum / max(targets_sum, 1), loss_sum / bytes_sum if bytes_sum else None
