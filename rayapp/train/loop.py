"""The training loop: it takes a model, optimizers and rows, and yields a record of each step.

    for record in train(engine, steps): log.write(record)

It needs torch and a process group, and no cluster: it runs in Ray Train workers and under torchrun.
A step is one optimizer step over the global batch. Each rank runs its micro-batches (gradient
accumulation), divides each loss by the weight of the global batch (loss-bearing tokens, or images),
and the gradients are summed over ranks. One small all-reduce in host memory, which overlaps the
first forward pass, carries what the ranks must agree on (step_sync.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from rayapp.observe.activity import TRAINING
from rayapp.observe.metrics import HeldOut, MetricsLine
from rayapp.train.engine import Batch, Engine, inputs
from rayapp.train.loss_spikes import LEVEL
from rayapp.train.optimizer import clip, set_lr
from rayapp.train.step_sums import StepSums, Sums
from rayapp.train.step_sync import CONTINUE, ENOUGH, Agreement, Totals
from rayapp.train.waiting import leave_now, leave_of, next_batch

logger = logging.getLogger("rayapp.train.loop")

MAX_SKIPS = 16  # bad steps in a row before the run ends
NEW_LEVEL = "step %d: its loss and those of the %d steps before lie near %.3f, a new level"


class BadLoss(RuntimeError):
    """The loss or the gradient is not finite, or a spike; the message names the step and rows."""

    def __init__(self, message: str, step: int, rows: list[int], finite: bool) -> None:
        super().__init__(message)
        self.step, self.rows, self.finite = step, rows, finite

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.step, self.rows, self.finite)


class Interrupted(Exception):
    """The ranks have agreed to leave (args: STOP or RESTART) during an evaluation; all raise it."""


class Update(NamedTuple):
    """The result of a step; the same on all ranks except for `waited_s`."""

    sums: Sums
    """Of the losses in nats and of `Engine.take_sums` and `take_expert_tokens`, over all ranks."""
    grad_norm: float
    """Global norm before clipping."""
    skipped: bool
    """Whether the step was bad, so that the weights are unchanged."""
    waited_s: float
    """Seconds that the update waited for a save that was reading the weights."""


def train(engine: Engine, steps: Iterable[Batch]) -> Iterator[MetricsLine]:
    """Run the steps and yield a line of metrics.jsonl for each.

    While rows are still being prepared, the ranks may leave as they wait for them: they save then.
    After a step, all ranks evaluate if it is due, then save if rank 0 said so. If they agree to
    leave (`leave_due` or `poll`), they skip the evaluation or give it up, save, yield the record of
    this step, set `engine.left` and end. The evaluation then follows the next attempt's first step.
    An evaluation that is the best so far is saved, too. If `engine.best` has enough, they leave.

    Raises:
        BadLoss: before the optimizer has used what is not finite, or a spike; where such steps are
            skipped, after MAX_SKIPS of them in a row.
    """
    clock = time.perf_counter()
    iterator, before, saved = iter(steps), None, False
    while True:
        asked = time.perf_counter()
        batch, engine.left = next_batch(engine, iterator, before)
        data_wait_s = time.perf_counter() - asked
        if engine.left and before is not None and not saved:
            save(engine, before.step + 1)
        if engine.left or batch is None:
            return
        before = batch
        engine.phases.begin(TRAINING)
        agreement = agree(engine, batch)
        update = train_step(engine, batch, agreement)
        totals = agreement.wait()
        leave = leave_of(engine, totals)
        done = batch.step + 1
        facts = step_facts(engine, batch, update, totals)
        evaluated, best = time.perf_counter(), False
        if engine.evaluate is not None and engine.eval_due(done):
            evaluate = partial(engine.evaluate, done)
            held_out, leave = evaluate_or_leave(engine, evaluate, leave)
            facts |= held_out
            best = bool(held_out) and engine.best.take(done, held_out)
            leave = leave or (ENOUGH if engine.best.enough else CONTINUE)
        eval_s = time.perf_counter() - evaluated
        if engine.stalls:
            engine.stalls[-1] += update.waited_s
        saved = bool(totals.save or leave or best)
        stall_s = update.waited_s + (save(engine, done) if saved else 0.0)
        now = time.perf_counter()
        step_s, clock = now - clock, now
        facts |= {
            "step_s": step_s,
            "data_wait_s": data_wait_s,
            "checkpoint_stall_s": stall_s,
            "eval_s": eval_s,
            "time": time.time(),
        }
        assert engine.record is not None, "this engine was made for single steps"
        busy_s = max(step_s - stall_s - eval_s, 1e-9)
        yield engine.record(facts, totals.counts, update.sums, busy_s)
        if leave:
            engine.left = leave
            return


def evaluate_or_leave(
    engine: Engine, evaluate: Callable[[], HeldOut], leave: int
) -> tuple[HeldOut, int]:
    """Return the held-out figures and whether to leave; without figures if the ranks leave.

    A preempted node stays for minutes at most, so that an evaluation must not delay the save.
    """
    engine.interruptible = True
    try:
        held_out: HeldOut = {} if leave else evaluate()
    except Interrupted as interrupted:
        held_out, leave = {}, interrupted.args[0]
    finally:
        engine.interruptible = False
    engine.eval_owed = leave != CONTINUE
    return held_out, leave


def step_facts(engine: Engine, batch: Batch, update: Update, totals: Totals) -> dict[str, Any]:
    """Return the fields of a step's record that are known before evaluation and checkpoint."""
    done, peaks, imbalance = batch.step + 1, engine.peaks.take(), update.sums.imbalance
    facts = {
        "step": done,
        "epoch": done * engine.rows_per_step / engine.rows_per_epoch,
        "loss": update.sums.loss / totals.weight,
        **({} if imbalance is None else {"expert_imbalance": imbalance}),
        "grad_norm": update.grad_norm,
        "lr": engine.lr_at(batch.step),
        "skipped": update.skipped,
        "peak_gib": engine.peaks.highest_gib,
        **{f"peak_{name}_gib": peaks[name] for name in ("forward", "backward", "optimizer")},
        "workers": dist.get_world_size(),
        "attempt": engine.attempt,
        "batch_digest": totals.digest,
        **engine.own_time.figures(totals.own_us),
    }
    named = engine.figures(update.sums.named, totals.weight)
    assert facts.keys().isdisjoint(named), "figures of a loss have names of their own"
    return facts | named


