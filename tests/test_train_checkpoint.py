"""Check that a checkpoint exists if and only if its marker does, with real processes and gloo.

What needs several ranks runs in spawned processes; everything else in a group of one, in here.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import io
import json
import logging
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from processes import ensure_server
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.optim.subclass_8bit import OptimState8bit

from rayapp.observe.run_folder import RUN_ID, parsed
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.train.checkpoint import checkpoint_files as files
from rayapp.train.checkpoint import marker, staging
from rayapp.train.checkpoint import saver as saving
from rayapp.train.checkpoint.commit import claim
from rayapp.train.checkpoint.marker import (
    MARKER,
    METADATA,
    STATE,
    CheckpointError,
    Damaged,
    Digest,
    NoneUsable,
    SavedCheckpoint,
    SavedFile,
    latest,
    name_of,
    newest_committed,
    open_checked,
    order_of,
    refuse,
    resume_point,
)
from rayapp.train.checkpoint.quantized import narrowed, scales, widened
from rayapp.train.checkpoint.saver import MAX_FAILURES, Checkpointer
from rayapp.train.checkpoint.staging import HostCopy
from rayapp.train.checkpoint.state import load_checkpoint, saved_shapes
from rayapp.train.optimizer import make_optimizers

SPAWN_S = 120.0  # after which a group of processes is taken to hang


# ---- Several ranks ---------------------------------------------------------------------------


def spawn(folder: Path, world: int, function: Callable[..., None], *args: Any) -> list[int | None]:
    """Run `function(rank, world, *args)` in `world` processes; return their exit codes."""
    ensure_server()  # torch is imported once, not 9 times
    context = torch.multiprocessing.get_context("forkserver")
    init = f"file://{folder}/init-{len(list(folder.iterdir()))}"
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    processes = [
        context.Process(target=child, args=(function, rank, world, init, aws, *args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SPAWN_S)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hung, f"ranks {hung} hang"
    return [process.exitcode for process in processes]


def child(
    function: Callable[..., None],
    rank: int,
    world: int,
    init: str,
    aws: dict[str, str],
    *args: Any,
) -> None:
    os.environ |= aws  # the server of forks is older than the S3 server
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    function(rank, world, *args)
    gc.collect()  # see processes.py
    dist.destroy_process_group()


class Trained:
    """A tiny sharded model with its optimizer after two steps; `seed` makes its values."""

    def __init__(self, seed: int, *, sharded: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # uneven shards
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.95)}
        (self.optimizer,) = make_optimizers("adamw", self.model, **options)
        for _ in range(2):
            self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 5)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": optimizer}

    def load(self, storage: Storage, name: str) -> None:
        tensors = self.tensors()
        load_checkpoint(storage, name, tensors)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )

    def values(self) -> dict[str, torch.Tensor]:
        """Return every tensor whole, by name."""
        found = {}
        for name, value in flat(self.tensors()).items():
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[name] = whole.detach().clone()
        assert len(found) == 4 + 3 * 4
        return found


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, part in tree.items() for k, v in flat(part, f"{prefix}/{name}").items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def found_name(storage: Storage) -> str:
    found, skipped = latest(storage)
    assert found is not None and not skipped, skipped
    return found.name


def save_while_training(rank: int, world: int, folder: str, urls: list[str]) -> None:
    """Save in the thread while the same tensors are trained on; load into another model."""
    gate = threading.Event()
    write = Checkpointer._write

    def gated(self: Checkpointer, *args: Any) -> None:
        gate.wait()
        write(self, *args)

    Checkpointer._write = gated  # type: ignore[method-assign]
    for url in urls:
        storage = open_storage(url)
        trained, saver = Trained(1), Checkpointer(storage, keep=2, asynchronous=True)
        values = []
        for step in (2, 3):
            gate.clear()
            values.append(trained.values())
            saver.save(step, trained.tensors(), {"step": step})
            saver.settle()
            trained.step()  # only now does the thread get to write
            gate.set()
        saver.close()
        assert saver.saved_step == 3 and not equal(*values)
        dist.barrier()
        for step, expected in zip((2, 3), values, strict=True):
            other = Trained(2)
            assert not equal(other.values(), expected)
            other.load(storage, f"step-{step:08d}")
            assert equal(other.values(), expected)
        if rank == 0:
            torch.save(values[-1], f"{folder}/expected.pt")
            assert found_name(storage) == "step-00000003"


def load_sharded(rank: int, world: int, folder: str, urls: list[str]) -> None:
    expected = torch.load(f"{folder}/expected.pt")
    for url in urls:
        trained = Trained(3)
        trained.load(open_storage(url), found_name(open_storage(url)))
        assert equal(trained.values(), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # that is what is tested
def test_bitwise_equal_at_other_world_sizes(tmp_path: Path, either_bucket: str) -> None:
    urls = [str(tmp_path / "run"), f"s3://{either_bucket}/run"]
    assert spawn(tmp_path, 2, save_while_training, str(tmp_path), urls) == [0, 0]
    expected = torch.load(tmp_path / "expected.pt")
    for url in urls:  # 2 -> 1, here, with neither shards nor a process group
        storage = open_storage(url)
        names = sorted(e.name for e in (storage / "checkpoints/step-00000003").list())
        assert names == [METADATA, MARKER, "__0_0.distcp", "__1_0.distcp", STATE]
        trained = Trained(3, sharded=False)
        trained.load(storage, found_name(storage))
        assert equal(trained.values(), expected)

    urls = [str(tmp_path / "one"), f"s3://{either_bucket}/one"]
    with alone(tmp_path):
        trained = Trained(4)
        for url in urls:
            save(open_storage(url), 1, trained.tensors())
        torch.save(trained.values(), tmp_path / "expected.pt")
    assert spawn(tmp_path, 3, load_sharded, str(tmp_path), urls) == [0, 0, 0]


def fail_and_recover(rank: int, world: int, url: str) -> None:
    """Let one rank's storage fail in each phase; all ranks must see it, and none may wait."""
    storage, lines = open_storage(url), Lines()
    kind = type(storage)
    tensors = {"x": torch.full((4,), float(rank))}
    saver = Checkpointer(storage, keep=9, asynchronous=True)

    def attempt(step: int, guilty: int | None, method: str, suffix: str) -> None:
        original = getattr(kind, method)

        def failing(self: Storage, name: str, *args: Any) -> Any:
            if rank == guilty and name.endswith(suffix):
                raise StorageError(method, name, "the disk is full")
            return original(self, name, *args)

        setattr(kind, method, failing)
        try:
            saver.save(step, tensors, {"step": step})
            saver.wait()
        finally:
            setattr(kind, method, original)

    cases = [
        (0, "create", STATE),  # the claim of the folder
        (1, "open_write", ".distcp"),
        (0, "open_write", METADATA),
        (0, "write", MARKER),
    ]
    for step, (guilty, method, suffix) in enumerate(cases, 1):
        attempt(10 * step, guilty, method, suffix)
        assert saver.saved_step in (None, 10 * step - 9), "training goes on"
        assert "checkpoint not saved (1 in a row): cannot" in lines.text[-1]
        assert "the disk is full" in lines.text[-1] and "Traceback" not in lines.text[-1]
        attempt(10 * step + 1, None, "write", "")
        assert saver.saved_step == 10 * step + 1
        dist.barrier()
        assert found_step(storage) == 10 * step + 1
    for number in range(1, MAX_FAILURES):
        attempt(100, 1, "open_write", ".distcp")
        assert f"({number} in a row)" in lines.text[-1]
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row .*the disk is full.*rank 1"):
        attempt(100, 1, "open_write", ".distcp")
    with pytest.raises(CheckpointError, match="the last checkpoint could not be saved"):
        saver.close()
    dist.barrier()
    assert found_step(storage) == 41


