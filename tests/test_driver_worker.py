"""Check that a worker trains only on rows of the step that its checkpoint comes before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rayapp.config import load
from rayapp.driver import worker
from rayapp.train.rank import RankContext


@pytest.mark.parametrize("checkpoint", [2, 3, 4])
def test_the_data_start_where_the_checkpoint_ends(
    checkpoint: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here at step 3; a checkpoint may be committed or refused after they have started."""
    steps = [SimpleNamespace(step=number) for number in (3, 4, 5)]

    def train_rank(spec: Any, context: RankContext) -> dict[str, Any]:
        taken: Iterator[Any] = context.open_steps(checkpoint)
        return {"status": "done", "taken": [batch.step for batch in taken]}

    gauges = nullcontext(SimpleNamespace(step=lambda record: None))
    monkeypatch.setattr(worker, "train_rank", train_rank)
    monkeypatch.setattr(worker, "Steps", lambda name, rank: gauges)
    monkeypatch.setattr(worker, "_free_workers", lambda config: None)
    monkeypatch.setattr(worker.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(worker.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(worker.ray.train, "get_dataset_shard", lambda name: None)
    monkeypatch.setattr(worker.ray.train.torch, "get_device", lambda: None)
    spec: Any = SimpleNamespace(config=load(), steps=lambda shard, world: iter(steps))
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
