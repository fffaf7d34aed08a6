"""The tokens of a block as they are stored: sections of records, each with a checksum.

    for section in read(file):
        for record in section.records(): ...

A section holds consecutive records of a block: their pieces and places, what they drew for the
held-out split, and the tokens of those that are documents. What is made of tokens afterwards, rows
and splits, is not in it. A section is a frame, whose header has the length and the xxh3 of the
rest, of the block's place and of the section's number; the rest is compressed with Zstandard, to
about 2 bytes a token. The last section is followed by the header of an empty one.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from rayapp.data.packing import Document
from rayapp.data.token_rows import checksum_of

SECTION_TOKENS, SECTION_RECORDS = 2**20, 2**16  # a section ends after either
NO_DOCUMENT = 2**32 - 1  # as the length of a record
HEADER = struct.Struct("<4sIQ")  # MAGIC, bytes that follow, their xxh3
MAGIC = b"rtk3"
SIZE = struct.Struct("<I")
CODEC = "zstd"
WIDE = {  # types of a section's arrays
    "pieces": np.uint32,
    "places": np.int64,
    "drawn": np.uint64,
    "said": np.uint32,
    "lengths": np.uint32,
    "tokens": np.int32,
    "num_bytes": np.uint16,
}

Array = np.ndarray[Any, Any]


class DamagedTokens(ValueError):
    """A section is cut off, or its bytes are not those that were written."""


@dataclass(frozen=True, eq=False)
class TokenisedRecord:
    """A record of the user's: a document, perhaps with a note, or the reason why it is none."""

    piece: int
    """Number of its piece in the block."""
    place: int
    document: Document | None
    problem: str | None
    """Why the record is no document; or, beside a document, what is left out of it."""
    drawn: int
    """What its content drew in [0, 2^64); 0 if it is no document."""
    more: bool = False
    """The next record is another document of the same record of the user's."""
    values: tuple[float, ...] = ()
    """The numbers in the columns that a loss of the user's names."""


@dataclass(frozen=True, eq=False)
class TokenSection:
    """Consecutive records of a block: r records, t tokens."""

    pieces: Array  # uint32 [r]
    places: Array  # int64 [r]
    drawn: Array  # uint64 [r]
    said: Array  # uint32 [r]: 0, or 1 + the number of a problem in `texts`
    lengths: Array  # uint32 [r]: tokens, or NO_DOCUMENT
    tokens: Array  # int32 [t]
    loss: Array  # bool [t]
    num_bytes: Array  # uint16 [t]
    texts: tuple[str, ...]
    more: tuple[int, ...] = ()
    """The records that the next one is another document of, by their numbers in the section."""
    values: tuple[tuple[float, ...], ...] = ()
    """Of each record, its numbers in the columns; empty if there are no columns."""

    def records(self) -> Iterator[TokenisedRecord]:
        """Yield the records in order; their arrays are views."""
        last, more = 0, set(self.more)
        columns = (self.pieces, self.places, self.drawn, self.said, self.lengths)
        rows = zip(*(c.tolist() for c in columns), strict=True)
        for number, (piece, place, drawn, said, length) in enumerate(rows):
            document = None
            if length != NO_DOCUMENT:
                here = slice(last, last + length)
                document = Document(self.tokens[here], self.loss[here], self.num_bytes[here])
                last += length
            problem = self.texts[said - 1] if said else None
            values = self.values[number] if self.values else ()
            another = number in more
            yield TokenisedRecord(piece, place, document, problem, drawn, another, values)


def sections(records: Iterable[TokenisedRecord]) -> Iterator[TokenSection]:
    """Gather the records of a block into sections."""
    held: list[TokenisedRecord] = []
    size = 0
    for record in records:
        held.append(record)
        size += len(record.document.tokens) if record.document else 0
        if size >= SECTION_TOKENS or len(held) == SECTION_RECORDS:
            yield _section(held)
            held, size = [], 0
    if held:
        yield _section(held)