def save(engine: Engine, done: int) -> float:
    """Start a checkpoint of `done` steps; return the seconds that training waited for it."""
    asked = time.perf_counter()
    engine.phases.begin("saving a checkpoint", f"of step {done}")
    engine.save(done)
    engine.being_read = True
    engine.stalls.append(time.perf_counter() - asked)
    return engine.stalls[-1]


def agree(engine: Engine, batch: Batch) -> Agreement:
    """Start the all-reduce of the step's sums and digest, and of what rank 0 decides."""
    return Agreement(
        batch.counts(),
        batch.digest(),
        engine.own_time.take(),
        save=engine.save_due(batch.step + 1),
        leave=engine.leave_due(),
        poll=engine.poll_due(),
        group=engine.control,
    )


def train_step(engine: Engine, batch: Batch, agreement: Agreement) -> Update:
    """Run one optimizer step over the global batch; skip the update if the step is bad.

    A bad step raises BadLoss instead, on all ranks, unless `engine.skip_bad`.
    """
    batch = engine.ready(batch)
    losses, summing, last = [], None, len(batch.rows) - 1
    by_source = list[torch.Tensor]()
    for i in range(last + 1):
        engine.last_of_step(i == last)
        with engine.peaks.phase("forward"), engine.own_time.forward(batch.step):
            objective, loss, *more = engine.model(**inputs(batch, i, engine.device))
        losses.append(loss.detach())
        by_source += more[:1] if engine.by_source else []
        if i == last:  # overlaps the last backward pass
            summing = StepSums(losses, by_source, engine.take_sums(), engine.take_expert_tokens())
        with engine.peaks.phase("backward"):
            # Gradients are summed over ranks, never averaged: this is the only division.
            (objective / agreement.wait().weight).backward()
        del objective, loss, more  # else this graph would live through the next forward pass
    with engine.peaks.phase("optimizer"):
        grad_norm = clip(engine.model, engine.grad_clip)
        if batch.step == 0 and grad_norm == 0.0 and agreement.wait().counts.weight:
            refuse_no_gradient(engine)
        assert summing is not None, "a step has a micro-batch, and every rank is in the group"
        sums = summing.wait()
        if sums.expert_tokens is not None:
            engine.experts = sums.expert_tokens + (0 if engine.experts is None else engine.experts)
        waited_s = settle(engine)
        bad = is_bad(engine, sums.loss / agreement.wait().weight, grad_norm)
        if bad:
            engine.skips += 1
            report_bad(engine, batch, sums.loss, grad_norm)
        else:
            if engine.spikes is not None and engine.spikes.at_level == 0 and dist.get_rank() == 0:
                logger.warning(NEW_LEVEL, batch.step + 1, LEVEL - 1, engine.spikes.losses[-1])
            engine.skips = 0
            set_lr(engine.optimizers, engine.lr_at(batch.step))
            for optimizer in engine.optimizers:
                optimizer.step()
        for optimizer in engine.optimizers:
            optimizer.zero_grad(set_to_none=True)
        engine.updated(bad)
    return Update(sums, grad_norm, bad, waited_s)


def settle(engine: Engine) -> float:
    """Wait until the last save has read the weights; return the seconds that this took."""
    if not engine.being_read:
        return 0.0
    asked = time.perf_counter()
    engine.settle()
    engine.being_read = False
    return time.perf_counter() - asked


