"""Check mixtures of windows: the same steps whether prepared before, meanwhile, or after kills.

Run: python -m pytest tests/test_data_prepared_windows_mixed.py
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_growing import gate  # noqa: F401  a fixture
from test_data_preparation import (  # noqa: F401  fixtures
    VALUES,
    contents,
    recipe,
    tokenised,
    tokenizer_url,
    write_jsonl,
)
from test_data_prepared_windows import here, in_this_process, root_of, small_parts  # noqa: F401  fixtures
from test_data_stream import ray_cluster  # noqa: F401  a fixture

from rayapp.data import prepared_windows as windows
from rayapp.data.prepared import Prepared, mixed
from rayapp.data.prepared_windows import GrowingRows, Preparation, Windows
from rayapp.data.recipe import RowRecipe
from rayapp.data.token_rows import local_steps, step_rows
from rayapp.order import SOURCE_ROWS, Order, combine, taken
from rayapp.storage import Storage, open_storage

STEPS, ROWS_PER_STEP, SEED, WINDOW = 30, 8, 5, 1000
SIZES = {"a.jsonl": 160, "b.jsonl": 90, "c.jsonl": 120}  # documents
WEIGHTS = {"a.jsonl": 3.0, "b.jsonl": 1.0, "c.jsonl": 0.05}  # of c, the first windows suffice

Recipes = dict[str, RowRecipe]


@pytest.fixture
def recipes(recipe: RowRecipe, tmp_path: Path) -> Recipes:  # noqa: F811
    """Return recipes of three sources, of several windows each."""
    found = {}
    for number, (name, count) in enumerate(SIZES.items()):
        values = [VALUES["text"](1000 * number + n) for n in range(count)]
        source = write_jsonl(tmp_path / name, values)
        found[name] = replace(recipe, source=source, window_bytes=WINDOW)
    return found


def preparation(recipes: Recipes, root: Storage, seed: int = SEED) -> Preparation:
    return Preparation([Windows(each, root, seed) for each in recipes.values()])


def joined(recipes: Recipes, root: Storage, every: list[Prepared]) -> Prepared:
    return mixed(root, dict(zip(recipes, every, strict=True)), WEIGHTS)


def needed(steps: int) -> list[int]:
    rows = taken([*WEIGHTS.values()], steps * ROWS_PER_STEP, SEED)
    return [max(1, count) for count in rows]


def order_of(prepared: Prepared) -> Order:
    sizes = (ROWS_PER_STEP, 2, SEED, STEPS)
    order = Order.for_mixture(prepared.sizes, prepared.weights, *sizes)
    return replace(order, windows=prepared.windows_rows, follow=prepared.follow)


def digests(prepared: Prepared, world: int) -> list[str]:
    """Return the digest of each step's batch, read by ranks in turn as the stream's tasks do."""
    order = order_of(prepared)
    kept = pickle.dumps(GrowingRows(prepared, order))
    ranks: list[GrowingRows] = [pickle.loads(kept) for _ in range(world)]
    return [
        combine(
            step_rows(*rows.at(step), step, rank, world).digest() for rank, rows in enumerate(ranks)
        )
        for step in range(STEPS)
    ]


def beforehand(recipes: Recipes, root: Storage, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Prepare all windows of all sources in this process."""
    with monkeypatch.context() as patched:
        patched.setattr(windows, "run_tasks", in_this_process)
        return joined(recipes, root, preparation(recipes, root).prepare())


def expected(prepared: Prepared) -> list[str]:
    steps = local_steps(prepared.rows("train"), order_of(prepared), 0, 1, 0)
    return [combine([batch.digest()]) for batch in steps]


def none(every: list[Prepared]) -> None:
    return None


# ---- Rows and their sources --------------------------------------------------------------------


