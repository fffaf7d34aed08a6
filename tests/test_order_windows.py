"""Test windows: parts from distant places, each row once an epoch, nothing of later windows.

Run: python -m pytest tests/test_order_windows.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.data.packing import lay_out
from rayapp.order import Cursor, Order, visits, window_of
from rayapp.order.windows import windowed

seeds = st.integers(0, 2**63)
some_windows = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)


def order_of(windows: list[int], steps: int = 12, seed: int = 3, micro: int = 1) -> Order:
    order = Order.for_steps(sum(windows), 4 * micro, micro, seed, steps)
    return replace(order, windows=(tuple(windows),))


# ---- Which parts make a window -----------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=300), st.integers(1, 2000))
@settings(deadline=None, max_examples=200)
def test_each_window_takes_one_part_of_each_run(sizes: list[int], window_size: int) -> None:
    chosen = window_of(sizes, window_size)
    count = int(chosen.max()) + 1
    assert len(chosen) == len(sizes) and chosen.min() == 0
    assert count <= max(1, -(-sum(sizes) // window_size))
    for first in range(0, len(sizes), count):
        run = chosen[first : first + count].tolist()
        assert len(set(run)) == len(run)
        if len(run) == count:
            assert set(run) == set(range(count))


def test_windows_are_of_about_the_size_that_was_asked() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 1000, 20_000).tolist()
    chosen = window_of(sizes, 100_000)
    of_windows = np.bincount(chosen, sizes)
    assert len(of_windows) == -(-sum(sizes) // 100_000)
    assert 75_000 < of_windows.min() <= of_windows.max() < 125_000


def test_a_part_larger_than_a_window_is_in_one() -> None:
    assert sorted(window_of([1000, 1, 1, 1], 10).tolist()) == [0, 1, 2, 3]
    assert window_of([5], 10).tolist() == [0]


@given(st.integers(1, 300), seeds)
@settings(deadline=None, max_examples=100)
def test_every_window_is_visited_once_and_the_held_out_one_first(count: int, seed: int) -> None:
    order = visits(count, seed)
    assert sorted(order) == list(range(count)) and order[0] == 0


def test_another_seed_visits_in_another_order() -> None:
    assert len({tuple(visits(50, seed)) for seed in range(20)}) == 20
    second = Counter(visits(5, seed)[1] for seed in range(4000))
    assert set(second) == {1, 2, 3, 4}
    assert all(abs(count - 1000) < 5 * 27.4 for count in second.values())  # 5 deviations


# ---- The order of rows -------------------------------------------------------------------------


@given(some_windows, seeds, st.integers(1, 3), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_every_epoch_takes_every_row_once(
    windows: list[int], seed: int, epochs: int, world: int
) -> None:
    rows = sum(windows)
    order = replace(Order.for_epochs(rows, 4, 2, seed, epochs), windows=(tuple(windows),))
    taken: list[int] = []
    for step in range(order.num_steps):
        parts = [order.micro_batches(step, rank, world) for rank in range(world)]
        dealt = np.stack(parts, axis=1).reshape(-1, 2)  # [m * world, b], in turn
        assert dealt[dealt >= 0].tolist() == [r for r in order.rows(step).tolist() if r >= 0]
        taken += dealt[dealt >= 0].tolist()
    assert len(taken) == epochs * rows
    for epoch in range(epochs):
        assert sorted(taken[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(some_windows, seeds)
@settings(deadline=None, max_examples=100)
def test_the_first_epoch_goes_through_one_window_after_another(
    windows: list[int], seed: int
) -> None:
    taken = windowed(np.arange(sum(windows)), windows, seed).tolist()
    first = 0
    for size in windows:
        assert sorted(taken[first : first + size]) == list(range(first, first + size))
        first += size


@given(some_windows, some_windows, some_windows, seeds)
@settings(deadline=None, max_examples=100)
def test_a_step_depends_on_its_windows_and_those_before(
    known: list[int], later: list[int], others: list[int], seed: int
) -> None:
    begun = replace(order_of(known, seed=seed), follow=(True,))
    for step in range(sum(known) // 4):
        if step < begun.num_steps:
            taken = begun.rows(step).tolist()
            assert taken == order_of(known + later, seed=seed).rows(step).tolist()
            assert taken == order_of(known + others, seed=seed).rows(step).tolist()


def test_a_step_of_a_window_that_is_not_known_is_refused() -> None:
    begun = replace(order_of([6], steps=3), follow=(True,))
    assert len(begun.rows(0)) == 4
    with pytest.raises(ValueError, match=r"position 7 has no row yet.*num_rows=6"):
        begun.rows(1)
    assert replace(begun, follow=(False,)).rows(1).tolist() != []  # the next epoch follows


@given(some_windows, some_windows, st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_cursors_are_the_same_whatever_is_known(
    known: list[int], later: list[int], step: int
) -> None:
    begun, whole = replace(order_of(known), follow=(True,)), order_of(known + later)
    cursor = begun.cursor(step, "f")
    assert cursor == whole.cursor(step, "f") == Cursor(0, 4 * step, 3, "f")
    assert begun.step_of(cursor) == whole.step_of(cursor) == step


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"windows": ((3, 4),)}, "are not those of"),
        ({"windows": ((3, 3), (2, 2))}, "are not those of"),
        ({"follow": (True,)}, "each source has windows"),
        ({"windows": ((6, 4),), "follow": (False, True)}, "each source has windows"),
        ({"windows": ((6, 4),), "follow": (True,), "total_rows": 100}, "steps end the run"),
    ],
)
def test_windows_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(Order.for_steps(10, 4, 2, 0, 12), **changes)


def test_golden_windows() -> None:
    assert window_of([1] * 12, 4).tolist() == GOLDEN["parts"]
    assert visits(8, seed=11) == GOLDEN["visits"]
    assert windowed(np.arange(9), [4, 5], seed=11).tolist() == GOLDEN["rows"]


GOLDEN = {
    "parts": [1, 2, 0, 2, 1, 0, 0, 2, 1, 0, 1, 2],
    "visits": [0, 1, 3, 7, 6, 2, 5, 4],
    "rows": [0, 3, 2, 1, 5, 7, 8, 6, 4],
}


# ---- The spread of a site over batches ---------------------------------------------------------

BATCH = 2**19  # tokens
PART, PARTS = 2**18, 256  # tokens of a part (1 MiB of text), parts of a window of 256 MiB
NUM_PARTS = 4 * PARTS


def packed(
    lengths: np.ndarray, sites: np.ndarray, seq_len: int, rng: np.random.Generator
) -> np.ndarray:
    """Pack documents, shuffled, and return the tokens of each site in each row: [rows, sites]."""
    order = rng.permutation(len(lengths))
    lengths, sites = lengths[order], sites[order]
    layout = lay_out(lengths, seq_len)
    document = np.searchsorted(np.cumsum(lengths), layout.starts, side="right")
    tokens = np.zeros((layout.num_rows, int(sites.max()) + 1))
    np.add.at(tokens, (layout.row_of, sites[document]), layout.lengths)
    return tokens[rng.permutation(len(tokens))]


def spread(rows: np.ndarray, seq_len: int) -> float:
    """Return the standard deviation of a site's share of a batch, over batches and sites."""
    per_step = BATCH // seq_len
    whole = rows[: len(rows) // per_step * per_step]
    batches = whole.reshape(-1, per_step, rows.shape[1]).sum(1)
    shares = batches / batches.sum(1, keepdims=True)
    return float(np.sqrt(shares.var(0).mean()))


@pytest.mark.parametrize(("seq_len", "mean", "sites"), [(2048, 1100, 16), (32768, 1100, 100)])
def test_a_site_is_spread_over_batches_as_documents_that_are_shuffled(
    seq_len: int, mean: int, sites: int
) -> None:
    """Sites follow one another, as in crawls. Rows of units of 4 MiB, shuffled: 1.14 to 2.45."""
    rng = np.random.default_rng(7)
    drawn = np.exp(rng.normal(np.log(mean) - 0.845, 1.3, NUM_PARTS * PART // mean))
    lengths = np.clip(drawn, 8, 40_000).astype(np.int64)
    ends = np.cumsum(lengths)
    site = np.minimum(ends * sites // ends[-1], sites - 1)
    part = ends // PART
    chosen = window_of([PART] * (int(part[-1]) + 1), PART * PARTS)[part]
    each = [np.flatnonzero(chosen == window) for window in range(int(chosen.max()) + 1)]
    assert len(each) >= 4
    ours = np.concatenate([packed(lengths[at], site[at], seq_len, rng) for at in each])
    best = packed(lengths, site, seq_len, rng)
    assert spread(ours, seq_len) <= 1.2 * spread(best, seq_len)
