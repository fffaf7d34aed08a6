"""Check that rows read while windows are prepared are those that are read afterwards.

Run: python -m pytest tests/test_data_growing.py
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_preparation import (  # noqa: F401  fixtures
    VALUES,
    recipe,
    tokenised,
    tokenizer_url,
    write_jsonl,
)
from test_data_prepared_windows import (  # noqa: F401  fixtures
    in_this_process,
    order_of,
    prepare,
    root_of,
    small_parts,
    windowed,
)

from rayapp.data import prepared_windows as windows
from rayapp.data.prepared import Prepared
from rayapp.data.prepared_windows import GrowingRows, Preparation, Windows
from rayapp.data.recipe import RowRecipe
from rayapp.data.sources import SourceError
from rayapp.data.token_rows import StepRows, local_steps, step_rows
from rayapp.order import combine

STEPS, SEED = 40, 5


def no_problem(prepared: list[Prepared]) -> None:
    return None


Told = tuple[str, float]  # the digest of a step's batch, and the sum of its records' numbers


def told(batches: Sequence[StepRows]) -> Told:
    numbers = [each.values.sum(dtype=np.float64) for each in batches if each.values is not None]
    return combine(each.digest() for each in batches), float(sum(numbers))


def digests(prepared: Prepared, world: int) -> list[Told]:
    """Return what each step's batch is, read by ranks in turn as the stream's tasks do."""
    order = order_of(prepared, STEPS, SEED)
    ranks = [GrowingRows(prepared, order) for _ in range(world)]
    return [
        told([step_rows(*rows.at(step), step, rank, world) for rank, rows in enumerate(ranks)])
        for step in range(STEPS)
    ]


def expected(recipe: RowRecipe, path: Path) -> list[Told]:  # noqa: F811
    prepared = prepare(Windows(recipe, root_of(path), SEED))
    order = order_of(prepared, STEPS, SEED)
    steps = local_steps(prepared.rows("train"), order, 0, 1, 0)
    return [told([batch]) for batch in steps]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Let windows be packed as often as it is released, after the first."""
    allowed = threading.Semaphore(1)

    def run(*given: Any) -> Iterator[windows.UnitTask]:
        for task in given[2]:
            if task.packs:
                allowed.acquire()
            yield from in_this_process(*given[:2], [task])

    monkeypatch.setattr(windows, "run_tasks", run)
    monkeypatch.setattr(windows, "POLL_S", 0.01)
    windows._shard_of.cache_clear()
    return allowed


@pytest.mark.parametrize("world", [1, 3])
def test_steps_are_the_same_while_windows_are_prepared(
    windowed: RowRecipe,  # noqa: F811
    tmp_path: Path,
    gate: threading.Semaphore,
    world: int,
) -> None:
    """They come as soon as their window is there, and wait for it."""
    if world == 3:
        values = [VALUES["text"](n) | {"reward": n} for n in range(300)]
        source = write_jsonl(tmp_path / "rewarded.jsonl", values)
        windowed = replace(windowed, source=source, values=("reward",))
    begun = Preparation([Windows(windowed, root_of(tmp_path / "meanwhile"), SEED)])
    begun.start([4 * STEPS], no_problem, 2)
    (first,) = begun.wait_for([4])
    assert first.known == (1,) < first.windows
    rows = GrowingRows(first, order_of(first, STEPS, SEED))
    in_first = first.num_rows("train") // 4
    for step in range(in_first):
        rows.at(step)
    late = threading.Thread(target=rows.at, args=(in_first,))
    late.start()
    late.join(0.2)
    assert late.is_alive(), "the next window was not waited for"
    gate.release(100)
    late.join(60)
    assert not late.is_alive() and rows.known == [2]
    found = digests(first, world)
    gate.release(100)
    assert found == expected(windowed, tmp_path / "beforehand")
    assert begun.problem is None and (world == 3) == any(numbers for _, numbers in found)


def test_tasks_in_other_processes_take_what_is_known_with_them(
    windowed: RowRecipe,  # noqa: F811
    tmp_path: Path,
    gate: threading.Semaphore,
) -> None:
    gate.release(100)
    first = prepare(Windows(windowed, root_of(tmp_path), SEED), 4)
    prepare(Windows(windowed, root_of(tmp_path), SEED))
    rows = pickle.loads(pickle.dumps(GrowingRows(first, order_of(first, STEPS, SEED))))
    whole = Windows(windowed, root_of(tmp_path), SEED).prepared()
    assert first.known == (1,) and not order_of(whole, STEPS, SEED).more
    assert rows.at(10**6)[1] == order_of(whole, STEPS, SEED)
    assert rows.rows.shards == whole.shards["train"]


def test_a_preparation_that_fails_is_told(
    windowed: RowRecipe,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*given: Any) -> Iterator[windows.UnitTask]:
        yield from in_this_process(*given[:2], given[2][:4])  # window 0
        raise SourceError("a.jsonl is not JSON")

    monkeypatch.setattr(windows, "run_tasks", run)
    begun = Preparation([Windows(windowed, root_of(tmp_path), SEED)])
    begun.start([10**6], no_problem, 2)
    assert begun._thread is not None
    begun._thread.join(60)
    assert begun.problem == "a.jsonl is not JSON"
    with pytest.raises(SourceError, match="is not JSON"):
        begun.wait_for([4])


def test_what_is_not_to_be_trained_on_is_told_at_the_end(
    windowed: RowRecipe,  # noqa: F811
    tmp_path: Path,
    gate: threading.Semaphore,
) -> None:
    gate.release(100)
    begun = Preparation([Windows(windowed, root_of(tmp_path), SEED)])
    begun.start([10**6], lambda every: f"{every[0].known} windows are bad", 2)
    assert begun._thread is not None
    begun._thread.join(60)
    assert begun.problem == f"({begun.sources[0].count},) windows are bad"


def test_a_driver_that_is_killed_while_it_prepares_changes_nothing(
    windowed: RowRecipe,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenised: list[int],  # noqa: F811
) -> None:
    """Nothing is tokenised twice, whichever task was the last."""
    windows._shard_of.cache_clear()
    root = root_of(tmp_path / "out")
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    whole = expected(windowed, tmp_path / "beforehand")
    once = sum(tokenised)
    tokenised.clear()
    for cut in (2, 9, 11):

        def run(*given: Any, cut: int = cut) -> Iterator[windows.UnitTask]:
            yield from in_this_process(*given[:2], given[2][:cut])
            raise RuntimeError("killed")

        monkeypatch.setattr(windows, "run_tasks", run)
        begun = Preparation([Windows(windowed, root, SEED)])
        begun.start([10**6], no_problem, 2)
        assert begun._thread is not None
        begun._thread.join(60)
        assert begun.problem == "killed"
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    begun = Preparation([Windows(windowed, root, SEED)])
    (of_first,) = begun.sources
    assert (0,) < of_first.prepared().known < (of_first.count,)
    begun.start([10**6], no_problem, 2)
    (prepared,) = begun.wait_for([4])
    assert digests(prepared, 2) == whole
    assert begun._thread is not None
    begun._thread.join(60)
    assert begun.problem is None and sum(tokenised) == once