def is_bad(engine: Engine, loss: float, grad_norm: float) -> bool:
    """Say whether the step must not update the weights; `loss` is in nats per token or image.

    All ranks get the same answer. The loss of a step that is not bad joins `engine.spikes`.
    """
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if engine.spikes is None:
        return not finite
    return engine.spikes.is_spike(loss if finite else math.nan)


def report_bad(engine: Engine, batch: Batch, loss_sum: float, grad_norm: float) -> None:
    """Name the bad step and rows: rank 0 logs them if bad steps are skipped, else all ranks raise.

    Raises:
        BadLoss: on all ranks.
    """
    rows, unit = worst_rows(engine, batch), f"nats/{engine.unit.one}"
    broken = sorted(row for loss, row, _ in rows if not math.isfinite(loss))
    own = None if broken else engine.own_loss
    broken = broken or sorted(row for _, row, is_finite in rows if not is_finite)
    shown = ", ".join(map(str, broken[:8])) + (" ..." if len(broken) > 8 else "")
    finite = math.isfinite(loss_sum) and math.isfinite(grad_norm)
    if finite:
        assert engine.spikes is not None
        highest = ", ".join(f"{row} ({loss:.2f} {unit})" for loss, row, _ in rows[:3])
        what = f"is a spike (above {engine.spikes.threshold():.3f} {unit})"
        cause = f"highest are rows {highest} of the prepared data"
    else:
        what = "is not finite"
        cause = (
            f"rows {shown} of the prepared data cause it"
            if broken
            else "each row alone gives a finite loss"
        )
        if own is not None:
            cause += f"; their cross-entropy is finite, train.loss={own} or its gradient is not"
    message = (
        f"step {batch.step + 1}: loss sum {loss_sum}, gradient norm {grad_norm} {what}; {cause}. "
        "The weights are as before the step"
    )
    if not engine.skip_bad:
        fix = "lower train.lr, or correct or remove those rows"
        fix = fix if finite or own is None else f"mend {own}, or {fix}"
        raise BadLoss(f"{message}; {fix}", batch.step + 1, broken, finite)
    if engine.skips >= MAX_SKIPS:
        fix = (
            "Raise train.spike_sigmas or set train.on_spike=none, and run the same command"
            if finite
            else "Lower train.lr, and set another run.name"
        )
        problem = f"it is bad step number {engine.skips} in a row, so those rows are not the cause"
        raise BadLoss(f"{message}; {problem}. {fix}", batch.step + 1, broken, finite)
    if dist.get_rank() == 0:
        logger.warning("%s, and training goes on", message)


def refuse_no_gradient(engine: Engine) -> None:
    """Raise BadLoss: the first step would not change a weight, and so would none."""
    cause = "no trained parameter takes part in the loss"
    if engine.own_loss is not None:
        cause = f"train.loss={engine.own_loss} is cut off from the logits, or zero for each token"
    raise BadLoss(f"step 1: the gradient is exactly zero: {cause}", 1, [], True)


@torch.no_grad()
def worst_rows(engine: Engine, batch: Batch) -> list[tuple[float, int, bool]]:
    """Run the forward pass row by row on all ranks; return (loss, row, is finite) of all.

    The loss is in nats per token or image of the row, worst first; losses that are not finite come
    first. The last says whether the objective is finite.
    """
    losses, weights = [], batch.weights()
    for (i, j), row in np.ndenumerate(batch.rows):
        objective, loss, *_ = engine.model(**inputs(batch, i, engine.device, slice(j, j + 1)))
        if row >= 0:
            is_finite = math.isfinite(float(objective))
            losses.append((float(loss) / max(int(weights[i, j]), 1), int(row), is_finite))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, losses, group=engine.control)
    rows = [each for part in gathered for each in part]
    return sorted(rows, key=lambda each: (math.isfinite(each[0]), -each[0], each[1]))


@torch.no_grad()
def evaluate(
    engine: Engine,
    batches: Iterable[Any],
    measure: Callable[[Any, int, Any], Mapping[Any, float]],
    phase: str = "evaluating",
) -> dict[Any, float]:
    """Run the model in eval mode on all micro-batches; return what `measure` gives, summed.

    `measure(batch, i, output)` returns figures of micro-batch i, by the same names in each; they
    are summed over all ranks, each of which has equally many batches.

    Raises:
        Interrupted: the evaluation is interruptible, and the ranks leave; before a batch.
    """
    engine.phases.begin(phase)
    engine.model.eval()
    sums, names = list[torch.Tensor](), list[Any]()
    try:
        for batch in batches:
            if engine.interruptible and (leave := leave_now(engine)):
                raise Interrupted(leave)
            for i in range(len(batch.rows)):
                output = engine.model(**inputs(batch, i, engine.device))
                figures = measure(batch, i, output)
                names = list(figures)
                sums.append(torch.tensor(list(figures.values()), dtype=torch.float64))
    finally:
        engine.model.train()
    whole = torch.stack(sums).sum(0)
    dist.all_reduce(whole, group=engine.control)
    return dict(zip(names, whole.tolist(), strict=True))
