"""Prove the order of packings that epochs take in turn.

Run: python -m pytest tests/test_order_packings.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.order import EMPTY, Order

seeds = st.integers(0, 2**63)
some_packings = st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple)


def order_of(packings: tuple[int, ...], epochs: int, seed: int) -> Order:
    return Order.for_epochs(sum(packings), 4, 2, seed, epochs, packings=packings)


def rows_of(order: Order) -> list[int]:
    taken = np.concatenate([order.rows(step) for step in range(order.num_steps)])
    return taken[taken != EMPTY].tolist()


@given(some_packings, st.integers(1, 7), seeds)
@settings(deadline=None, max_examples=60)
def test_an_epoch_takes_every_row_of_its_packing_once(
    packings: tuple[int, ...], epochs: int, seed: int
) -> None:
    taken = rows_of(order_of(packings, epochs, seed))
    firsts = np.cumsum([0, *packings])
    for epoch in range(epochs):
        packing = epoch % len(packings)
        size = packings[packing]
        mine, taken = taken[:size], taken[size:]
        assert sorted(mine) == list(range(firsts[packing], firsts[packing] + size))
    assert not taken


@given(some_packings, st.integers(1, 7), seeds, st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_neither_workers_nor_kills_change_a_step(
    packings: tuple[int, ...], epochs: int, seed: int, world: int
) -> None:
    order = order_of(packings, epochs, seed)
    for step in range(order.num_steps):
        parts = [order.micro_batches(step, rank, world) for rank in range(world)]
        dealt = np.stack(parts, axis=1).reshape(-1, 2)[: order.rows_per_step // 2].ravel()
        assert dealt.tolist() == order.rows(step).tolist()
        cursor = order.cursor(step, "f")
        assert order.step_of(cursor) == step and 0 <= cursor.row < sum(packings)


@given(st.integers(1, 40), st.integers(1, 4), seeds)
@settings(deadline=None, max_examples=40)
def test_one_packing_is_the_order_without_packings(rows: int, epochs: int, seed: int) -> None:
    plain = Order.for_epochs(rows, 4, 2, seed, epochs)
    assert rows_of(replace(plain, packings=(rows,))) == rows_of(plain)


def test_the_rows_of_one_packing_come_in_another_order_each_time() -> None:
    taken = rows_of(order_of((20, 20), 6, 1))
    assert len({tuple(taken[first : first + 20]) for first in range(0, 120, 20)}) == 6


@pytest.mark.parametrize(
    "changes", [{"packings": (3, 4)}, {"packings": (4, 6), "windows": ((10,),)}]
)
def test_packings_that_do_not_fit_are_refused(changes: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(ValueError, match="packings"):
        replace(Order.for_steps(10, 4, 2, 0, 12), **changes)  # type: ignore[arg-type]


def test_golden_packings() -> None:
    assert rows_of(order_of((3, 4), 3, 11)) == GOLDEN


GOLDEN = [2, 1, 0, 6, 5, 4, 3, 2, 1, 0]
