"""Pack the documents of a unit into rows, and write them as the unit's shards."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections import Counter
from contextlib import ExitStack, closing
from typing import IO, Any, BinaryIO

import numpy as np

from rayapp.data import sources
from rayapp.data.kinds import are_labelled, are_pairs
from rayapp.data.packing import (
    IGNORE,
    Document,
    Slices,
    crossed,
    filled,
    in_groups,
    joined,
    lay_out,
    row_dtype,
)
from rayapp.data.prepared import MAX_EXAMPLES, SPLITS
from rayapp.data.recipe import RowRecipe
from rayapp.data.report import Counts, UnitSummary, summed
from rayapp.data.token_rows import PLACED, with_checksums
from rayapp.data.token_sections import TokenisedRecord
from rayapp.order import shuffled
from rayapp.storage import Storage

BATCH_TOKENS = 2**20  # of a stream that are packed at once
GROUP = 1024  # documents that a later packing packs together
BATCH_BYTES = 4 * 2**20  # of rows that are made and written at once
SPOOL_TOKENS = 2**20  # most that are held in memory, at 7 bytes each
TOO_LONG = (
    "has answers (of kto: its own and that of another record) that do not fit into a row of {} "
    "tokens together. Raise data.seq_len, or cut them with data.truncate"
)
CUT = "has a prompt, or answers, that are cut to fit into a row together"
TYPES: list[np.dtype[Any]] = [np.dtype(t) for t in (np.int32, np.bool_, np.uint16)]  # a Document's


class Spool:
    """Documents laid end to end: what `packing.filled` takes its slices from."""

    def __init__(self) -> None:
        self.lengths, self.values, self.size = array("q"), array("f"), 0
        self.edges = array("q")
        self.stack = ExitStack()
        limits = [SPOOL_TOKENS * dtype.itemsize for dtype in TYPES]
        spooled = map(tempfile.SpooledTemporaryFile, limits)
        self.files = [self.stack.enter_context(file) for file in spooled]

    def add(self, document: Document, values: tuple[float, ...] = (), edge: int = 0) -> None:
        """Add a copy of a document at the end; `edge` is as in a `Pair`."""
        self.lengths.append(len(document.tokens))
        self.edges.append(edge)
        self.values.extend(values)
        self.size += len(document.tokens)
        columns = (document.tokens, document.loss, document.num_bytes)
        for file, column, dtype in zip(self.files, columns, TYPES, strict=True):
            file.write(np.ascontiguousarray(column, dtype).data)

    def arrays(self) -> tuple[Slices, Slices, Slices]:
        """Return the tokens, whether they bear loss, and their bytes; nothing is added any more."""
        tokens, loss, num_bytes = map(FileSlices, self.files, TYPES)
        if self.size > SPOOL_TOKENS:
            return tokens, loss, num_bytes
        return tokens[: self.size], loss[: self.size], num_bytes[: self.size]  # in memory

    def close(self) -> None:
        """Remove the temporary files; slices of them can be taken no more."""
        self.stack.close()


class FileSlices:
    """An array in a file, read slice by slice: a memory map would count as memory of the task."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any]) -> None:
        self.file, self.dtype = file, dtype

    def __getitem__(self, index: slice, /) -> np.ndarray[Any, Any]:
        first, last = index.start or 0, index.stop
        self.file.seek(first * self.dtype.itemsize)
        return np.frombuffer(self.file.read((last - first) * self.dtype.itemsize), self.dtype)


