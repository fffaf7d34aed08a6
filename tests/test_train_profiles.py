"""Check what is recorded of some steps, and that a profiler that fails ends no run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rayapp.storage import open_storage
from rayapp.train import profiles
from rayapp.train.profiles import Profiler

CPU = torch.device("cpu")


def run(profiler: Profiler, first: int, last: int) -> None:
    """Do the steps `first` + 1 to `last`, each a product of its own size."""
    profiler.after(first)
    for step in range(first + 1, last + 1):
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(step, step) @ torch.ones(step, step)
        profiler.after(step)
    profiler.after(last, last=True)


@pytest.mark.parametrize(
    ("first", "last", "recorded"),
    [(0, 9, (4, 5, 6)), (4, 9, (5, 6)), (0, 5, (4, 5)), (6, 9, ()), (0, 3, ())],
)
def test_the_steps_that_were_asked_for_are_in_the_trace(
    first: int,
    last: int,
    recorded: tuple[int, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(Profiler(open_storage(str(tmp_path)), range(4, 7), CPU), first, last)
    files = {path.name: path for path in tmp_path.glob("profiles/*")}
    assert len(caplog.records) == (last < 4)  # it says that it has nothing
    if not recorded:
        assert not files
        return
    name = f"steps-{recorded[0]}-{recorded[-1]}.trace.json.gz"
    events = json.loads(gzip.decompress(files.pop(name).read_bytes()))["traceEvents"]
    assert not files
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("step ")] == [f"step {n}" for n in recorded]
    assert sum(event.get("name") == "aten::mm" for event in events) == len(recorded)


def test_a_profiler_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file where the folder should be")
    run(Profiler(open_storage(str(tmp_path)), range(2, 4), CPU), 0, 9)
    monkeypatch.setattr(profiles, "profile", lambda: 1 / 0)
    run(Profiler(open_storage(str(tmp_path)), range(2, 4), CPU), 0, 9)
    assert len(caplog.records) == 2 and "ZeroDivisionError" in caplog.text


def test_a_gpus_memory_is_in_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **given: asked.append(given))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    run(Profiler(open_storage(str(tmp_path)), range(2, 4), torch.device("cuda")), 0, 9)
    assert asked == [{"max_entries": profiles.MOST_ALLOCATIONS}, {"enabled": None}]
    assert (tmp_path / "profiles/steps-2-3.memory.pickle").read_bytes() == b"snapshot"
    assert (tmp_path / "profiles/steps-2-3.trace.json.gz").exists()
