"""What a checkpoint costs: the stall of an asynchronous save, its memory, and the usual ways.

    python bench/checkpoint.py [--rounds 5] [--million 60] [--tokens 256]

2 CPU processes hold a Llama and AdamW, sharded by FSDP2, and save them to a folder. In each round,
in turn:

    copy       a plain copy of the rank's state to host memory that is already there
    state      the dict of the state, references only; what all saves below are given
    step       forward and backward passes over so many tokens a rank, and the optimizer's step
    at once    Checkpointer.save and settle, asynchronous, then a step
    behind     the same as the loop does it, settle only before the optimizer's step
    dcp.save   torch.distributed.checkpoint's own synchronous save of the same state
    gathered   the full state on rank 0 (model and optimizer), torch.save, as most trainers do it

A stall is the time in `save` and in `settle`. What a save costs in truth is in the step as well: on
a CPU the copy and the upload take time from the passes that they run behind. Ratios are taken round
by round. Peak memory is that of a rank (VmHWM) above what it held before the state was made, over
the bytes of its state and one copy of it; `gathered` is rank 0's.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from rayapp import model
from rayapp.driver.ray_workers import CPU_ENVIRONMENT
from rayapp.storage import open_storage
from rayapp.train.checkpoint.saver import Checkpointer
from rayapp.train.loss import chunked_cross_entropy
from rayapp.train.optimizer import make_optimizers

WORLD = 2
GIB = 2**30
TITLES = {
    "state": "state dict",
    "copy": "plain copy of a rank's state",
    "step": "a step",
    "stall_at_once": "asynchronous save, copied at once: stall",
    "total_at_once": "stall and step, copied at once",
    "stall": "asynchronous save, copied behind the next step: stall",
    "total": "stall and step, copied behind",
    "commit": "asynchronous save: to the commit marker",
    "dcp": "dcp.save",
    "all": "gathered on rank 0, torch.save",
}


def resident(name: str = "VmRSS") -> int:
    """Return bytes of this process, now (VmRSS) or at most since `forget_peak` (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # or what is free already would hide what is taken next
    Path("/proc/self/clear_refs").write_text("5")


def leaves(tree: object) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, DTensor):
        return [tree.to_local()]
    return [tree] if isinstance(tree, torch.Tensor) else []


