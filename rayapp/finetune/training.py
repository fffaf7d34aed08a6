"""What one training process does from its first line to its last, with or without Ray.

    summary = run(job, device, open_steps)

Every rank runs the same lines: build the model on the meta device, shard it, fill the shards, go
back to the newest whole checkpoint, train, evaluate, export. `open_steps(first_step)` gives this
rank's rows: from Ray Data in a Ray Train worker, read directly under torchrun.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as dcp_state

from rayapp import formulas, hardware, loop, metrics, model
from rayapp.checkpoint import loader, marker
from rayapp.checkpoint.saver import Checkpointer
from rayapp.data.rows import StepRows, sequential_batches
from rayapp.finetune.job import Job
from rayapp.finetune.pace import Cadence, Clock, Leaving
from rayapp.finetune.parts import Parts, compile_gain, make_parts
from rayapp.metrics import StepRecord
from rayapp.optim import lr_at
from rayapp.order import Cursor
from rayapp.spikes import Spikes
from rayapp.storage import Storage, open_storage

SAMPLE_TOKENS = 64

logger = logging.getLogger("rayapp.training")


class Resumed(RuntimeError):
    """The checkpoint cannot go on with this data; the message names what differs."""


class StartAgain(RuntimeError):
    """This attempt cannot go on, but another one can; raised by all ranks. The message says why."""


def run(
    job: Job,
    device: torch.device,
    open_steps: Callable[[int], Iterator[StepRows]],
    notice: Callable[[], str | None] = lambda: None,
    room: Callable[[], int] | None = None,
    tell: Callable[[StepRecord], None] = lambda record: None,
) -> dict[str, Any]:
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
    parts = make_parts(job, device)
    clock.lap("model")
    first_step, losses = restore(job, parts, storage)
    clock.lap("restore")
    gain = compile_gain(job, parts, device)
    clock.lap("compile")
    log = metrics.MetricsLog(storage, first_step) if rank == 0 else None
    attempt = [log.attempt if log else 0]
    dist.broadcast_object_list(attempt, src=0, group=control)
    asynchronous = config.checkpoint.asynchronous
    saver = Checkpointer(
        storage,
        keep=config.checkpoint.keep,
        asynchronous=asynchronous,
        # A synchronous save ends before its step has a record.
        before_commit=log.wait_stored if log and asynchronous else lambda step: None,
    )
    leaving = Leaving(storage, room) if rank == 0 else None
    notices: list[str] = []

    def look() -> int:
        found = notice()
        notices.extend([found] if found else [])
        return loop.MOVE if found else loop.STAY

    engine = make_engine(job, parts, device, control, saver, leaving, losses)
    engine.attempt, engine.look = attempt[0], look
    last: metrics.StepRecord | None = None
    try:
        for record in loop.train(engine, open_steps(first_step)):
            if last is None:
                clock.lap("first_step")
            last = record
            if log:
                log.write(record)
            tell(record)
        clock.lap("train")
        saver.close()
    finally:
        if log:
            log.close()
        if leaving:
            leaving.close()
    steps = last.step if last else first_step
    summary: dict[str, Any] = {
        "entered": entered,
        "status": status_of(engine, steps >= job.order.num_steps),
        "steps": steps,
        "first_step": first_step,
        "attempt": attempt[0],
        "commit_s": saver.commit_s,
        "parameters": model.num_parameters(parts.lm),
        "compile": None if gain is None else asdict(gain) | {"speedup": gain.speedup},
    }
    if summary["status"] == "moved":
        summary["notice"] = bool(notices)
        summary["reason"] = notices[0] if notices else leaving.reason if leaving else ""
    if summary["status"] == "done":
        summary |= finish(job, parts, engine, storage, clock)
    summary["seconds"] = clock.seconds
    return summary


def status_of(engine: loop.Engine, complete: bool) -> str:
    """Say how training ended: done, moved (to start again elsewhere) or stopped."""
    if complete:
        return "done"
    return "moved" if engine.left == loop.MOVE else "stopped"


def make_engine(
    job: Job,
    parts: Parts,
    device: torch.device,
    control: Any,
    saver: Checkpointer,
    leaving: Leaving | None,
    losses: list[float],
) -> loop.Engine:
    """Tell the loop what it needs, and when to save, evaluate and leave (`leaving`: on rank 0).

    `losses` are those that a spike is compared with, of the steps before this attempt.
    """
    config, rank, world = job.config, dist.get_rank(), dist.get_world_size()
    cadence = Cadence(config, job.order.num_steps)
    watched = config.train.on_spike != "none"
    spikes = Spikes(config.train.spike_sigmas, losses) if watched else None
    engine = loop.Engine(
        model=parts.lm,
        optimizers=parts.optimizers,
        lr_at=partial(
            lr_at,
            peak=config.train.lr,
            schedule=config.train.schedule,
            num_steps=job.order.num_steps,
            warmup_steps=config.train.warmup_steps,
            floor=config.train.min_lr,
            decay=config.train.decay,
        ),
        device=device,
        grad_clip=config.train.grad_clip,
        control=control,
        rows_per_epoch=job.order.num_rows,
        rows_per_step=job.order.rows_per_step,
        spikes=spikes,
        mfu=mfu_of(job, parts, device),
        skip_bad=config.train.on_spike == "skip",
        save=lambda step: saver.save(step, state_tensors(parts), state_values(job, step, spikes)),
        save_due=cadence.save_due if rank == 0 else lambda step: False,
        leave_due=leaving.due if leaving else lambda: loop.STAY,
        look_due=leaving.look_due if leaving else lambda: False,
        eval_due=cadence.eval_due,
    )
    if job.prepared.num_rows("eval"):
        rows = job.prepared.rows("eval")
        engine.evaluate = lambda: loop.evaluate(
            engine, sequential_batches(rows, config.micro_batch, rank, world)
        )
    return engine


def mfu_of(
    job: Job, parts: Parts, device: torch.device
) -> Callable[[int, int, float], float | None]:
    """Return what computes model FLOP/s over the peak, None for what has no known peak or shape."""
    if device.type != "cuda":
        return lambda tokens, pairs, seconds: None
    gpu = hardware.gpu_from_device_name(torch.cuda.get_device_name(device))
    peak = None if gpu is None else gpu.flops[job.config.train.precision]
    lora = job.config.model.lora
    options = (None, ()) if lora is None else (lora.rank, lora.targets)
    try:
        shape = formulas.shape_of(parts.lm.hf.config.to_dict())
    except formulas.UnknownShape:
        peak = None
    if peak is None:
        return lambda tokens, pairs, seconds: None
    of_token = formulas.model_flops(shape, 0.0, *options)
    of_pair = formulas.model_flops(shape, 1.0, *options) - of_token  # linear in what is attended
    all_of_them = peak * dist.get_world_size()
    return lambda tokens, pairs, seconds: (
        (tokens * of_token + pairs * of_pair) / seconds / all_of_them
    )


def state_tensors(parts: Parts) -> dict[str, Any]:
    """Return what a checkpoint holds as tensors: model, optimizer and every rank's RNG."""
    weights, optimizer = dcp_state.get_state_dict(
        parts.lm, parts.optimizers, options=dcp_state.StateDictOptions(ignore_frozen_params=True)
    )
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {"model": weights, "optimizer": optimizer, "rng": {str(dist.get_rank()): rng}}


