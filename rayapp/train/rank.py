"""Run one rank of a training run from start to end, with or without Ray.

    summary = train_rank(spec, RankContext(device, open_steps))

Every rank does the same: it builds the model, restores the newest usable checkpoint, trains,
evaluates and exports. A Ray Train worker gets its rows from Ray Data; a process under torchrun
reads them directly.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from rayapp.observe.activity import Phases
from rayapp.observe.metrics import HeldOut, MetricsLine
from rayapp.observe.metrics_log import MetricsLog
from rayapp.observe.records import Evaluated, Summary, Validation
from rayapp.observe.run_folder import DONE, MOVED, REJECTED, STOPPED
from rayapp.observe.words import number
from rayapp.storage import Storage, open_storage
from rayapp.train import loop
from rayapp.train.best import judged
from rayapp.train.checkpoint import state as checkpoints
from rayapp.train.checkpoint.saver import Checkpointer
from rayapp.train.engine import Engine
from rayapp.train.profiles import Profiler
from rayapp.train.schedule import Cadence, LeaveWatcher
from rayapp.train.spec import AnySpec
from rayapp.train.step_sync import CONTINUE, ENOUGH, RESTART
from rayapp.train.trainer_interface import Trainer


@dataclass(frozen=True)
class RankContext:
    """The device of a rank, its rows, and its view of the cluster around it."""

    device: torch.device
    open_steps: Callable[[int], Iterator[Any]]
    """Return an iterator over this rank's batches, from the given step (from 0) on."""
    preemption: Callable[[], str | None] = lambda: None
    """Say which nodes of the run are being preempted, None if none; all ranks call it together."""
    free_workers: Callable[[], int] | None = None
    """Return how many more workers the cluster has room for; None: the run wants no more."""
    on_record: Callable[[MetricsLine], None] = lambda record: None
    """Called with each step's line of metrics.jsonl, on every rank."""
    phases: Phases = field(default_factory=Phases)
    """Says what the rank does, and takes the seconds of its phases."""


def train_rank(spec: AnySpec, context: RankContext) -> Summary:
    """Train, and if all steps are done evaluate and export; return a summary of plain values.

    Rank 0's summary becomes the run's.
    """
    phases = context.phases
    phases.begin("loading the model", spec.config.model.path)
    storage, rank = open_storage(spec.run_url), dist.get_rank()
    torch.manual_seed(spec.config.run.seed * 1_000_003 + rank)
    timeout = timedelta(seconds=spec.config.cluster.collective_timeout_s)
    control = dist.new_group(backend="gloo", timeout=timeout)
    trainer = spec.build(context.device)
    phases.end("model")
    phases.begin("restoring the newest usable checkpoint")
    first_step, state = checkpoints.restore(spec, trainer, storage)
    if not first_step and spec.config.origin is not None:
        checkpoints.start_from(trainer, spec.config.origin)
    phases.end("restore")
    phases.begin("compiling" if spec.config.train.compile else "checking the model")
    warmed_up = trainer.warm_up()
    phases.end("compile")
    log = MetricsLog(storage, first_step) if rank == 0 else None
    attempt = [log.attempt if log else 0]
    dist.broadcast_object_list(attempt, src=0, group=control)
    saver = make_saver(spec, storage, log)
    leaving = LeaveWatcher(storage, context.free_workers) if rank == 0 else None
    notices: list[str] = []

    def poll() -> int:
        notice = context.preemption()
        notices.extend([notice] if notice else [])
        return RESTART if notice else CONTINUE

    engine = trainer.engine(control)
    engine.attempt, engine.poll, engine.phases = attempt[0], poll, phases
    engine.own_time.nodes = nodes = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, socket.gethostname(), group=control)
    engine.resume(state)
    schedule(engine, spec, trainer, saver, leaving)
    try:
        before_steps(trainer, engine, first_step)
        profiled = spec.config.train.profiled if rank == 0 else range(0)
        profiler = Profiler(storage, profiled, context.device)
        last = None if engine.left else train(trainer, engine, context, first_step, log, profiler)
        phases.begin("committing the last checkpoint")
        saver.close()
    finally:
        if log:
            log.close()
        if leaving:
            leaving.close()
    steps = last["step"] if last else first_step
    complete = steps >= spec.order.num_steps or engine.left == ENOUGH
    status = DONE if complete else MOVED if engine.left == RESTART else STOPPED
    summary = cast(Summary, {**warmed_up, "entered": phases.started, "status": status})
    summary |= {"steps": steps, "first_step": first_step, "attempt": engine.attempt}
    stall_s = statistics.median(engine.stalls) if engine.stalls else None
    summary |= {"stall_s": stall_s, "commit_s": saver.commit_s}
    summary["parameters"] = trainer.num_parameters()
    if status == MOVED:
        reason = notices[0] if notices else leaving.reason if leaving else ""
        summary |= {"notice": bool(notices), "reason": reason}
    if status == DONE:
        summary = {**summary, **conclude(trainer, engine, storage, steps)}
    return {**summary, "seconds": phases.seconds}


