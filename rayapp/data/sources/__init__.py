"""Find training data and read it as raw records, piece by piece, in a fixed order.

    source = find("s3://bucket/chats/*.jsonl")
    for unit in units(source, eval_fraction):
        for piece in unit.pieces:
            for record in read_piece(source, piece): ...

A source is a sorted list of files (or a hub dataset). A piece is a part of one file that can be
read alone: a byte range cut at line ends (text, JSONL), a row group (Parquet), a shard (hub), or a
whole file that has no cuts (compressed, CSV, JSON arrays, Arrow, formats of the user's). A unit is
a run of pieces of about `UNIT_BYTES` or more: what one task packs. Pieces and units depend on the
files alone, so they are the same on every machine and attempt. A block is what is tokenised
together, once, whatever units its records are in.
"""

from __future__ import annotations

from rayapp.data.sources.cutting import units, windows
from rayapp.data.sources.finding import find
from rayapp.data.sources.parts import (
    Block,
    DataFile,
    DataSource,
    Piece,
    ReadUnit,
    Record,
    SourceError,
    printable,
)
from rayapp.data.sources.pieces import (
    RecordReader,
    content_key,
    drawn_of,
    file_of,
    is_eval,
    is_own,
    place_of,
    read_piece,
)

__all__ = [
    "Block",
    "DataFile",
    "DataSource",
    "Piece",
    "ReadUnit",
    "Record",
    "RecordReader",
    "SourceError",
    "content_key",
    "drawn_of",
    "file_of",
    "find",
    "is_eval",
    "is_own",
    "place_of",
    "printable",
    "read_piece",
    "units",
    "windows",
]
