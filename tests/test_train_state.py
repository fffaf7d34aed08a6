"""Check what a checkpoint holds while training goes on, and what of it a resume gets back.

test_train_loop and test_vision resume whole runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rayapp.config import Origin, load
from rayapp.observe.clock import CLOCK, Call
from rayapp.observe.records import LoopState
from rayapp.order import Order
from rayapp.storage import Storage, open_storage
from rayapp.train.checkpoint.marker import CheckpointError, NoneUsable, latest
from rayapp.train.checkpoint.saver import Checkpointer
from rayapp.train.checkpoint.state import (
    Resumed,
    StartAgain,
    restore,
    start_from,
    state_tensors,
    state_values,
)
from rayapp.train.engine import Engine
from rayapp.train.loss_spikes import RECENT, Spikes
from rayapp.train.rank import make_saver


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    url = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, torch.Tensor):
        yield tree.to_local() if isinstance(tree, DTensor) else tree


@pytest.mark.parametrize("wrapped", ["fsdp", "ddp"])
def test_nothing_of_it_changes_before_the_optimizers_next_step(group: None, wrapped: str) -> None:
    """Though torch's own batch norm counts, and random numbers are drawn, in a forward pass."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    model: Any = fully_shard(layers) if wrapped == "fsdp" else DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = {"average": torch.ones(2)}
    trainee: Any = SimpleNamespace(model=model, optimizers=[optimizer], tensors=lambda: average)
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    tensors = state_tensors(trainee)
    assert set(tensors) == {"model", "optimizer", "rng", "average"}
    assert {"1.running_mean", "1.num_batches_tracked", "3.weight"} <= set(tensors["model"])
    held = list(leaves(tensors))
    before = [tensor.clone() for tensor in held]
    model(torch.randn(8, 3)).sum().backward()
    assert all(map(torch.equal, held, before))
    (counted,) = (b for name, b in model.named_buffers() if name.endswith("batches_tracked"))
    assert (int(counted), int(tensors["model"]["1.num_batches_tracked"])) == (2, 1)
    optimizer.step()  # the rest is no copy
    changed = [not torch.equal(now, was) for now, was in zip(held, before, strict=True)]
    parameters = len(list(model.parameters()))
    assert sum(changed) == parameters * 4  # each with two moments and a count of steps


# ---- A resume ----------------------------------------------------------------------------------


LOOP: LoopState = {
    "losses": [2.5, 1.5],
    "spikes": [9.5],
    "at_level": 40,
    "skips": 2,
    "evaluate": True,
}


