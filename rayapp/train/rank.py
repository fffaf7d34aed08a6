"""What one training process does from its first line to its last, with or without Ray.

    summary = run(job, make, device, open_steps)

Every rank runs the same lines: make what is trained, go back to the newest whole checkpoint, train,
evaluate, export. `open_steps(first_step)` gives this rank's rows: from Ray Data in a Ray Train
worker, read directly under torchrun.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from rayapp.observe import metrics
from rayapp.observe.metrics import StepRecord
from rayapp.observe.records import Summary
from rayapp.observe.run_folder import DONE, MOVED, STOPPED
from rayapp.storage import Storage, open_storage
from rayapp.train import loop
from rayapp.train.checkpoint.saver import Checkpointer
from rayapp.train.checkpoint.state import restore, state_tensors, state_values
from rayapp.train.schedule import Cadence, Clock, Leaving
from rayapp.train.spec import Job
from rayapp.train.step_sync import MOVE, STAY
from rayapp.train.trainer import Trainee


def run(
    job: Job,
    make: Callable[[torch.device], Trainee],
    device: torch.device,
    open_steps: Callable[[int], Iterator[Any]],
    notice: Callable[[], str | None] = lambda: None,
    room: Callable[[], int] | None = None,
    tell: Callable[[StepRecord], None] = lambda record: None,
) -> Summary:
    """Train, evaluate and export; return a summary of plain values (rank 0's is the run's).

    `notice` says which of our nodes are being taken away; all ranks call it together. `room` says
    how many more workers could be placed. `tell` takes each step's record, on every rank.
    """
    clock, entered = Clock(), time.time()
    config, storage = job.config, open_storage(job.run_url)
    rank = dist.get_rank()
    torch.manual_seed(config.run.seed * 1_000_003 + rank)
    control = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=config.cluster.collective_timeout_s)
    )
    trainee = make(device)
    clock.lap("model")
    first_step, losses, skips = restore(job, trainee, storage)
    clock.lap("restore")
    said = trainee.warm_up()
    clock.lap("compile")
    log = metrics.MetricsLog(storage, first_step) if rank == 0 else None
    attempt = [log.attempt if log else 0]
    dist.broadcast_object_list(attempt, src=0, group=control)
    saver = make_saver(job, storage, log)
    leaving = Leaving(storage, room) if rank == 0 else None
    notices: list[str] = []

    def look() -> int:
        found = notice()
        notices.extend([found] if found else [])
        return MOVE if found else STAY

    engine = trainee.engine(control, losses)
    engine.attempt, engine.look, engine.skips = attempt[0], look, skips
    arm(engine, job, trainee, saver, leaving)
    try:
        last = train(engine, open_steps(first_step), log, tell, clock)
        saver.close()
    finally:
        if log:
            log.close()
        if leaving:
            leaving.close()
    steps = last.step if last else first_step
    status = status_of(engine, steps >= job.order.num_steps)
    values = {
        **said,
        "entered": entered,
        "status": status,
        "steps": steps,
        "first_step": first_step,
        "attempt": engine.attempt,
        "stall_s": statistics.median(engine.stalls) if engine.stalls else None,
        "commit_s": saver.commit_s,
        "parameters": trainee.num_parameters(),
    }
    summary = cast(Summary, values)
    if status == MOVED:
        reason = notices[0] if notices else leaving.reason if leaving else ""
        summary |= {"notice": bool(notices), "reason": reason}
    if status == DONE:
        summary = {**summary, **trainee.finish(engine, storage, clock.lap)}
    return {**summary, "seconds": clock.seconds}


def make_saver(job: Job, storage: Storage, log: metrics.MetricsLog | None) -> Checkpointer:
    """Return what saves this run; `log` is rank 0's."""
    settings = job.config.checkpoint
    return Checkpointer(
        storage,
        keep=settings.keep,
        asynchronous=settings.asynchronous,
        # A synchronous save ends before its step has a record.
        before_commit=log.wait_stored if log and settings.asynchronous else lambda step: None,
    )


def train(
    engine: loop.Engine,
    steps: Iterator[Any],
    log: metrics.MetricsLog | None,
    tell: Callable[[StepRecord], None],
    clock: Clock,
) -> StepRecord | None:
    """Run the steps, log and tell their records; return the last one."""
    last: StepRecord | None = None
    for record in loop.train(engine, steps):
        if last is None:
            clock.lap("first_step")
        last = record
        if log:
            log.write(record)
        tell(record)
    clock.lap("train")
    return last


def status_of(engine: loop.Engine, complete: bool) -> str:
    """Say how training ended: done, moved (to start again elsewhere) or stopped."""
    if complete:
        return DONE
    return MOVED if engine.left == MOVE else STOPPED


def arm(
    engine: loop.Engine,
    job: Job,
    trainee: Trainee,
    saver: Checkpointer,
    leaving: Leaving | None,
) -> None:
    """Tell the loop how and when to save, and when to evaluate and leave (`leaving`: on rank 0)."""
    cadence = Cadence(job.config, job.order.num_steps)

    def save(step: int) -> None:
        values = state_values(job, trainee, step, engine.spikes, engine.skips)
        saver.save(step, state_tensors(trainee), values)

    engine.save, engine.settle, engine.eval_due = save, saver.settle, cadence.eval_due
    if leaving is not None:
        engine.save_due = cadence.save_due
        engine.leave_due, engine.look_due = leaving.due, leaving.look_due
