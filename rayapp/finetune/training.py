"""What one training process does from its first line to its last, with or without Ray.

    summary = run(job, device, open_steps)

Every rank runs the same lines: build the model on the meta device, shard it, fill the shards, go
back to the newest whole checkpoint, train, evaluate, export. `open_steps(first_step)` gives this
rank's rows: from Ray Data in a Ray Train worker, read directly under torchrun.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as dcp_state

from rayapp import loop, metrics, model
from rayapp.checkpoint import loader, marker
from rayapp.checkpoint.saver import Checkpointer
from rayapp.config import Config
from rayapp.data.rows import StepRows, sequential_batches
from rayapp.data.tokens import load_tokenizer
from rayapp.finetune.job import Job
from rayapp.finetune.pace import Cadence, Clock, Leaving
from rayapp.loss import chunked_cross_entropy
from rayapp.model.build import find_blocks
from rayapp.optim import adamw, lr_at
from rayapp.order import Cursor
from rayapp.storage import Storage, open_storage

SAMPLE_TOKENS = 64

logger = logging.getLogger("rayapp.training")


class Resumed(RuntimeError):
    """The checkpoint cannot go on with this data; the message names what differs."""


class StartAgain(RuntimeError):
    """This attempt cannot go on, but another one can; raised by all ranks. The message says why."""


@dataclass
class Parts:
    """What a run is made of, on one rank."""

    lm: model.LanguageModel
    optimizer: torch.optim.Optimizer
    source: model.Source
    tokenizer: Any
    head: Head


class Head:
    """The output layer as the model calls it: the loss, or, to sample, the next logits."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.sampling = chunk, False

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.sampling:
            return torch.nn.functional.linear(hidden[:, -1], weight, bias).float()  # [b, V]
        return chunked_cross_entropy(hidden, weight, labels, bias, chunk=self.chunk)


