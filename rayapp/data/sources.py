"""Find training data and read it as raw records, piece by piece, in an order that never changes.

    source = find("s3://bucket/chats/*.jsonl")
    for piece in unit.pieces: ...  read_piece(source, piece)

A source is a sorted list of files (or a hub dataset). A piece is a part of one file that can be
read alone: a byte range cut at line ends (text, JSONL), a row group (Parquet), a shard (hub). A
unit is a run of pieces of about `UNIT_BYTES`: what one task reads, tokenises and packs. Pieces and
units follow from file sizes alone, so they are the same on every machine and in every attempt.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

from rayapp.storage import Entry, Storage, open_storage

UNIT_BYTES = 4 * 2**20
MAX_UNITS = 4096
MAX_COUNTED_BYTES = 64 * 2**20  # beyond it a place is named by its byte, not by its line
READERS = 16  # Parquet footers read at once
SUFFIXES = {
    "text": (".txt", ".md", ".rst", ".py", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
}
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


class SourceError(ValueError):
    """The data cannot be read as asked; the message is for the user."""


@dataclass(frozen=True)
class File:
    """One file of a source: `name` is relative to the source's root."""

    name: str
    size: int
    version: str
    """Changes when the content does: an S3 etag, or a digest of a local file."""


@dataclass(frozen=True)
class Source:
    """Files under one root, all of one format; a hub dataset has none and is named by `root`."""

    root: str
    format: str
    files: tuple[File, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)

    def digest(self) -> str:
        """Return 16 hex digits of every file's name, size and version; the root may move."""
        listing = json.dumps([asdict(file) for file in self.files] or self.root)
        return blake2b(listing.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes [start, end), Parquet row groups [start, end), or a hub shard."""

    file: str
    start: int
    end: int
    split: str
    """`train`, `eval`, or `hash`: each document goes where the digest of its place says."""
    size: int = 0
    """Bytes of the whole file, so that reading a piece needs no list of files."""


@dataclass(frozen=True)
class Unit:
    """What one task prepares."""

    index: int
    pieces: tuple[Piece, ...]
    num_bytes: int


@dataclass(frozen=True)
class Record:
    """A raw record and its place; `value` is a str (text) or a mapping of columns."""

    file: str
    place: int
    """Byte offset (text, JSONL) or row number (Parquet, hub)."""
    value: Any
    problem: str | None = None
    """Why the record is unusable, or None."""


def find(path: str, format: str = "auto") -> Source:
    """List the files of `data.path`.

    Raises:
        SourceError: nothing there, nothing of the format, or a mixture of formats.
        StorageError: storage that cannot be listed.
    """
    if path == "stdlib":
        return _stdlib()
    if "://" not in path and not _is_local(path) and _looks_like_hub_id(path):
        return Source(path, "hub", ())
    root, pattern = _split_glob(path)
    storage = open_storage(root)
    entries = storage.list()
    single = not entries and pattern is None
    if single:
        storage, entries = _one_file(storage)
    if pattern is not None:
        entries = [entry for entry in entries if _matches(entry.name.split("/"), pattern)]
    if not entries:
        raise SourceError(f"data.path={path} is missing: there is no such file, folder or match")
    chosen = format != "auto"  # by the user, whose pattern then needs no suffix
    wanted = entries if single else [entry for entry in entries if not _hidden(entry.name)]
    names = [entry.name for entry in wanted or entries]
    format = format if chosen else _format_of(names, path, single)
    if not single and not (chosen and pattern is not None):
        wanted = [entry for entry in wanted if entry.name.lower().endswith(SUFFIXES[format])]
    if not wanted:
        raise SourceError(
            f"data.path={path} is without {format} files: it holds {len(entries)} others. "
            f"Name them {' or '.join(SUFFIXES[format])}, or set data.format and a pattern like *"
        )
    if not any(entry.size for entry in wanted):
        raise SourceError(f"data.path={path} is empty: its {len(wanted)} files hold 0 bytes")
    files = tuple(
        File(e.name, e.size, e.etag if storage.url.startswith("s3://") else _digest(storage, e))
        for e in wanted
    )
    return Source(storage.url, format, files)


def units(source: Source, eval_fraction: float) -> list[Unit]:
    """Cut a source into units; `eval_fraction` 0-1 is held out.

    A single text file gives its last bytes to `eval`; anything else decides document by document.
    """
    unit_bytes = max(UNIT_BYTES, -(-source.num_bytes // MAX_UNITS))
    pieces: list[tuple[Piece, int]] = []
    split = "hash" if 0 < eval_fraction < 1 else ("eval" if eval_fraction >= 1 else "train")
    if source.format == "hub":
        shards = range(_hub_shards(source.root))
        pieces = [(Piece(source.root, i, i + 1, split), unit_bytes) for i in shards]
    elif source.format == "parquet":
        with ThreadPoolExecutor(READERS) as pool:
            groups = pool.map(lambda file: _row_groups(source, file, split), source.files)
            pieces = [piece for found in groups for piece in found]
    elif source.format == "text" and len(source.files) == 1 and split == "hash":
        (file,) = source.files
        boundary = int(file.size * (1 - eval_fraction))
        pieces = _ranges(file, 0, boundary, unit_bytes, "train")
        pieces += _ranges(file, boundary, file.size, unit_bytes, "eval")
    else:
        for file in source.files:
            pieces += _ranges(file, 0, file.size, unit_bytes, split)
    grouped: list[Unit] = []
    current: list[Piece] = []
    size = 0
    for piece, num_bytes in pieces:
        if current and size + num_bytes > unit_bytes:
            grouped.append(Unit(len(grouped), tuple(current), size))
            current, size = [], 0
        current.append(piece)
        size += num_bytes
    if current:
        grouped.append(Unit(len(grouped), tuple(current), size))
    return grouped


def read_piece(source: Source, piece: Piece) -> Iterator[Record]:
    """Yield the records of a piece in order."""
    if source.format == "hub":
        yield from _read_hub(source.root, piece.start)
    elif source.format == "parquet":
        yield from _read_parquet(source, piece)
    elif source.format == "text":
        yield from _read_text(source, piece)
    else:
        yield from _read_jsonl(source, piece)


def line_number(source: Source, file: str, offset: int) -> int:
    """Return the number of the line, from 1, that starts at a byte offset."""
    storage, lines, position = _opened(source.root), 1, 0
    while position < offset:
        chunk = storage.read(file, position, min(8 * 2**20, offset - position))
        lines += chunk.count(b"\n")
        position += len(chunk)
    return lines


def place_of(source: Source, record_file: str, place: int) -> str:
    """Return `file:line` or `file byte N` (text, JSONL) or `file row N`, for a person to look up.

    Lines are counted as far as `MAX_COUNTED_BYTES`, since counting reads the file up to there.
    """
    if source.format not in ("text", "jsonl"):
        return f"{record_file} row {place}"
    if place > MAX_COUNTED_BYTES:
        return f"{source.root}/{record_file} byte {place}"
    return f"{source.root}/{record_file}:{line_number(source, record_file, place)}"


def is_eval(piece: Piece, record: Record, eval_fraction: float) -> bool:
    """Say whether a record is held out."""
    if piece.split != "hash":
        return piece.split == "eval"
    place = f"{record.file}\0{record.place}".encode()
    drawn = int.from_bytes(blake2b(place, digest_size=8).digest(), "little")
    return drawn < eval_fraction * 2**64


# ---- Finding -----------------------------------------------------------------------------------


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    storage = open_storage(str(root))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not STDLIB_SKIPPED & set(path.relative_to(root).parts)
    )
    files = tuple(
        File(name, len(data), blake2b(data, digest_size=8).hexdigest())
        for name in names
        if (data := (root / name).read_bytes())
    )
    return Source(storage.url, "text", files)


def _is_local(path: str) -> bool:
    return os.path.exists(path) or _is_pattern(path) or path.startswith((".", "/", "~"))


def _is_pattern(path: str) -> bool:
    return any(mark in path for mark in "*?[")


def _looks_like_hub_id(path: str) -> bool:
    """Tell `org/name`, dots included, from a file that is missing or a folder that exists."""
    parts = path.split("/")
    named_as_file = path.lower().endswith(tuple(e for ends in SUFFIXES.values() for e in ends))
    return len(parts) == 2 and all(parts) and not named_as_file and not os.path.isdir(parts[0])


def _one_file(storage: Storage) -> tuple[Storage, list[Entry]]:
    """Return the parent of what turned out to be no folder, and its entry in it if it is a file."""
    parent, _, name = storage.url.rpartition("/")
    if not name or parent == "s3:/":  # the root of the disk, or a whole bucket
        return storage, []
    folder = open_storage(parent or "/")
    entry = folder.stat(name)
    return folder, [] if entry is None else [entry]


def _split_glob(path: str) -> tuple[str, list[str] | None]:
    """Split `a/b/*/c.txt` into the folder `a/b` and the patterns `*`, `c.txt`."""
    if not _is_pattern(path) or os.path.exists(path):
        return path, None
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if _is_pattern(part))
    root = "/".join(parts[:first]) or ("/" if path.startswith("/") else ".")
    return root, parts[first:]


def _matches(names: list[str], patterns: list[str]) -> bool:
    """Match folder by folder as a shell does: `*` stops at a `/`, `**` is any number of folders."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(names[skip:], patterns[1:]) for skip in range(len(names) + 1))
    matched = bool(names) and fnmatch.fnmatchcase(names[0], patterns[0])
    return matched and _matches(names[1:], patterns[1:])


def _format_of(names: list[str], path: str, single: bool) -> str:
    found = {f for f, ends in SUFFIXES.items() if any(n.lower().endswith(ends) for n in names)}
    if len(found) == 1:
        return found.pop()
    if single:
        return "text"
    state = "mixed" if found else "of no known kind"
    raise SourceError(
        f"data.path={path} is {state}: it holds {', '.join(sorted(found)) or names[0]}. "
        "Set data.format=text, jsonl or parquet"
    )


def _hidden(name: str) -> bool:
    *folders, last = name.split("/")
    return last.startswith(".") or any(folder.startswith((".", "_")) for folder in folders)


def _digest(storage: Storage, entry: Entry) -> str:
    """Digest a local file: all of it up to 8 MiB, else its ends and its time of change."""
    if entry.size <= 8 * 2**20:
        return blake2b(storage.read(entry.name), digest_size=8).hexdigest()
    ends = storage.read(entry.name, 0, 2**20) + storage.read(entry.name, entry.size - 2**20, 2**20)
    return blake2b(ends + str(entry.modified_s).encode(), digest_size=8).hexdigest()


# ---- Cutting -----------------------------------------------------------------------------------


def _ranges(
    file: File, start: int, end: int, unit_bytes: int, split: str
) -> list[tuple[Piece, int]]:
    cuts = [*range(start, end, unit_bytes), end]
    return [
        (Piece(file.name, low, high, split, file.size), high - low) for low, high in pairwise(cuts)
    ]


def _row_groups(source: Source, file: File, split: str) -> list[tuple[Piece, int]]:
    import pyarrow.parquet as pq

    try:
        metadata = pq.ParquetFile(_opened(source.root).open_read(file.name)).metadata
    except Exception as error:  # pyarrow raises a family of unrelated types for a broken footer
        raise SourceError(f"{source.root}/{file.name} is not Parquet: {error}") from error
    return [
        (Piece(file.name, i, i + 1, split), metadata.row_group(i).total_byte_size)
        for i in range(metadata.num_row_groups)
    ]


# ---- Reading -----------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _opened(root: str) -> Storage:
    return open_storage(root)


def _line_bytes(source: Source, piece: Piece) -> tuple[int, bytes]:
    """Read the lines that begin inside [start, end); return their first byte's offset and bytes."""
    storage, start, end = _opened(source.root), piece.start, piece.end
    if start:  # a line begins at `start` only if the byte before it ends one
        start = _after_newline(storage, piece.file, start - 1, piece.size)
    if end < piece.size:
        end = _after_newline(storage, piece.file, end - 1, piece.size)
    if start >= end:
        return start, b""
    return start, storage.read(piece.file, start, end - start)


def _after_newline(storage: Storage, name: str, position: int, size: int) -> int:
    """Return the offset just past the first newline at or after `position`."""
    while position < size:
        chunk = storage.read(name, position, min(64 * 2**10, size - position))
        newline = chunk.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(chunk)
    return size


def _read_text(source: Source, piece: Piece) -> Iterator[Record]:
    start, data = _line_bytes(source, piece)
    if not data:
        return
    try:
        yield Record(piece.file, start, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        yield Record(piece.file, start + error.start, None, "is not UTF-8")


def _read_jsonl(source: Source, piece: Piece) -> Iterator[Record]:
    offset, data = _line_bytes(source, piece)
    for line in data.split(b"\n"):
        if line.strip():
            try:
                value = json.loads(line)
                problem = None if isinstance(value, dict) else "is not a JSON object"
                yield Record(piece.file, offset, value, problem)
            except (ValueError, RecursionError) as error:
                deep = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "too deep"
                reason = getattr(error, "msg", deep)
                yield Record(piece.file, offset, None, f"is not JSON ({reason})")
        offset += len(line) + 1


def _read_parquet(source: Source, piece: Piece) -> Iterator[Record]:
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(_opened(source.root).open_read(piece.file))
    row = sum(parquet.metadata.row_group(i).num_rows for i in range(piece.start))
    groups = list(range(piece.start, min(piece.end, parquet.num_row_groups)))
    for batch in parquet.iter_batches(row_groups=groups, batch_size=1024):
        for value in batch.to_pylist():
            yield Record(piece.file, row, value)
            row += 1


def _hub_dataset(name: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:  # the hub client raises many types; all mean "not to be had"
        raise SourceError(f"data.path={name} is not to be had from the hub: {error}") from error


def _hub_shards(name: str) -> int:
    return int(_hub_dataset(name).num_shards)


def _read_hub(name: str, shard: int) -> Iterator[Record]:
    dataset = _hub_dataset(name)
    for row, value in enumerate(dataset.shard(num_shards=dataset.num_shards, index=shard)):
        yield Record(f"{name}[{shard}]", row, value)