class Lines(logging.Handler):
    """The log lines of this module's subject."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        logging.getLogger("rayapp.train.checkpoint").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(record.getMessage())


def found_step(storage: Storage) -> int | None:
    found, _ = latest(storage)
    return found.step if found else None


def test_a_failure_on_one_rank_fails_all_and_hangs_none(tmp_path: Path) -> None:
    assert spawn(tmp_path, 2, fail_and_recover, str(tmp_path / "run")) == [0, 0]


def die_before_the_marker(rank: int, world: int, url: str) -> None:
    saver = Checkpointer(open_storage(url), keep=2, asynchronous=True)
    saver.save(1, {"x": torch.arange(4)}, {"step": 1})
    saver.wait()
    if rank == 1:  # all shards and the index are written, and then
        write = saving.dcp_save

        def die(*args: Any, **options: Any) -> None:
            write(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        saving.dcp_save = die
    saver.save(2, {"x": torch.arange(4) + 1}, {"step": 2})
    with pytest.raises(CheckpointError, match="the last checkpoint could not be saved"):
        saver.close()
    os._exit(7)  # the group is broken: no orderly end


def test_a_killed_rank_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    assert spawn(tmp_path, 2, die_before_the_marker, url) == [7, -signal.SIGKILL]
    torn = open_storage(url) / "checkpoints/step-00000002"
    assert {"__0_0.distcp", METADATA, STATE} <= {e.name for e in torn.list()}
    found, skipped = latest(open_storage(url))
    assert found is not None and (found.name, found.step) == ("step-00000001", 1)
    assert skipped == [
        "checkpoints/step-00000002 is skipped: it has no COMMITTED (the save was cut off)"
    ]
    with alone(tmp_path):  # the next attempt saves the same step, and sweeps
        save(open_storage(url), 2, {"x": torch.arange(4)})
    assert (open_storage(url) / "checkpoints").dirs() == ["step-00000001", "step-00000002.1"]
    assert found_name(open_storage(url)) == "step-00000002.1"


# ---- One rank --------------------------------------------------------------------------------


class alone:
    """A process group of one, for the length of a block."""

    def __init__(self, folder: Path) -> None:
        self.init = f"file://{folder}/init-alone-{len(list(folder.iterdir()))}"

    def __enter__(self) -> None:
        dist.init_process_group("gloo", init_method=self.init, rank=0, world_size=1)

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    with alone(tmp_path):
        yield


@pytest.fixture
def storage(place: str, group: None) -> Storage:
    return open_storage(f"{place}/run")


# Hundreds of requests, of kinds that other tests send to Ceph too.
not_ceph = pytest.mark.parametrize("place", ["local", "moto"], indirect=True)


def save(
    storage: Storage, step: int, tensors: dict[str, Any] | None = None, *, keep: int = 2
) -> Checkpointer:
    saver = Checkpointer(storage, keep=keep, asynchronous=False)
    saver.save(step, tensors or {"x": torch.full((3,), float(step))}, {"step": step})
    saver.close()
    return saver


def folders(storage: Storage) -> list[str]:
    return (storage / "checkpoints").dirs()


def test_there_may_be_none(storage: Storage) -> None:
    assert latest(storage) == (None, [])


def test_what_is_written(storage: Storage) -> None:
    saver = Checkpointer(storage, keep=2, asynchronous=True)
    tensors = {"a": {"x": torch.arange(6.0), "text": "words"}, "n": 3}
    state = {"step": 500, "cursor": {"row": 7}, "\u00e9": None}
    saver.save(500, tensors, state)
    state["cursor"] = "changed afterwards"
    saver.close()
    assert saver.saved_step == 500 and saver.commit_s is not None and saver.commit_s > 0
    assert folders(storage) == ["step-00000500"]
    folder = storage / "checkpoints" / "step-00000500"
    whole = {"step": 500, "cursor": {"row": 7}, "\u00e9": None}
    assert json.loads(folder.read(STATE)) == whole
    files = {e.name: e.size for e in folder.list()}
    assert sorted(files) == [METADATA, MARKER, "__0_0.distcp", STATE]
    del files[MARKER]
    run = storage.read(RUN_ID).decode()
    assert len(run) == 32
    assert json.loads(folder.read(MARKER)) == {
        "run": run,
        "name": "step-00000500",
        "step": 500,
        "files": {
            name: {"size": size, "sha256": [hashlib.sha256(folder.read(name)).hexdigest()]}
            for name, size in files.items()
        },
    }
    found, skipped = latest(storage)
    assert found == SavedCheckpoint("step-00000500", 500, whole) and skipped == []
    assert saved_shapes(storage, found.name) == {"a.x": (6,), "a.text": None, "n": None}
    loaded = {"a": {"x": torch.zeros(6), "text": ""}, "n": 0}
    load_checkpoint(storage, found.name, loaded)
    assert torch.equal(loaded["a"]["x"], torch.arange(6.0))  # type: ignore[index]
    assert (loaded["a"]["text"], loaded["n"]) == ("words", 3)  # type: ignore[index]


def test_the_copy_shares_no_memory(group: None) -> None:
    copy = HostCopy()
    base = torch.arange(8.0)
    mesh = init_device_mesh("cpu", (1,))
    tensors: dict[str, Any] = {
        "whole": base,
        "view": base[2:5],
        "list": [base.view(2, 4)],
        "turned": base.view(2, 4).t(),
        "half": base.bfloat16(),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0),
        "large": torch.zeros(3, staging.LARGE // 8),
        "large_turned": torch.zeros(staging.LARGE // 8, 3).t(),
        "large_half": torch.zeros(staging.LARGE, dtype=torch.bfloat16),
        "parameter": nn.Parameter(torch.ones(2)),
        "sharded": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]),
        "count": [1],
        "name": "a",
    }
    places = []
    for number in (1.0, 2.0, 3.0):  # the second and the third in the memory of the first
        for each in every_tensor(tensors):
            each.fill_(number)
        tensors["count"][0] = int(number)
        staged = copy.take(tensors)
        places.append([each.data_ptr() for each in every_tensor(staged)])
        for each in every_tensor(tensors):
            each.fill_(-1)
        tensors["count"][0] = -1
        for was, now in zip(every_tensor(tensors), every_tensor(staged), strict=True):
            assert torch.equal(now, torch.full_like(was, number)) and now.dtype == was.dtype
        assert (staged["count"], staged["name"]) == ([int(number)], "a")
        assert staged["sharded"].placements == (Shard(0),)
    assert places[0] == places[1] == places[2]
    copy.close()


def test_a_state_of_another_form_is_copied_anew() -> None:
    copy = HostCopy()
    first = copy.take({"a": torch.ones(3)})
    more = copy.take({"a": torch.full((3,), 2.0), "b": torch.zeros(2)})
    wider = copy.take({"a": torch.full((4,), 3.0), "b": torch.zeros(2)})
    double = copy.take({"a": torch.full((4,), 4.0, dtype=torch.float64), "b": torch.zeros(2)})
    assert torch.equal(first["a"], torch.ones(3)) and torch.equal(more["a"], torch.full((3,), 2.0))
    assert torch.equal(wider["a"], torch.full((4,), 3.0))
    assert double["a"].dtype == torch.float64 and float(double["a"].sum()) == 16.0
    copy.close()


def test_moments_of_8_bits_come_back_bit_by_bit(group: None, tmp_path: Path) -> None:
    """Saved as fp32 values, with the scales of this rank's shards; without them, nearly."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))

    def state(seed: int) -> tuple[dict[str, Any], Any]:
        torch.manual_seed(seed)
        moment = OptimState8bit.zeros((64, 96))
        moment.copy_(torch.randn(64, 96) * torch.logspace(-6, 0, 64)[:, None])
        sharded = DTensor.from_local(moment, mesh, [Shard(0)], run_check=False)
        return {"moment": sharded, "step": torch.tensor(3.0)}, moment

    (tree, moment), (other, _) = state(1), state(2)
    saver = Checkpointer(open_storage(str(tmp_path / "run")), keep=3, asynchronous=False)
    for step in (1, 2):  # the second into the memory of the first
        saver.save(step, {"o": other if step == 1 else tree, "s": scales(tree)}, {"step": step})
    saver.close()
    storage = open_storage(str(tmp_path / "run"))
    found, _ = latest(storage)
    assert found is not None
    assert saved_shapes(storage, found.name)["o.moment"] == (64, 96)
    for exact in (True, False):
        target, into = state(3)
        loading = {"o": widened(target)} | ({"s": scales(target)} if exact else {})
        assert loading["o"]["step"] is target["step"]
        load_checkpoint(storage, found.name, loading)
        back = narrowed(target, loading["o"], loading.get("s", {}))
        assert back["moment"] is target["moment"] and float(back["step"]) == 3.0
        if exact:
            assert torch.equal(into.codes, moment.codes) and torch.equal(into.scale, moment.scale)
        else:
            assert not torch.equal(into.scale, moment.scale)
            error = (into.dequantize() - moment.dequantize()).abs().view(-1, 256).amax(1)
            assert (error <= 0.02 * moment.scale).all()