def before_steps(trainer: Trainer, engine: Engine, first_step: int) -> None:
    """Prepare the steps and evaluate what the run starts with; tell the engine if the ranks leave.

    All of the evaluation is done if a condition of eval.gate needs the base.
    """
    owed, prepared = engine.eval_owed, partial(trainer.prepare, engine, first_step)
    _, leave = loop.evaluate_or_leave(engine, prepared, CONTINUE)
    engine.eval_owed, engine.left = owed, leave or engine.left
    if first_step or leave:
        return
    before = partial(trainer.before_first_step, engine)
    if engine.evaluate and any(each.base for each in trainer.spec.config.eval.conditions):
        before = partial(engine.evaluate, 0)
    engine.before, engine.left = loop.evaluate_or_leave(engine, before, CONTINUE)
    engine.phases.end("before_first_step")


def conclude(trainer: Trainer, engine: Engine, storage: Storage, steps: int) -> Summary:
    """Evaluate after the last step, go back to the best one, judge it by eval.gate, and export it.

    Returns the fields of a summary that this adds or changes.
    """
    config, at, held_out = trainer.spec.config, steps, HeldOut()
    last: Evaluated | None = None
    if engine.evaluate is not None and engine.left != ENOUGH:
        held_out = engine.evaluate(steps)
        engine.best.take(steps, held_out)
    engine.phases.end("evaluation")
    best = engine.best.best
    if best is not None and best["step"] != steps:
        engine.phases.begin("going back to the best checkpoint", f"of step {best['step']}")
        if checkpoints.go_back_to(trainer, storage, best["step"]):
            if held_out:
                last = {**held_out, "step": steps}
            at, held_out = best["step"], best["held_out"]
        elif engine.evaluate is not None and not held_out:
            held_out = engine.evaluate(steps)
    found = judged(config.eval.conditions, held_out, engine.before)
    missed = [each for each in found if not each["met"]]
    export = config.checkpoint.export and not missed
    summary = cast(Summary, trainer.finish(engine, storage, at, held_out, export=export))
    summary |= {"last": last} if last else {}
    summary |= {"gate": found} if found else {}
    summary |= {"best": best} if best is not None and at == best["step"] else {}
    if missed:
        told = (f"{each['condition']} (it is {number(each['value'])})" for each in missed)
        summary["status"] = REJECTED
        summary["reason"] = (
            f"eval.gate is not met: {', '.join(told)}. Nothing is exported; the same command with "
            "another eval.gate judges the model again"
        )
    return summary


def make_saver(spec: AnySpec, storage: Storage, log: MetricsLog | None) -> Checkpointer:
    """Return this run's Checkpointer; `log` is the metrics log on rank 0, None on other ranks.

    Before an asynchronous save commits, it waits until the record of its step is stored.
    """
    settings = spec.config.checkpoint
    return Checkpointer(
        storage,
        keep=settings.keep,
        asynchronous=settings.asynchronous,
        timeout_s=spec.config.cluster.collective_timeout_s,
        # A synchronous save commits before its step has a record, so it cannot wait for one.
        before_commit=log.wait_stored if log and settings.asynchronous else lambda step: None,
    )


def train(
    trainer: Trainer,
    engine: Engine,
    context: RankContext,
    first_step: int,
    log: MetricsLog | None,
    profiler: Profiler,
) -> MetricsLine | None:
    """Run the steps from `first_step` on, log their lines (rank 0), and return the last one."""
    last: MetricsLine | None = None
    phases, done = context.phases, first_step
    profiler.after(done)
    phases.begin("waiting for the first rows")
    for line in loop.train(engine, trainer.joined(context.open_steps(first_step))):
        if last is None:
            phases.end("first_step")
        last, done = line, line["step"]
        if log:
            log.write(line)
        context.on_record(line)
        profiler.after(done)
    profiler.after(done, last=True)
    phases.end("train")
    return last


def schedule(
    engine: Engine,
    spec: AnySpec,
    trainer: Trainer,
    saver: Checkpointer,
    leaving: LeaveWatcher | None,
) -> None:
    """Tell the engine how to save and when to evaluate; on rank 0 also when to save and leave."""
    cadence = Cadence(spec.config, spec.order.num_steps)

    def save(step: int) -> None:
        values = checkpoints.state_values(spec, trainer, step, engine.state())
        saver.save(step, checkpoints.state_tensors(trainer), values)

    engine.save, engine.settle = save, saver.settle
    engine.eval_due = lambda step: cadence.eval_due(step, owed=engine.eval_owed)
    if leaving is not None:
        engine.save_due = cadence.save_due
        engine.leave_due, engine.poll_due = leaving.due, leaving.poll_due


def validate(spec: AnySpec, name: str, step: int) -> Validation:
    """Evaluate a checkpoint as training does, in this process alone, which the driver starts.

    Return a line of validation.jsonl.
    """
    began = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=0, world_size=1)
        try:
            trainer = spec.alone().build(device)
            checkpoints.load_weights(trainer, open_storage(spec.run_url), name)
            engine = trainer.engine(dist.group.WORLD)
            trainer.prepare(engine, step)
            assert engine.evaluate is not None, "no rows are held out"
            held_out = engine.evaluate(step)
        finally:
            dist.destroy_process_group()
    return {"step": step, **held_out, "seconds": time.time() - began, "time": time.time()}