def test_rows_are_of_the_source_that_their_number_says(
    recipes: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = beforehand(recipes, root_of(tmp_path / "out"), monkeypatch)
    order, rows = order_of(whole), whole.rows("train")
    alone = {}
    for source, made in enumerate(recipes.values()):
        (prepared,) = preparation({"": made}, root_of(tmp_path / "out")).prepare()
        alone[source] = prepared.rows("train").read(np.arange(prepared.num_rows("train")))
    counts: Counter[int] = Counter()
    for step in range(STEPS):
        batch = step_rows(rows, order, step, 0, 1)
        sources = batch.of_source().argmax(0)  # [m, b]
        assert (sources == batch.rows // SOURCE_ROWS).all()
        for (i, j), number in np.ndenumerate(batch.rows):
            source, place = divmod(int(number), SOURCE_ROWS)
            assert (batch.input_ids[i, j] == alone[source][place]["input_ids"]).all()
        counts.update(sources.ravel().tolist())
        assert sum(batch.counts().weight_by_source) == batch.counts().targets
    assert tuple(counts[n] for n in range(3)) == order.needed(STEPS - 1)
    places = np.arange(whole.num_rows("train"))
    numbers = rows.numbers(places)
    assert numbers.tolist() == [
        source * SOURCE_ROWS + n for source, size in enumerate(whole.sizes) for n in range(size)
    ]


def test_the_batches_of_windows_that_are_all_there_have_the_shares_of_a_plain_mixture(
    recipes: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = beforehand(recipes, root_of(tmp_path / "out"), monkeypatch)
    order = order_of(whole)
    plain = replace(order, windows=(), follow=())
    for step in range(STEPS):
        ours = np.searchsorted(order.source_ends, order.rows(step), side="right")
        assert (ours == np.searchsorted(plain.source_ends, plain.rows(step), side="right")).all()


# ---- While windows are prepared ----------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
def test_steps_are_the_same_while_the_windows_of_sources_are_prepared(
    recipes: Recipes,
    tmp_path: Path,
    gate: threading.Semaphore,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    world: int,
) -> None:
    """The first step comes when the first window of each source is there."""
    whole = expected(beforehand(recipes, root_of(tmp_path / "beforehand"), monkeypatch))
    root = root_of(tmp_path / "meanwhile")
    begun = preparation(recipes, root)
    begun.start(needed(STEPS), none, 2)
    waiting = threading.Thread(target=begun.wait_for, args=(needed(1),))
    waiting.start()
    gate.release(1)
    waiting.join(0.3)
    assert waiting.is_alive(), "the window of the last source was not waited for"
    gate.release(1)
    first = joined(recipes, root, begun.wait_for(needed(1)))
    assert first.known == (1, 1, 1) < first.windows
    rows = GrowingRows(first, order_of(first))
    assert rows.at(0)[1].follow == (True, True, True)
    gate.release(1000)
    assert digests(first, world) == whole
    assert begun._thread is not None
    begun._thread.join(60)
    assert begun.problem is None and begun.ended


def test_no_more_windows_are_prepared_than_the_run_needs(
    recipes: Recipes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: list[Any],  # noqa: F811
) -> None:
    """Of c few are needed, though its windows could be made beside those of the others."""
    root = root_of(tmp_path / "out")
    made = preparation(recipes, root)
    prepared = joined(recipes, root, made.prepare(needed(STEPS)))
    assert prepared.known < prepared.windows and prepared.known[2] <= 2 < prepared.windows[2]
    assert prepared.known[0] > 2
    packed = [(task.source, task.index) for task in here if task.packs]
    assert len(set(packed)) == len(packed)
    assert packed[:3] == [(0, 0), (1, 0), (2, 0)]
    for source, known in enumerate(prepared.known):
        mine = [index for number, index in packed if number == source]
        assert mine == made.sources[source].order[: len(mine)]
        assert len(mine) - known in (0, 1)  # what was estimated
    # In between, a source is ahead of another by no more than it is needed earlier.
    ahead = [sum(number == 0 for number, _ in packed[:n]) for n in range(len(packed))]
    of_b = [sum(number == 1 for number, _ in packed[:n]) for n in range(len(packed))]
    rates = [needed(STEPS)[n] / prepared.sizes[n] * prepared.known[n] for n in (0, 1)]
    assert all(abs(a / rates[0] - b / rates[1]) < 0.75 for a, b in zip(ahead, of_b, strict=True))
    assert expected(prepared) == expected(beforehand(recipes, root, monkeypatch))
    state = made.state(needed(STEPS))
    assert state.ready == sum(prepared.known) >= state.needed and state.of == sum(prepared.windows)


def test_drivers_that_are_killed_while_they_prepare_a_mixture_change_nothing(
    recipes: Recipes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenised: list[int],  # noqa: F811
) -> None:
    """Nothing is tokenised twice, whichever task was the last."""
    windows._shard_of.cache_clear()
    whole = expected(beforehand(recipes, root_of(tmp_path / "beforehand"), monkeypatch))
    every = sum(tokenised)
    tokenised.clear()
    root, reached = root_of(tmp_path / "out"), []

    def stopping(cut: int) -> Callable[..., Iterator[windows.UnitTask]]:
        def run(*given: Any) -> Iterator[windows.UnitTask]:
            yield from in_this_process(*given[:2], given[2][:cut])
            raise RuntimeError("killed")

        return run

    for cut in (1, 5, 7, 6):
        monkeypatch.setattr(windows, "run_tasks", stopping(cut))
        begun = preparation(recipes, root)
        begun.start(needed(STEPS), none, 2)
        assert begun._thread is not None
        begun._thread.join(60)
        reached.append(sum(each.prepared().known[0] for each in begun.sources))
    assert sorted(reached) == reached and reached[-1] > 2
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    begun = preparation(recipes, root)
    begun.start(needed(STEPS), none, 2)
    assert digests(joined(recipes, root, begun.wait_for(needed(1))), 2) == whole
    preparation(recipes, root).prepare()
    assert sum(tokenised) == every


def test_a_source_that_comes_again_needs_all_of_its_windows(
    recipes: Recipes,
    tmp_path: Path,
    gate: threading.Semaphore,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the run waits for its last one where its second epoch begins."""
    few = write_jsonl(tmp_path / "few.jsonl", [VALUES["text"](5000 + n) for n in range(28)])
    recipes["b.jsonl"] = replace(recipes["b.jsonl"], source=few, window_bytes=400)
    whole = beforehand(recipes, root_of(tmp_path / "beforehand"), monkeypatch)
    assert needed(STEPS)[1] > 2 * whole.sizes[1] and whole.windows[1] > 1
    root = root_of(tmp_path / "meanwhile")
    begun = preparation(recipes, root)
    begun.start(needed(STEPS), none, 2)
    gate.release(1000)
    first = joined(recipes, root, begun.wait_for(needed(1)))
    assert digests(first, 2) == expected(whole)
    assert begun._thread is not None
    begun._thread.join(60)
    last = [each.prepared().known[0] for each in begun.sources]
    assert last[1] == whole.windows[1] and last[2] < whole.windows[2]


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_ray_makes_the_same_windows_of_a_mixture(
    recipes: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_of(tmp_path / "ray")
    made = joined(recipes, root, preparation(recipes, root).prepare(needed(STEPS)))
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    there = root_of(tmp_path / "here")
    same = joined(recipes, there, preparation(recipes, there).prepare(needed(STEPS)))
    assert replace(made, url=same.url).shards == same.shards and made.known == same.known
    for folder in made.folders:
        ours, theirs = (
            {n: d for n, d in contents(open_storage(f"{p.url}/{folder}")).items() if "train" in n}
            for p in (made, same)
        )
        assert all(ours[name] == data for name, data in theirs.items())
