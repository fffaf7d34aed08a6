"""Group the pieces of a source into blocks: what is tokenised together, and stored as one object.

A block must not change when other files do. A byte range of JSONL is read as cells of a fixed
grid, since a unit's own cuts depend on the size of the whole source. Small pieces share a block
that ends where a hash of the piece says so: a file that is added or removed changes the blocks
around it, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby

from rayapp.data.sources.records import Block, DataSource, Piece, ReadUnit

SMALL = 1 / 4  # of a cell: pieces below that share a block
MEAN = 1 / 2  # of a cell: mean size of shared blocks; none is larger than a cell

Entry = tuple[int, Piece, Piece]  # number of a unit, piece of a block, the unit's piece


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
    """Yield the entries of each block."""
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
