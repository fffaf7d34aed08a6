"""Say which row is where: the order of training data as a function of (seed, epoch, step).

>>> order = Order.for_steps(num_rows=10, rows_per_step=4, micro_batch=2, seed=7, num_steps=5)
>>> order.rows(2).tolist()                             # the last 2 of epoch 0, the first 2 of 1
[1, 7, 2, 7]
>>> order.micro_batches(2, rank=1, world=2).tolist()
[[2, 7]]
>>> order.cursor(2, fingerprint="") == Cursor(epoch=0, row=8, seed=7, fingerprint="")
True

The model: a keyed bijection of [0, num_rows) per (seed, epoch), which can be asked at any position
without computing the others. Epochs follow one another in one endless sequence, steps cut it into
equal pieces, micro-batches cut a step, and ranks take micro-batches in turn. Nothing else decides
where a row goes, so the batch of a step is the same for every number of workers and after every
resume, and a resume costs the same at any position.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from hashlib import blake2b, shake_256
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

EMPTY = -1  # the row id of a position that holds no row
MAX_ROWS = 2**40
MAX_STEPS = 2**31  # also of rows per step, so that every position fits an int64
NUM_ROUNDS = 16  # 8 and 12 are measurably uneven for 5 to 8 rows: see tests/test_order.py
MIN_BLOCK = 1024  # positions over which a mixture has its shares
MAX_BLOCK = 2**20

# row          one packed sequence, by its number in the data set: [0, num_rows)
# position     a place in the global sequence: epoch 0 is [0, num_rows), epoch 1 the next num_rows
# step         one optimizer step: positions [step * rows_per_step, (step + 1) * rows_per_step)
# micro-batch  one forward and backward: `micro_batch` positions of a step that lie side by side
# rank         one worker: takes micro-batches rank, rank + world, rank + 2 * world ... of each step
# world        the number of ranks; it moves micro-batches between ranks and changes nothing else
#
# Letters in shapes: R rows per step, M = R / b micro-batches per step, b rows per micro-batch,
# m = ceil(M / world) micro-batches per rank.


# ---- The permutation -------------------------------------------------------------------------


def permutation(positions: npt.ArrayLike, num_rows: int, seed: int, epoch: int) -> Ints:
    """Return the row at each position of one epoch: a bijection of [0, num_rows).

    Any positions may be asked, in any shape and number: no other position is computed or stored.
    Integer arithmetic only, so the answer is the same on every machine.

    >>> permutation(range(5), num_rows=5, seed=0, epoch=0).tolist()
    [4, 3, 2, 0, 1]
    """
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(_outside("num_rows", num_rows, 1, MAX_ROWS))
    places = np.asarray(positions, dtype=np.int64)
    if places.size and not 0 <= places.min() <= places.max() < num_rows:
        raise ValueError(
            f"positions in [{places.min()}, {places.max()}] are out of range: an epoch has "
            f"num_rows={num_rows}. Set positions within [0, {num_rows})"
        )
    return _permute(places, num_rows, _round_keys("rows", seed, epoch))


def _permute(places: Ints, size: int, keys: Words) -> Ints:
    """Walk each place through the cipher until it lands inside [0, size).

    The cipher permutes the smallest power of two >= size, so fewer than 2 passes are needed on
    average. Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", method 2.
    """
    bits = (size - 1).bit_length()
    words = _encrypt(places.ravel().astype(np.uint64), bits, keys)
    outside = np.flatnonzero(words >= size)
    while outside.size:
        words[outside] = _encrypt(words[outside], bits, keys)
        outside = outside[words[outside] >= size]
    return words.astype(np.int64).reshape(places.shape)


def _encrypt(words: Words, bits: int, keys: Words) -> Words:
    """Permute [0, 2**bits) by a Feistel network; the halves differ by one bit if `bits` is odd."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left_mask, right_mask = np.uint64(2**left_bits - 1), np.uint64(2**right_bits - 1)
    left, right = words >> np.uint64(right_bits), words & right_mask
    for left_key, right_key in keys.reshape(-1, 2):  # [rounds] -> [rounds / 2, 2]
        left ^= _mix(right ^ left_key) & left_mask
        right ^= _mix(left ^ right_key) & right_mask
    return (left << np.uint64(right_bits)) | right