def every_tensor(tree: Any) -> list[torch.Tensor]:
    """Return the plain tensors under a tree, those of DTensors too."""
    if isinstance(tree, dict):
        return [each for value in tree.values() for each in every_tensor(value)]
    if isinstance(tree, list):
        return [each for value in tree for each in every_tensor(value)]
    if isinstance(tree, DTensor):
        return every_tensor(tree.to_local())
    return [tree.data] if isinstance(tree, torch.Tensor) else []


def test_load_refuses_what_does_not_fit(tmp_path: Path, group: None) -> None:
    storage = open_storage(str(tmp_path / "run"))
    save(storage, 1)
    for wrong in ({"y": torch.zeros(3)}, {"x": torch.zeros(4)}):
        with pytest.raises(CheckpointError, match=r"step-00000001 could not be loaded: .*rank 0"):
            load_checkpoint(storage, "step-00000001", wrong)
    with pytest.raises(CheckpointError, match=r"^checkpoints/step-00000009 could not be loaded: "):
        load_checkpoint(storage, "step-00000009", {"x": torch.zeros(3)})


Damage = tuple[str, Callable[[bytes], bytes | None], str]


def damages(name: str, size: int) -> list[Damage]:
    """Return (what, how, the words of `latest`) for one file."""
    flipped = f"{name} has another checksum than when it was saved"
    shorter = f"{name} has {size - 1} bytes instead of {size}"
    found: list[Damage] = [
        ("missing", lambda data: None, f"{name} is missing"),
        ("truncated", lambda data: data[:-1], shorter),
        ("empty", lambda data: b"", f"{name} has 0 bytes instead of {size}"),
        ("longer", lambda data: data + b"\0", f"{name} has {size + 1} bytes instead of {size}"),
        ("flipped", lambda data: data[:-1] + bytes([data[-1] ^ 1]), flipped),
        ("flipped", lambda data: bytes([data[0] ^ 128]) + data[1:], flipped),
    ]
    if name == MARKER:
        words = f"{MARKER} is damaged"
        others = (b"", b"{", b"[]", b"null", b"{}", b'{"files": 3}', b"\xff", b"[" * 10**5)
        found = [("missing", lambda data: None, "it has no COMMITTED (the save was cut off)")]
        found += [("broken", lambda data, other=other: other, words) for other in others]
        found += [
            ("truncated", lambda data: data[: len(data) // 2], words),
            ("of another", lambda data: data.replace(b'"step": 2', b'"step": 3'), words),
            ("of another", lambda data: data.replace(b"step-00000002", b"step-00000001"), words),
            ("odd step", lambda data: data.replace(b'"step": 2', b'"step": Infinity'), words),
            ("odd step", lambda data: data.replace(b'"step": 2', b'"step": 2.0'), words),
            ("odd run", lambda data: data.replace(b'"run": "', b'"run": 1, "x": "'), words),
            ("without a file", lambda data: data.replace(b'"state.json"', b'"state.jsom"'), words),
            ("without a shard", without_shard, "__0_0.distcp is not named in COMMITTED"),
        ]
        others = (b"Infinity", b"NaN", b"-5", b"1" + b"0" * 400, b"1" + b"0" * 5000, b"null", b'""')
        found += [
            (
                "odd size",
                lambda data, o=other: data.replace(b'"size": ', b'"size": %s, "x": ' % o),
                words,
            )
            for other in others
        ]
    return found


def without_shard(data: bytes) -> bytes:
    """Return a marker that does not name the shard."""
    said = json.loads(data)
    del said["files"]["__0_0.distcp"]
    return json.dumps(said).encode()


def resumed(storage: Storage) -> tuple[int | None, list[str]]:
    """Resume as a run does: refuse what turns out to be damaged, and start again."""
    said: list[str] = []
    while True:
        found, skipped = latest(storage)
        said += skipped
        if found is None:
            return None, said
        tensors = {"x": torch.zeros(3)}
        try:
            load_checkpoint(storage, found.name, tensors)
        except Damaged as damage:
            refuse(storage, found.name, str(damage))
            continue
        assert torch.equal(tensors["x"], torch.full((3,), float(found.step)))  # never a wrong model
        return found.step, said


@not_ceph
def test_a_damaged_file_is_refused_and_named(storage: Storage) -> None:
    save(storage, 1)
    save(storage, 2)
    folder = storage / "checkpoints" / "step-00000002"
    whole = {entry.name: folder.read(entry.name) for entry in folder.list()}
    for name, data in whole.items():
        for what, damage, words in damages(name, len(data)):
            damaged = damage(data)
            if damaged is None:
                folder.delete(name)
            else:
                assert damaged != data
                folder.write(name, damaged)
            step, (said,) = resumed(storage)
            assert step == 1, what
            assert said.startswith("checkpoints/step-00000002 is skipped: ") and words in said, what
            for each, content in whole.items():
                folder.write(each, content)
            folder.delete(marker.REFUSED)
    assert found_name(storage) == "step-00000002"
    for name in folders(storage):
        (storage / "checkpoints" / name).delete("__0_0.distcp")
    found, skipped = latest(storage)
    assert found is None and [line.split()[0] for line in skipped] == [
        "checkpoints/step-00000002",
        "checkpoints/step-00000001",
    ]


def test_a_state_that_is_no_json_is_damage(tmp_path: Path, group: None) -> None:
    """Though the marker has its size and checksum: it was damaged before they were taken."""
    storage = open_storage(str(tmp_path / "run"))
    for step in (1, 2):
        save(storage, step)
    folder = storage / "checkpoints" / "step-00000002"
    for data in (b'{"step": 2', b"[]", b"[" * 10**5):
        folder.write(STATE, data)
        said = json.loads(folder.read(MARKER))
        digest = hashlib.sha256(data).hexdigest()
        said["files"][STATE] = {"size": len(data), "sha256": [digest]}
        folder.write(MARKER, json.dumps(said).encode())
        found, skipped = latest(storage)
        assert found is not None and found.step == 1
        assert skipped == ["checkpoints/step-00000002 is skipped: state.json is damaged"]


class Runs:
    """What calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


def forged(storage: Storage, name: str, data: bytes) -> None:
    """Replace a file of step 2, and its size and checksum in the marker."""
    folder = storage / "checkpoints" / "step-00000002"
    folder.write(name, data)
    said = json.loads(folder.read(MARKER))
    said["files"][name] = {"size": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}
    folder.write(MARKER, json.dumps(said).encode())


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ((os.system, "touch {}"), "it names posix.system, which no checkpoint needs"),
        ((Path.touch, Path("{}")), "it names pathlib.Path.touch"),
        ((getattr, "{}", "touch"), "it names builtins.getattr"),
        ((torch.load, "{}"), "it names torch.serialization.load"),
        ((torch.hub.load, "{}"), "it names torch.hub.load"),
        ((list, "{}"), "it names builtins.list"),
        ((torch.Size, (1, 2)), "it is of another form"),
        (None, "is damaged: "),
        ("words", "is damaged: "),
    ],
)
def test_nothing_of_the_metadata_is_run(tmp_path: Path, group: None, made: Any, why: str) -> None:
    """Though the marker was forged with it: the step before it is taken."""
    storage, mark = open_storage(str(tmp_path / "run")), tmp_path / "ran"
    for step in (1, 2):
        save(storage, step)
    if isinstance(made, tuple):
        put = [
            type(part)(str(part).format(mark)) if isinstance(part, str | Path) else part
            for part in made[1:]
        ]
        made = Runs(made[0], *put)
    forged(storage, METADATA, b"" if made is None else pickle.dumps(made))
    with pytest.raises(Damaged, match=rf"step-00000002 could not be loaded: \.metadata .*{why}"):
        saved_shapes(storage, "step-00000002")
    step, (said,) = resumed(storage)
    assert step == 1 and ".metadata is damaged" in said and not mark.exists()


def test_no_value_of_a_shard_is_run(tmp_path: Path, group: None) -> None:
    """torch pickles what is no tensor into the shards."""
    storage, mark = open_storage(str(tmp_path / "run")), tmp_path / "ran"
    values = {"x": torch.ones(3), "v": [1.5, (True, None), "words", {"deep": 3}]}
    save(storage, 1, values)
    loaded = {"x": torch.zeros(3), "v": [0, 0, 0, {"deep": 0}]}
    load_checkpoint(storage, "step-00000001", loaded)
    assert loaded["v"] == values["v"]
    save(storage, 2, {"v": "words"})
    torch.save(Runs(os.system, f"touch {mark}"), shard := io.BytesIO())
    known = files.CheckedReader(storage / "checkpoints", "step-00000002").metadata
    ((index, place),) = known.storage_data.items()
    known.storage_data = {index: dataclasses.replace(place, length=len(shard.getvalue()))}
    forged(storage, METADATA, pickle.dumps(known))
    forged(storage, "__0_0.distcp", shard.getvalue())
    with pytest.raises(Damaged, match=r"(?s)v is damaged: .*posix.system"):
        load_checkpoint(storage, "step-00000002", {"v": ""})
    assert not mark.exists()


def test_none_is_usable_is_told_from_none_was_made(storage: Storage) -> None:
    """To begin anew is right after a first save that was cut off, not after a committed one."""
    (storage / "checkpoints").write("step-00000001/__0_0.distcp", b"half")
    assert resume_point(storage)[0] is None
    for step in (2, 3):
        save(storage, step)
    (storage / "checkpoints").delete("step-00000003/__0_0.distcp")
    found, skipped = resume_point(storage)
    assert found is not None and found.step == 2 and len(skipped) == 1
    refuse(storage, "step-00000002", "its disk was damaged")
    (storage / "checkpoints").write("step-00000004/__0_0.distcp", b"half")
    url = (storage / "checkpoints").url
    with pytest.raises(NoneUsable) as caught:
        resume_point(storage)
    assert str(caught.value) == (
        f"{url} is not usable: none of its checkpoints can be used (step-00000003: __0_0.distcp is "
        "missing; step-00000002: its disk was damaged). Restore the files of one from a copy, "
        "with its COMMITTED, or move the folder away to train from step 1 again"
    )


def copy_of(storage: Storage, name: str, to: Storage) -> None:
    """Copy a checkpoint to another run."""
    for entry in (storage / "checkpoints" / name).list():
        data = (storage / "checkpoints" / name).read(entry.name)
        (to / "checkpoints" / name).write(entry.name, data)


def test_a_checkpoint_of_another_run_is_refused(storage: Storage) -> None:
    other = storage / "other"
    save(storage, 1)
    save(other, 5)
    assert storage.read(RUN_ID) != other.read(RUN_ID)
    copy_of(other, "step-00000005", storage)
    mine, its = (each.read(RUN_ID).decode() for each in (storage, other))
    found, skipped = latest(storage)
    assert found is not None and found.step == 1
    words = f"is skipped: it is of another run: its id is {its}, and RUN_ID has {mine}"
    assert skipped == [f"checkpoints/step-00000005 {words}"]
    save(storage, 6)  # retention counts it not
    assert folders(storage) == ["step-00000001", "step-00000006"]


def test_a_run_keeps_its_id(storage: Storage) -> None:
    """It is the same wherever its folder is, and after an editor has ended its line."""
    save(storage, 1)
    run = storage.read(RUN_ID)
    save(storage, 2)
    assert storage.read(RUN_ID) == run
    moved = storage / "moved"
    for name in folders(storage):
        copy_of(storage, name, moved)
    moved.write(RUN_ID, run + b"\n")
    assert resumed(moved) == (2, [])


def test_an_id_that_an_editor_has_saved_is_the_same(storage: Storage) -> None:
    save(storage, 1)
    storage.write(RUN_ID, storage.read(RUN_ID) + b"\r\n")
    assert resumed(storage) == (1, [])
    save(storage, 2)
    assert resumed(storage) == (2, []) and folders(storage) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_that_no_id_ties_to_its_run_is_refused(storage: Storage) -> None:
    """Its marker has none, or the run's folder: it may be of any run."""
    save(storage, 1)
    save(storage, 2)
    marked, run = "checkpoints/step-00000002/COMMITTED", storage.read(RUN_ID)
    said = json.loads(storage.read(marked))
    del said["run"]
    storage.write(marked, json.dumps(said).encode())
    assert resumed(storage) == (1, [f"{marked.removesuffix('/COMMITTED')} is skipped: "
                                    "COMMITTED is damaged"])  # fmt: skip
    storage.delete(RUN_ID)
    with pytest.raises(NoneUsable, match=rf"RUN_ID is missing .* write {run.decode()} into that"):
        resume_point(storage)
    storage.write(RUN_ID, run)
    assert resumed(storage)[0] == 1


def test_what_is_refused_is_swept_and_not_counted(storage: Storage) -> None:
    for step in (1, 2):
        save(storage, step)
    refuse(storage, "step-00000002", "its disk was damaged")
    assert latest(storage)[1] == ["checkpoints/step-00000002 is skipped: its disk was damaged"]
    save(storage, 3)
    assert folders(storage) == ["step-00000001", "step-00000003"]


@not_ceph
def test_tensors_of_several_blocks(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker, "BLOCK_BYTES", 4096)
    saved = {f"x{n}": torch.randn(n) for n in (10, 1000, 1025, 50_000)}
    save(storage, 1, saved)
    found, _ = latest(storage)
    assert found is not None
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_checkpoint(storage, found.name, loaded)
    assert equal(loaded, saved)


@pytest.mark.parametrize("extra", [-1, 0, 1, 5])
def test_a_file_of_several_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    """Model: the bytes themselves, read at any place; damage is found where it is read."""
    monkeypatch.setattr(marker, "BLOCK_BYTES", 64)
    monkeypatch.setattr(marker, "READ_BLOCK", 64)  # so that no later block is read ahead
    storage, size = open_storage(str(tmp_path)), 4 * 64 + extra
    data = random.Random(extra).randbytes(size)
    digest = Digest()
    for start in range(0, size, 29):  # written in parts that know nothing of blocks
        digest.update(data[start : start + 29])
    file = parsed(json.dumps(dataclasses.asdict(digest.file())).encode(), SavedFile)
    assert file.size == size and len(file.sha256) == -(-size // 64)
    storage.write("f", data)
    reader = open_checked(storage, "f", file)
    draw = random.Random(7)
    for _ in range(200):
        start, length = draw.randrange(size + 5), draw.randrange(size)
        reader.seek(start)
        assert reader.read(length) == data[start : start + length]  # in one piece, as torch wants
    storage.write("f", data[:70] + bytes([data[70] ^ 1]) + data[71:])
    reader = open_checked(storage, "f", file)
    assert reader.read(64) == data[:64]
    with pytest.raises(Damaged, match=r"f has another checksum"):
        reader.read(1)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    folder = tmp_path_factory.mktemp("committed")
    storage = open_storage(str(folder / "run"))
    with alone(folder):
        save(storage, 1)
        save(storage, 2)
    return storage


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(file=st.integers(0, 3), position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_or_does_no_harm(
    committed: Storage, file: int, position: float, bit: int
) -> None:
    folder = committed / "checkpoints" / "step-00000002"
    entry = folder.list()[file]
    whole_marker, data = folder.read(MARKER), folder.read(entry.name)
    flipped = bytearray(data)
    flipped[int(position * len(data))] ^= 1 << bit
    folder.write(entry.name, bytes(flipped))
    try:
        step, said = resumed(committed)
        if step == 2:  # e.g. a blank of the marker, or a name in it that is there twice
            assert entry.name == MARKER and not said
        else:
            assert step == 1 and len(said) == 1
            assert entry.name in said[0] or entry.name == MARKER  # a flipped checksum in it
    finally:
        folder.delete(marker.REFUSED)
        folder.write(MARKER, whole_marker)
        folder.write(entry.name, data)


def test_a_storage_that_does_not_answer_is_no_reason_to_go_back(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(storage, 1)
    save(storage, 2)
    read = type(storage).read

    def failing(self: Storage, name: str, *args: Any) -> bytes:
        if name.endswith(METADATA):
            raise StorageError("read", name, "access denied")
        return read(self, name, *args)

    monkeypatch.setattr(type(storage), "read", failing)
    with pytest.raises(StorageError, match="access denied"):
        latest(storage)


@pytest.mark.parametrize("order", [(0, 0), (7, 3), (123_456_789, 12)])
def test_a_folder_is_read_as_it_is_named(order: tuple[int, int]) -> None:
    assert order_of(name_of(*order)) == order


def test_retention_keeps_the_newest_and_sweeps_after_a_commit(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(storage, step)
    assert folders(storage) == ["step-00000002", "step-00000003"]
    torn = ["step-00000001.1", "step-00000002.7", "step-00000900"]
    mine = ["best", "old-step-00000001", "step-1"]  # a user's own copies
    for name in torn + mine:
        (storage / "checkpoints").write(f"{name}/__0_0.distcp", b"half")
    with monkeypatch.context() as broken:

        def refuse(self: Storage, name: str) -> Any:
            raise StorageError("write", name, "the disk is full")

        broken.setattr(type(storage), "open_write", refuse)
        with pytest.raises(CheckpointError, match="disk is full"):
            save(storage, 4)
    expected = ["step-00000002", "step-00000003", *torn, *mine]
    assert set(expected) <= set(folders(storage))  # S3's create needs no writer, so 4 may be torn
    save(storage, 5)
    expected = ["step-00000003", "step-00000005", "step-00000900", *mine]
    assert folders(storage) == sorted(expected)
    found, skipped = latest(storage)
    assert found is not None and found.step == 5
    newest = newest_committed(storage)  # not step 900, which has no marker
    assert newest is not None and (newest.name, newest.step) == ("step-00000005", 5)
    assert [line.split()[0] for line in skipped] == ["checkpoints/step-00000900"]
    save(storage, 6, keep=1)
    assert folders(storage) == sorted(["step-00000006", "step-00000900", *mine])
    save(storage, 901, keep=3)
    assert folders(storage) == sorted(["step-00000006", "step-00000901", *mine])


def test_retention_counts_what_can_be_used(storage: Storage) -> None:
    """A damaged checkpoint takes no place of a whole one."""
    for step in (300, 400):
        save(storage, step)
    (storage / "checkpoints").delete("step-00000400/__0_0.distcp")
    save(storage, 350)  # resumed from 300
    save(storage, 400)
    assert folders(storage) == ["step-00000350", "step-00000400.1"]


def test_the_marker_waits_for_what_the_step_leaves_elsewhere(storage: Storage) -> None:
    """A checkpoint that what comes before the commit refuses is none."""
    asked: list[int] = []
    folder = storage / "checkpoints" / "step-00000007"

    def before_commit(step: int) -> None:
        asked.append(step)
        assert not folder.exists(MARKER)
        assert sorted(entry.name for entry in folder.list()) == [METADATA, "__0_0.distcp", STATE]

    saver = Checkpointer(storage, keep=2, asynchronous=True, before_commit=before_commit)
    saver.save(7, {"x": torch.zeros(3)}, {"step": 7})
    saver.close()
    assert asked == [7] and found_name(storage) == "step-00000007"

    def refuse(step: int) -> None:
        raise StorageError("write", "metrics.jsonl", f"step {step} is not stored")

    saver = Checkpointer(storage, keep=2, asynchronous=True, before_commit=refuse)
    saver.save(8, {"x": torch.zeros(3)}, {"step": 8})
    with pytest.raises(CheckpointError, match="step 8 is not stored"):
        saver.close()
    assert found_step(storage) == 7


def test_a_sweep_that_fails_is_no_failed_save(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(str(tmp_path / "run"))

    def refuse(self: Storage, name: str) -> None:
        raise StorageError("delete", name, "permission denied")

    monkeypatch.setattr(type(storage), "delete_tree", refuse)
    for step in (1, 2):
        assert save(storage, step, keep=1).saved_step == step
    assert "old checkpoints are not deleted: cannot delete" in caplog.text
    # The marker went first: what is left of step 1 is torn, and is not taken for a checkpoint.
    assert found_name(storage) == "step-00000002"
    (storage / "checkpoints" / "step-00000002").delete(MARKER)
    assert latest(storage)[0] is None


def test_a_name_is_never_taken_twice(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    base = "step-00000005"
    for name in [base] + [f"{base}.{n}" for n in range(1, 11)]:
        (storage / "checkpoints").write(f"{name}/__0_0.distcp", b"half")
    save(storage, 5)
    assert found_name(storage) == f"{base}.11"  # newer than .2 and .10, and they are swept
    assert folders(storage) == [f"{base}.11"]
    (storage / "checkpoints" / f"{base}.11").delete(MARKER)
    save(storage, 5)
    assert found_name(storage) == f"{base}.12"
    save(storage, 5)
    assert found_name(storage) == f"{base}.13"
    # What another attempt makes at the same time is not listed yet: creating decides.
    monkeypatch.setattr(type(storage), "dirs", lambda self: [])
    claimed = [claim(storage, 7, b"{}") for _ in range(3)]
    assert claimed == ["step-00000007", "step-00000007.1", "step-00000007.2"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failures_in_a_row_stop_the_run(
    tmp_path: Path,
    group: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asynchronous: bool,
) -> None:
    storage = open_storage(str(tmp_path / "run"))
    saver = Checkpointer(storage, keep=2, asynchronous=asynchronous)
    tensors, state = {"x": torch.ones(2)}, {"step": 0}

    def refuse(self: Storage, name: str) -> Any:
        raise StorageError("write", name, "access denied", "Check the credentials")

    with monkeypatch.context() as broken:
        broken.setattr(type(storage), "open_write", refuse)
        for step in range(1, MAX_FAILURES):
            saver.save(step, tensors, state)
        saver.wait()
    saver.save(7, tensors, state)
    saver.wait()
    saver.wait()  # a wait for nothing counts nothing
    lines = [r.getMessage() for r in caplog.records if r.name == "rayapp.train.checkpoint"]
    assert len(lines) == MAX_FAILURES - 1 and saver.saved_step == 7
    assert all("access denied. Check the credentials" in line for line in lines)
    monkeypatch.setattr(type(storage), "open_write", refuse)
    for step in range(8, 8 + MAX_FAILURES - 1):
        saver.save(step, tensors, state)
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row .*access denied"):
        saver.save(20, tensors, state)
        saver.wait()
    with pytest.raises(CheckpointError, match="the last checkpoint could not be saved"):
        saver.close()
    assert found_step(storage) == 7


@pytest.mark.parametrize("asynchronous", [False, True])
def test_close_fails_if_the_last_save_did(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    storage = open_storage(str(tmp_path / "run"))
    saver = Checkpointer(storage, keep=2, asynchronous=asynchronous)
    saver.save(1, {"x": torch.ones(2)}, {"step": 1})
    saver.wait()
    monkeypatch.setattr(
        files.Digesting, "write", lambda self, data: (_ for _ in ()).throw(OSError("torn"))
    )
    saver.save(2, {"x": torch.ones(2)}, {"step": 2})
    with pytest.raises(CheckpointError, match=r"last checkpoint could not be saved: .*torn"):
        saver.close()
    assert found_step(storage) == 1


def test_tensors_may_change_when_they_are_copied(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path / "run"))
    saver = Checkpointer(storage, keep=2, asynchronous=True)
    saver.settle()  # nothing was saved yet
    gate, settled = threading.Event(), threading.Event()
    take = HostCopy.take

    def gated(self: HostCopy, state: dict[str, Any]) -> dict[str, Any]:
        assert gate.wait(PATIENCE_S)
        return take(self, state)

    monkeypatch.setattr(HostCopy, "take", gated)
    tensors = {"x": torch.ones(3)}
    saver.save(1, tensors, {"step": 1})  # returns before the copy is made
    waiting = threading.Thread(target=lambda: (saver.settle(), settled.set()))
    waiting.start()
    try:
        assert not settled.wait(0.2)
        tensors["x"].fill_(2.0)  # it is not copied yet, so this is what is saved
    finally:
        gate.set()
    waiting.join()
    tensors["x"].fill_(3.0)
    saver.close()
    loaded = {"x": torch.zeros(3)}
    load_checkpoint(storage, found_name(storage), loaded)
    assert settled.is_set() and torch.equal(loaded["x"], torch.full((3,), 2.0))


@pytest.mark.parametrize("method", ["settle", "wait", "close", "save"])
def test_a_copy_that_cannot_be_made_stops_the_run(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """At the first call after it, whichever that is; nothing of it is listed."""
    storage = open_storage(str(tmp_path / "run"))
    saver = Checkpointer(storage, keep=2, asynchronous=True)

    def refuse(self: HostCopy, state: dict[str, Any]) -> Any:
        raise MemoryError("no room for a copy")

    with monkeypatch.context() as broken:
        broken.setattr(HostCopy, "take", refuse)
        saver.save(1, {"x": torch.ones(3)}, {"step": 1})
        arguments = (2, {"x": torch.ones(3)}, {"step": 2}) if method == "save" else ()
        with pytest.raises(MemoryError, match="no room for a copy"):
            getattr(saver, method)(*arguments)
    assert latest(storage) == (None, [])


def test_a_state_that_is_not_json_is_refused_at_once(tmp_path: Path, group: None) -> None:
    saver = Checkpointer(open_storage(str(tmp_path / "run")), keep=2, asynchronous=True)
    with pytest.raises(TypeError):
        saver.save(1, {"x": torch.ones(2)}, {"step": 1, "bad": object()})
    saver.close()
    assert latest(open_storage(str(tmp_path / "run"))) == (None, [])
