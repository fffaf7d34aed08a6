"""Check that a worker trains only on rows of the step that its checkpoint comes before."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayapp.config import load
from rayapp.driver import worker
from rayapp.train.loop import BadLoss
from rayapp.train.rank import RankContext


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for Ray; return what the gauges were told."""
    found: list[str] = []
    gauges = SimpleNamespace(step=None, bad_step=lambda: found.append("bad step"))
    monkeypatch.setattr(worker, "Steps", lambda name, rank: nullcontext(gauges))
    monkeypatch.setattr(worker, "_free_workers", lambda config: None)
    monkeypatch.setattr(worker.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(worker.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(worker.ray.train, "get_dataset_shard", lambda name: None)
    monkeypatch.setattr(worker.ray.train.torch, "get_device", lambda: None)
    return found


@pytest.mark.parametrize("checkpoint", [2, 3, 4])
def test_the_data_start_where_the_checkpoint_ends(
    checkpoint: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here at step 3; a checkpoint may be committed or refused after they have started."""
    steps = [SimpleNamespace(step=number) for number in (3, 4, 5)]

    def train_rank(spec: Any, context: RankContext) -> dict[str, Any]:
        taken: Iterator[Any] = context.open_steps(checkpoint)
        return {"status": "done", "taken": [batch.step for batch in taken]}

    monkeypatch.setattr(worker, "train_rank", train_rank)
    spec: Any = SimpleNamespace(
        config=load(),
        order=SimpleNamespace(more=False),
        run_url=str(tmp_path),
        steps=lambda shard, world: iter(steps),
    )
    summary: Any = worker.work(spec)
    if checkpoint == 3:
        assert summary == {"status": "done", "taken": [3, 4, 5]}
        return
    assert summary == {
        "status": "moved",
        "notice": False,
        "again": True,
        "reason": f"the data start at step 3, the checkpoint at {checkpoint}",
    }


@pytest.mark.parametrize("finite", [True, False])
def test_only_what_is_not_finite_is_told_as_a_bad_step(
    finite: bool, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spike that ends the run is none."""

    def train_rank(spec: Any, context: RankContext) -> None:
        raise pickle.loads(pickle.dumps(BadLoss("step 4: why", 4, [7], finite)))

    monkeypatch.setattr(worker, "train_rank", train_rank)
    spec: Any = SimpleNamespace(
        config=load(),
        order=SimpleNamespace(more=False),
        run_url=str(tmp_path),
        steps=lambda shard, world: iter(()),
    )
    assert worker.work(spec) == {"status": "failed", "reason": "step 4: why"}
    assert told == ["bad step"] * (not finite)


@pytest.mark.parametrize("more", [True, False])
def test_first_rows_that_are_maybe_still_prepared_are_waited_for(
    more: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without windows that follow, they come within cluster.collective_timeout_s or not at all."""
    asked = threading.Event()

    def rows() -> Iterator[Any]:
        asked.wait(60)
        yield SimpleNamespace(step=0)

    def train_rank(spec: Any, context: RankContext) -> Any:
        threading.Timer(1.0, asked.set).start()
        return {"status": "done", "taken": [batch.step for batch in context.open_steps(0)]}

    monkeypatch.setattr(worker, "train_rank", train_rank)
    spec: Any = SimpleNamespace(
        config=load(None, {"cluster.collective_timeout_s": "0.1"}),
        order=SimpleNamespace(more=more),
        run_url=str(tmp_path),
        steps=lambda shard, world: rows(),
    )
    if more:
        assert worker.work(spec) == {"status": "done", "taken": [0]}
        return
    with pytest.raises(RuntimeError, match="no rows came from Ray Data"):
        worker.work(spec)
