"""Prove the order of a mixture of windows: its shares, its epochs, and what it does not depend on.

Run: python -m pytest tests/test_order_mixture_windows.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.order import EMPTY, SOURCE_ROWS, Cursor, Order, mixture, taken
from rayapp.order.windows import windowed

STEPS, ROWS_PER_STEP = 6, 40
seeds = st.integers(0, 2**63)
some_windows = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any).map(tuple)


class Mixture(NamedTuple):
    windows: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    seed: int


mixtures = st.lists(
    st.tuples(some_windows, st.sampled_from([0.02, 0.1, 0.5, 1.0, 3.0, 7.25])),
    min_size=2,
    max_size=4,
).flatmap(lambda each: st.builds(Mixture, *(st.just(x) for x in zip(*each, strict=True)), seeds))


def order_of(mixed: Mixture, steps: int = STEPS) -> Order:
    sizes = [sum(windows) for windows in mixed.windows]
    order = Order.for_mixture(sizes, mixed.weights, ROWS_PER_STEP, 2, mixed.seed, steps)
    return replace(order, windows=mixed.windows)


def rows_of(order: Order, first: int = 0) -> np.ndarray:
    return np.concatenate([order.rows(step) for step in range(first, order.num_steps)])


def cut(mixed: Mixture, known: list[int]) -> Order:
    """Return the order of those whose first windows are known, at least one row of each source."""
    begun, follow = [], []
    for windows, count in zip(mixed.windows, known, strict=True):
        least = next(n for n, size in enumerate(windows, 1) if size)
        begun.append(windows[: max(count, least)])
        follow.append(len(begun[-1]) < len(windows))
    return replace(order_of(mixed._replace(windows=tuple(begun))), follow=tuple(follow))


# ---- Shares ------------------------------------------------------------------------------------


@given(mixtures)
@settings(deadline=None, max_examples=40)
def test_every_position_is_of_the_source_that_it_is_of_without_windows(mixed: Mixture) -> None:
    """So the shares of every batch, and of any number of steps, are those of a plain mixture."""
    order = order_of(mixed)
    plain = replace(order, windows=())
    of_source = np.searchsorted(order.source_ends, rows_of(order), side="right")
    assert (of_source == np.searchsorted(plain.source_ends, rows_of(plain), side="right")).all()
    positions = np.arange(STEPS * ROWS_PER_STEP)
    assert (of_source == mixture(mixed.weights, positions, mixed.seed)[0]).all()


@given(st.lists(st.floats(0.002, 9), min_size=1, max_size=5), seeds, st.integers(0, 5000))
@settings(deadline=None, max_examples=40)
def test_the_rows_that_each_source_gives_are_counted(
    weights: list[float], seed: int, count: int
) -> None:
    sources, _ = mixture(weights, np.arange(count), seed)
    assert taken(weights, count, seed) == tuple(np.bincount(sources, minlength=len(weights)))
    order = Order.for_mixture([1] * len(weights), weights, 50, 2, seed, 100)
    assert order.needed(99) == taken(weights, 5000, seed)


def test_a_run_of_one_source_needs_the_rows_of_its_steps() -> None:
    assert Order.for_steps(5, 4, 2, 0, 9).needed(3) == (16,)


# ---- Epochs ------------------------------------------------------------------------------------


@given(mixtures)
@settings(deadline=None, max_examples=40)
def test_each_source_takes_every_row_once_an_epoch(mixed: Mixture) -> None:
    rows = rows_of(order_of(mixed, 8))
    for source, windows in enumerate(mixed.windows):
        size = sum(windows)
        mine = rows[rows // SOURCE_ROWS == source] - source * SOURCE_ROWS
        for first in range(0, len(mine), size):
            epoch = mine[first : first + size]
            assert len(set(epoch.tolist())) == len(epoch)
            assert 0 <= epoch.min() <= epoch.max() < size


@given(mixtures)
@settings(deadline=None, max_examples=30)
def test_the_first_epoch_of_a_source_is_that_of_its_windows_alone(mixed: Mixture) -> None:
    rows = rows_of(order_of(mixed))
    for source, windows in enumerate(mixed.windows):
        mine = rows[rows // SOURCE_ROWS == source][: sum(windows)] - source * SOURCE_ROWS
        assert mine.tolist() == windowed(np.arange(len(mine)), windows, mixed.seed).tolist()


# ---- What it does not depend on ----------------------------------------------------------------


@given(mixtures, st.lists(st.integers(1, 6), min_size=4, max_size=4))
@settings(deadline=None, max_examples=60)
def test_a_step_is_the_same_whatever_windows_are_known(mixed: Mixture, known: list[int]) -> None:
    """The first step that needs a row more is refused; those before it are those of the whole."""
    whole, begun = order_of(mixed), cut(mixed, known[: len(mixed.windows)])
    for step in range(STEPS):
        needed = zip(begun.follow, begun.needed(step), begun.sizes, strict=True)
        if any(follow and rows > size for follow, rows, size in needed):
            with pytest.raises(ValueError, match="has no row yet"):
                begun.rows(step)
            break
        assert begun.rows(step).tolist() == whole.rows(step).tolist()
    assert begun.source_ends == whole.source_ends


@given(mixtures, st.integers(1, 5), st.integers(0, STEPS))
@settings(deadline=None, max_examples=30)
def test_a_step_is_the_same_for_any_workers_and_after_any_kill(
    mixed: Mixture, world: int, killed: int
) -> None:
    order = order_of(mixed)
    cursor = order.cursor(killed, "f")
    assert cursor == Cursor(0, killed * ROWS_PER_STEP, mixed.seed, "f")
    known = [len(windows) // 2 for windows in mixed.windows]
    first = cut(mixed, known).step_of(cursor)  # the next driver may know more or less
    assert first == order.step_of(cursor) == killed
    for step in range(first, STEPS):
        parts = [order.micro_batches(step, rank, world) for rank in range(world)]
        dealt = np.stack(parts, axis=1).reshape(-1)
        assert dealt[dealt != EMPTY].tolist() == order.rows(step).tolist()


@given(mixtures, st.data())
@settings(deadline=None, max_examples=30)
def test_windows_of_another_source_change_no_row(mixed: Mixture, data: st.DataObject) -> None:
    other = mixed.windows[0], *(data.draw(some_windows) for _ in mixed.windows[1:])
    ours, theirs = (rows_of(order_of(m)) for m in (mixed, mixed._replace(windows=other)))
    mine = ours // SOURCE_ROWS == 0
    assert (mine == (theirs // SOURCE_ROWS == 0)).all()
    assert (ours[mine] == theirs[mine]).all()


def test_another_seed_is_another_order() -> None:
    mixed = Mixture(((9, 9), (8, 8)), (1.0, 1.0), 0)
    assert len({rows_of(order_of(mixed._replace(seed=n))).tobytes() for n in range(20)}) == 20


def test_golden_mixture_of_windows() -> None:
    order = order_of(Mixture(((3, 4), (2, 5, 2)), (3.0, 1.0), 11))
    assert [divmod(row, SOURCE_ROWS) for row in order.rows(1)[:12].tolist()] == GOLDEN


GOLDEN = [
    (0, 6),
    (0, 3),
    (0, 1),
    (1, 3),
    (1, 8),
    (1, 7),
    (1, 7),
    (0, 0),
    (0, 2),
    (0, 4),
    (0, 5),
    (0, 6),
]
