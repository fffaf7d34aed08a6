"""Ranks that wait for rows which are still being prepared: they stop, and they go on, together."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from test_train_loop import config_of, inputs, spec_of  # noqa: F401  a fixture

from rayapp.data.token_rows import StepRows, local_steps
from rayapp.observe.run_folder import STOP, STOPPED
from rayapp.storage import open_storage
from rayapp.train import schedule
from rayapp.train.checkpoint.marker import latest
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec

STEPS, BLOCK, LATE_S = 6, 3, 20.0


def blocks(
    spec: LanguageSpec, rank: int, world: int, first: int, late: dict[int, float], stop: bool
) -> Iterator[StepRows]:
    """Yield steps in blocks of BLOCK; the rows of a `late` rank come after so many seconds."""
    for batch in local_steps(spec.data.rows("train"), spec.order, rank, world, first):
        if batch.step == BLOCK and first < BLOCK:
            if stop and rank == 0:
                open_storage(spec.run_url).write(STOP, b"")
            time.sleep(late.get(rank, 0.0))
        yield replace(batch, ends_block=batch.step % BLOCK == BLOCK - 1)


def worker(
    rank: int, world: int, spec: LanguageSpec, late: dict[int, float], stop: bool, summary: str
) -> None:
    schedule.STOP_POLL_S = 0.2
    context = RankContext(
        torch.device("cpu"), lambda first: blocks(spec, rank, world, first, late, stop)
    )
    began = time.monotonic()
    found = train_rank(spec, context)
    if rank == 0:
        took = {"took_s": time.monotonic() - began, "phase": context.phases.current.phase}
        Path(summary).write_text(json.dumps(found | took))


def run(
    folder: Path, name: str, late: dict[int, float], stop: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Train on two ranks while windows may follow; return the steps' digests and the summary."""
    spec = spec_of(config_of(folder, name, max_steps=STEPS), folder, STEPS)
    order = replace(spec.order, windows=((spec.order.num_rows,),), follow=(True,))
    spec = replace(spec, order=order)
    open_storage(spec.run_url).delete(STOP)
    summary = folder / f"{name}.json"
    meet = str(folder / f"{name}-{time.monotonic_ns()}")
    processes.spawn(worker, 2, meet, spec, late, stop, str(summary))
    text = Path(spec.run_url, "metrics.jsonl").read_text()
    digests = [json.loads(line)["batch_digest"] for line in text.splitlines()]
    return digests, json.loads(summary.read_text())


@pytest.mark.parametrize("waiting", ["0", "1", "01"])
def test_a_stop_ends_a_wait_for_rows(inputs: Path, waiting: str) -> None:  # noqa: F811
    """Each rank may have its rows already, or wait; all leave before the same step, and save."""
    late = {int(rank): LATE_S for rank in waiting}
    digests, summary = run(inputs, f"stop-{waiting}", late, stop=True)
    assert summary["status"] == STOPPED and summary["steps"] == BLOCK == len(digests)
    assert summary["took_s"] < LATE_S
    newest, _ = latest(open_storage(str(inputs / "runs" / f"stop-{waiting}")))
    assert newest is not None and newest.step == BLOCK
    again, resumed = run(inputs, f"stop-{waiting}", {})
    assert again[:BLOCK] == digests and resumed["steps"] == STEPS
    assert again == run(inputs, "unstopped", {})[0]


def test_rows_that_come_late_change_nothing(inputs: Path) -> None:  # noqa: F811
    digests, summary = run(inputs, "late", {1: 3.0})
    assert summary["steps"] == STEPS and digests == run(inputs, "in-time", {})[0]
