"""Rows, steps, micro-batches and ranks: the order of a run, and a position in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rayapp.order.bijection import MAX_ROWS, Ints, outside, permutation
from rayapp.order.shares import mixture, shares_and_block, taken
from rayapp.order.windows import packed_in_turn, windowed

EMPTY = -1  # the row id of a position that holds no row
SOURCE_ROWS = 10**12  # from the first row of a source to that of the next, in a mixture of windows
MAX_STEPS = 2**31  # also of rows per step, so that every position fits an int64

# row          one packed sequence, by its number in the data set: [0, num_rows), or in a mixture of
#              windows from source * SOURCE_ROWS on, which does not depend on what is known
# packing      one way in which the documents make rows: epochs take several in turn, and those of
#              one turn are an epoch of num_rows here, so that cursors know no packings
# position     a place in the global sequence: epoch 0 is [0, num_rows), epoch 1 the next num_rows
# step         one optimizer step: positions [step * rows_per_step, (step + 1) * rows_per_step)
# micro-batch  one forward and backward: `micro_batch` positions of a step that lie side by side
# rank         one worker: takes micro-batches rank, rank + world, rank + 2 * world ... of each step
# world        the number of ranks; it moves micro-batches between ranks and changes nothing else
#
# Letters in shapes: R rows per step, M = R / b micro-batches per step, b rows per micro-batch,
# m = ceil(M / world) micro-batches per rank.


@dataclass(frozen=True)
class Cursor:
    """The position of a run in its data: everything that is needed to resume there."""

    epoch: int
    """Epochs completed; 0 in an order of windows, which may not know how long an epoch is."""
    row: int
    """Rows of this epoch already consumed, in [0, num_rows); of all epochs in one of windows."""
    seed: int
    """Seed of the order."""
    fingerprint: str
    """The `fingerprint()` of what the rows were made from."""

    def to_dict(self) -> dict[str, int | str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """Rebuild from `to_dict()`; a missing or unknown name is a TypeError."""
        return cls(**values)


@dataclass(frozen=True)
class Order:
    """The rows of every step, rank and micro-batch of a run.

    Raises ValueError, with the values to set, for sizes that do not fit together.
    """

    num_rows: int
    """Rows in the data set."""
    rows_per_step: int
    """Rows in the global batch of one optimizer step."""
    micro_batch: int
    """Rows in one forward pass of one rank; divides `rows_per_step`."""
    seed: int
    """Determines the order, together with the epoch."""
    num_steps: int
    """Steps in the run."""
    total_rows: int | None = None
    """Rows to train on in all (epochs * num_rows); positions past them are empty. None: no end."""
    sizes: tuple[int, ...] = ()
    """Rows of each source of a mixture, whose rows are numbered one source after another."""
    weights: tuple[float, ...] = ()
    """Share of each source of a mixture, up to a common factor; empty: all rows are one source."""
    stages: tuple[tuple[int, int], ...] = ()
    """(steps, rows) at which the run ended before it grew, where its last step was short: the rows
    after it begin a new step, so that none is lost or repeated."""
    windows: tuple[tuple[int, ...], ...] = ()
    """Rows of each window of each source, in the order of the visits (see rayapp.order.windows);
    empty: the rows of a source are shuffled at once."""
    packings: tuple[int, ...] = ()
    """Rows of each packing, which are numbered one packing after another, and which epochs take in
    turn; empty: all epochs have the same rows."""
    follow: tuple[bool, ...] = ()
    """Whether windows of each source follow whose rows are not known: those that are known make its
    size. Empty: none follow."""

    def __post_init__(self) -> None:
        for name in ("num_rows", "rows_per_step", "micro_batch", "num_steps"):
            low = 0 if name == "num_steps" else 1  # a run of no steps only exports
            high = MAX_ROWS if name == "num_rows" else MAX_STEPS
            if not low <= getattr(self, name) <= high:
                raise ValueError(outside(name, getattr(self, name), low, high))
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        sizes, total = self.sizes or (self.num_rows,), self.total_rows
        if self.rows_per_step % self.micro_batch:
            yield (
                f"micro_batch={self.micro_batch} is illegal: rows_per_step={self.rows_per_step} "
                "is not a multiple of it. Set one of its divisors"
            )
        if self.weights:
            shares_and_block(self.weights)
            pairs = list(zip(sizes, self.weights, strict=False))
            whole = len(sizes) == len(self.weights) and sum(sizes) == self.num_rows
            if not whole or total is not None or any(weight and not n for n, weight in pairs):
                yield (
                    f"sizes={sizes} do not fit weights={self.weights}, num_rows={self.num_rows}, "
                    f"total_rows={total}: each source has one of both, and rows if it has a "
                    "share. Set sizes that sum to num_rows, and total_rows=None"
                )
        if self.windows and tuple(map(sum, self.windows)) != sizes:
            yield (
                f"windows={self.windows} are not those of {sizes} rows: each source has windows of "
                "all its rows. Set windows that sum to them"
            )
        if self.more and (len(self.windows) != len(self.follow) or total is not None):
            yield (
                f"follow={self.follow} is in conflict with windows={self.windows}, total_rows="
                f"{total}: each source has windows, and steps end the run. Set follow=()"
            )
        if self.packings and (sizes != (sum(self.packings),) or self.windows):
            yield (
                f"packings={self.packings} are not those of {sizes} rows with windows="
                f"{self.windows}: one source without windows has them. Set packings that sum to it"
            )
        if total is not None:
            steps, rows = self.stages[-1] if self.stages else (0, 0)
            most = steps + -(-(total - rows) // self.rows_per_step)
            if total < 1:
                yield outside("total_rows", total, 1, None)
            elif self.num_steps > most:
                yield (
                    f"num_steps={self.num_steps} is too many: total_rows={total} at rows_per_step="
                    f"{self.rows_per_step} last {most} steps. Set num_steps={most} or fewer, or "
                    "total_rows=None"
                )

    @classmethod
    def for_epochs(
        cls,
        num_rows: int,
        rows_per_step: int,
        micro_batch: int,
        seed: int,
        epochs: int,
        stages: tuple[tuple[int, int], ...] = (),
        packings: tuple[int, ...] = (),
    ) -> Order:
        """Train on every row exactly `epochs` times; the very last step may be short.

        Of several packings, each epoch takes every row of one of them once.
        """
        if epochs < 1:
            raise ValueError(outside("epochs", epochs, 1, None))
        turns, rest = divmod(epochs, max(1, len(packings)))
        total_rows = turns * num_rows + sum(packings[:rest])
        steps, rows = stages[-1] if stages else (0, 0)
        num_steps = steps + -(-(total_rows - rows) // max(rows_per_step, 1))
        sizes = (num_rows, rows_per_step, micro_batch, seed, num_steps, total_rows)
        return cls(*sizes, stages=stages, packings=packings)

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

        Each source has its own epochs: none of its rows repeats before all have come once. An epoch
        of the cursor is as many rows as all sources have together. Windows change which row of a
        source comes at a position, and never which source.
        """
        sizes, weights = tuple(sizes), tuple(weights)
        return cls(
            sum(sizes), rows_per_step, micro_batch, seed, num_steps, sizes=sizes, weights=weights
        )

    @property
    def more(self) -> bool:
        """Whether windows follow whose rows are not known."""
        return any(self.follow)

    @property
    def source_ends(self) -> tuple[int, ...]:
        """The row after the numbers of each source; empty unless there are several."""
        apart = (SOURCE_ROWS,) * len(self.sizes) if self.windows else self.sizes
        return tuple(itertools.accumulate(apart)) if len(self.sizes) > 1 else ()

    def needed(self, step: int) -> tuple[int, ...]:
        """Return how many rows of each source the steps up to this one take, repeated ones too."""
        rows = (step + 1) * self.rows_per_step
        return taken(self.weights, rows, self.seed) if self.weights else (rows,)

    def rows(self, step: int) -> Ints:
        """Return the row ids of a step's global batch, int64[R]; -1 fills a short last step."""
        first = self._first_position(step)
        return self._row_ids(np.arange(first, first + self.rows_per_step), self._limit(step))

    def num_micro_batches(self, world: int) -> int:
        """Return how many micro-batches each rank runs per step; it is the same for all ranks."""
        if world < 1:
            raise ValueError(outside("world", world, 1, None))
        return -(-self.rows_per_step // self.micro_batch // world)

    def micro_batches(self, step: int, rank: int, world: int) -> Ints:
        """Return the row ids that one rank takes in a step, int64[m, b]; -1 where there is none.

        Micro-batch i of the step goes to rank i mod world. A rank that has fewer than the others
        gets micro-batches of -1 at the end, so that all ranks join the same number of collectives.
        """
        places = self.places(rank, world)
        ids = np.full(places.shape, EMPTY, dtype=np.int64)
        there = places[places[:, 0] < self.rows_per_step]  # [m or m - 1, b]
        positions = self._first_position(step) + there.ravel()
        ids[: len(there)] = self._row_ids(positions, self._limit(step)).reshape(there.shape)
        return ids

    def places(self, rank: int, world: int) -> Ints:
        """Return the places within a step of the rows that one rank takes in it, int64 [m, b]."""
        count = self.num_micro_batches(world)
        if not 0 <= rank < world:
            raise ValueError(outside("rank", rank, 0, world - 1))
        index = rank + world * np.arange(count)  # [m], micro-batch within the step
        return index[:, None] * self.micro_batch + np.arange(self.micro_batch)

    def cursor(self, step: int, fingerprint: str) -> Cursor:
        """Return the position before `step`; num_steps gives the position after the run."""
        if not 0 <= step <= self.num_steps:
            raise ValueError(outside("step", step, 0, self.num_steps))
        position = self._position_before(step)
        epoch, row = (0, position) if self.windows else divmod(position, self.num_rows)
        return Cursor(epoch=epoch, row=row, seed=self.seed, fingerprint=fingerprint)

    def step_of(self, cursor: Cursor) -> int:
        """Return the step that comes next at a cursor of this order: the inverse of `cursor()`.

        It ignores the fingerprint: compare that first, and report the `differences()`.
        """
        at = f"cursor epoch={cursor.epoch} row={cursor.row}"
        if cursor.seed != self.seed:
            raise ValueError(
                f"seed={self.seed} is not that of the cursor: rows were consumed in the order of "
                f"seed={cursor.seed}, and another order would repeat some and lose others. "
                f"Set seed={cursor.seed}, or start a new run"
            )
        if cursor.epoch < 0 or not 0 <= cursor.row < (MAX_ROWS if self.windows else self.num_rows):
            raise ValueError(
                f"{at} is out of range: an epoch has num_rows={self.num_rows}. Set the data back "
                "to what it was, or start a new run"
            )
        position = cursor.epoch * self.num_rows + cursor.row
        ended = [(steps, rows) for steps, rows in self.stages if rows <= position]
        steps, rows = ended[-1] if ended else (0, 0)
        step = steps + -(-(position - rows) // self.rows_per_step)
        if step > self.num_steps:
            raise ValueError(
                f"{at} is past the end: {position} rows were consumed, and num_steps="
                f"{self.num_steps} at rows_per_step={self.rows_per_step} take "
                f"{self._position_before(self.num_steps)}. Set num_steps={step} or more"
            )
        if position != self._position_before(step):
            raise ValueError(
                f"{at} is not at a step boundary: {position} rows were consumed, not a multiple of "
                f"rows_per_step={self.rows_per_step}. Set rows_per_step back to what it was, or "
                "start a new run"
            )
        return step

    def _first_position(self, step: int) -> int:
        if not 0 <= step < self.num_steps:
            raise ValueError(outside("step", step, 0, self.num_steps - 1))
        return self._start(step)

    def _start(self, step: int) -> int:
        """Return the position at which a step starts, if the rows last so long."""
        ended = [(steps, rows) for steps, rows in self.stages if steps <= step]
        steps, rows = ended[-1] if ended else (0, 0)
        return rows + (step - steps) * self.rows_per_step

    def _limit(self, step: int) -> int | None:
        """Return the position at which the rows of a step end at the latest; None: nowhere."""
        return next((rows for steps, rows in self.stages if step < steps), self.total_rows)

    def _position_before(self, step: int) -> int:
        position = self._start(step)
        return position if self.total_rows is None else min(position, self.total_rows)

    def _row_ids(self, positions: Ints, limit: int | None) -> Ints:
        """Return the rows at global positions, ascending, EMPTY from `limit` on: [n] -> [n]."""
        if self.weights:
            return self._mixed_row_ids(positions)
        ids = np.full(len(positions), EMPTY, dtype=np.int64)
        if limit is not None:
            positions = positions[: np.searchsorted(positions, limit)]
        self._check_known(0, positions, self.num_rows)
        epochs, places = np.divmod(positions, self.num_rows)
        present, starts = np.unique(epochs, return_index=True)
        bounds = [*starts.tolist(), len(positions)]
        for epoch, low, high in zip(present.tolist(), bounds, bounds[1:], strict=False):
            ids[low:high] = self._epoch_rows(0, places[low:high], self.num_rows, epoch)
        return ids

    def _check_known(self, source: int, places: Ints, size: int) -> None:
        """Refuse places of a source, ascending, in windows that are not known."""
        if self.more and self.follow[source] and len(places) and places[-1] >= size:
            raise ValueError(
                f"position {places[-1]} has no row yet: the windows of source {source} that are "
                f"known have num_rows={size}. Wait for the next one"
            )

    def _epoch_rows(self, source: int, places: Ints, size: int, epoch: int) -> Ints:
        """Return the rows of a source at places of one of its epochs: [n] -> [n]."""
        if self.windows and epoch == 0:
            return windowed(places, self.windows[source], self.seed)
        if self.packings:
            return packed_in_turn(places, self.packings, self.seed, epoch)
        return permutation(places, size, self.seed, epoch)

    def _mixed_row_ids(self, positions: Ints) -> Ints:
        """Return the rows at global positions of a mixture: [n] -> [n]."""
        sources, items = mixture(self.weights, positions, self.seed)
        ids = np.empty(len(positions), dtype=np.int64)
        first = 0
        for source, size in enumerate(self.sizes):
            here = np.flatnonzero(sources == source)
            self._check_known(source, items[here], size)
            epochs = items[here] // max(size, 1)
            for epoch in np.unique(epochs).tolist():
                slots = here[epochs == epoch]
                places = items[slots] - epoch * size
                ids[slots] = first + self._epoch_rows(source, places, size, epoch)
            first += SOURCE_ROWS if self.windows else size
        return ids