def trainee_of(seed: int) -> Any:
    """Return the trainer of one layer."""
    torch.manual_seed(seed)
    model = fully_shard(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return SimpleNamespace(
        model=model, optimizers=[optimizer], tensors=dict, amounts=lambda step: {}
    )


def spec_of(seq_len: int = 8) -> Any:
    parts = {"files": ["a"], "seq_len": seq_len}
    data = SimpleNamespace(fingerprint=f"of {seq_len}", parts=parts)
    return SimpleNamespace(
        config=load(), data=data, order=Order.for_steps(10, 4, 2, seed=3, num_steps=9)
    )


def saved(storage: Storage, trainee: Any, *steps: int) -> None:
    """Save the trainee after each of these steps, with what the loop knows."""
    saver = Checkpointer(storage, keep=3, asynchronous=False)
    for step in steps:
        values = state_values(spec_of(), trainee, step, LOOP)
        saver.save(step, state_tensors(trainee), values)
    saver.close()


def test_a_resume_gets_back_what_was_saved(group: None, tmp_path: Path) -> None:
    """Weights, the place, what tells a spike, and the next random numbers."""
    storage, first, second = open_storage(str(tmp_path / "run")), trainee_of(1), trainee_of(2)
    torch.manual_seed(5)
    saved(storage, first, 4)
    drawn = torch.rand(3)
    step, state = restore(spec_of(), second, storage)
    assert step == 4 and {name: state[name] for name in LOOP} == LOOP  # type: ignore[literal-required]
    assert torch.equal(torch.rand(3), drawn)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def test_the_loop_goes_on_from_its_state() -> None:
    engine = Engine(nn.Linear(1, 1), [], lambda step: 0.0, torch.device("cpu"), None, None)
    engine.spikes = Spikes(6.0)
    engine.resume(LOOP)
    assert engine.state() == LOOP and engine.spikes.sigmas == 6.0
    engine.resume({"losses": [1.0]})  # of an older version
    assert engine.state() == {
        "losses": [1.0],
        "spikes": [],
        "at_level": RECENT,
        "skips": 0,
        "evaluate": False,
    }


def test_a_run_does_not_resume_on_other_data(group: None, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    saved(storage, trainee_of(1), 4)
    with pytest.raises(Resumed, match=r"checkpoint at step 4: changed seq_len\. Restore them"):
        restore(spec_of(seq_len=16), trainee_of(2), storage)


def flip(folder: Path) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)


def forge(folder: Path) -> None:
    """Replace the metadata by a pickle that calls os.getcwd, and its checksum in the marker."""
    forged, said = pickle.dumps(os.getcwd), json.loads((folder / "COMMITTED").read_text())
    (folder / ".metadata").write_bytes(forged)
    facts = {"size": len(forged), "sha256": [hashlib.sha256(forged).hexdigest()]}
    said["files"][".metadata"] = facts
    (folder / "COMMITTED").write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("damage", "why"), [(flip, "another checksum"), (forge, "names posix.getcwd")]
)
def test_a_damaged_checkpoint_is_met_once(
    group: None, tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    storage = open_storage(str(tmp_path / "run"))
    saved(storage, trainee_of(1), 3, 4)
    damage(tmp_path / "run" / "checkpoints" / "step-00000004")
    with pytest.raises(NoneUsable, match=rf"model.init_from=.*{why}"):
        start_from(trainee_of(2), Origin(storage.url))
    with pytest.raises(StartAgain, match=rf"{why}.* this checkpoint is not used again"):
        restore(spec_of(), trainee_of(2), storage)
    assert restore(spec_of(), trainee_of(2), storage)[0] == 3
    assert why in latest(storage)[1][0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_waits_for_the_metrics_of_its_step(
    group: None, tmp_path: Path, asynchronous: bool
) -> None:
    """A synchronous one cannot: its step has no record yet."""
    spec, waited = spec_of(), list[int]()
    settings = spec.config.checkpoint.model_copy(update={"asynchronous": asynchronous})
    spec.config = spec.config.model_copy(update={"checkpoint": settings})
    log: Any = SimpleNamespace(wait_stored=waited.append)
    saver = make_saver(spec, open_storage(str(tmp_path / "run")), log)
    saver.save(7, {"x": torch.zeros(3)}, state_values(spec, trainee_of(1), 7, {}))
    saver.close()
    assert waited == [7] * asynchronous and saver.saved_step == 7


def test_a_rank_that_hangs_does_not_hold_up_a_save_for_ever(tmp_path: Path) -> None:
    processes.spawn(hanging_rank, 2, str(tmp_path / "rendezvous"), str(tmp_path))


def hanging_rank(rank: int, world: int, folder: str) -> None:
    """Rank 1 does not save until rank 0 has given up, after cluster.collective_timeout_s."""
    spec, over = spec_of(), Path(folder, "over")
    spec.config = load(None, {"cluster.collective_timeout_s": "2"})
    saver = make_saver(spec, open_storage(f"{folder}/run"), None)
    if rank == 1:
        while not over.exists():
            time.sleep(0.1)
        return
    try:
        began = time.monotonic()
        saver.save(7, {"x": torch.zeros(3)}, state_values(spec, trainee_of(1), 7, {}))
        closing = Call(CLOCK, saver.close, "close")
        assert closing.wait(PATIENCE_S) and time.monotonic() - began >= 2.0
        assert isinstance(closing.error, CheckpointError)
    finally:
        over.touch()
