"""The training loop: model, optimizer and rows in, records out. It knows torch and no cluster.

    for record in train(engine, steps): log.write(record)

Runs wherever a process group does: in Ray Train workers and under torchrun alike. A step is one
optimizer step over the whole global batch: every rank runs its micro-batches, the loss is divided
by the loss-bearing tokens of all of them, and the gradients are summed. One small all-reduce in
host memory at the start of a step carries all that the ranks must agree on: the token counts, the
digest of the batch, and whether to save or leave after it.
"""

from __future__ import annotations

import math
import resource
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
from rayapp.metrics import StepRecord
from rayapp.optim import set_lr

GIB = 2**30

STAY, STOP, MOVE = 0, 1, 2  # leave after this step: not at all, for good, to start again elsewhere


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is not finite; the message gives the step and the rows."""

    def __init__(self, message: str, step: int, rows: list[int]) -> None:
        super().__init__(message)
        self.step, self.rows = step, rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.step, self.rows)


@dataclass
class Engine:
    """What a step needs; `model(input_ids, labels, position_ids)` returns a sum of losses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
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
    evaluate: Callable[[], tuple[float, float | None]] | None = None
    eval_due: Callable[[int], bool] = field(default=lambda step: False)


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks of a step, made before it runs."""

    targets: int
    tokens: int
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
        NonFiniteLoss: before the optimizer has used what is not finite.
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
        loss_sum, grad_norm = train_step(engine, batch, totals)
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
            mfu=None,
            step_s=step_s,
            data_wait_s=data_wait_s,
            checkpoint_stall_s=stall_s,
            eval_s=eval_s,
            peak_gib=peak_gib(engine.device),
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
    targets, tokens, target_bytes, high, low, save, leave, look = map(int, message)
    return Totals(
        targets, tokens, target_bytes, order.combine([high << 32, low]), save > 0, leave, look > 0
    )


def train_step(engine: Engine, batch: Any, totals: Totals) -> tuple[float, float]:
    """Update the weights once; return (sum of losses over all ranks in nats, gradient norm)."""
    losses = []
    for i in range(batch.input_ids.shape[0]):
        loss = engine.model(*tensors(batch, i, engine.device))
        # Gradients of all ranks are summed, never averaged: this division is the only one.
        (loss / max(totals.targets, 1)).backward()
        losses.append(loss.detach())
    grad_norm = clip(engine.model, engine.grad_clip)
    loss_sum = sum_over_ranks(engine, torch.stack(losses).double().sum().cpu())
    if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
        raise explain_non_finite(engine, batch, loss_sum, grad_norm)
    set_lr(engine.optimizer, engine.lr_at(batch.step))
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)
    return loss_sum, grad_norm


def tensors(
    batch: Any, i: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (input_ids, labels, position_ids) [b, S] of a micro-batch on the device.

    position_ids are None if no row holds more than one document: plain causal attention, no mask.
    """
    segments = batch.segments[i]
    plain = bool((segments[:, :1] == segments).all())
    positions = None if plain else torch.from_numpy(packing.position_ids(segments))
    arrays = [
        torch.from_numpy(np.ascontiguousarray(a[i], np.int64))
        for a in (batch.input_ids, batch.labels)
    ]
    input_ids, labels = (array.to(device, non_blocking=True) for array in arrays)
    return input_ids, labels, None if positions is None else positions.to(device, non_blocking=True)


def clip(model: nn.Module, limit: float | None) -> float:
    """Clip the gradient to a global norm over all shards and return the norm before."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def sum_over_ranks(engine: Engine, value: torch.Tensor) -> float:
    """Return the sum of a host scalar over all ranks."""
    dist.all_reduce(value, group=engine.control)
    return float(value)


def explain_non_finite(
    engine: Engine, batch: Any, loss_sum: float, grad_norm: float
) -> NonFiniteLoss:
    """Run the forward pass row by row on all ranks and name the rows whose loss is not finite."""
    culprits = []
    with torch.no_grad():
        for i in range(batch.input_ids.shape[0]):
            input_ids, labels, positions = tensors(batch, i, engine.device)
            for j in range(input_ids.shape[0]):
                one = slice(j, j + 1)
                loss = engine.model(
                    input_ids[one], labels[one], positions if positions is None else positions[one]
                )
                if not math.isfinite(float(loss)):
                    culprits.append(int(batch.rows[i, j]))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, culprits, group=engine.control)
    rows = sorted(row for part in gathered for row in part)
    shown = ", ".join(map(str, rows[:8])) + (" ..." if len(rows) > 8 else "")
    cause = (
        f"rows {shown} of the prepared data give it"
        if rows
        else "each row alone gives a finite loss"
    )
    message = (
        f"step {batch.step + 1}: loss sum {loss_sum}, gradient norm {grad_norm} is not finite; "
        f"{cause}. The weights are as before the step; lower train.lr, or mend or remove those rows"
    )
    return NonFiniteLoss(message, batch.step + 1, rows)


@torch.no_grad()
def evaluate(engine: Engine, batches: Iterable[Any]) -> tuple[float, float | None]:
    """Return held-out (nats per token, nats per byte) over all ranks' batches."""
    engine.model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        for i in range(batch.input_ids.shape[0]):
            loss = engine.model(*tensors(batch, i, engine.device))
            targets = int((batch.labels[i] != IGNORE).sum())
            sums += torch.tensor(
                [float(loss), targets, int(batch.target_bytes[i].sum())], dtype=torch.float64
            )
    engine.model.train()
    dist.all_reduce(sums, group=engine.control)
    loss_sum, targets_sum, bytes_sum = sums.tolist()
    return loss_sum / max(targets_sum, 1), loss_sum / bytes_sum if bytes_sum else None


def peak_gib(device: torch.device) -> float:
    """Return the most memory this process held: on the GPU, else resident, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
