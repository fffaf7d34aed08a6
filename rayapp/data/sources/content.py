"""Name what a block holds by its content, so that its tokens are found again under any name.

On S3 an etag names the content. On a disk, size and time do not: what is to be read is hashed,
at some 1 GB/s, and then read in the version that was hashed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from rayapp.data.sources.reading import line_bytes, open_parquet
from rayapp.data.sources.records import DataSource, Piece, opened, unreadable
from rayapp.storage import Readable, StorageError

CHUNK = 4 * 2**20


def content_key(source: DataSource, pieces: tuple[Piece, ...]) -> tuple[str, tuple[Piece, ...]]:
    """Return 32 hex digits of what pieces hold, and the pieces bound to the versions seen.

    Raises:
        SourceError: a file has gone since it was listed, or is broken.
    """
    digest = blake2b(digest_size=16)
    bound = []
    for piece in pieces:
        try:
            version, piece = _version(source, piece)
        except StorageError:
            raise
        except Exception as error:  # pyarrow raises a family of unrelated types
            raise unreadable(source, piece.file, error) from error
        digest.update(json.dumps(version).encode())
        bound.append(piece)
    return digest.hexdigest(), tuple(bound)


def _version(source: DataSource, piece: Piece) -> tuple[tuple[Any, ...], Piece]:
    """Return what names the content of a piece, and the piece bound to it."""
    if source.format == "hub":
        return (source.root, source.version, piece.start), piece
    if piece.etag is not None:
        return (piece.etag, piece.size, piece.start, piece.end, piece.is_stream), piece
    storage = opened(source.root)
    entry = storage.stat(piece.file)
    if entry is None:
        raise FileNotFoundError("it has gone since it was listed")
    piece = replace(piece, etag=entry.etag)
    if piece.is_stream:
        return ("file", _hashed(storage, piece, [(0, entry.size)])), piece
    if source.format == "parquet":
        return ("rows", *_row_group(source, piece)), piece
    start, data = line_bytes(source, piece)
    return ("lines", start, blake2b(data, digest_size=16).hexdigest()), piece


def _row_group(source: DataSource, piece: Piece) -> tuple[Any, ...]:
    """Return the first row of a row group, how it is written, and the hash of its bytes."""
    parquet = open_parquet(source, piece)
    # For damaged columns this raises an error; their metadata alone would end the process.
    next(parquet.iter_batches(1, [piece.start]), None)
    first = sum(parquet.metadata.row_group(i).num_rows for i in range(piece.start))
    digest = blake2b(parquet.schema_arrow.serialize().to_pybytes(), digest_size=16)
    ranges = []
    group = parquet.metadata.row_group(piece.start)
    for number in range(group.num_columns):
        column = group.column(number)
        start = column.dictionary_page_offset or column.data_page_offset
        if not 0 <= start <= start + column.total_compressed_size <= piece.size:
            raise ValueError(f"its column {column.path_in_schema} lies outside of the file")
        ranges.append((start, column.total_compressed_size))
        how = (column.path_in_schema, column.physical_type, column.compression, column.num_values)
        digest.update(json.dumps(how).encode())
    hashed = _hashed(opened(source.root), piece, ranges)
    return first, group.num_rows, digest.hexdigest(), hashed


def _hashed(storage: Readable, piece: Piece, ranges: list[tuple[int, int]]) -> str:
    """Hash (offset, length) of a file's bytes."""
    digest = blake2b(digest_size=16)
    for offset, length in ranges:
        for start, size in _chunks(offset, length):
            digest.update(storage.read(piece.file, start, size, piece.etag))
    return digest.hexdigest()


def _chunks(offset: int, length: int) -> Iterator[tuple[int, int]]:
    for start in range(offset, offset + length, CHUNK):
        yield start, min(CHUNK, offset + length - start)