def _section(records: list[TokenisedRecord]) -> TokenSection:
    texts = {r.problem: None for r in records if r.problem is not None}
    numbers = {text: number for number, text in enumerate(texts, 1)}
    documents = [record.document for record in records if record.document is not None]
    lengths = [NO_DOCUMENT if r.document is None else len(r.document.tokens) for r in records]
    return TokenSection(
        np.array([record.piece for record in records], np.uint32),
        np.array([record.place for record in records], np.int64),
        np.array([record.drawn for record in records], np.uint64),
        np.array([numbers[r.problem] if r.problem else 0 for r in records], np.uint32),
        np.array(lengths, np.uint32),
        _joined([d.tokens for d in documents], np.int32),
        _joined([d.loss for d in documents], np.bool_),
        _joined([d.num_bytes for d in documents], np.uint16),
        tuple(texts),
        tuple(number for number, record in enumerate(records) if record.more),
        tuple(r.values for r in records) if any(r.values for r in records) else (),
    )


def _joined(columns: list[Array], dtype: Any) -> Array:
    return np.concatenate([np.empty(0, dtype), *columns], dtype=dtype, casting="unsafe")


def end_of(seed: int, count: int) -> bytes:
    """Return what follows the last section of a block with so many."""
    return HEADER.pack(MAGIC, 0, checksum_of(b"", seed, count))


def encoded(section: TokenSection, seed: int, number: int) -> list[Any]:
    """Return a section as it is stored, in parts: each array in the narrowest type that holds it.

    The parts are bytes or buffers; `seed` is that of the block's file.
    """
    base = int(section.places.min())
    columns: dict[str, Array] = {name: getattr(section, name) for name in WIDE}
    columns["places"] = section.places - base
    types = {name: _narrow(column) for name, column in columns.items()}
    sizes = [(name, types[name].str, len(column)) for name, column in columns.items()]
    head = {"base": base, "texts": section.texts, "arrays": sizes}
    head |= {"more": section.more} if section.more else {}
    head |= {"values": section.values} if section.values else {}
    text = json.dumps(head).encode()
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, CODEC) as packing:  # one array after the other
        packing.write(SIZE.pack(len(text)) + text)
        for name, column in columns.items():
            packing.write(column.astype(types[name]).view(np.uint8))
        packing.write(np.packbits(section.loss))
    packed = out.getvalue()
    return [HEADER.pack(MAGIC, packed.size, checksum_of(packed, seed, number)), packed]


def _narrow(column: Array) -> np.dtype[Any]:
    """Return the narrowest little-endian type that holds unsigned numbers."""
    return np.min_scalar_type(int(column.max(initial=0))).newbyteorder("<")


def read(file: BinaryIO, seed: int) -> Iterator[TokenSection]:
    """Yield the sections of a block's file.

    Raises:
        DamagedTokens: it is cut off, or has other bytes than were written there.
    """
    for number in itertools.count():
        header = file.read(HEADER.size)
        if header == end_of(seed, number):
            return
        if len(header) < HEADER.size:
            raise DamagedTokens("is cut off")
        magic, size, checksum = HEADER.unpack(header)
        packed = file.read(size) if magic == MAGIC else b""
        if not packed or checksum_of(packed, seed, number) != checksum:
            raise DamagedTokens("has other bytes than were written")
        yield _decoded(pa.CompressedInputStream(pa.BufferReader(packed), CODEC))


def _decoded(packed: Any) -> TokenSection:
    (size,) = SIZE.unpack(packed.read(SIZE.size))
    head = json.loads(packed.read(size))
    if head.get("going_on"):
        raise DamagedTokens("has documents in parts, as an earlier version wrote long ones")
    arrays = {}
    for name, dtype, length in head["arrays"]:
        stored = packed.read(length * np.dtype(dtype).itemsize)
        arrays[name] = np.frombuffer(stored, dtype).astype(WIDE[name])
    count = len(arrays["tokens"])
    loss = np.frombuffer(packed.read(), np.uint8)
    return TokenSection(
        loss=np.unpackbits(loss, count=count).view(np.bool_),
        texts=tuple(head["texts"]),
        more=tuple(head.get("more", ())),
        values=tuple(map(tuple, head.get("values", ()))),
        **{**arrays, "places": arrays["places"] + head["base"]},
    )
