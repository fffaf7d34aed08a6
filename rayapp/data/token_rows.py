"""Read prepared rows by number, and cut them into the steps of one rank.

    rows = prepared.rows("train")
    for batch in local_steps(rows, order, rank=0, world=2, first_step=0): ...

A prepared data set is a list of shard files of fixed-size records (`packing.row_dtype`): row n is
record n - first of the shard whose rows start at `first`. Shards are numbered consecutively, unless
`firsts` says otherwise. A row is contiguous: it is read from a memory map, or by a ranged GET. A
record is followed by the xxh3 of its bytes and its place, which is checked at each read. Shards
that the version before wrote lack PLACED in their names, and their checksums are of bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from rayapp.data.packing import (
    IGNORE,
    MAX_SEGMENTS,
    attended_pairs,
    boundaries,
    position_ids,
    row_dtype,
)
from rayapp.order import EMPTY, Order, StepCounts, row_digest
from rayapp.storage import Storage, StorageError

READERS = 16  # concurrent ranged GETs
PLACED = ".placed.rows"  # the end of the names of shards
MOST_TRAINED = 0.9  # share of labels above which choosing them costs more than it saves
CHECKSUM = np.dtype("<u8")


def stored_bytes(seq_len: int, columns: int = 0) -> int:
    """Return the bytes of a record in a shard."""
    return row_dtype(seq_len, columns).itemsize + CHECKSUM.itemsize


def seed_of(url: str) -> int:
    """Return what the checksums in a file begin with: a number of its folder and name.

    The parts of a file have this and the following seeds, so that none is taken for another.
    """
    return xxh3_64_intdigest("/".join(url.split("/")[-2:]).encode())


def checksum_of(data: Any, seed: int, number: int = 0) -> int:
    """Return the checksum of a part of a file, by the seed of the file and the part's number."""
    return xxh3_64_intdigest(data, (seed + number) % 2**64)


def with_checksums(rows: np.ndarray[Any, Any], url: str, first: int) -> np.ndarray[Any, Any]:
    """Return rows [n] of `row_dtype` as a shard at a URL has them from row `first` on.

    Shapes: uint8 [n, stored_bytes].
    """
    plain = rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
    seed = seed_of(url)
    checksums = [checksum_of(row.data, seed, number) for number, row in enumerate(plain, first)]
    return np.concatenate([plain, np.array(checksums, CHECKSUM)[:, None].view(np.uint8)], axis=1)


