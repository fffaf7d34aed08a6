"""Read a piece as raw records, name their places, choose those held out, and name its content.

An etag of S3 names the content. The size and time of a file on a disk do not: what is to be read is
hashed, at some 1 GB/s, and then read in the version that was hashed.
"""

from __future__ import annotations

import io
import json
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from rayapp.config.code import CodeError, load_code
from rayapp.config.code_digest import source_digest
from rayapp.data.sources import hub
from rayapp.data.sources.formats import is_stream
from rayapp.data.sources.parts import (
    DataSource,
    Piece,
    Record,
    SourceError,
    opened,
    printable,
    unreadable,
)
from rayapp.data.sources.streams import (
    BATCH_ROWS,
    BOM,
    LINE_BYTES,
    TOO_LONG,
    json_line,
    read_stream,
    rows_of,
)
from rayapp.storage import Readable, StorageError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

BATCH_BYTES = 2 * 2**20  # most of a batch of Parquet
PAGE_BYTES = 2**20  # of Parquet that are read at once
# Columns of smaller files are read whole: page by page, pyarrow takes the memory that the header of
# a damaged page asks for, up to 2 GiB.
PAGES_FROM_BYTES = 8 * 2**20
MAX_COUNTED_BYTES = 64 * 2**20  # beyond it a place is given as a byte offset, not a line
CHUNK = 4 * 2**20  # bytes hashed at once
OWN_FIELD = "data.format"


def read_piece(source: DataSource, piece: Piece) -> Iterator[Record]:
    """Yield the records of a piece in order.

    Raises:
        SourceError: the file is not of its format, or broken so that the rest cannot be read, or
            the user's function fails.
    """
    last: int | None = None
    try:
        for record in _records(source, piece):
            yield record
            last = record.place
    except (SourceError, StorageError):
        raise
    except Exception as error:  # of pyarrow, codecs, the hub's client and users, of any type
        rows = source.is_table or is_own(source.format)
        unit = "row" if rows else "line" if piece.is_stream else "byte"
        after = f" after {unit} {last}" if last is not None else ""
        told = _failure if is_own(source.format) else unreadable
        raise told(source, file_of(source, piece), error, after) from error


def _records(source: DataSource, piece: Piece) -> Iterator[Record]:
    if source.format == "hub":
        return hub.read(source.root, source.version, piece.start)
    if is_own(source.format):
        return _read_own(source.root, piece.file, source.format)
    if piece.is_stream:
        return read_stream(source, piece)
    if source.format == "parquet":
        return _read_parquet(source, piece)
    if source.format == "text":
        return _read_text(source, piece)
    return _read_jsonl(source, piece)


def file_of(source: DataSource, piece: Piece) -> str:
    """Return what the records of a piece give as their file."""
    return f"{piece.file}[{piece.start}]" if source.format == "hub" else piece.file


def place_of(source: DataSource, record_file: str, place: int) -> str:
    """Return `file:line`, `file byte N` or `file row N`, for a person to look up.

    Lines are counted as far as `MAX_COUNTED_BYTES`, since counting reads the file up to there.
    """
    if source.is_table or is_own(source.format):
        where = f"{record_file} row {place}"
    elif is_stream(record_file, source.format):
        where = f"{source.root}/{record_file}:{place}"
    elif place > MAX_COUNTED_BYTES:
        where = f"{source.root}/{record_file} byte {place}"
    else:
        where = f"{source.root}/{record_file}:{_line_number(source, record_file, place)}"
    return printable(where)


