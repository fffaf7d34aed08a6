"""Cut a source into pieces that can be read alone, and group them into units, one per task.

Pieces are also grouped into blocks: what is tokenised together, and stored as one object. A block
must not change when other files do. A byte range of JSONL is read as cells of a fixed grid, since
a unit's own cuts depend on the size of the whole source. Small pieces share a block that ends where
a hash of the piece says so: a file that is added or removed changes the blocks around it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import TypeVar

from rayapp.data.sources import hub
from rayapp.data.sources.formats import is_stream
from rayapp.data.sources.parts import (
    Block,
    DataFile,
    DataSource,
    Piece,
    ReadUnit,
    opened,
    unreadable,
)
from rayapp.order import window_of

UNIT_BYTES = 4 * 2**20
MAX_UNITS = 4096
PART_BYTES = 2**20  # of a window; a power of two
MAX_PARTS = 2**17
READERS = 16  # Parquet footers read at once
SMALL = 1 / 4  # of a cell: pieces below that share a block
MEAN = 1 / 2  # of a cell: mean size of shared blocks; none is larger than a cell

Item = TypeVar("Item")
Entry = tuple[int, Piece, Piece]  # number of a unit, piece of a block, the unit's piece


def units(source: DataSource, eval_fraction: float) -> list[ReadUnit]:
    """Cut a source into units; the fraction `eval_fraction` (0-1) is held out.

    A single plain text file gives its last bytes to `eval`; otherwise each document is assigned by
    hash.

    Raises:
        SourceError: a Parquet file is broken, or the hub has no such dataset.
    """
    unit_bytes = max(UNIT_BYTES, -(-source.num_bytes // MAX_UNITS))
    pieces = _all_pieces(source, eval_fraction, unit_bytes)
    each = enumerate(runs(pieces, unit_bytes))
    grouped = [ReadUnit(number, tuple(part), size) for number, (part, size) in each]
    return with_blocks(source, grouped, UNIT_BYTES)


def windows(source: DataSource, eval_fraction: float, window_bytes: int) -> list[ReadUnit]:
    """Cut a source into windows: units whose blocks lie in distant places (rayapp.order.windows).

    Of a single plain text file, `eval` gets the last bytes that are the fraction of one window;
    window 0 has them.

    Raises:
        SourceError: a Parquet file is broken, or the hub has no such dataset.
    """
    part_bytes = PART_BYTES
    while part_bytes * MAX_PARTS < source.num_bytes:
        part_bytes *= 2  # so that blocks change only where a source has grown to twice that
    share = min(1.0, window_bytes / max(source.num_bytes, 1))
    pieces = _all_pieces(source, eval_fraction, part_bytes, share)
    sizes = dict(pieces)
    everything = ReadUnit(0, tuple(sizes), source.num_bytes)
    (unit,) = with_blocks(source, [everything], part_bytes)
    found: dict[int, list[Block]] = {}
    trained = [b for b in unit.blocks if all(p.split != "eval" for _, p in b.taken)]
    chosen = window_of([sum(sizes[p] for _, p in b.taken) for b in trained], window_bytes)
    of_block = dict(zip(trained, chosen.tolist(), strict=True))
    for block in unit.blocks:
        found.setdefault(of_block.get(block, 0), []).append(block)
    made = []
    for index, blocks in sorted(found.items()):
        taken = tuple(dict.fromkeys(piece for block in blocks for _, piece in block.taken))
        size = sum(sizes[piece] for piece in taken)
        made.append(ReadUnit(index, taken, size, tuple(blocks)))
    return made


def _all_pieces(
    source: DataSource, eval_fraction: float, unit_bytes: int, share: float = 1.0
) -> list[tuple[Piece, int]]:
    """Return all pieces, each with its bytes; `share` is that of a window in the source."""
    split = "hash" if 0 < eval_fraction < 1 else ("eval" if eval_fraction >= 1 else "train")
    if source.format == "hub":
        shards = range(hub.num_shards(source.root, source.version))
        return [(Piece(source.root, i, i + 1, split), unit_bytes) for i in shards]
    single = len(source.files) == 1 and not is_stream(source.files[0].name, source.format)
    if source.format == "text" and split == "hash" and single:
        (file,) = source.files
        boundary = int(file.size * (1 - eval_fraction * share))
        pieces = _ranges(source, file, 0, boundary, unit_bytes, "train")
        return pieces + _ranges(source, file, boundary, file.size, unit_bytes, "eval")
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda file: _pieces(source, file, split, unit_bytes), source.files)
        return [piece for each in found for piece in each]


def runs(items: Iterable[tuple[Item, int]], most: int) -> Iterator[tuple[list[Item], int]]:
    """Group consecutive (item, bytes) into runs of at most `most` bytes, or of one larger item.

    Yield each run with its bytes.
    """
    run: list[Item] = []
    held = 0
    for item, size in items:
        if run and held + size > most:
            yield run, held
            run, held = [], 0
        run.append(item)
        held += size
    if run:
        yield run, held


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
        raise unreadable(source, file.name, error) from error
    return [
        (source.piece(file, i, i + 1, split), metadata.row_group(i).total_byte_size)
        for i in range(metadata.num_row_groups)
    ]


def with_blocks(source: DataSource, units: list[ReadUnit], cell: int) -> list[ReadUnit]:
    """Return the units with their blocks; `cell` is the most bytes of a block of small pieces."""
    gridded = source.format == "jsonl"
    entries = [
        (unit.index, part, piece)
        for unit in units
        for piece in unit.pieces
        for part in (_cells(piece, cell) if gridded and not piece.is_stream else [piece])
    ]
    blocks: list[list[Block]] = [[] for _ in units]
    for group in _groups(source, entries, cell):
        pieces = tuple(part for _, part, _ in group)
        numbered = [(unit, (n, piece)) for n, (unit, _, piece) in enumerate(group)]
        for unit, taken in groupby(numbered, key=lambda each: each[0]):
            blocks[unit].append(Block(pieces, tuple(each for _, each in taken)))
    return [replace(unit, blocks=tuple(blocks[unit.index])) for unit in units]


def _cells(piece: Piece, cell: int) -> list[Piece]:
    """Return the cells of the grid that a byte range touches."""
    first = piece.start - piece.start % cell
    return [
        replace(piece, start=start, end=min(start + cell, piece.size))
        for start in range(first, piece.end, cell)
    ]


def _groups(source: DataSource, entries: list[Entry], cell: int) -> Iterator[list[Entry]]:
    versions = {file.name: file.version for file in source.files}
    held: list[Entry] = []
    size = 0
    for entry in entries:
        piece = entry[1]
        small = piece.size < SMALL * cell and piece.file in versions
        if held and (not small or size + piece.size > cell):
            yield held
            held, size = [], 0
        if not small:
            yield [entry]
            continue
        held.append(entry)
        size += piece.size
        place = f"{versions[piece.file]} {piece.start}".encode()
        drawn = int.from_bytes(blake2b(place, digest_size=8).digest(), "little")
        if drawn < 2**64 * piece.size / (MEAN * cell):
            yield held
            held, size = [], 0
    if held:
        yield held