def build(million: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a sharded model of about so many million parameters, with AdamW's state."""
    hidden = 64 * max(1, round((million * 1e6 / 12 / 8) ** 0.5 / 64))
    shape = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden // 64 * 64,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    lm = model.build(shape, loss=chunked_cross_entropy, attention="sdpa")
    mesh = model.device_mesh("cpu", strategy="full_shard", replicas=1)
    model.shard(lm, mesh, strategy="full_shard", param_dtype=None, cpu_offload=False)
    model.init_weights(lm, 0, torch.device("cpu"))
    options = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    (optimizer,) = make_optimizers("adamw", lm, **options)
    for parameter in lm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return lm, optimizer


def state_of(lm: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> dict:
    weights, moments = dcp_state.get_state_dict(
        lm, optimizer, options=dcp_state.StateDictOptions(**options)
    )
    return {"model": weights, "optimizer": moments}


def timed(function: object) -> float:
    """Run on all ranks together; return the seconds of the slowest."""
    dist.barrier()
    start = time.perf_counter()
    function()
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def slowest(**seconds: float) -> dict[str, float]:
    """Return each of some seconds as the slowest rank has them."""
    values = torch.tensor(list(seconds.values()))
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(seconds, values.tolist(), strict=True))


class Training:
    """A model that takes steps, and a checkpointer that saves it meanwhile."""

    def __init__(self, folder: str, million: int, tokens: int) -> None:
        self.lm, self.optimizer = build(million)
        words = torch.randint(0, 8192, (1, tokens + 1))
        self.inputs = {"input_ids": words[:, :-1], "labels": words[:, 1:]}
        self.saver = Checkpointer(open_storage(f"{folder}/run"), keep=1, asynchronous=True)
        self.saves = 0

    def state(self) -> dict:
        return state_of(self.lm, self.optimizer)

    def step(self, settle: Callable[[], None] = lambda: None) -> float:
        """Take a step; return the seconds that `settle` held up the optimizer."""
        loss, _ = self.lm(**self.inputs)
        (loss / loss.numel()).backward()
        start = time.perf_counter()
        settle()
        waited = time.perf_counter() - start
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return waited

    def save_and_step(self, state: dict, behind: bool) -> dict[str, float]:
        """Save and take a step; return the seconds of the stall and of all."""
        self.saves += 1
        dist.barrier()
        start = time.perf_counter()
        self.saver.save(self.saves, state, {"step": self.saves})
        if not behind:
            self.saver.settle()
        stall = time.perf_counter() - start
        stall += self.step(self.saver.settle)
        total = time.perf_counter() - start
        self.saver.wait()
        assert self.saver.saved_step == self.saves, "a save failed"
        return slowest(stall=stall, total=total)


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    empty = resident()
    training = Training(folder, options.million, options.tokens)
    local = leaves(training.state())
    size = sum(tensor.nbytes for tensor in local)
    gc.collect()
    peaks: dict[str, float] = {}
    forget_peak()
    for _ in range(2):  # the first save makes the memory that all later ones use again
        training.saver.save(0, training.state(), {})
        training.saver.wait()
    peaks["rayapp"] = (resident("VmHWM") - empty) / (2 * size)
    training.step()
    copies = [torch.empty_like(tensor).fill_(0) for tensor in local]
    found: dict[str, list[float]] = {name: [] for name in TITLES}

    def copy() -> None:
        for there, here in zip(copies, local, strict=True):
            there.copy_(here)

    def dcp(number: int, state: dict) -> None:
        writer = FileSystemWriter(f"{folder}/dcp-{number}", sync_files=False)
        dcp_save(state, storage_writer=writer)

    def gathered(number: int) -> None:
        whole = state_of(training.lm, training.optimizer, full_state_dict=True, cpu_offload=True)
        if rank == 0:
            torch.save(whole, f"{folder}/whole-{number}.pt")

    for number in range(options.rounds):
        found["copy"].append(timed(copy))
        found["step"].append(timed(training.step))
        start = time.perf_counter()
        state = training.state()
        found["state"].append(time.perf_counter() - start)
        for behind in (True, False) if number % 2 else (False, True):
            seconds = training.save_and_step(state, behind)
            for name in ("stall", "total"):
                found[name if behind else f"{name}_at_once"].append(seconds[name])
        assert training.saver.commit_s is not None
        found["commit"].append(training.saver.commit_s)
        found["dcp"].append(timed(lambda n=number, s=state: dcp(n, s)))
        del state
        if rank == 0:
            shutil.rmtree(f"{folder}/dcp-{number}")
    copies.clear()
    gc.collect()
    forget_peak()
    before = resident()
    for number in range(options.rounds):
        found["all"].append(timed(lambda n=number: gathered(n)))
        if rank == 0:
            Path(f"{folder}/whole-{number}.pt").unlink()
    peaks["gathered"] = (resident("VmHWM") - before + 2 * size) / (2 * size)
    if rank == 0:
        report = {"found": found, "peaks": peaks, "gib": WORLD * size / GIB}
        Path(folder, "found.json").write_text(json.dumps(report))
    training.saver.close()


def work(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Measure on one rank."""
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    measure(rank, folder, options)
    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--million", type=int, default=60, help="parameters")
    parser.add_argument("--tokens", type=int, default=256, help="of a rank in a step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, options), nprocs=WORLD)
        report = json.loads(Path(folder, "found.json").read_text())
    found = report["found"]
    print(f"{report['gib']:.2f} GiB of state on {WORLD} ranks, medians of {options.rounds} rounds")
    found["loop"] = [a + b for a, b in zip(found["state"], found["stall"], strict=True)]
    titles = TITLES | {"loop": "state dict and stall together, as metrics.jsonl counts them"}
    for name, title in titles.items():
        print(f"{title}: {1000 * statistics.median(found[name]):,.0f} ms")
    pairs = (
        ("stall", "dcp"),
        ("stall_at_once", "dcp"),
        ("loop", "dcp"),
        ("stall_at_once", "copy"),
        ("total", "total_at_once"),
        ("all", "stall"),
        ("all", "commit"),
    )
    for above, below in pairs:
        ratios = [a / b for a, b in zip(found[above], found[below], strict=True)]
        print(
            f"{titles[above]} / {titles[below]}: {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f})"
        )
    print(
        f"peak memory over a rank's state and one copy: {report['peaks']['rayapp']:.2f}; "
        f"gathered, on rank 0: {report['peaks']['gathered']:.2f}"
    )


if __name__ == "__main__":
    os.environ |= CPU_ENVIRONMENT
    main()