def drawn_of(content: bytes) -> int:
    """Return the number in [0, 2^64) that a record's content draws, and its copies too."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def is_eval(piece: Piece, drawn: int, eval_fraction: float) -> bool:
    """Return whether a record is held out, by what its content drew: so are all its copies."""
    return drawn < eval_fraction * 2**64 if piece.split == "hash" else piece.split == "eval"


def _line_number(source: DataSource, file: str, offset: int) -> int:
    """Return the number (from 1) of the line that starts at a byte offset."""
    storage, lines, position = opened(source.root), 1, 0
    while position < offset:
        chunk = storage.read(file, position, min(8 * 2**20, offset - position))
        lines += chunk.count(b"\n")
        position += len(chunk)
    return lines


def line_bytes(source: DataSource, piece: Piece) -> tuple[int, bytes]:
    """Return the offset and bytes of the lines that begin inside the piece's [start, end).

    Of a line that is longer than LINE_BYTES, a byte more than that is returned, so that it is
    refused, and none of the rest.
    """
    storage, start, end = opened(source.root), piece.start, piece.end
    if start:  # a line begins at `start` only if the byte before it ends one
        start = _after_newline(storage, piece, start - 1, end)
    if start >= end:
        return start, b""
    if end < piece.size:
        end = _after_newline(storage, piece, end - 1, end + LINE_BYTES + 1)
    return start, storage.read(piece.file, start, end - start, piece.etag)


def _after_newline(storage: Readable, piece: Piece, position: int, last: int) -> int:
    """Return the offset just past the first newline at or after `position`, at most `last`."""
    last = min(last, piece.size)
    while position < last:
        length = min(64 * 2**10, last - position)
        chunk = storage.read(piece.file, position, length, piece.etag)
        newline = chunk.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(chunk)
    return last


def _read_text(source: DataSource, piece: Piece) -> Iterator[Record]:
    start, data = line_bytes(source, piece)
    if not data:
        return
    if len(data) > piece.end - piece.start + LINE_BYTES:
        yield Record(piece.file, start, None, TOO_LONG)
        return
    if not start:
        start = len(BOM) if data.startswith(BOM) else 0
        data = data[start:]
    try:
        yield Record(piece.file, start, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        yield Record(piece.file, start + error.start, None, "is not UTF-8")


def _read_jsonl(source: DataSource, piece: Piece) -> Iterator[Record]:
    place, data = line_bytes(source, piece)
    for line in io.BytesIO(data):
        found = json_line(line.removesuffix(b"\n"))
        if found is not None:
            yield Record(piece.file, place, *found)
        place += len(line)


def _read_parquet(source: DataSource, piece: Piece) -> Iterator[Record]:
    parquet = open_parquet(source, piece)
    row = sum(parquet.metadata.row_group(i).num_rows for i in range(piece.start))
    groups = list(range(piece.start, min(piece.end, parquet.num_row_groups)))
    row_groups = [parquet.metadata.row_group(i) for i in groups]
    mean = sum(g.total_byte_size for g in row_groups) // max(sum(g.num_rows for g in row_groups), 1)
    batch_size = max(1, min(BATCH_ROWS, BATCH_BYTES // max(mean, 1)))
    yield from rows_of(piece.file, parquet.iter_batches(batch_size, groups), row)


def open_parquet(source: DataSource, piece: Piece) -> pq.ParquetFile:
    """Open a Parquet file, to read its columns page by page."""
    import pyarrow.parquet as pq

    file = opened(source.root).open_read(piece.file, piece.etag)
    size = PAGE_BYTES if piece.size > PAGES_FROM_BYTES else 0
    return pq.ParquetFile(file, buffer_size=size, pre_buffer=False, page_checksum_verification=True)


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
        for start in range(offset, offset + length, CHUNK):
            size = min(CHUNK, offset + length - start)
            digest.update(storage.read(piece.file, start, size, piece.etag))
    return digest.hexdigest()


# ---- Formats of the user's: `data.format: mypackage.module:function` ---------------------------


class RecordReader(Protocol):
    """What `data.format: module:function` names."""

    def __call__(self, path: str, /) -> Iterator[Mapping[str, Any] | str]:
        """Yield the records of a file in an order that is the same at each call."""


def is_own(format: str) -> bool:
    """Return whether a format is a function of the user's."""
    return ":" in format


def reader_version(format: str) -> str:
    """Return a digest of the source of the function, and of what it uses of its package.

    Raises:
        SourceError: it cannot be imported, or is not a function.
    """
    try:
        return source_digest(OWN_FIELD, format)
    except CodeError as error:
        raise SourceError(str(error)) from error


def _read_own(root: str, name: str, format: str) -> Iterator[Record]:
    url = f"{opened(root).url.rstrip('/')}/{name}"
    try:
        function: RecordReader = load_code(OWN_FIELD, format, checked=True)
    except CodeError as error:
        raise SourceError(str(error)) from error
    for row, value in enumerate(function(url)):
        good = isinstance(value, (str, Mapping))
        problem = None if good else f"is {type(value).__name__}, neither a mapping nor text"
        yield Record(name, row, dict(value) if isinstance(value, Mapping) else value, problem)


def _failure(source: DataSource, file: str, error: Exception, after: str) -> SourceError:
    """Return what to raise when the user's function has raised an error: where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if frame.filename == __file__]
    called = frames[max(ours, default=-1) + 1 :]  # the function, and what it called
    folders = [os.path.dirname(frame.filename) for frame in called]
    theirs = [f for f, folder in zip(called, folders, strict=True) if folder == folders[0]]
    at = f" ({theirs[-1].filename}:{theirs[-1].lineno}, in {theirs[-1].name})" if theirs else ""
    url, first = printable(f"{source.root}/{file}"), next(iter(str(error).splitlines()), "")
    why = f"{url}{after}: {type(error).__name__}: {first}{at}"
    return SourceError(f"{OWN_FIELD}={source.format} fails on {why}. Correct the function")
