"""Test order: bijection, quality of the shuffle, the same batches for every world, mixtures.

Run: python -m pytest tests/test_order.py
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import sampled

from rayapp.order import (
    EMPTY,
    Cursor,
    Order,
    combine,
    differences,
    fingerprint,
    mixture,
    permutation,
    row_digest,
)
from rayapp.planner.question import per_worker

seeds = st.integers(0, 2**63)
orders = st.builds(
    lambda rows, micro, per_step, seed, steps: Order.for_steps(
        rows, micro * per_step, micro, seed, steps
    ),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 9),
    seeds,
    st.integers(1, 12),
)


def epoch_of(num_rows: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permutation(np.arange(num_rows), num_rows, seed, epoch)


def chi_square_z(table: np.ndarray, freedom: int, scale: float = 1.0) -> float:
    """Return how many standard deviations a table of counts is from even."""
    expected = table.sum() / table.size
    statistic = ((table - expected) ** 2 / expected).sum() * scale
    return (statistic - freedom) / np.sqrt(2 * freedom)


# ---- The permutation


@pytest.mark.parametrize(
    "num_rows",
    [*range(1, 35), 97, 127, 128, 129, 1009, 1023, 1024, 1025, 4095, 4096, 4097, 65537, 10**5],
)
def test_every_epoch_is_a_bijection(num_rows: int) -> None:
    for epoch in range(3):
        seen = np.zeros(num_rows, int)
        np.add.at(seen, epoch_of(num_rows, seed=5, epoch=epoch), 1)
        assert (seen == 1).all()


@given(st.integers(1, 3000), seeds, st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_bijection_for_drawn_sizes(num_rows: int, seed: int, epoch: int) -> None:
    rows = epoch_of(num_rows, seed, epoch)
    assert rows.dtype == np.int64
    assert set(rows.tolist()) == set(range(num_rows))


@given(st.integers(1, 2**40), seeds, st.integers(0, 99), st.data())
@settings(deadline=None, max_examples=60)
def test_asking_one_by_one_is_asking_together(n: int, seed: int, epoch: int, data: st.DataObject):
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=12, unique=True))
    together = permutation(np.array(places), n, seed, epoch)
    assert together.tolist() == [int(permutation(p, n, seed, epoch)) for p in places]
    assert len(set(together.tolist())) == len(places)
    assert 0 <= together.min() <= together.max() < n


def test_shape_is_kept() -> None:
    places = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(permutation(places, 24, 1, 2), epoch_of(24, 1, 2).reshape(2, 3, 4))
    assert permutation([], 24, 1, 2).shape == (0,)
    assert permutation(3, 24, 1, 2).shape == ()


def reference_permutation(place: int, size: int, seed: int, epoch: int) -> int:
    """Compute one row with Python's own integers, by the definition."""
    bits, word = (size - 1).bit_length(), 2**64 - 1
    low = bits - bits // 2
    text = f"rows {seed} {epoch}".encode()
    digest = hashlib.shake_256(text).digest(128)
    keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 128, 8)]

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & word
        return z ^ (z >> 31)

    while True:
        left, right = place >> low, place % 2**low
        for i in range(0, 16, 2):
            left ^= mix(right ^ keys[i]) % 2 ** (bits // 2)
            right ^= mix(left ^ keys[i + 1]) % 2**low
        place = left << low | right
        if place < size:
            return place


@given(st.integers(1, 2**40), st.integers(-(2**80), 2**80), st.integers(0, 2**40), st.data())
@settings(deadline=None, max_examples=100)
def test_permutation_equals_plain_integers(n: int, seed: int, epoch: int, data: st.DataObject):
    place = data.draw(st.integers(0, n - 1))
    assert permutation(place, n, seed, epoch) == reference_permutation(place, n, seed, epoch)


def test_golden_permutations() -> None:
    """Pin the order: a change here repeats and loses rows in every run that is resumed."""
    assert epoch_of(1).tolist() == [0]
    assert epoch_of(10, seed=0, epoch=0).tolist() == [4, 1, 0, 3, 9, 6, 8, 2, 5, 7]
    assert epoch_of(10, seed=0, epoch=1).tolist() == [1, 2, 8, 0, 6, 7, 9, 4, 3, 5]
    assert epoch_of(10, seed=1234, epoch=0).tolist() == [7, 4, 0, 9, 8, 6, 3, 1, 5, 2]
    assert permutation([0, 1, 2**39, 2**40 - 1], 2**40, -3, 7).tolist() == [
        126436311553,
        928653802281,
        386508199947,
        450604575479,
    ]
    assert permutation(range(4), 10**9 + 7, 2**70, 0).tolist() == [
        513883454,
        856546190,
        275266806,
        523786090,
    ]


@pytest.mark.parametrize("num_rows", sampled([2, 5, 6, 3, 7, 8, 4, 12, 33, 16], 3))
def test_few_rows_are_shuffled_evenly(num_rows: int) -> None:
    """Each row is as often at each place, and each pair of rows at two places, over many epochs.

    Fewer rounds fail this: at 8, pairs of 5, 7 and 8 rows are 17 to 42 deviations off in 20,000
    epochs; at 12, up to 5.5.
    """
    n, epochs = num_rows, 8000 if num_rows < 10 else 3000
    rows = np.stack([epoch_of(n, seed=11, epoch=e) for e in range(epochs)])  # [epochs, n]
    counts = np.stack([np.bincount(rows[:, place], minlength=n) for place in range(n)])
    # Rows of one epoch exclude each other, which the factor (n - 1) / n makes up for.
    assert abs(chi_square_z(counts, (n - 1) ** 2, (n - 1) / n)) < 4.5
    if n == 2:
        return
    for one, other in [(0, 1), (0, n - 1), (n // 2, n - 1)]:
        pairs = np.zeros((n, n))
        np.add.at(pairs, (rows[:, one], rows[:, other]), 1)
        assert abs(chi_square_z(pairs[~np.eye(n, dtype=bool)], n * (n - 1) - 1)) < 4.5


def test_all_orders_of_few_rows_occur() -> None:
    for n in (2, 3, 4, 5):
        found = {tuple(epoch_of(n, seed=3, epoch=e).tolist()) for e in range(1500)}
        assert found == set(itertools.permutations(range(n)))


@pytest.mark.parametrize("num_rows", [1000, 4096, 10007, 65537])
def test_many_rows_are_shuffled_well(num_rows: int) -> None:
    n, bins = num_rows, 16
    rows = epoch_of(n, seed=42, epoch=3)
    table = np.zeros((bins, bins))
    np.add.at(table, (np.arange(n) * bins // n, rows * bins // n), 1)
    assert abs(chi_square_z(table, (bins - 1) ** 2)) < 4
    # A correlation of n independent values has deviation 1 / sqrt(n).
    for lag in (1, 2, 3, 64):
        assert abs(np.corrcoef(rows[:-lag], rows[lag:])[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(np.arange(n), rows)[0, 1]) < 4 / np.sqrt(n)
    # |i - j| of two uniform places: mean n / 3, deviation n / sqrt(18).
    displaced = np.abs(rows - np.arange(n))
    assert abs(displaced.mean() / n - 1 / 3) < 4 / np.sqrt(18 * n)
    # Neighbours that stay neighbours are Poisson with mean 1, as are fixed points.
    assert np.count_nonzero(np.diff(rows) == 1) <= 7
    assert np.count_nonzero(displaced == 0) <= 7


def test_fixed_points_are_poisson() -> None:
    counts = [np.count_nonzero(epoch_of(500, 9, e) == np.arange(500)) for e in range(1000)]
    assert abs(np.mean(counts) - 1) < 4 / np.sqrt(1000)
    assert abs(np.var(counts) - 1) < 4 * np.sqrt(3 / 1000)


def test_epochs_and_seeds_differ() -> None:
    """Orders that have nothing in common agree at about one place (Poisson, mean 1)."""
    n = 5000
    keys = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (1, 1), (2**32, 0), (-1, 0), (0, 2**32)]
    all_rows = [epoch_of(n, seed, epoch) for seed, epoch in keys]
    for one, other in itertools.combinations(all_rows, 2):
        assert np.count_nonzero(one == other) <= 8
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / np.sqrt(n)
        assert abs(np.corrcoef(np.argsort(one), np.argsort(other))[0, 1]) < 4.5 / np.sqrt(n)


@pytest.mark.parametrize("places, num_rows", [([0], 0), ([0], 2**40 + 1), ([-1], 5), ([5], 5)])
def test_permutation_refuses(places: list[int], num_rows: int) -> None:
    with pytest.raises(ValueError, match=r"is out of range|are out of range"):
        permutation(places, num_rows, 0, 0)


# ---- The order of a run


def global_sequence(order: Order) -> list[int]:
    """Return the rows of the whole run by the definition, position after position."""
    end = order.num_steps * order.rows_per_step
    sequence = []
    for epoch in range(-(-end // order.num_rows)):
        sequence += epoch_of(order.num_rows, order.seed, epoch).tolist()
    if order.total_rows is not None:
        sequence = sequence[: order.total_rows]
    return (sequence + [-1] * end)[:end]


def reassemble(order: Order, step: int, world: int) -> list[int]:
    """Return a step's rows in global order from what each rank was given."""
    given_to = [order.micro_batches(step, rank, world) for rank in range(world)]
    assert {part.shape for part in given_to} == {
        (order.num_micro_batches(world), order.micro_batch)
    }
    in_turn = np.stack(given_to, axis=1).reshape(-1)  # [m, world, b] -> [m * world * b]
    assert (in_turn[order.rows_per_step :] == -1).all()
    return in_turn[: order.rows_per_step].tolist()


@given(orders)
@settings(deadline=None, max_examples=50)
def test_steps_walk_the_sequence(order: Order) -> None:
    steps = [row for step in range(order.num_steps) for row in order.rows(step).tolist()]
    assert steps == global_sequence(order)


@given(orders, st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_every_world_takes_the_same_batches(order: Order, world: int) -> None:
    for step in range(order.num_steps):
        assert reassemble(order, step, world) == order.rows(step).tolist()
    # The planner deals them out as well, without numpy.
    each = per_worker(order.rows_per_step, order.micro_batch, world)
    assert each == order.num_micro_batches(world)


@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 8)
)
@settings(deadline=None, max_examples=60)
def test_epochs_take_every_row_once(n: int, micro: int, m: int, epochs: int, world: int) -> None:
    order = Order.for_epochs(n, micro * m, micro, seed=1, epochs=epochs)
    steps = [reassemble(order, step, world) for step in range(order.num_steps)]
    sequence = [row for step in steps for row in step]
    assert sequence == global_sequence(order)
    assert sequence[epochs * n :] == [-1] * (len(sequence) - epochs * n)
    assert len(sequence) - epochs * n < order.rows_per_step
    for epoch in range(epochs):
        assert set(sequence[epoch * n : (epoch + 1) * n]) == set(range(n))


def test_golden_order() -> None:
    order = Order.for_epochs(num_rows=7, rows_per_step=6, micro_batch=2, seed=3, epochs=2)
    assert order.num_steps == 3
    assert [order.rows(step).tolist() for step in range(3)] == [
        [6, 3, 5, 0, 1, 2],
        [4, 1, 6, 4, 0, 3],
        [2, 5, -1, -1, -1, -1],
    ]
    assert order.micro_batches(1, rank=0, world=2).tolist() == [[4, 1], [0, 3]]
    assert order.micro_batches(1, rank=1, world=2).tolist() == [[6, 4], [-1, -1]]


def test_more_ranks_than_micro_batches() -> None:
    order = Order.for_steps(100, rows_per_step=4, micro_batch=2, seed=0, num_steps=1)
    assert order.num_micro_batches(5) == 1
    assert [order.micro_batches(0, rank, 5).tolist() for rank in (2, 3, 4)] == [[[-1, -1]]] * 3


@given(orders, st.booleans())
@settings(deadline=None, max_examples=60)
def test_cursor_and_step_are_inverse(order: Order, by_epochs: bool) -> None:
    if by_epochs:
        order = Order.for_epochs(
            order.num_rows, order.rows_per_step, order.micro_batch, order.seed, epochs=3
        )
    for step in range(order.num_steps + 1):
        cursor = order.cursor(step, "f")
        assert order.step_of(cursor) == step
        assert 0 <= cursor.row < order.num_rows
        assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor


@given(orders, st.data())
@settings(deadline=None, max_examples=60)
def test_resume_goes_on_exactly(order: Order, data: st.DataObject) -> None:
    """Stop anywhere, resume from the cursor with another world: the sequence is unbroken."""
    stop = data.draw(st.integers(0, order.num_steps))
    first, second = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    resumed = order.step_of(order.cursor(stop, "f"))
    steps = [reassemble(order, step, first) for step in range(stop)]
    steps += [reassemble(order, step, second) for step in range(resumed, order.num_steps)]
    assert [row for step in steps for row in step] == global_sequence(order)


def test_last_cursor_is_the_end_of_the_epochs() -> None:
    order = Order.for_epochs(num_rows=10, rows_per_step=4, micro_batch=4, seed=0, epochs=1)
    assert order.cursor(3, "f") == Cursor(epoch=1, row=0, seed=0, fingerprint="f")


@pytest.mark.parametrize(
    "cursor, words",
    [
        (Cursor(0, 4, 8, ""), r"seed=7 is not that of the cursor: .*Set seed=8"),
        (Cursor(0, 3, 7, ""), r"row=3 is not at a step boundary: 3 .*rows_per_step=4"),
        (Cursor(0, 10, 7, ""), r"row=10 is out of range: .*num_rows=10"),
        (Cursor(-1, 2, 7, ""), r"epoch=-1 row=2 is out of range"),
        (Cursor(2, 4, 7, ""), r"is past the end: 24 rows .*num_steps=5 .*take 20.*num_steps=6"),
    ],
)
def test_step_of_refuses(cursor: Cursor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Order.for_steps(10, 4, 2, seed=7, num_steps=5).step_of(cursor)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((0, 4, 2, 0, 1), r"num_rows=0 is out of range: .*Set num_rows in \[1, "),
        ((10, 0, 2, 0, 1), r"rows_per_step=0 is out of range"),
        ((10, 4, 0, 0, 1), r"micro_batch=0 is out of range"),
        ((10, 4, 2, 0, -1), r"num_steps=-1 is out of range"),
        ((10, 8, 3, 0, 1), r"micro_batch=3 is illegal: .* Set one of its divisors$"),
        ((10, 4, 6, 0, 1), r"micro_batch=6 is illegal"),
        ((10, 4, 2, 0, 1, 0), r"total_rows=0 is out of range"),
        ((10, 4, 2, 0, 4, 10), r"num_steps=4 is too many: .*Set num_steps=3 or fewer"),
    ],
)
def test_order_refuses(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Order(*sizes)


def test_order_refuses_steps_ranks_and_epochs_that_are_not_there() -> None:
    order = Order.for_steps(10, 4, 2, seed=7, num_steps=5)
    for call in (
        lambda: order.rows(5),
        lambda: order.rows(-1),
        lambda: order.cursor(6, ""),
        lambda: order.micro_batches(5, 0, 1),
        lambda: order.micro_batches(0, 2, 2),
        lambda: order.num_micro_batches(0),
        lambda: Order.for_epochs(10, 4, 2, 0, epochs=0),
    ):
        with pytest.raises(ValueError, match=r"=-?\d+ is out of range: .* Set "):
            call()


# ---- Proof of what was read

values = st.recursive(
    st.sampled_from([None, True, False, 0, 1, "", "a", "1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner),
    max_leaves=4,
)
parts = st.dictionaries(st.sampled_from("abcd"), values)


@given(parts, parts)
@settings(max_examples=60)
def test_differences_are_empty_if_fingerprints_agree(old: dict, new: dict) -> None:
    assert (differences(old, new) == []) == (fingerprint(old) == fingerprint(new))
    assert differences(old, old) == []
    assert differences(old, new) == differences(new, old)


def test_fingerprint_ignores_the_order_of_names_only() -> None:
    assert (
        fingerprint({"a": 1, "b": [1, 2]})
        == fingerprint({"b": (1, 2), "a": 1})
        == "bba7f0f516ab1a2e"
    )
    assert fingerprint({"a": [1, 2]}) != fingerprint({"a": [2, 1]})
    assert differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4}) == ["b", "c", "d"]


def test_digest_of_a_batch() -> None:
    batch = np.arange(24, dtype=np.int32).reshape(6, 4)
    digests = [row_digest(position, ids) for position, ids in enumerate(batch)]
    assert combine(digests) == "08255a22032b8d73"
    # Any split among ranks gives the same, by digests or by sums.
    for world in range(1, 7):
        assert combine(sum(digests[rank::world]) for rank in range(world)) == combine(digests)
    # The dtype and the memory layout of the ids do not matter; order, content and repeats do.
    assert row_digest(1, batch[1].astype(">i8")) == row_digest(1, np.repeat(batch[1], 2)[::2])
    assert row_digest(1, batch[1]) == digests[1]
    swapped = [row_digest(p, ids) for p, ids in enumerate(batch[[1, 0, 2, 3, 4, 5]])]
    assert combine(swapped) != combine(digests)
    assert combine(digests[:-1]) != combine(digests) != combine([*digests, digests[0]])
    assert combine([]) == "0" * 16


# ---- Mixtures


def sources_of(weights: Any, count: int, seed: int, start: int = 0) -> Any:
    """The sources of the positions [start, start + count)."""
    return mixture(weights, np.arange(start, start + count), seed)[0]


weight_lists = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any)


@given(weight_lists, seeds, st.integers(0, 6000), st.integers(0, 1500))
@settings(deadline=None, max_examples=40)
def test_any_part_of_a_mixture_is_that_part_of_the_whole(
    weights: list[int], seed: int, start: int, count: int
) -> None:
    whole = sources_of(weights, 7500, seed)
    assert sources_of(weights, count, seed, start).tolist() == whole[start : start + count].tolist()
    assert set(np.unique(whole)) == {j for j, w in enumerate(weights) if w}


@given(weight_lists, seeds)
@settings(deadline=None, max_examples=40)
def test_shares_are_exact_at_every_block(weights: list[int], seed: int) -> None:
    sources = sources_of(weights, 8 * 1024, seed)
    for blocks in range(1, 9):
        counts = np.bincount(sources[: blocks * 1024], minlength=len(weights))
        exact = np.array(weights) / sum(weights) * blocks * 1024
        assert (np.abs(counts - exact) < 1).all()


@given(weight_lists, seeds, st.lists(st.integers(0, 5000), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_items_of_a_source_are_counted_through(
    weights: list[int], seed: int, positions: list[int]
) -> None:
    whole = sources_of(weights, 5001, seed)
    sources, items = mixture(weights, np.array(positions), seed)
    for position, source, item in zip(positions, sources, items, strict=True):
        assert source == whole[position]
        assert item == np.count_nonzero(whole[:position] == source)


def test_far_positions_are_exact() -> None:
    """A trillion blocks on, the count is the share, to one position, and costs one block."""
    first = 1024 * 10**12
    sources, items = mixture([0.5, 0.3, 0.2], np.arange(first, first + 1024), seed=4)
    for source, share in enumerate((5, 3, 2)):
        mine = items[sources == source]
        assert abs(int(mine[0]) * 10 - first * share) < 10
        assert (np.diff(mine) == 1).all()


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    seeds,
    st.integers(1, 4),
    st.data(),
)
@settings(deadline=None, max_examples=40)
def test_a_mixture_goes_through_each_source_by_its_own_epochs(
    sizes: list[int], seed: int, world: int, data: st.DataObject
) -> None:
    """Of each source all rows come once before any comes twice; the same for any world."""
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    order = Order.for_mixture(sizes, weights, 12, 2, seed, num_steps=30)
    rows = np.concatenate([order.rows(step) for step in range(30)])
    sources = sources_of(weights, len(rows), seed)
    first = 0
    for source, size in enumerate(sizes):
        mine = rows[sources == source] - first
        for epoch in range(0, len(mine), size):
            part = mine[epoch : epoch + size]
            assert ((part >= 0) & (part < size)).all() and len(set(part)) == len(part)
        first += size
    for step in (0, 17):
        parts = [order.micro_batches(step, rank, world) for rank in range(world)]
        dealt = [ids.tolist() for m in range(len(parts[0])) for ids in (p[m] for p in parts)]
        flat = [row for ids in dealt for row in ids if row != EMPTY]
        assert flat == order.rows(step).tolist()


def test_each_epoch_of_a_source_has_its_own_order() -> None:
    order = Order.for_mixture([40, 20], [2, 1], 12, 2, 0, num_steps=20)
    rows = np.concatenate([order.rows(step) for step in range(20)])
    for mine in (rows[rows < 40][:80], rows[rows >= 40][:40]):
        first, second = np.split(mine, 2)
        assert set(first) == set(second) and np.count_nonzero(first == second) <= 5


def test_a_mixture_of_sizes_that_do_not_fit_is_refused() -> None:
    for sizes, weights in (((3,), (1, 1)), ((0, 3), (1, 1)), ((3, 3), (0, 0))):
        with pytest.raises(ValueError, match="Set"):
            Order.for_mixture(sizes, weights, 4, 2, 0, 5)


def test_shares_are_the_decimals_as_written() -> None:
    """Ten blocks hold 0.7 and 0.3 of 10,240 exactly, though neither is a binary number."""
    assert np.bincount(sources_of([0.7, 0.3], 10240, seed=0)).tolist() == [7168, 3072]
    assert np.array_equal(sources_of([0.7, 0.3], 3000, 0), sources_of([7, 3], 3000, 0))
    assert np.array_equal(sources_of(np.array([0.7, 0.3]), 3000, 0), sources_of([7, 3], 3000, 0))


def test_rare_sources_lengthen_the_block() -> None:
    weights = [1, 9999, 0, 1]
    sources = sources_of(weights, 3 * 2**14, seed=0)
    for blocks in (1, 2, 3):
        counts = np.bincount(sources[: blocks * 2**14], minlength=4)
        assert (np.abs(counts - np.array(weights) / 10001 * blocks * 2**14) < 1).all()
        assert counts[2] == 0


def test_golden_mixture() -> None:
    assert sources_of([0.5, 0.3, 0.2], 16, seed=1).tolist() == [
        1,
        0,
        0,
        1,
        0,
        1,
        1,
        2,
        2,
        1,
        1,
        1,
        0,
        0,
        1,
        0,
    ]
    assert sources_of([0.5, 0.3, 0.2], 8, seed=1, start=1020).tolist() == [1, 2, 0, 2, 1, 1, 2, 1]


def test_a_mixture_is_mixed_within_its_block() -> None:
    """Runs of one source are as long as chance makes them."""
    sources = sources_of([1, 1], 20 * 1024, seed=0)
    changes = np.count_nonzero(np.diff(sources))
    assert abs(changes - 10 * 1024) < 4 * np.sqrt(20 * 1024) / 2
    assert not np.array_equal(sources[:1024], sources[1024:2048])
    assert not np.array_equal(sources, sources_of([1, 1], 20 * 1024, seed=1))


@pytest.mark.parametrize(
    "weights", [[], [0, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1, 1e-9]]
)
def test_mixture_refuses(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weights=.* Set "):
        sources_of(weights, 1, 0)
