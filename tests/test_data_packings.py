"""Check packings: every document in each, in other company, and tokenised once.

Run: python -m pytest tests/test_data_packings.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from test_data_preparation import (  # noqa: F401  fixtures
    VALUES,
    make,
    recipe,
    segments_of,
    tokenised,
    tokenizer_url,
    write_jsonl,
)
from test_finetune_prepared_run import ready_run

from rayapp.data import preparation as rows
from rayapp.data import unit_rows
from rayapp.data.packing import in_groups, lay_out
from rayapp.data.prepared import Prepared, repacked
from rayapp.data.recipe import RowRecipe
from rayapp.finetune import plan_lines as show
from rayapp.finetune import prepared_run as prepare
from rayapp.observe.activity import Phases
from rayapp.storage import open_storage

COUNT, SEQ_LEN = 3, 96


@pytest.fixture
def packings(
    recipe: RowRecipe,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Prepared]:
    """Return three packings of 300 texts."""
    monkeypatch.setattr(unit_rows, "GROUP", 64)
    source = write_jsonl(tmp_path / "many.jsonl", [VALUES["text"](n) for n in range(300)])
    whole = replace(recipe, source=source, seq_len=SEQ_LEN)
    root = open_storage(str(tmp_path / "out"))
    made = []
    for number in range(COUNT):
        make(replace(whole, packing=number), root)  # in this process, without Ray
        made.append(rows.prepare(replace(whole, packing=number), root))
    return made


def read(prepared: Prepared) -> np.ndarray:
    found = prepared.rows("train")
    return found.read(np.arange(len(found)))


def company(prepared: Prepared) -> set[tuple[str, str]]:
    """Return the pairs of documents that share a row."""
    return {
        pair
        for row in read(prepared)
        for pair in combinations(sorted(set(map(repr, segments_of(row[None])))), 2)
    }


def test_every_packing_has_every_document_in_other_company(packings: list[Prepared]) -> None:
    documents = [Counter(segments_of(read(each))) for each in packings]
    assert documents[0] == documents[1] == documents[2] and documents[0].total() > 200
    for one, other in combinations([company(each) for each in packings], 2):
        assert len(one & other) < len(one) / 4
    assert len({each.fingerprint for each in packings}) == COUNT
    assert packings[0].held_out and not packings[1].held_out and not packings[2].held_out


def test_packings_are_one_data_set(packings: list[Prepared], tmp_path: Path) -> None:
    whole = repacked(open_storage(str(tmp_path / "out")), packings)
    assert whole.turn_rows == sum(whole.packings) == len(whole.rows("train"))
    assert whole.num_rows("train") == whole.epoch_rows == packings[0].num_rows("train")
    assert whole.held_out == packings[0].held_out == len(whole.rows("eval"))
    assert read(whole).tobytes() == b"".join(read(each).tobytes() for each in packings)
    assert whole.folders == sorted(each.fingerprint for each in packings)


def test_the_documents_of_packings_are_tokenised_once(
    packings: list[Prepared],
    tokenised: list[int],  # noqa: F811
    recipe: RowRecipe,  # noqa: F811
    tmp_path: Path,
) -> None:
    source = replace(recipe, seq_len=SEQ_LEN, packing=7).source
    again = replace(recipe, seq_len=SEQ_LEN, packing=7, source=source)
    assert "packing" not in recipe.parts() and again.parts()["packing"] == 7
    many = write_jsonl(tmp_path / "many.jsonl", [VALUES["text"](n) for n in range(300)])
    tokenised.clear()
    make(replace(again, source=many), open_storage(str(tmp_path / "out")))
    assert not tokenised


def test_groups_are_packed_one_after_another() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    firsts = np.cumsum(lengths) - lengths
    parts = np.array_split(np.arange(200), 3)
    each = [lay_out(lengths[part], 32, firsts=firsts[part]) for part in parts]
    whole = in_groups(each)
    plain = lay_out(lengths, 32)
    assert in_groups([plain]).starts.tolist() == plain.starts.tolist()
    assert whole.num_rows == sum(layout.num_rows for layout in each) >= plain.num_rows
    assert (whole.num_tokens, whole.num_split) == (plain.num_tokens, plain.num_split)
    assert sorted(whole.starts.tolist()) == sorted(plain.starts.tolist())
    assert (np.diff(whole.row_of) >= 0).all() and whole.row_of[-1] == whole.num_rows - 1
    filled = np.bincount(whole.row_of, whole.lengths)
    assert filled.max() <= 32 and len(filled) == whole.num_rows


def test_a_run_takes_its_packings_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_rows, "GROUP", 8)
    ready = ready_run(tmp_path, "a.jsonl", packings=2)
    update = {"epochs": 3, "max_steps": None, "tokens_per_step": 64, "micro_batch": 2}
    train = ready.config.train.model_copy(update=update)
    ready.config = config = ready.config.model_copy(update={"train": train})
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())
    plain = prepare._recipe(ready, ready.inputs[0], url, tokenizer)
    for number in range(2):
        make(replace(plain, packing=number), open_storage(str(tmp_path)) / ".prepared")
    prepared, rest = prepare.prepare_rows(ready, url, tokenizer, Phases())
    first, second = prepared.packings
    order = prepare.order_of(config, prepared)
    assert rest is None and order.packings == (first, second)
    line = show._ways(config, prepared, order)["packings"]
    assert line == f"{first:,}, {second:,} rows, which epochs take in turn"
    assert order.total_rows == 2 * first + second and order.num_rows == first + second
    taken = np.concatenate([order.rows(step) for step in range(order.num_steps)])
    assert sorted(taken[:first].tolist()) == list(range(first))
    assert sorted(taken[first : first + second].tolist()) == list(range(first, first + second))