def state_values(job: Job, step: int, spikes: Spikes | None) -> dict[str, Any]:
    """Return what a checkpoint holds as plain values, in state.json."""
    import ray
    import transformers

    return {
        "step": step,
        "tokens": step * job.config.train.tokens_per_step,
        "cursor": job.order.cursor(step, job.prepared.fingerprint).to_dict(),
        "data": job.prepared.parts,
        "workers": dist.get_world_size(),
        "losses": [] if spikes is None else list(spikes.losses),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "ray": ray.__version__,
        },
    }


def restore(job: Job, parts: Parts, storage: Storage) -> tuple[int, list[float]]:
    """Load the newest whole checkpoint, if there is one.

    Returns the number of steps it has done, and the last losses, which spikes are compared with.

    Raises:
        Resumed: the data are not those that the checkpoint was trained on.
        StartAgain: the checkpoint turned out to be damaged, and is refused from now on.
    """
    choice: list[Any] = [None]
    if dist.get_rank() == 0:
        found, skipped = marker.latest(storage)
        for line in skipped:
            logger.warning(line)
        choice = [found]
    dist.broadcast_object_list(choice, src=0)
    found = choice[0]
    if found is None:
        return 0, []
    check_cursor(job, found.state)
    wanted = state_tensors(parts)
    saved = loader.saved_names(storage, found.name)
    rank = str(dist.get_rank())
    if not any(name.startswith(f"rng.{rank}.") for name in saved):  # there were fewer workers
        del wanted["rng"]
    try:
        loader.load(storage, found.name, wanted)
    except marker.Damaged as damage:
        if dist.get_rank() == 0:
            marker.refuse(storage, found.name, str(damage))
        dist.barrier()
        raise StartAgain(f"{damage}; it is refused from now on") from damage
    dcp_state.set_state_dict(
        parts.lm,
        parts.optimizers,
        model_state_dict=wanted["model"],
        optim_state_dict=wanted["optimizer"],
        options=dcp_state.StateDictOptions(strict=False),  # what is frozen is not saved
    )
    if "rng" in wanted:
        torch.set_rng_state(wanted["rng"][rank]["cpu"])
        if torch.cuda.is_available() and "cuda" in wanted["rng"][rank]:
            torch.cuda.set_rng_state(wanted["rng"][rank]["cuda"])
    return found.step, found.state["losses"]


