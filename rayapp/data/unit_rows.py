"""Pack the documents of a unit into rows, and write them as the unit's shards."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import ExitStack
from typing import Any, BinaryIO

import numpy as np

from rayapp.data import sources
from rayapp.data.packing import Document, pack
from rayapp.data.prepared import MAX_EXAMPLES, SPLITS
from rayapp.data.recipe import RowRecipe
from rayapp.data.report import Counts, UnitSummary
from rayapp.data.rows import CHECKED, with_checksums
from rayapp.data.sections import TokenisedRecord
from rayapp.storage import Storage

WINDOW_TOKENS = 2**20  # of a stream that are packed at once


class UnitRows:
    """The documents of a unit, packed into the rows of its shards."""

    def __init__(self, recipe: RowRecipe, storage: Storage, index: int, stack: ExitStack) -> None:
        self.recipe, self.storage, self.index, self.stack = recipe, storage, index, stack
        self.held: dict[str, list[Document]] = {split: [] for split in SPLITS}
        self.num_tokens = 0
        self.counts: dict[str, list[Counts]] = {split: [] for split in SPLITS}
        self.shards: dict[str, str] = {}
        self.files: dict[str, BinaryIO] = {}
        self.hashes: list[bytes] = []

    def add(self, split: str, document: Document, in_windows: bool) -> None:
        """Add a document; a unit of any size, a stream, is packed in windows."""
        self.held[split].append(document)
        self.num_tokens += len(document.tokens)
        if in_windows and self.num_tokens >= WINDOW_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Pack and write what is held."""
        self.hashes.append(_hashes(self.held["train"]).tobytes())
        for split, documents in self.held.items():
            counts, data = _pack(documents, self.recipe)
            self.counts[split].append(counts)
            if data and split not in self.shards:
                self.shards[split] = name = f"{split}-{self.index:05d}{CHECKED}"
                self.files[split] = self.stack.enter_context(self.storage.open_write(name))
            if data:
                self.files[split].write(data)
            self.held[split] = []
        self.num_tokens = 0


class UnitAccount:
    """What the records of a unit were, and the blocks that they came from."""

    def __init__(self, source: sources.DataSource) -> None:
        self.source, self.records = source, 0
        self.bad: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.blocks: list[str] = []

    def add(self, piece: sources.Piece, record: TokenisedRecord) -> None:
        """Count a record of a piece; name the place of the first with a problem."""
        self.records += 1
        if record.problem is None:
            return
        if record.document is not None:
            self.notes[record.problem] += 1
            return
        self.bad[record.problem] += 1
        if record.problem not in self.examples and len(self.examples) < MAX_EXAMPLES:
            place = sources.place_of(self.source, sources.file_of(self.source, piece), record.place)
            self.examples[record.problem] = place

    def summary(self, counts: dict[str, Counts], shards: dict[str, str]) -> UnitSummary:
        """Return what is written of the unit."""
        return UnitSummary(
            counts=counts,
            shards=shards,
            bad=dict(self.bad),
            examples=[(place, why) for why, place in self.examples.items()],
            records=self.records,
            notes=dict(self.notes),
            blocks=self.blocks,
        )


def _hashes(documents: list[Document]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a 64-bit hash of each document's tokens: [d]."""
    digests = (hashlib.blake2b(d.tokens.tobytes(), digest_size=8).digest() for d in documents)
    return np.frombuffer(b"".join(digests), np.uint64)


def _pack(documents: list[Document], recipe: RowRecipe) -> tuple[Counts, bytes]:
    packed = pack(
        documents,
        recipe.seq_len,
        pad_id=recipe.pad_id,
        best_fit=recipe.pack,
        truncate=recipe.truncate,
    )
    lengths = Counter(f"2^{len(d.tokens).bit_length() - 1}" for d in documents if len(d.tokens))
    counts = Counts(
        documents=packed.num_documents,
        empty=packed.num_empty,
        split=packed.num_split,
        truncated=packed.num_truncated,
        cut_tokens=packed.cut_tokens,
        tokens=packed.num_tokens,
        target_tokens=packed.num_target_tokens,
        target_bytes=int(packed.rows["target_bytes"].sum(dtype=np.int64)),
        rows=len(packed.rows),
        lengths=dict(lengths),
    )
    return counts, with_checksums(packed.rows).tobytes()
