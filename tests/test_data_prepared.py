"""Check the account of a finished data set, and several of them taken as one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_preparation import VALUES, here, small_units, tokenizer_url, write_jsonl  # noqa: F401

from rayapp.data import tokens
from rayapp.data.prepared import duplicate_share, mixed
from rayapp.data.recipe import RowRecipe
from rayapp.order import Order
from rayapp.storage import open_storage


def recipe_of(path: Path, tokenizer: str, first: int, last: int) -> RowRecipe:
    """Texts first..last, each of which no other number has."""
    source = write_jsonl(path, [VALUES["text"](n) for n in range(first, last)])
    digest = tokens.tokenizer_digest(tokens.load_tokenizer(tokenizer))
    return RowRecipe(source, None, "text", tokenizer, digest, 0, 16, True, False, 0.1)


@given(st.lists(st.lists(st.integers(0, 30), max_size=40), max_size=6))
def test_the_duplicate_share_is_exact_for_few_documents(units: list[list[int]]) -> None:
    counts = Counter(value for unit in units for value in unit)
    repeats = sum(counts.values()) - len(counts)
    expected = repeats / max(sum(counts.values()), 1)
    assert duplicate_share(np.array(u, np.uint64) for u in units) == expected


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=20)
def test_the_duplicate_share_of_many_documents_is_a_fair_sample(seed: int) -> None:
    """Every third document twice: 1/4 repeat another; 1,000 kept of 30,000 give it within 4 %."""
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, 2**63, 30_000, dtype=np.uint64)
    every = np.concatenate([hashes, hashes[::3]])
    rng.shuffle(every)
    assert abs(duplicate_share(np.array_split(every, 7), limit=2_000) - 0.25) < 0.04


def test_duplicates_are_found_across_units(tmp_path: Path, tokenizer_url: str) -> None:  # noqa: F811
    values = [VALUES["text"](n) for n in (*range(1, 10), *range(3, 8))]
    source = write_jsonl(tmp_path / "twice.jsonl", values * 5)
    digest = tokens.tokenizer_digest(tokens.load_tokenizer(tokenizer_url))
    recipe = RowRecipe(source, None, "text", tokenizer_url, digest, 0, 16, True, False, 0.0)
    made = here(recipe, tmp_path / "prepared")
    assert made.counts["train"]["documents"] == 70 and made.duplicates == 61 / 70


def test_the_rows_of_a_mixture_are_those_of_its_parts_in_turn(
    tmp_path: Path,
    tokenizer_url: str,  # noqa: F811
) -> None:
    root = tmp_path / "prepared"
    parts = {
        "b": here(recipe_of(tmp_path / "b.jsonl", tokenizer_url, 0, 30), root),
        "a": here(recipe_of(tmp_path / "a.jsonl", tokenizer_url, 30, 90), root),
    }
    whole = mixed(open_storage(str(root)), parts, {"b": 3, "a": 1})
    for split in ("train", "eval"):
        rows = whole.rows(split).read(np.arange(whole.num_rows(split)))
        own = [parts[path].rows(split) for path in ("a", "b")]
        expected = np.concatenate([each.read(np.arange(len(each))) for each in own])
        assert np.array_equal(rows, expected)
    assert whole.sizes == (parts["a"].num_rows("train"), parts["b"].num_rows("train"))
    assert whole.weights == (1, 3)
    swapped = mixed(open_storage(str(root)), dict(reversed(parts.items())), {"a": 1, "b": 3})
    assert swapped == whole
    assert mixed(open_storage(str(root)), parts, {"b": 2, "a": 1}).fingerprint != whole.fingerprint
    order = Order.for_mixture(whole.sizes, whole.weights, 8, 2, seed=1, num_steps=128)
    of_a = sum(int((order.rows(step) < whole.sizes[0]).sum()) for step in range(128))
    assert of_a == 1024 / 4
