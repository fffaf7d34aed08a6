"""Cut a source into pieces that can be read alone, and group them into units, one per task."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from rayapp.data.sources import hub
from rayapp.data.sources.blocks import with_blocks
from rayapp.data.sources.formats import is_stream
from rayapp.data.sources.records import DataFile, DataSource, Piece, ReadUnit, SourceError, opened

UNIT_BYTES = 4 * 2**20
MAX_UNITS = 4096
READERS = 16  # Parquet footers read at once


def units(source: DataSource, eval_fraction: float) -> list[ReadUnit]:
    """Cut a source into units; the fraction `eval_fraction` (0-1) is held out.

    A single plain text file gives its last bytes to `eval`; otherwise each document is assigned by
    hash.

    Raises:
        SourceError: a Parquet file is broken, or the hub has no such dataset.
    """
    unit_bytes = max(UNIT_BYTES, -(-source.num_bytes // MAX_UNITS))
    pieces: list[tuple[Piece, int]] = []
    split = "hash" if 0 < eval_fraction < 1 else ("eval" if eval_fraction >= 1 else "train")
    if source.format == "hub":
        shards = range(hub.num_shards(source.root, source.version))
        pieces = [(Piece(source.root, i, i + 1, split), unit_bytes) for i in shards]
    elif (
        source.format == "text"
        and split == "hash"
        and len(source.files) == 1
        and not is_stream(source.files[0].name, "text")
    ):
        (file,) = source.files
        boundary = int(file.size * (1 - eval_fraction))
        pieces = _ranges(source, file, 0, boundary, unit_bytes, "train")
        pieces += _ranges(source, file, boundary, file.size, unit_bytes, "eval")
    else:
        with ThreadPoolExecutor(READERS) as pool:
            found = pool.map(lambda file: _pieces(source, file, split, unit_bytes), source.files)
            pieces = [piece for each in found for piece in each]
    return with_blocks(source, _grouped(pieces, unit_bytes), UNIT_BYTES)


def _grouped(pieces: list[tuple[Piece, int]], unit_bytes: int) -> list[ReadUnit]:
    """Group consecutive (piece, bytes) into units of at most `unit_bytes`, or one larger piece."""
    grouped: list[ReadUnit] = []
    current: list[Piece] = []
    size = 0
    for piece, num_bytes in pieces:
        if current and size + num_bytes > unit_bytes:
            grouped.append(ReadUnit(len(grouped), tuple(current), size))
            current, size = [], 0
        current.append(piece)
        size += num_bytes
    if current:
        grouped.append(ReadUnit(len(grouped), tuple(current), size))
    return grouped


def _pieces(
    source: DataSource, file: DataFile, split: str, unit_bytes: int
) -> list[tuple[Piece, int]]:
    """Return the pieces of a file, each with its bytes.

    Raises:
        SourceError: a Parquet file is broken.
    """
    if is_stream(file.name, source.format):
        return [(source.piece(file, 0, file.size, split, True), file.size)]
    if source.format == "parquet":
        return _row_groups(source, file, split)
    return _ranges(source, file, 0, file.size, unit_bytes, split)


def _ranges(
    source: DataSource, file: DataFile, start: int, end: int, unit_bytes: int, split: str
) -> list[tuple[Piece, int]]:
    cuts = [*range(start, end, unit_bytes), end]
    return [(source.piece(file, low, high, split), high - low) for low, high in pairwise(cuts)]


def _row_groups(source: DataSource, file: DataFile, split: str) -> list[tuple[Piece, int]]:
    import pyarrow.parquet as pq

    try:
        metadata = pq.ParquetFile(opened(source.root).open_read(file.name)).metadata
    except Exception as error:  # pyarrow raises a family of unrelated types for a broken footer
        raise SourceError(f"{source.root}/{file.name} is not Parquet: {error}") from error
    return [
        (source.piece(file, i, i + 1, split), metadata.row_group(i).total_byte_size)
        for i in range(metadata.num_row_groups)
    ]