@dataclass(frozen=True)
class StepRows:
    """One rank's rows of one step: m micro-batches of b rows of S tokens."""

    step: int
    input_ids: np.ndarray[Any, Any]  # int32 [m, b, S]
    labels: np.ndarray[Any, Any]  # int32 [m, b, S], IGNORE where a position bears no loss
    segments: np.ndarray[Any, Any]  # uint16 [m, b, S], 1, 2, ... by document, 0 on padding
    target_bytes: np.ndarray[Any, Any]  # int64 [m, b], UTF-8 bytes of the loss-bearing labels
    positions: np.ndarray[Any, Any]  # int64 [m, b], place in the step, EMPTY without a row
    rows: np.ndarray[Any, Any]  # int64 [m, b], number in the data set, EMPTY without a row
    source_ends: tuple[int, ...] = ()
    """Of several sources: behind each, the number of rows up to there; else empty"""
    ends_block: bool = False
    """Whether the rows of the next step come in another block; the same on all ranks"""
    values: np.ndarray[Any, Any] | None = None
    """float32 [m, b, columns, S]: the numbers of each position's record; None without columns"""
    group: int = 0
    """Of preferences: the documents in turn that divide the loss as one, 2 of pairs; else 0"""
    reference: np.ndarray[Any, Any] | None = None
    """float32 [m, b, documents]: of preferences, the reference's log-probability of each answer"""
    kl: float | None = None
    """Of kto: the divergence from the reference, in nats"""

    def weights(self) -> np.ndarray[Any, Any]:
        """Return what divides the loss of each row, int64 [m, b]: its labels, or its groups."""
        if self.group:
            return self.segments.max(-1, initial=0).astype(np.int64) // self.group
        return (self.labels != IGNORE).sum(-1)

    def counts(self) -> StepCounts:
        """Return the counts of this rank's rows."""
        weights = self.weights()
        return StepCounts(
            weight=int(weights.sum()),
            tokens=int((self.segments != 0).sum()),
            targets=int((self.labels != IGNORE).sum()),
            attended_pairs=attended_pairs(self.segments),
            target_bytes=int(self.target_bytes.sum()),
            weight_by_source=tuple(int(weights[mine].sum()) for mine in self.of_source()),
        )

    def of_source(self) -> np.ndarray[Any, Any]:
        """Return whether each row is of each source, bool [sources, m, b].

        A place without a row is of the first.
        """
        source = np.searchsorted(self.source_ends, self.rows, side="right")  # [m, b]
        return source == np.arange(len(self.source_ends))[:, None, None]

    def digest(self) -> int:
        """Return the sum of the rows' digests, which include their positions in the step."""
        return sum(
            row_digest(int(position), self.input_ids[i, j])
            for (i, j), position in np.ndenumerate(self.positions)
            if position != EMPTY
        )

    def alone(self, place: int) -> StepRows:
        """Return the first (0) or second (1) documents of pairs, in rows some eighths shorter."""
        keep = (self.segments > 0) & (self.segments % 2 != place)  # [m, b, S]
        size = self.segments.shape[-1]
        eighth = -(-size // 8)
        width = min(size, -(-int(keep.sum(-1).max(initial=1)) // eighth) * eighth)
        places = np.argsort(~keep, axis=-1, kind="stable")[..., :width]
        there = np.take_along_axis(keep, places, -1)

        def taken(array: np.ndarray[Any, Any], empty: int) -> np.ndarray[Any, Any]:
            return np.where(there, np.take_along_axis(array, places, -1), empty)

        values = self.values
        if values is not None:
            values = np.take_along_axis(values, places[:, :, None], -1)
        return replace(
            self,
            input_ids=taken(self.input_ids, 0),
            labels=taken(self.labels, IGNORE),
            segments=taken((self.segments + 1) // 2, 0),
            values=values,
            group=1,
            reference=None if self.reference is None else self.reference[..., place::2],
        )

    def inputs(self, i: int, rows: slice = slice(None)) -> dict[str, Any]:
        """Return what the model takes of a micro-batch, or of some of its rows.

        Positions and boundaries are left out if no row holds more than one document: plain causal
        attention keeps rows apart in every model, and no token sees the padding after its row's.
        `present` tells tokens from padding, if there are both; `of_source` tells the rows of each
        source, bool [sources, b], if there are several; `trained` are the places of the labels that
        bear loss, int64 [labels], unless nearly all do and there are no groups; `values` are
        float32 [columns, b, S]. Of preferences, `answers` are the loss-bearing labels of each
        document in turn, int64 [documents], and `reference` are their log-probabilities by the
        reference, float32 [documents], where these are known.
        """
        segments = self.segments[i][rows]
        found: dict[str, Any] = {
            "input_ids": self.input_ids[i][rows].astype(np.int64),
            "labels": self.labels[i][rows].astype(np.int64),
        }
        if not ((segments == segments[:, :1]) | (segments == 0)).all():
            found["position_ids"] = position_ids(segments)
            found["boundaries"] = boundaries(segments)
            found["longest"] = int(np.diff(found["boundaries"]).max())
        present = segments != 0
        if present.any() and not present.all():
            found["present"] = present
        trained = self.labels[i][rows] != IGNORE
        if self.group or trained.mean() <= MOST_TRAINED:
            found["trained"] = np.flatnonzero(trained)
        if self.source_ends:
            found["of_source"] = self.of_source()[:, i][:, rows]
        if self.values is not None:
            found["values"] = self.values[i][rows].swapaxes(0, 1).copy()
        if self.kl is not None:
            found["kl"] = self.kl
        if self.group:
            row = np.arange(len(segments))[:, None] * (MAX_SEGMENTS + 1)
            found["answers"] = np.unique((row + segments)[trained], return_counts=True)[1]
        if self.reference is not None:
            some = self.reference[i][rows]  # [b, documents]
            held = np.arange(some.shape[-1]) < segments.max(-1, initial=0)[:, None]
            found["reference"] = some[held]
        return found


class TokenRows:
    """The rows of one split, by number."""

    def __init__(
        self,
        storage: Storage,
        shards: Sequence[tuple[str, int]],
        seq_len: int,
        firsts: Sequence[int] | None = None,
        columns: int = 0,
        pairs: bool = False,
    ) -> None:
        """`shards` are (name, rows); `firsts` is the number of the first row of each, ascending.

        With `pairs`, the documents of a row are pairs in turn.
        """
        self.pairs = pairs
        self.storage, self.shards = storage, list(shards)
        self.seq_len, self.columns = seq_len, columns
        self.dtype, self._size = row_dtype(seq_len, columns), stored_bytes(seq_len, columns)
        counts = np.array([count for _, count in self.shards], np.int64)
        self._len = int(counts.sum())
        self._firsts = np.cumsum(counts) - counts if firsts is None else np.array(firsts, np.int64)
        self._maps: dict[str, np.ndarray[Any, Any]] = {}
        self._seeds = {name: seed_of(f"{storage.url}/{name}") for name, _ in self.shards}
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return self._len

    def numbers(self, places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the numbers of rows at places in [0, len): int64 [n] -> [n]."""
        counts = np.array([count for _, count in self.shards], np.int64)
        ends = np.cumsum(counts)
        shard = np.searchsorted(ends, places, side="right")
        return self._firsts[shard] + places - (ends - counts)[shard]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": {}, "_pool": None}

    def read(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return records [n] of `row_dtype` for row numbers int64 [n]; EMPTY gives an empty row.

        Raises:
            StorageError: a row is not what was written.
        """
        records = np.zeros(len(ids), self.dtype)
        records["labels"] = IGNORE
        present = np.flatnonzero(ids != EMPTY)
        shard_of = np.searchsorted(self._firsts, ids[present], side="right") - 1
        numbers = ids[present] - self._firsts[shard_of]
        places = [
            (self.shards[shard][0], number)
            for shard, number in zip(shard_of.tolist(), numbers.tolist(), strict=True)
        ]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS)
        local = self.storage.local_path() is not None
        read = map(self._read, places) if local else self._pool.map(self._read, places)
        for slot, record in zip(present.tolist(), read, strict=True):
            records[slot] = record
        return records

    def _read(self, place: tuple[str, int]) -> Any:
        name, number = place
        path = self.storage.local_path(name)
        if path is None:
            data = self.storage.read(name, number * self._size, self._size)
            return self._checked(name, number, np.frombuffer(data, np.uint8))
        if name not in self._maps:
            self._maps[name] = np.memmap(path, np.uint8, mode="r").reshape(-1, self._size)
        return self._checked(name, number, self._maps[name][number])

    def _checked(self, name: str, index: int, stored: np.ndarray[Any, Any]) -> Any:
        """Return the record in stored bytes, uint8 [stored_bytes]."""
        plain, checksum = np.split(stored, [self.dtype.itemsize])
        place = (self._seeds[name], index) if name.endswith(PLACED) else (0, 0)
        if checksum_of(plain.data, *place) != checksum.view(CHECKSUM)[0]:
            raise StorageError(
                "read",
                f"{self.storage.url}/{name}",
                f"row {index} has other bytes than were written, or belongs elsewhere",
                "Delete that file: the run's next command makes it again",
            )
        return plain.view(self.dtype)[0]


def step_rows(rows: TokenRows, order: Order, step: int, rank: int, world: int) -> StepRows:
    """Read the rows that `rank` of `world` takes in a step."""
    ids = order.micro_batches(step, rank, world)  # [m, b]
    positions = np.where(ids == EMPTY, EMPTY, order.places(rank, world))
    return _batch(rows, step, ids, positions, order.source_ends)


def _batch(
    rows: TokenRows,
    step: int,
    ids: np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
    source_ends: tuple[int, ...],
) -> StepRows:
    """Read a batch of rows; shapes: ids and positions int64 [m, b]."""
    records, shape = rows.read(ids.ravel()), ids.shape
    return StepRows(
        step,
        records["input_ids"].reshape(*shape, -1),
        records["labels"].reshape(*shape, -1),
        records["segments"].reshape(*shape, -1),
        records["target_bytes"].astype(np.int64).reshape(shape),
        positions,
        ids,
        source_ends,
        values=records["values"].reshape(*shape, rows.columns, -1) if rows.columns else None,
        group=2 * rows.pairs,
    )


def local_steps(
    rows: TokenRows, order: Order, rank: int, world: int, first_step: int
) -> Iterator[StepRows]:
    """Yield the rest of a run's steps for one rank, read in this process, without Ray."""
    for step in range(first_step, order.num_steps):
        yield step_rows(rows, order, step, rank, world)


def sequential_batches(
    rows: TokenRows,
    micro_batch: int,
    rank: int,
    world: int,
    source_ends: tuple[int, ...] = (),
    among: range | None = None,
) -> Iterator[StepRows]:
    """Yield every row once, in order, one micro-batch at a time; all ranks yield equally often.

    `source_ends` is as in StepRows; `among` are the numbers of the rows, all by default.
    """
    among = range(len(rows)) if among is None else among
    count = -(-len(among) // micro_batch)
    for first in range(0, count, world):
        ids = among.start + (first + rank) * micro_batch + np.arange(micro_batch)
        ids = np.where(ids < among.stop, ids, EMPTY)
        yield _batch(rows, first // world, ids[None], ids[None], source_ends)
