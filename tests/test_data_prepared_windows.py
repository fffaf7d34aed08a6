"""Check windows: every document once, in few tasks or many, cut off or not, in whatever order.

Run: python -m pytest tests/test_data_prepared_windows.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
from test_data_preparation import (  # noqa: F401  fixtures
    VALUES,
    contents,
    expected_documents,
    pieces_of,
    recipe,
    segments_of,
    tokenised,
    tokenizer_url,
    write_jsonl,
)
from test_data_stream import ray_cluster  # noqa: F401  a fixture

from rayapp.data import prepared_windows as windows
from rayapp.data import sources, tokens
from rayapp.data.preparation import jobs_of
from rayapp.data.prepared import Prepared
from rayapp.data.prepared_windows import Preparation, WindowProgress, Windows
from rayapp.data.recipe import RowRecipe
from rayapp.data.sources import cutting
from rayapp.order import Order, visits
from rayapp.storage import Storage, open_storage

WINDOW = 1500  # bytes


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "UNIT_BYTES", 500)
    monkeypatch.setattr(cutting, "PART_BYTES", 128)


def in_this_process(
    recipes: Sequence[RowRecipe], url: str, tasks: list[windows.UnitTask], *_: Any
) -> Iterator[windows.UnitTask]:
    for task in tasks:
        made = recipes[task.source]
        task.run(made, url, made.fingerprint)
        yield task


def prepare(made: Windows, rows: int | None = None) -> Prepared:
    """Prepare the windows of one source that hold the first rows, or all."""
    (prepared,) = Preparation([made]).prepare(None if rows is None else [rows])
    return prepared


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[windows.UnitTask]:
    """Run tasks in this process; return the list of those that have ended."""
    ended: list[windows.UnitTask] = []

    def run(*given: Any) -> Iterator[windows.UnitTask]:
        for task in in_this_process(*given):
            ended.append(task)
            yield task

    monkeypatch.setattr(windows, "run_tasks", run)
    return ended


@pytest.fixture
def windowed(recipe: RowRecipe, tmp_path: Path) -> RowRecipe:  # noqa: F811
    """Return a recipe of 300 texts in 6 windows."""
    source = write_jsonl(tmp_path / "many.jsonl", [VALUES["text"](n) for n in range(300)])
    return replace(recipe, source=source, window_bytes=WINDOW)


def root_of(path: Path) -> Storage:
    return open_storage(str(path))


def order_of(prepared: Prepared, steps: int, seed: int) -> Order:
    order = Order.for_steps(prepared.num_rows("train"), 4, 2, seed, steps)
    return replace(order, windows=prepared.windows_rows, follow=prepared.follow)


def batches(prepared: Prepared, steps: int, seed: int) -> list[bytes]:
    order, rows = order_of(prepared, steps, seed), prepared.rows("train")
    return [rows.read(order.rows(step))["input_ids"].tobytes() for step in range(steps)]


# ---- Which bytes are in a window ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["jsonl", "text", "gz", "parquet"])
def test_every_piece_is_in_one_window(tmp_path: Path, name: str) -> None:
    source = sources.find(corpora.write(tmp_path / name, name))
    found = sources.windows(source, 0.1, WINDOW)
    pieces = Counter(piece for unit in found for piece in unit.pieces)
    whole = Counter(piece for unit in sources.windows(source, 0.1, 2**30) for piece in unit.pieces)
    assert pieces == whole and set(pieces.values()) == {1}
    assert [unit.index for unit in found] == list(range(len(found)))
    blocks = Counter(block for unit in found for block in unit.blocks)
    assert set(blocks.values()) == {1}


def test_the_parts_of_a_window_are_from_all_over_a_file(windowed: RowRecipe) -> None:
    found = sources.windows(windowed.source, 0.1, WINDOW)
    assert len(found) >= 4
    size = windowed.source.num_bytes
    for unit in found:
        starts = [piece.start for piece in unit.pieces]
        assert len(starts) >= 4 and starts[0] < size / 2 < starts[-1]
        assert sum(a.end == b.start for a, b in pairwise(unit.pieces)) <= len(starts) / 2


def test_the_end_of_a_text_file_that_is_held_out_is_in_the_first_window(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{n:05d} a line\n" for n in range(1000)))
    source = sources.find(str(tmp_path / "a.txt"))
    first, *others = sources.windows(source, 0.2, WINDOW)
    held_out = [piece for piece in first.pieces if piece.split == "eval"]
    assert sum(piece.end - piece.start for piece in held_out) in range(299, 302)
    assert {piece.split for unit in others for piece in unit.pieces} == {"train"}


# ---- Rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "prompt", "chat"])
def test_every_document_is_trained_on_once(
    windowed: RowRecipe, tmp_path: Path, here: list[Any], kind: str
) -> None:
    source = write_jsonl(tmp_path / "kind.jsonl", [VALUES[kind](n) for n in range(200)])
    made = replace(windowed, source=source, kind=kind)
    prepared = prepare(Windows(made, root_of(tmp_path), seed=1))
    assert prepared.known == prepared.windows >= (3,)
    rows = prepared.rows("train").read(np.arange(prepared.num_rows("train")))
    found = Counter(segments_of(rows))
    expected = expected_documents(made)
    assert found == Counter(p for d in expected["train"] for p in pieces_of(d, False))
    held = prepared.rows("eval").read(np.arange(prepared.num_rows("eval")))
    of_first = Counter(segments_of(held))
    assert of_first and not of_first - Counter(
        p for d in expected["eval"] for p in pieces_of(d, False)
    )


def test_documents_of_a_row_are_from_distant_places(
    windowed: RowRecipe, tmp_path: Path, here: list[Any]
) -> None:
    """Of a unit of neighbours, 500 bytes, they are within 20 of the 300 documents."""
    windowed = replace(windowed, seq_len=96)
    prepared = prepare(Windows(windowed, root_of(tmp_path), seed=1))
    tokenizer = tokens.load_tokenizer(windowed.tokenizer_url)
    distances = []
    for row in prepared.rows("train").read(np.arange(prepared.num_rows("train"))):
        each = [row["input_ids"][row["segments"] == n] for n in range(1, row["segments"].max() + 1)]
        texts = tokenizer.batch_decode(each, skip_special_tokens=True)
        numbers = [int(text[:3]) for text in texts]
        distances += [abs(a - b) for a, b in pairwise(numbers)]
    assert len(distances) > 100 and np.median(distances) > 50


def test_windows_that_a_run_needs_are_prepared_in_the_order_of_its_visits(
    windowed: RowRecipe, tmp_path: Path, here: list[Any]
) -> None:
    order = visits(len(sources.windows(windowed.source, 0.1, WINDOW)), seed=5)
    made = Windows(windowed, root_of(tmp_path), seed=5)
    prepared = prepare(made, 1)
    assert [task.index for task in here if task.packs] == [0] and prepared.known == (1,)
    assert [name for name, _ in prepared.shards["train"]] == ["train-00000.placed.rows"]
    few = prepared.num_rows("train")
    assert prepare(made, few) == prepared
    more = prepare(made, few + 1)
    assert more.known == (2,) and more.shards["train"][1][0] == f"train-{order[1]:05d}.placed.rows"
    whole = prepare(made)
    packed = [task.index for task in here if task.packs]
    assert packed == order and whole.windows == whole.known == (len(order),)
    assert [name for name, _ in whole.shards["train"]] == [
        f"train-{n:05d}.placed.rows" for n in order
    ]


def test_batches_are_the_same_whatever_is_prepared(
    windowed: RowRecipe, tmp_path: Path, here: list[Any]
) -> None:
    for seed in (1, 2):
        whole = prepare(Windows(windowed, root_of(tmp_path / "whole"), seed))
        begun = prepare(Windows(windowed, root_of(tmp_path / f"begun {seed}"), seed), 41)
        steps = begun.num_rows("train") // 4
        assert begun.known < begun.windows and steps >= 10
        assert batches(begun, steps, seed) == batches(whole, steps, seed)
    assert batches(whole, 10, 1) != batches(whole, 10, 2)


def test_a_preparation_that_is_cut_off_tokenises_nothing_twice(
    windowed: RowRecipe,
    tmp_path: Path,
    here: list[Any],
    tokenised: list[int],  # noqa: F811
) -> None:
    expected = prepare(Windows(windowed, root_of(tmp_path / "expected"), seed=1))
    whole = sum(tokenised)
    tokenised.clear()
    root = root_of(tmp_path / "out")
    for ended in (3, 8, 9):  # tasks, of which some had been done by the one before
        progress: list[int] = []

        def cut(*_: int, ended: int = ended, progress: list[int] = progress) -> None:
            progress.append(0)
            if len(progress) == ended:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Preparation([Windows(windowed, root, seed=1)], progress=cut).prepare()
    prepared = prepare(Windows(windowed, root, seed=1))
    assert sum(tokenised) == whole
    assert replace(prepared, url=expected.url) == expected
    assert contents(open_storage(prepared.url)) == contents(open_storage(expected.url))


def test_the_state_of_a_preparation_says_window_and_bytes(
    windowed: RowRecipe, tmp_path: Path, here: list[Any]
) -> None:
    made = Windows(windowed, root_of(tmp_path), seed=1)
    whole = sum(unit.num_bytes for _, unit in made.jobs)
    sizes = [made.jobs[index][1].num_bytes for index in made.order]
    assert made.progress(4) == WindowProgress(
        0, made.count, made.count, 0, whole
    )  # of rows none is known
    told: list[WindowProgress] = []
    Preparation([made], progress=lambda *_: told.append(made.progress(10**6))).prepare()
    ready, lasts, _, done, totals = zip(*told, strict=True)
    assert set(lasts) == {made.count} and set(totals) == {whole}
    assert list(done) == sorted(done) and done[-1] == whole
    packed = [number for number, task in enumerate(here) if task.packs]
    assert [done[number] for number in packed] == [sum(sizes[:n]) for n in range(1, made.count + 1)]
    assert [ready[number] for number in packed] == [*range(1, made.count + 1)]
    first = made.whole[made.order[0]]["counts"]["train"]["rows"]
    again = Windows(windowed, root_of(tmp_path / "again"), seed=1)
    prepare(again, 1)
    assert again.progress(2 * first) == WindowProgress(1, 2, again.count, sizes[0], sum(sizes[:2]))
    assert again.progress(first).needed == 1


def test_other_seeds_and_windows_take_the_tokens(
    windowed: RowRecipe,
    tmp_path: Path,
    here: list[Any],
    tokenised: list[int],  # noqa: F811
) -> None:
    root = root_of(tmp_path)
    prepare(Windows(windowed, root, seed=1))
    tokenised.clear()
    here.clear()
    prepare(Windows(windowed, root, seed=2))
    assert not here
    for changed in ({"window_bytes": 3000}, {"seq_len": 32}, {"eval_fraction": 0.3}):
        prepare(Windows(replace(windowed, **changed), root, seed=1))
    assert not tokenised and here


def test_the_size_of_windows_is_in_the_fingerprint_if_there_is_one(
    recipe: RowRecipe,  # noqa: F811
) -> None:
    assert "window_bytes" not in recipe.parts()
    prints = {replace(recipe, window_bytes=size).fingerprint for size in (None, 1500, 3000)}
    assert len(prints) == 3 and recipe.fingerprint in prints


def test_a_file_that_is_held_out_is_prepared_before_the_first_window(
    windowed: RowRecipe, tmp_path: Path, here: list[Any]
) -> None:
    values = [VALUES["text"](n) for n in range(300, 340)]
    held_out = write_jsonl(tmp_path / "held.jsonl", values)
    made = replace(windowed, eval_source=held_out, eval_fraction=0.0)
    prepared = prepare(Windows(made, root_of(tmp_path), seed=1), 1)
    count = len([job for job in jobs_of(made) if job[0] == "eval"])
    assert count > 1 and prepared.known == (1,)
    assert [task.origin for task in here if task.packs] == ["eval"] * count + ["train"]
    every = prepare(Windows(made, root_of(tmp_path), seed=1))
    assert every.num_rows("eval") == prepared.num_rows("eval") > 0


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_ray_makes_the_same_windows(
    windowed: RowRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = Preparation([Windows(windowed, root_of(tmp_path / "ray"), 3)], 2).prepare()
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    expected = prepare(Windows(windowed, root_of(tmp_path / "here"), 3))
    assert replace(made, url=expected.url) == expected
    assert contents(open_storage(made.url)) == contents(open_storage(expected.url))