class UnitRows:
    """The documents of a unit, packed into the rows of its shards, and what its records were."""

    def __init__(
        self,
        recipe: RowRecipe,
        source: sources.DataSource,
        storage: Storage,
        index: int,
        stack: ExitStack,
    ) -> None:
        self.recipe, self.source, self.storage, self.index = recipe, source, storage, index
        self.stack, self.records = stack, 0
        self.bad, self.notes = Counter[str](), Counter[str]()
        self.examples: dict[str, str] = {}
        self.blocks: list[str] = []
        self.held = {split: stack.enter_context(closing(Spool())) for split in SPLITS}
        self.counts: dict[str, list[Counts]] = {split: [] for split in SPLITS}
        self.shards: dict[str, str] = {}
        self.files: dict[str, BinaryIO] = {}
        self.hashes = bytearray()
        """A 64-bit hash of each training document's tokens."""
        self.chosen: Document | None = None
        """The first document of a pair whose second is still to come."""
        self.first: dict[str, tuple[sources.Piece, TokenisedRecord]] = {}
        """Of labelled answers in each split: the first, which is crossed with the last."""
        self.last: dict[str, Document] = {}

    def add(self, split: str, piece: sources.Piece, record: TokenisedRecord) -> None:
        """Add a record's document; a stream or a window, of any size, is packed in parts."""
        document = record.document
        assert document is not None
        if are_labelled(self.recipe.kind):
            if split in self.last:
                other = crossed(document, self.last[split])
                self._hold_pair(split, piece, record, document, other)
            else:
                self.first[split] = piece, record
            self.last[split] = document
        elif not are_pairs(self.recipe.kind):
            self._hold(split, record, document)
        elif self.chosen is None:
            self.chosen = document
        else:
            self._hold_pair(split, piece, record, self.chosen, document)
            self.chosen = None
        window_bytes = self.recipe.window_bytes
        most = 2 * window_bytes if window_bytes else BATCH_TOKENS
        in_parts = piece.is_stream or window_bytes is not None
        if in_parts and sum(spool.size for spool in self.held.values()) >= most:
            self.flush()

    def _hold_pair(
        self,
        split: str,
        piece: sources.Piece,
        record: TokenisedRecord,
        chosen: Document,
        rejected: Document,
    ) -> None:
        pair = joined(chosen, rejected, self.recipe.seq_len, self.recipe.truncate)
        if pair is None:
            self._refuse(TOO_LONG.format(self.recipe.seq_len), piece, record)
            return
        self.notes[CUT] += bool(pair.cut)
        self._hold(split, record, pair.document, pair.edge)

    def _hold(self, split: str, record: TokenisedRecord, document: Document, edge: int = 0) -> None:
        self.held[split].add(document, record.values, edge)
        if split == "train":
            tokens = np.ascontiguousarray(document.tokens).data
            self.hashes += hashlib.blake2b(tokens, digest_size=8).digest()

    def count(self, piece: sources.Piece, record: TokenisedRecord) -> None:
        """Count a record of a piece; name the place of the first with a problem."""
        if record.more:
            return
        self.records += 1
        if record.problem is None:
            return
        if record.document is not None:
            self.notes[record.problem] += 1
            return
        self._refuse(record.problem, piece, record)

    def _refuse(self, problem: str, piece: sources.Piece, record: TokenisedRecord) -> None:
        self.bad[problem] += 1
        if problem not in self.examples and len(self.examples) < MAX_EXAMPLES:
            place = sources.place_of(self.source, sources.file_of(self.source, piece), record.place)
            self.examples[problem] = place

    def summary(self) -> UnitSummary:
        """Pack and write what is held; return what is written of the unit."""
        self.flush()
        return UnitSummary(
            counts={split: summed(counts) for split, counts in self.counts.items()},
            shards=self.shards,
            bad=dict(self.bad),
            examples=[(place, why) for why, place in self.examples.items()],
            records=self.records,
            notes=dict(+self.notes),
            blocks=self.blocks,
        )

    def flush(self) -> None:
        for split, (piece, record) in self.first.items():
            assert record.document is not None
            other = crossed(record.document, self.last.pop(split))
            self._hold_pair(split, piece, record, record.document, other)
        self.first.clear()
        for split, spool in self.held.items():
            self.counts[split].append(self._write(split, spool))
            spool.close()
            self.held[split] = self.stack.enter_context(closing(Spool()))

    def _write(self, split: str, spool: Spool) -> Counts:
        """Pack a spool's documents, and write the rows in batches."""
        recipe, lengths = self.recipe, np.array(spool.lengths, np.int64)
        firsts, columns = np.cumsum(lengths) - lengths, len(recipe.values)
        values = np.array(spool.values, np.float32).reshape(len(lengths), columns)
        edges = np.array(spool.edges, np.int64)
        if recipe.window_bytes is not None or recipe.packing:
            order = shuffled(len(lengths), self.index, recipe.packing)
            lengths, firsts, values = lengths[order], firsts[order], values[order]
            edges = edges[order]
        # Of documents of different lengths, best fit makes the same rows in any order.
        groups = max(1, len(lengths) // GROUP) if recipe.packing else 1
        layout = in_groups(
            [
                lay_out(
                    lengths[group],
                    recipe.seq_len,
                    best_fit=recipe.pack,
                    truncate=recipe.truncate,
                    firsts=firsts[group],
                    values=values[group],
                    edges=edges[group] if are_pairs(recipe.kind) else None,
                )
                for group in np.array_split(np.arange(len(lengths)), groups)
            ]
        )
        if layout.num_rows and split not in self.shards:
            self.shards[split] = name = f"{split}-{self.index:05d}{PLACED}"
            self.files[split] = self.stack.enter_context(self.storage.open_write(name))
        arrays, before = spool.arrays(), sum(counts["rows"] for counts in self.counts[split])
        target_tokens = target_bytes = 0
        size = max(1, BATCH_BYTES // row_dtype(recipe.seq_len, columns).itemsize)
        for first in range(0, layout.num_rows, size):
            last = min(first + size, layout.num_rows)
            rows = filled(layout, first, last, *arrays, recipe.pad_id)
            url = f"{self.storage.url}/{self.shards[split]}"
            self.files[split].write(with_checksums(rows, url, before + first).data)
            target_tokens += int(np.count_nonzero(rows["labels"] != IGNORE))
            target_bytes += int(rows["target_bytes"].sum(dtype=np.int64))
        sizes = Counter(f"2^{length.bit_length() - 1}" for length in lengths.tolist() if length)
        return Counts(
            documents=layout.num_documents,
            empty=layout.num_empty,
            split=layout.num_split,
            truncated=layout.num_truncated,
            cut_tokens=layout.cut_tokens,
            tokens=layout.num_tokens,
            target_tokens=target_tokens,
            target_bytes=target_bytes,
            rows=layout.num_rows,
            lengths=dict(sizes),
        )