def check_cursor(job: Job, state: dict[str, Any]) -> None:
    """Refuse a checkpoint of other data.

    Raises:
        Resumed: naming the parts that differ.
    """
    from rayapp.order import differences

    cursor = Cursor.from_dict(state["cursor"])
    if cursor.fingerprint != job.prepared.fingerprint:
        changed = ", ".join(differences(state["data"], job.prepared.parts))
        raise Resumed(
            f"the data are not those of the checkpoint at step {state['step']}: changed {changed}. "
            "Restore them, or give the run another run.name"
        )
    assert job.order.step_of(cursor) == state["step"], (cursor, state["step"])


def finish(
    job: Job, parts: Parts, engine: loop.Engine, storage: Storage, clock: Clock
) -> dict[str, Any]:
    """Evaluate, sample and export what was trained."""
    found: dict[str, Any] = {"eval_loss": None, "eval_loss_per_byte": None, "samples": []}
    if engine.evaluate is not None:
        found["eval_loss"], found["eval_loss_per_byte"] = engine.evaluate()
    clock.lap("evaluation")
    for prompt in job.config.eval.prompts if parts.lm.plain_head else ():
        found["samples"].append((prompt, sample(parts, prompt, engine.device, job.config.run.seed)))
    clock.lap("sample")
    found["model_path"] = None
    if job.config.checkpoint.export:
        export(job, parts, storage)
        found["model_path"] = f"{storage.url}/model"
    dist.barrier(group=engine.control)
    clock.lap("export")
    return found


def export(job: Job, parts: Parts, storage: Storage) -> None:
    """Write model/: a whole model, or the adapters alone; adapter/ too where they are merged."""
    lora = job.config.model.lora
    if lora is not None:
        folder = storage / ("adapter" if lora.merge else "model")
        model.export_adapters(
            parts.lm, folder, base=job.config.model.path, tokenizer=parts.tokenizer
        )
    if lora is None or lora.merge:
        model.export(
            parts.lm,
            storage / "model",
            tokenizer=parts.tokenizer,
            generation_config=parts.source.generation_config,
        )


@torch.no_grad()
def sample(parts: Parts, prompt: str, device: torch.device, seed: int) -> str:
    """Continue a prompt on the sharded model; all ranks draw the same (temperature 0.8)."""
    ids = parts.tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)
    generator = torch.Generator().manual_seed(seed)
    limit = getattr(parts.lm.hf.config, "max_position_embeddings", None) or 2**30
    parts.lm.eval()
    parts.head.sampling = True
    try:
        start = ids.shape[1]
        while ids.shape[1] < min(start + SAMPLE_TOKENS, limit):
            logits, _ = parts.lm(ids, ids)
            drawn = torch.multinomial(torch.softmax(logits.cpu() / 0.8, -1), 1, generator=generator)
            ids = torch.cat([ids, drawn.to(device)], 1)
            if int(drawn) == parts.tokenizer.eos_token_id:
                break
    finally:
        parts.head.sampling = False
        parts.lm.train()
    return str(parts.tokenizer.decode(ids[0, start:], skip_special_tokens=True))
