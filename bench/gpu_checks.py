"""What must hold on every card, each a function that returns (whether it does, the figures).

passed, detail = CHECKS["host_reads"](torch.device("cuda"))
"""

from __future__ import annotations

import gc
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from drawn import batches, make_engine, step
from gpu_steps import NotHere
from torch.overrides import TorchFunctionMode

from rayapp import model
from rayapp.config import Config, load
from rayapp.data.tokens import byte_tokenizer
from rayapp.finetune.auto import after_failure, out_of_memory
from rayapp.finetune.trainer import LanguageTrainer
from rayapp.hardware import GIB
from rayapp.order import Order
from rayapp.storage import open_storage
from rayapp.train import loop
from rayapp.train.checkpoint.saver import Checkpointer
from rayapp.train.checkpoint.state import load_checkpoint, state_tensors, state_values
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec

Answer = tuple[bool, str]
VOCABULARY = 2048
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
}
KERNELS = ("varlen", "sdpa", "flex", "flash", "eager")
READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__float__", "__int__", "__bool__")
APART = 3e-2  # nats, of a loss in bf16; README states it for every option
FAST = 1e-3  # learning rate with which ten steps learn most of the drawn documents
PERIOD = 64  # of the tokens of those documents
MANY_ROWS = 4096  # of the micro-batch that does not fit


def config_with(
    settings: dict[str, str] | None = None, seq_len: int = 256, rows: int = 4, layers: int = 4
) -> Config:
    """Return the config of a small model."""
    common = {
        "model.path": "tiny",
        "model.overrides": json.dumps(
            {**SHAPE, "num_hidden_layers": layers, "max_position_embeddings": seq_len}
        ),
        "data.seq_len": str(seq_len),
        "train.micro_batch": str(rows),
        "train.tokens_per_step": str(rows * seq_len * dist.get_world_size()),
        "train.precision": "bf16",
        "train.on_spike": "none",
        "cluster.workers": str(dist.get_world_size()),
    }
    return load(None, common | (settings or {}), Config)


def drawn(config: Config, count: int) -> list[Any]:
    """Return this rank's rows of `count` steps."""
    return batches(config, VOCABULARY, count, dist.get_rank(), period=PERIOD)


class Reads(TorchFunctionMode):
    """Count the calls by which the host reads a tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


def host_reads(device: torch.device) -> Answer:
    """Check that the host waits for the device twice a step: for the loss and for the norm."""
    config = config_with()
    engine = make_engine(config, device)
    *warm, last = drawn(config, 4)
    for batch in warm:
        step(engine, batch)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(engine, last)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        count = sum("synchronizing" in str(each.message) for each in caught)
    else:
        agreement = loop.agree(engine, last)
        agreement.wait()  # its message is in host memory on GPUs too
        with Reads() as reads:
            loop.train_step(engine, last, agreement)
        count = reads.count
    return count == 2, f"{count} reads a step"


def checkpointing(device: torch.device) -> Answer:
    """Check that each kind of activation checkpointing lowers what a step adds to the memory."""
    added = {}
    for kind in ("none", "selective", "full"):
        settings = {"parallel.activation_checkpointing": kind}
        config = config_with(settings, seq_len=1024, layers=16)
        engine = make_engine(config, device)
        first, second = drawn(config, 2)
        step(engine, first)
        engine.peaks.take()
        before_gib = held_gib(device)
        step(engine, second)
        added[kind] = max(engine.peaks.take().values()) - before_gib
        del engine
        gc.collect()
    detail = ", ".join(f"{kind} {gib:.3f} GiB" for kind, gib in added.items())
    return added["none"] > added["selective"] > added["full"], detail


def held_gib(device: torch.device) -> float:
    """Return the memory of tensors on a GPU, or of this process without what it shares."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text("utf-8").split())
    return (resident - shared) * resource.getpagesize() / GIB


def kernels(device: torch.device) -> Answer:
    """Check that ten losses agree across attention kernels in bf16, and with fp32."""
    losses = {"fp32": ten_losses(config_with({"train.precision": "fp32"}), device)}
    for kernel in KERNELS:
        config = config_with({"model.attention": kernel})
        try:
            losses[kernel] = ten_losses(config, device)
        except (model.Unavailable, ImportError):
            continue
    apart = {
        name: max(abs(a - b) for a, b in zip(found, losses["fp32"], strict=True))
        for name, found in losses.items()
        if name != "fp32"
    }
    detail = ", ".join(f"{name} {worst:.4f}" for name, worst in apart.items())
    first, last = losses["fp32"][0], losses["fp32"][-1]
    return max(apart.values()) < APART, f"{first:.2f} to {last:.2f} nats; from fp32: {detail}"


def ten_losses(config: Config, device: torch.device) -> list[float]:
    """Return the losses of ten steps."""
    engine = make_engine(config, device)
    engine.lr_at = lambda step: FAST
    return [step(engine, batch)[1] for batch in drawn(config, 10)]