def run(
    job: Job,
    device: torch.device,
    open_steps: Callable[[int], Iterator[StepRows]],
    notice: Callable[[], str | None] = lambda: None,
    room: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """Train, evaluate and export; return a summary of plain values (rank 0's is the run's).

    `notice` says which of our nodes are being taken away; all ranks call it together. `room` says
    how many more workers could be placed.
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
    first_step = restore(job, parts, storage)
    clock.lap("restore")
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

    engine = make_engine(job, parts, device, control, saver, leaving)
    engine.attempt, engine.look = attempt[0], look
    last: metrics.StepRecord | None = None
    try:
        for record in loop.train(engine, open_steps(first_step)):
            if last is None:
                clock.lap("first_step")
            last = record
            if log:
                log.write(record)
        clock.lap("train")
        saver.close()
    finally:
        if log:
            log.close()
        if leaving:
            leaving.close()
    steps = last.step if last else first_step
    moved = engine.left == loop.MOVE
    summary: dict[str, Any] = {
        "entered": entered,
        "status": "done" if steps >= job.order.num_steps else "moved" if moved else "stopped",
        "steps": steps,
        "first_step": first_step,
        "attempt": attempt[0],
        "commit_s": saver.commit_s,
        "parameters": model.num_parameters(parts.lm),
    }
    if summary["status"] == "moved":
        summary["notice"] = bool(notices)
        summary["reason"] = notices[0] if notices else leaving.reason if leaving else ""
    if summary["status"] == "done":
        summary |= finish(job, parts, engine, storage, clock)
    summary["seconds"] = clock.seconds
    return summary


def make_engine(
    job: Job,
    parts: Parts,
    device: torch.device,
    control: Any,
    saver: Checkpointer,
    leaving: Leaving | None,
) -> loop.Engine:
    """Tell the loop what it needs, and when to save, evaluate and leave (`leaving`: on rank 0)."""
    config, rank, world = job.config, dist.get_rank(), dist.get_world_size()
    cadence = Cadence(config, job.order.num_steps)
    engine = loop.Engine(
        model=parts.lm,
        optimizer=parts.optimizer,
        lr_at=partial(
            lr_at,
            peak=config.train.lr,
            schedule=config.train.schedule,
            num_steps=job.order.num_steps,
            warmup_steps=config.train.warmup_steps,
            floor=config.train.min_lr,
        ),
        device=device,
        grad_clip=config.train.grad_clip,
        control=control,
        rows_per_epoch=job.order.num_rows,
        rows_per_step=job.order.rows_per_step,
        save=lambda step: saver.save(step, state_tensors(parts), state_values(job, step)),
        save_due=cadence.save_due if rank == 0 else lambda step: False,
        leave_due=leaving.due if leaving else lambda: loop.STAY,
        look_due=leaving.look_due if leaving else lambda: False,
        eval_due=cadence.eval_due,
    )
    if job.prepared.num_rows("eval"):
        rows = job.prepared.rows("eval")
        engine.evaluate = lambda: loop.evaluate(
            engine, sequential_batches(rows, config.train.micro_batch, rank, world)
        )
    return engine


def make_parts(job: Job, device: torch.device) -> Parts:
    """Build the model on the meta device, shard it, fill its shards, and make the optimizer."""
    config = job.config
    source = model.resolve(config.model.path)
    tokenizer = load_tokenizer(job.tokenizer_url)
    head = Head(config.train.loss_chunk)
    shape = model_shape(source, config, len(tokenizer))
    lm = model.build(shape, loss=head, attention="sdpa")
    if config.parallel.activation_checkpointing == "full":
        lm.hf.gradient_checkpointing_enable({"use_reentrant": False})
    replicas = config.parallel.replicas or 1
    mesh = model.device_mesh(device.type, strategy=config.parallel.strategy, replicas=replicas)
    if config.train.compile:
        for block in find_blocks(lm.hf):
            block.compile()
    model.shard(
        lm,
        mesh,
        strategy=config.parallel.strategy,
        param_dtype=torch.bfloat16 if config.train.precision == "bf16" else None,
        cpu_offload=config.parallel.cpu_offload,
    )
    if source.preset or config.model.from_scratch:
        model.init_weights(lm, config.run.seed, device)
    else:
        model.load_weights(lm, source, device)
    optimizer = adamw(
        lm, lr=config.train.lr, weight_decay=config.train.weight_decay, betas=config.train.betas
    )
    return Parts(lm.train(), optimizer, source, tokenizer, head)


def model_shape(source: model.Source, config: Config, vocabulary: int) -> Any:
    """Return the model's config: a preset takes its tokenizer's vocabulary, then the overrides."""
    shape = copy.deepcopy(source.config)
    if source.preset:
        shape.vocab_size = vocabulary
    for name, value in config.model.overrides.items():
        setattr(shape, name, value)
    return shape


def state_tensors(parts: Parts) -> dict[str, Any]:
    """Return what a checkpoint holds as tensors: model, optimizer and every rank's RNG."""
    weights, optimizer = dcp_state.get_state_dict(parts.lm, parts.optimizer)
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {"model": weights, "optimizer": optimizer, "rng": {str(dist.get_rank()): rng}}


def state_values(job: Job, step: int) -> dict[str, Any]:
    """Return what a checkpoint holds as plain values, in state.json."""
    import ray
    import transformers

    return {
        "step": step,
        "tokens": step * job.config.train.tokens_per_step,
        "cursor": job.order.cursor(step, job.prepared.fingerprint).to_dict(),
        "data": job.prepared.parts,
        "workers": dist.get_world_size(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "ray": ray.__version__,
        },
    }


def restore(job: Job, parts: Parts, storage: Storage) -> int:
    """Load the newest whole checkpoint, if there is one; return the number of steps it has done.

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
        return 0
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
        parts.optimizer,
        model_state_dict=wanted["model"],
        optim_state_dict=wanted["optimizer"],
    )
    if "rng" in wanted:
        torch.set_rng_state(wanted["rng"][rank]["cpu"])
        if torch.cuda.is_available() and "cuda" in wanted["rng"][rank]:
            torch.cuda.set_rng_state(wanted["rng"][rank]["cuda"])
    return found.step


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
        model.export(
            parts.lm,
            storage / "model",
            tokenizer=parts.tokenizer,
            generation_config=parts.source.generation_config,
        )
        found["model_path"] = f"{storage.url}/model"
    dist.barrier(group=engine.control)
    clock.lap("export")
    return found


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
            logits = parts.lm(ids, ids)
            drawn = torch.multinomial(torch.softmax(logits.cpu() / 0.8, -1), 1, generator=generator)
            ids = torch.cat([ids, drawn.to(device)], 1)
            if int(drawn) == parts.tokenizer.eos_token_id:
                break
    finally:
        parts.head.sampling = False
        parts.lm.train()
    return str(parts.tokenizer.decode(ids[0, start:], skip_special_tokens=True))
