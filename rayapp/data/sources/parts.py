"""The parts of a source: files, pieces, units and records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from rayapp.config import ConfigError
from rayapp.storage import Readable, open_input


class SourceError(ConfigError):
    """The data cannot be read as asked; the message is for the user."""

    def __init__(self, problem: str | Sequence[str]) -> None:
        super().__init__([problem] if isinstance(problem, str) else problem)


@dataclass(frozen=True)
class DataFile:
    """One file of a source: `name` is relative to the source's root."""

    name: str
    size: int
    version: str
    """Changes with the content: an S3 etag, or a digest of a local file."""


@dataclass(frozen=True)
class DataSource:
    """Files under one root, all of one format; a hub dataset has none and is named by `root`."""

    root: str
    format: str
    files: tuple[DataFile, ...]
    version: str = ""
    """The hub's revision, or a digest of the user's reader; empty for all else."""

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def is_table(self) -> bool:
        """Whether its records are rows of Arrow, in which structs have the fields of all rows."""
        return self.format in ("hub", "parquet", "arrow")

    def piece(
        self, file: DataFile, start: int, end: int, split: str, is_stream: bool = False
    ) -> Piece:
        """Return a part of a file; on S3, of the version that was listed."""
        etag = file.version if self.root.startswith("s3://") else None
        return Piece(file.name, start, end, split, file.size, is_stream, etag)

    def digest(self) -> str:
        """Return 16 hex digits of all files' names, sizes and versions, but not of their root."""
        listing = json.dumps([asdict(file) for file in self.files] or self.root) + self.version
        return blake2b(listing.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes [start, end), Parquet row groups [start, end), or a hub shard.

    A file that is read as a stream is one piece, from 0 to its size.
    """

    file: str
    start: int
    end: int
    split: str
    """`train`, `eval`, or `hash`: each document's split is chosen by a hash of its content."""
    size: int = 0
    """Bytes of the whole file, so that a piece can be read without the list of files."""
    is_stream: bool = False
    """The file has no cuts, is read from its beginning, and may be much larger than a unit."""
    etag: str | None = None
    """If given, only this version of the file is read."""


@dataclass(frozen=True)
class Block:
    """Pieces that are tokenised together, and what a unit takes of them.

    A block depends on its files alone: not on other files' sizes, on names or on what is held out.
    """

    pieces: tuple[Piece, ...]
    taken: tuple[tuple[int, Piece], ...]
    """(number of a piece of the block, the unit's piece, whose records are taken from it)."""


@dataclass(frozen=True)
class ReadUnit:
    """The pieces that one task prepares."""

    index: int
    pieces: tuple[Piece, ...]
    num_bytes: int
    blocks: tuple[Block, ...] = ()
    """What the pieces are read as, in their order."""


@dataclass(frozen=True)
class Record:
    """A raw record and its place; `value` is a str (text) or a mapping of columns."""

    file: str
    place: int
    """Byte offset (text, JSONL), line (streams), or number of the row (Parquet, Arrow, hub)."""
    value: Any
    problem: str | None = None
    """Why the record is unusable, or None."""
    values: tuple[float, ...] = ()
    """The numbers in the columns that a loss of the user's names."""


def printable(name: str) -> str:
    """Return a name with escapes for what is not Unicode, as in a file's name that is not UTF-8."""
    return name.encode(errors="backslashreplace").decode()


def unreadable(source: DataSource, file: str, error: Exception, after: str = "") -> SourceError:
    """Return what to raise when pyarrow, a codec or a client refuses a file's bytes."""
    why = next(iter(str(error).splitlines()), "") or type(error).__name__
    name = file if source.format == "hub" else f"{source.root}/{file}"
    return SourceError(f"{printable(name)} cannot be read as {source.format}{after}: {why}")


@lru_cache(maxsize=8)
def opened(root: str) -> Readable:
    """Return the folder of a root, cached because many pieces share it."""
    return open_input(root)