def _mix(words: Words) -> Words:
    """Hash 64 bits to 64 bits. Source: the finaliser of splitmix64, Steele et al. 2014."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _round_keys(purpose: str, seed: int, epoch: int) -> Words:
    """Derive the keys of one permutation; each purpose draws from a stream of its own."""
    text = f"{purpose} {seed} {epoch}".encode()
    digest = shake_256(text).digest(8 * NUM_ROUNDS)  # a stream of any length, unlike blake2b
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


# ---- The order of a run ----------------------------------------------------------------------


@dataclass(frozen=True)
class Cursor:
    """Hold the position of a run in its data: everything needed to go on from there."""

    epoch: int
    """Epochs completed."""
    row: int
    """Rows of this epoch already consumed, in [0, num_rows)."""
    seed: int
    """Seed of the order."""
    fingerprint: str
    """What the rows were made from, as `fingerprint()` gives it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """Rebuild from `to_dict()`; a missing or unknown name is a TypeError."""
        return cls(**values)


@dataclass(frozen=True)
class Order:
    """Answer which rows a step, a rank and a micro-batch take.

    Raises ValueError, with the values to set, for sizes that do not fit together.
    """

    num_rows: int
    """Rows in the data set."""
    rows_per_step: int
    """Rows in the global batch of one optimizer step."""
    micro_batch: int
    """Rows in one forward pass of one rank; divides `rows_per_step`."""
    seed: int
    """Chooses the order, together with the epoch."""
    num_steps: int
    """Steps in the run."""
    total_rows: int | None = None
    """Rows to train on in all (epochs * num_rows); positions past them are empty. None: no end."""
    sizes: tuple[int, ...] = ()
    """Rows of each source of a mixture, whose rows are numbered one source after another."""
    weights: tuple[float, ...] = ()
    """Share of each source of a mixture, up to a common factor; empty: all rows are one source."""

    def __post_init__(self) -> None:
        for name, high in {
            "num_rows": MAX_ROWS,
            "rows_per_step": MAX_STEPS,
            "micro_batch": MAX_STEPS,
            "num_steps": MAX_STEPS,
        }.items():
            low = 0 if name == "num_steps" else 1  # a run of no steps only exports
            if not low <= getattr(self, name) <= high:
                raise ValueError(_outside(name, getattr(self, name), low, high))
        if self.rows_per_step % self.micro_batch:
            raise ValueError(_not_a_divisor(self.micro_batch, self.rows_per_step))
        if self.weights:
            self._check_mixture()
        if self.total_rows is not None:
            if self.total_rows < 1:
                raise ValueError(
                    f"total_rows={self.total_rows} is out of range: a run needs at least 1 row. "
                    "Set epochs * num_rows, or None for a run that only num_steps ends"
                )
            most = _ceil_div(self.total_rows, self.rows_per_step)
            if self.num_steps > most:
                raise ValueError(
                    f"num_steps={self.num_steps} is too many: total_rows={self.total_rows} at "
                    f"rows_per_step={self.rows_per_step} last {most} steps. "
                    f"Set num_steps={most} or fewer, or total_rows=None"
                )

    def _check_mixture(self) -> None:
        _shares_and_block(self.weights)
        if len(self.sizes) != len(self.weights) or sum(self.sizes) != self.num_rows:
            raise ValueError(
                f"sizes={self.sizes} are not those of a mixture of num_rows={self.num_rows} and "
                f"weights={self.weights}: each source has one of both. Set sizes that sum to it"
            )
        for size, weight in zip(self.sizes, self.weights, strict=True):
            if weight and not size:
                raise ValueError(
                    f"sizes={self.sizes} leave a source without rows, and weights={self.weights} "
                    "ask for some of it. Set that weight to 0"
                )
        if self.total_rows is not None:
            raise ValueError(
                f"total_rows={self.total_rows} is not for a mixture, whose sources end at "
                "different times. Set total_rows=None"
            )

    @classmethod
    def for_epochs(
        cls, num_rows: int, rows_per_step: int, micro_batch: int, seed: int, epochs: int
    ) -> Order:
        """Train on every row exactly `epochs` times; the very last step may be short."""
        if epochs < 1:
            raise ValueError(_outside("epochs", epochs, 1, None))
        total_rows = epochs * num_rows
        num_steps = _ceil_div(total_rows, max(rows_per_step, 1))
        return cls(num_rows, rows_per_step, micro_batch, seed, num_steps, total_rows)

    @classmethod
    def for_steps(
        cls, num_rows: int, rows_per_step: int, micro_batch: int, seed: int, num_steps: int
    ) -> Order:
        """Train for `num_steps` full steps, over as many epochs as that takes."""
        return cls(num_rows, rows_per_step, micro_batch, seed, num_steps)

    @classmethod
    def for_mixture(
        cls,
        sizes: Sequence[int],
        weights: Sequence[float],
        rows_per_step: int,
        micro_batch: int,
        seed: int,
        num_steps: int,
    ) -> Order:
        """Train on rows of several sources in the shares of their weights.

        Each source goes through its own epochs, so that none of its rows comes twice before all
        have come once. The cursor's epoch counts as many rows as all sources have together.
        """
        sizes, weights = tuple(sizes), tuple(weights)
        return cls(
            sum(sizes), rows_per_step, micro_batch, seed, num_steps, sizes=sizes, weights=weights
        )

    def rows(self, step: int) -> Ints:
        """Return the row ids of a step's global batch, int64[R]; -1 where a last step is short."""
        first = self._first_position(step)
        return self._row_ids(np.arange(first, first + self.rows_per_step))

    def num_micro_batches(self, world: int) -> int:
        """Return how many micro-batches every rank runs per step: the same for all of them."""
        if world < 1:
            raise ValueError(_outside("world", world, 1, None))
        return _ceil_div(self.rows_per_step // self.micro_batch, world)

    def micro_batches(self, step: int, rank: int, world: int) -> Ints:
        """Return the row ids that one rank takes in a step, int64[m, b]; -1 where there is none.

        Micro-batch i of the step goes to rank i mod world. A rank that has fewer than the others
        gets micro-batches of -1 at the end, so that all ranks join the same number of collectives.
        """
        num_micro = self.num_micro_batches(world)
        if not 0 <= rank < world:
            raise ValueError(_outside("rank", rank, 0, world - 1))
        index = rank + world * np.arange(num_micro)  # [m], micro-batch within the step
        index = index[index < self.rows_per_step // self.micro_batch]  # [m or m - 1]
        positions = (  # [m or m - 1, b]
            self._first_position(step)
            + index[:, None] * self.micro_batch
            + np.arange(self.micro_batch)
        )
        ids = np.full((num_micro, self.micro_batch), EMPTY, dtype=np.int64)
        ids[: len(index)] = self._row_ids(positions.ravel()).reshape(positions.shape)
        return ids

    def cursor(self, step: int, fingerprint: str) -> Cursor:
        """Return the position before `step`; step num_steps gives the position after the run."""
        if not 0 <= step <= self.num_steps:
            raise ValueError(_outside("step", step, 0, self.num_steps))
        epoch, row = divmod(self._position_before(step), self.num_rows)
        return Cursor(epoch=epoch, row=row, seed=self.seed, fingerprint=fingerprint)

    def step_of(self, cursor: Cursor) -> int:
        """Return the step that comes next at a cursor of this order: the inverse of `cursor()`.

        The fingerprint is not looked at: compare it, and name the `differences()`, before.
        """
        if cursor.seed != self.seed:
            raise ValueError(
                f"seed={self.seed} is not that of the cursor: rows were consumed in the order of "
                f"seed={cursor.seed}, and another order would repeat some and lose others. "
                f"Set seed={cursor.seed}, or start a new run"
            )
        if cursor.epoch < 0 or not 0 <= cursor.row < self.num_rows:
            raise ValueError(
                f"cursor epoch={cursor.epoch} row={cursor.row} is out of range: an epoch has "
                f"num_rows={self.num_rows}. Set the data back to what it was, or start a new run"
            )
        position = cursor.epoch * self.num_rows + cursor.row
        step = _ceil_div(position, self.rows_per_step)
        if step > self.num_steps:
            raise ValueError(
                f"cursor epoch={cursor.epoch} row={cursor.row} is past the end: {position} rows "
                f"were consumed, and num_steps={self.num_steps} at rows_per_step="
                f"{self.rows_per_step} take {self._position_before(self.num_steps)}. "
                f"Set num_steps={step} or more"
            )
        if position != self._position_before(step):
            raise ValueError(
                f"cursor epoch={cursor.epoch} row={cursor.row} is not at a step boundary: "
                f"{position} rows were consumed, not a multiple of rows_per_step="
                f"{self.rows_per_step}. "
                f"Set rows_per_step back to what it was, or start a new run"
            )
        return step

    def _first_position(self, step: int) -> int:
        if not 0 <= step < self.num_steps:
            raise ValueError(_outside("step", step, 0, self.num_steps - 1))
        return step * self.rows_per_step

    def _position_before(self, step: int) -> int:
        position = step * self.rows_per_step
        return position if self.total_rows is None else min(position, self.total_rows)

    def _row_ids(self, positions: Ints) -> Ints:
        """Return the rows at global positions, ascending: [n] -> [n]."""
        if self.weights:
            return self._mixed_row_ids(positions)
        ids = np.full(len(positions), EMPTY, dtype=np.int64)
        if self.total_rows is not None:
            positions = positions[: np.searchsorted(positions, self.total_rows)]
        epochs, places = np.divmod(positions, self.num_rows)
        present, starts = np.unique(epochs, return_index=True)
        bounds = [*starts.tolist(), len(positions)]
        for epoch, low, high in zip(present.tolist(), bounds, bounds[1:], strict=False):
            ids[low:high] = permutation(places[low:high], self.num_rows, self.seed, epoch)
        return ids

    def _mixed_row_ids(self, positions: Ints) -> Ints:
        """Return the rows at global positions of a mixture: [n] -> [n]."""
        sources, items = mixture(self.weights, positions, self.seed)
        ids = np.empty(len(positions), dtype=np.int64)
        first = 0
        for source, size in enumerate(self.sizes):
            here = np.flatnonzero(sources == source)
            epochs = items[here] // max(size, 1)
            for epoch in np.unique(epochs).tolist():
                slots = here[epochs == epoch]
                places = items[slots] - epoch * size
                ids[slots] = first + permutation(places, size, self.seed, epoch)
            first += size
        return ids


# ---- Proof of what was read ------------------------------------------------------------------


def fingerprint(parts: Mapping[str, object]) -> str:
    """Return 16 hex digits that change when any part does; parts are plain JSON values.

    >>> fingerprint({"seq_len": 8, "files": ["a"]}) == fingerprint({"files": ("a",), "seq_len": 8})
    True
    """
    return blake2b(_canonical(parts).encode(), digest_size=8).hexdigest()


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Name the parts that differ, sorted; empty if and only if the fingerprints are equal.

    >>> differences({"seq_len": 8, "files": ["a"]}, {"seq_len": 9, "files": ["a"], "template": 0})
    ['seq_len', 'template']
    """
    return [
        name
        for name in sorted({*old, *new})
        if name not in old or name not in new or _canonical(old[name]) != _canonical(new[name])
    ]


def row_digest(position: int, input_ids: npt.ArrayLike) -> int:
    """Return 64 bits that stand for one row at one position of its step.

    The position is part of it, so that two rows that change places change the sum.
    Source: blake2b over the position as 8 bytes and the ids as int32, both little-endian.
    """
    ids = np.ascontiguousarray(input_ids, dtype="<i4")
    digest = blake2b(int(position).to_bytes(8, "little"), digest_size=8)
    digest.update(ids.tobytes())
    return int.from_bytes(digest.digest(), "little")


def combine(digests: Iterable[int]) -> str:
    """Return the `batch_digest` of a step from its rows' digests, or from the ranks' sums of them.

    >>> combine([1, 2**64 - 1, 5]) == combine([6, 2**64 - 1]) == "0000000000000005"
    True
    """
    return f"{sum(digests) % 2**64:016x}"


# ---- Mixtures of sources ---------------------------------------------------------------------
#
# Positions are cut into blocks. With W_j the share of the sources before j, block k gives source j
# the slots from  floor(W_j (k+1) B) - floor(W_j k B)  up to the same of W_j+1, and a permutation of
# the block says at which position each slot comes. The floors telescope: after any number of whole
# blocks each source is less than one position away from its exact share. B is at least 1 / share of
# every source, without which a block's count, a difference of such edges, might be negative.


def mixture(weights: Sequence[float], positions: Ints, seed: int) -> tuple[Ints, Ints]:
    """Return, for positions int64[n], their sources [n] and which item of its source each is [n].

    Weights need not sum to 1. Shares are exact in the long run and to one position per block; the
    order within a block is a seeded permutation. The positions of source j, in order, hold its
    items 0, 1, 2, ... The cost is that of the blocks that are touched, whatever the positions.

    >>> sources, items = mixture([3, 1], np.array([0, 5, 6, 7, 4096]), seed=0)
    >>> sources.tolist(), items.tolist()
    ([0, 0, 1, 0, 0], [0, 5, 0, 6, 3072])
    """
    shares, block = _shares_and_block(weights)
    sources, items = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
    blocks, offsets = np.divmod(positions, block)
    for k in np.unique(blocks).tolist():
        here = np.flatnonzero(blocks == k)
        of_block = _block_sources(shares, block, k, seed, np.arange(offsets[here].max() + 1))
        for source in np.unique(of_block[offsets[here]]).tolist():
            before = math.floor(shares[source + 1] * k * block) - math.floor(
                shares[source] * k * block
            )
            mine = of_block == source
            slots = here[mine[offsets[here]]]
            sources[slots] = source
            items[slots] = before + np.cumsum(mine)[offsets[slots]] - 1
    return sources, items


def _block_sources(shares: list[Fraction], block: int, k: int, seed: int, offsets: Ints) -> Ints:
    """Return the source at each offset of block k: [n] -> [n]."""
    ends = [
        math.floor(share * (k + 1) * block) - math.floor(share * k * block) for share in shares[1:]
    ]
    slots = _permute(offsets, block, _round_keys("mixture", seed, k))
    return np.searchsorted(ends, slots, side="right").astype(np.int64)


def _shares_and_block(weights: Sequence[float]) -> tuple[list[Fraction], int]:
    """Return the cumulative shares, 0 first and 1 last, and the block length."""
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise ValueError(
            f"weights={list(weights)} is not a mixture: each is finite and >= 0, and one is > 0. "
            f"Set one such number per source"
        )
    # The decimals as written: 0.7 and 0.3 share exactly 7 to 3, which their binary values do not.
    exact = [Fraction(repr(float(w))) for w in weights]
    total = sum(exact)
    smallest = min(w for w in exact if w) / total
    if smallest * MAX_BLOCK < 1:
        raise ValueError(
            f"weights={list(weights)} has a share of {float(smallest):.1e}: a source must fill at "
            f"least one position in {MAX_BLOCK}. Set that weight to 0 or higher"
        )
    shares, reached = [Fraction(0)], Fraction(0)
    for w in exact:
        reached += w / total
        shares.append(reached)
    return shares, max(MIN_BLOCK, 1 << (math.ceil(1 / smallest) - 1).bit_length())


# ---- Words and small sums --------------------------------------------------------------------


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _canonical(value: object) -> str:
    """Return JSON with one spelling per value: sorted names, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _outside(name: str, value: int, low: int, high: int | None) -> str:
    rule = f">= {low}" if high is None else f"in [{low}, {high}]"
    return f"{name}={value} is out of range: {name} must be {rule}. Set {name} {rule}"


def _not_a_divisor(micro_batch: int, rows_per_step: int) -> str:
    small = [d for d in range(1, math.isqrt(rows_per_step) + 1) if rows_per_step % d == 0]
    divisors = sorted({*small, *(rows_per_step // d for d in small)})
    below = [d for d in divisors if d < micro_batch][-1:]
    above = [d for d in divisors if d > micro_batch][:1]
    lower = rows_per_step // micro_batch * micro_batch
    multiples = [rows for rows in (lower, lower + micro_batch) if rows]
    return (
        f"micro_batch={micro_batch} is illegal: rows_per_step={rows_per_step} is not a multiple of "
        f"it. Set micro_batch={_either(below + above)}, or rows_per_step={_either(multiples)}"
    )


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))