@contextmanager
def a_spec(config: Config, steps: int) -> Iterator[LanguageSpec]:
    """Yield what train_rank takes, for drawn rows and a run folder that all ranks share."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    with tempfile.TemporaryDirectory() as tokenizer:
        byte_tokenizer().save_pretrained(tokenizer)
        rows = config.rows_per_step
        data: Any = SimpleNamespace(
            columns=0,
            pairs=False,
            fingerprint="drawn",
            parts={},
            held_out=0,
            epoch_rows=rows * steps,
            sources={},
        )
        order = Order.for_steps(rows * steps, rows, config.micro_batch, 0, steps)
        yield LanguageSpec("rayapp.finetune", config, data, order, folder[0], tokenizer)


def copied_behind(device: torch.device) -> Answer:
    """Check that a checkpoint that is copied while the next step runs holds the values before."""
    config = config_with()
    with a_spec(config, 8) as spec:
        trainer = LanguageTrainer(spec, device)
        engine = trainer.engine(dist.new_group(backend="gloo"))
        rows, storage = drawn(config, 5), open_storage(spec.run_url)
        for batch in rows[:3]:
            step(engine, batch)
        before = cloned(state_tensors(trainer))
        saver = Checkpointer(storage, keep=1, asynchronous=True)
        saver.save(3, state_tensors(trainer), state_values(spec, trainer, 3, engine.state()))
        engine.settle, engine.being_read = saver.settle, True
        for batch in rows[3:]:
            step(engine, batch)
        saver.close()
        (name,) = (storage / "checkpoints").dirs()
        loaded = cloned(state_tensors(trainer))
        load_checkpoint(storage, name, loaded)
    wrong = [key for key, value in flat(before) if not same(value, dict(flat(loaded))[key])]
    return not wrong, f"{len(list(flat(before)))} tensors, {len(wrong)} differ"


def cloned(tree: Any) -> Any:
    """Copy the tensors of nested mappings."""
    if isinstance(tree, dict):
        return {key: cloned(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested mappings, each with its path."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        path = f"{prefix}.{key}"
        if isinstance(value, torch.Tensor):
            yield path, value
        else:
            yield from flat(value, path)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal to the last bit."""
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
    return bool(torch.equal(a.cpu(), b.cpu()))


def resumes(device: torch.device) -> Answer:
    """Check that a run of three and three steps has the losses and norms of one of six."""
    config = config_with(
        {"checkpoint.every_steps": "3", "checkpoint.every_s": "none", "checkpoint.export": "false"}
    )
    rows = drawn(config, 6)
    with a_spec(config, 6) as spec, a_spec(config, 6) as other:
        run(spec, device, rows, 6)
        run(other, device, rows, 3)
        run(other, device, rows, 6)
        dist.barrier()
        whole, parts = lines_of(spec), lines_of(other)
    return whole == parts and len(whole) == 6, f"losses and norms of {len(whole)} steps"


def run(spec: LanguageSpec, device: torch.device, rows: list[Any], until: int) -> None:
    """Train up to a step."""
    torch.manual_seed(0)
    train_rank(spec, RankContext(device, lambda first: islice(iter(rows), first, until)))


def lines_of(spec: LanguageSpec) -> list[tuple[float, float]]:
    """Return the loss and the gradient's norm of each step."""
    text = Path(spec.run_url, "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


def a_micro_batch_too_large(device: torch.device) -> Answer:
    """Check that a micro-batch that does not fit is known by its error, and is halved."""
    config = config_with(rows=MANY_ROWS)
    engine = make_engine(config, device)
    (batch,) = drawn(config, 1)
    error: Exception | None = None
    with little_memory(device):
        try:
            step(engine, batch)
        except (RuntimeError, MemoryError) as caught:
            error = caught
    if error is None:
        return False, f"{MANY_ROWS} rows have fitted"
    with a_spec(config, 1) as spec:
        smaller = after_failure(replace(spec, auto=("micro_batch",)), error)
    halved = None if smaller is None else smaller.config.micro_batch
    known = out_of_memory(error)
    return known and halved == MANY_ROWS // 2, f"{type(error).__name__}: {MANY_ROWS} -> {halved}"


@contextmanager
def little_memory(device: torch.device) -> Iterator[None]:
    """Leave this process half a GiB more than it has."""
    more = 2**29
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (torch.cuda.memory_reserved(device) + more) / total
        torch.cuda.set_per_process_memory_fraction(share, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def through_ray(device: torch.device) -> Answer:
    """Check that a fine-tuning through Ray ends with an exported model that opens."""
    if importlib.util.find_spec("ray") is None:
        raise NotHere("the package ray is not installed")
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "rayapp.finetune", "configs/tiny_cpu.yaml"]
            command += [f"--run.storage={folder}", "--train.max_steps=10", "--cluster.workers=1"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            answer[0] = _of_run(Path(folder, "tiny"), done)
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _of_run(folder: Path, done: subprocess.CompletedProcess[str]) -> Answer:
    if done.returncode:
        return False, f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    check = result["export_check"]
    opened = check["difference"] is not None and (folder / "model" / "config.json").exists()
    return opened, f"{result['steps']} steps, logits of the export {check['difference']:.1e} apart"


CHECKS: dict[str, Callable[[torch.device], Answer]] = {
    "host_reads": host_reads,
    "checkpointing": checkpointing,
    "kernels": kernels,
    "copied_behind": copied_behind,
    "resumes": resumes,
    "out_of_memory": a_micro_batch_too_large,
    "through_ray": through_ray,
}
