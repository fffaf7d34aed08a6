"""What one rank does from its first line to its last, with or without Ray.

    summary = train_rank(spec, RankContext(device, open_steps))

Every rank runs the same lines: build the model, restore the newest usable checkpoint, train,
evaluate, export. In a Ray Train worker the rows come from Ray Data; under torchrun they are read
directly.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from rayapp.observe import metrics
from rayapp.observe.metrics import StepRecord
from rayapp.observe.records import Summary
from rayapp.observe.result import Phases
from rayapp.observe.run_folder import DONE, MOVED, STOPPED
from rayapp.storage import Storage, open_storage
from rayapp.train import loop
from rayapp.train.checkpoint.saver import Checkpointer
from rayapp.train.checkpoint.state import restore, state_tensors, state_values
from rayapp.train.schedule import Cadence, LeaveWatcher
from rayapp.train.spec import AnySpec
from rayapp.train.step_sync import MOVE, STAY
from rayapp.train.trainer import Trainer


@dataclass(frozen=True)
class RankContext:
    """Where a rank trains, and how it reaches what is around it."""

    device: torch.device
    open_steps: Callable[[int], Iterator[Any]]
    """Return this rank's rows from a step on."""
    preemption: Callable[[], str | None] = lambda: None
    """Return which of the run's nodes are being taken away; all ranks call it together."""
    free_workers: Callable[[], int] | None = None
    """Return how many more workers could be placed; None: no more are wanted."""
    on_record: Callable[[StepRecord], None] = lambda record: None
    """Take each step's record, on every rank."""


def train_rank(spec: AnySpec, context: RankContext) -> Summary:
    """Train, evaluate and export; return a summary of plain values (rank 0's is the run's)."""
    phases = Phases()
    storage, rank = open_storage(spec.run_url), dist.get_rank()
    torch.manual_seed(spec.config.run.seed * 1_000_003 + rank)
    timeout = timedelta(seconds=spec.config.cluster.collective_timeout_s)
    control = dist.new_group(backend="gloo", timeout=timeout)
    trainer = spec.build(context.device)
    phases.end("model")
    first_step, losses, skips = restore(spec, trainer, storage)
    phases.end("restore")
    warmed_up = trainer.warm_up()
    phases.end("compile")
    log = metrics.MetricsLog(storage, first_step) if rank == 0 else None
    attempt = [log.attempt if log else 0]
    dist.broadcast_object_list(attempt, src=0, group=control)
    saver = make_saver(spec, storage, log)
    leaving = LeaveWatcher(storage, context.free_workers) if rank == 0 else None
    notices: list[str] = []

    def look() -> int:
        notice = context.preemption()
        notices.extend([notice] if notice else [])
        return MOVE if notice else STAY

    engine = trainer.engine(control, losses)
    engine.attempt, engine.look, engine.skips = attempt[0], look, skips
    schedule(engine, spec, trainer, saver, leaving)
    try:
        last = train(engine, context, first_step, log, phases)
        saver.close()
    finally:
        if log:
            log.close()
        if leaving:
            leaving.close()
    steps = last.step if last else first_step
    status = status_of(engine, steps >= spec.order.num_steps)
    values = {
        **warmed_up,
        "entered": phases.started,
        "status": status,
        "steps": steps,
        "first_step": first_step,
        "attempt": engine.attempt,
        "stall_s": statistics.median(engine.stalls) if engine.stalls else None,
        "commit_s": saver.commit_s,
        "parameters": trainer.num_parameters(),
    }
    summary = cast(Summary, values)
    if status == MOVED:
        reason = notices[0] if notices else leaving.reason if leaving else ""
        summary |= {"notice": bool(notices), "reason": reason}
    if status == DONE:
        summary = {**summary, **trainer.finish(engine, storage, phases.end)}
    return {**summary, "seconds": phases.seconds}


def make_saver(spec: AnySpec, storage: Storage, log: metrics.MetricsLog | None) -> Checkpointer:
    """Return what saves this run's checkpoints; `log` is rank 0's."""
    settings = spec.config.checkpoint
    return Checkpointer(
        storage,
        keep=settings.keep,
        asynchronous=settings.asynchronous,
        # A synchronous save ends before its step has a record.
        before_commit=log.wait_stored if log and settings.asynchronous else lambda step: None,
    )


def train(
    engine: loop.Engine,
    context: RankContext,
    first_step: int,
    log: metrics.MetricsLog | None,
    phases: Phases,
) -> StepRecord | None:
    """Run the steps and hand on their records; return the last one."""
    last: StepRecord | None = None
    for record in loop.train(engine, context.open_steps(first_step)):
        if last is None:
            phases.end("first_step")
        last = record
        if log:
            log.write(record)
        context.on_record(record)
    phases.end("train")
    return last


def status_of(engine: loop.Engine, complete: bool) -> str:
    """Say how training ended: done, moved (to start again elsewhere) or stopped."""
    if complete:
        return DONE
    return MOVED if engine.left == MOVE else STOPPED


def schedule(
    engine: loop.Engine,
    spec: AnySpec,
    trainer: Trainer,
    saver: Checkpointer,
    leaving: LeaveWatcher | None,
) -> None:
    """Set when the loop evaluates, how it saves, and on rank 0 when it saves and leaves."""
    cadence = Cadence(spec.config, spec.order.num_steps)

    def save(step: int) -> None:
        values = state_values(spec, trainer, step, engine.spikes, engine.skips)
        saver.save(step, state_tensors(trainer), values)

    engine.save, engine.settle, engine.eval_due = save, saver.settle, cadence.eval_due
    if leaving is not None:
        engine.save_due = cadence.save_due
        engine.leave_due, engine.look_due = leaving.due, leaving.look_due
