"""What a checkpoint costs: the stall of an asynchronous save, its memory, and the usual ways.

    python bench/checkpoint.py [--rounds 5] [--million 60]

2 CPU processes hold a Llama and AdamW, sharded by FSDP2, and save them to a folder. In each round,
in turn:

    copy       a plain copy of the rank's state to host memory that is already there
    state      the dict of the state, references only; what both saves below are given
    rayapp     Checkpointer.save, asynchronous: seconds stalled, then seconds to the commit marker
    dcp.save   torch.distributed.checkpoint's own synchronous save of the same state
    gathered   the full state on rank 0 (model and optimizer), torch.save, as most trainers do it

Ratios are taken round by round. Peak memory is that of a rank (VmHWM) above what it held before
the state was made, over the bytes of its state and one copy of it; `gathered` is rank 0's.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
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
from rayapp.checkpoint.saver import Checkpointer
from rayapp.driver.fit import CPU_ENVIRONMENT
from rayapp.optim import make_optimizers
from rayapp.storage import open_storage

WORLD = 2
GIB = 2**30
TITLES = {
    "state": "state dict",
    "copy": "plain copy of a rank's state",
    "stall": "asynchronous save: stall",
    "commit": "asynchronous save: to the commit marker",
    "dcp": "dcp.save",
    "all": "gathered on rank 0, torch.save",
}


def resident(name: str = "VmRSS") -> int:
    """Return bytes of this process, now (VmRSS) or at most since `forget_peak` (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
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
    lm = model.build(shape, loss=lambda *args: None, attention="sdpa")
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


def measure(rank: int, folder: str, rounds: int, million: int) -> None:
    empty = resident()
    lm, optimizer = build(million)
    local = leaves(state_of(lm, optimizer))
    size = sum(tensor.nbytes for tensor in local)
    gc.collect()
    storage = open_storage(f"{folder}/run")
    saver = Checkpointer(storage, keep=1, asynchronous=True)
    peaks: dict[str, float] = {}
    forget_peak()
    for step in (-1, 0):  # the first save makes the memory that all later ones use again
        saver.save(step + 2, state_of(lm, optimizer), {"step": step + 2})
        saver.wait()
    peaks["rayapp"] = (resident("VmHWM") - empty) / (2 * size)
    copies = [torch.empty_like(tensor).fill_(0) for tensor in local]
    found: dict[str, list[float]] = {name: [] for name in TITLES}

    def copy() -> None:
        for there, here in zip(copies, local, strict=True):
            there.copy_(here)

    def dcp(step: int, state: dict) -> None:
        writer = FileSystemWriter(f"{folder}/dcp-{step}", sync_files=False)
        dcp_save(state, storage_writer=writer)

    def gathered(step: int) -> None:
        whole = state_of(lm, optimizer, full_state_dict=True, cpu_offload=True)
        if rank == 0:
            torch.save(whole, f"{folder}/whole-{step}.pt")

    for step in range(3, 3 + rounds):
        found["copy"].append(timed(copy))
        start = time.perf_counter()
        state = state_of(lm, optimizer)
        found["state"].append(time.perf_counter() - start)
        found["stall"].append(timed(lambda s=step, t=state: saver.save(s, t, {"step": s})))
        saver.wait()
        found["commit"].append(saver.commit_s or 0.0)
        found["dcp"].append(timed(lambda s=step, t=state: dcp(s, t)))
        del state
        if rank == 0:
            shutil.rmtree(f"{folder}/dcp-{step}")
    copies.clear()
    gc.collect()
    forget_peak()
    before = resident()
    for step in range(3, 3 + rounds):
        found["all"].append(timed(lambda s=step: gathered(s)))
        if rank == 0:
            Path(f"{folder}/whole-{step}.pt").unlink()
    peaks["gathered"] = (resident("VmHWM") - before + 2 * size) / (2 * size)
    if rank == 0:
        report = {"found": found, "peaks": peaks, "gib": WORLD * size / GIB}
        Path(folder, "found.json").write_text(json.dumps(report))
    saver.close()


def work(rank: int, folder: str, rounds: int, million: int) -> None:
    """Measure on one rank."""
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    measure(rank, folder, rounds, million)
    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--million", type=int, default=60, help="parameters")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, options.rounds, options.million), nprocs=WORLD)
        report = json.loads(Path(folder, "found.json").read_text())
    found = report["found"]
    print(f"{report['gib']:.2f} GiB of state on {WORLD} ranks, medians of {options.rounds} rounds")
    found["loop"] = [a + b for a, b in zip(found["state"], found["stall"], strict=True)]
    titles = TITLES | {"loop": "state dict and stall together, as metrics.jsonl counts them"}
    for name, title in titles.items():
        print(f"{title}: {1000 * statistics.median(found[name]):,.0f} ms")
    pairs = (
        ("stall", "dcp"),
        ("loop", "dcp"),
        ("stall", "copy"),
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
