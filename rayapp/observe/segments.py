"""Read, append to, cut and seal metrics.jsonl, which on S3 is in segments while it grows.

    for start, lines in blocks(storage): ...  # of metrics.jsonl and of its segments, in order
    cut(storage, end)                         # drop what comes after byte `end`
    tail = Segments(storage); tail.put(lines); tail.end(len(lines)); seal(storage)

An S3 object cannot be appended to, and rewriting the whole file every few seconds would write the
square of its size. So what follows metrics.jsonl is in `metrics/<first byte>.jsonl`: the last one
is rewritten until it has SEGMENT_BYTES, and FAN of one size become one of the next size. `seal`
writes one metrics.jsonl. At any kill the bytes are whole: what is merged or sealed is written
before its sources are deleted, and a segment that begins before the end of what precedes it is
skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rayapp.observe.run_folder import METRICS, SEGMENTS
from rayapp.storage import Entry, Storage, StorageError

SEGMENT_BYTES = 64 * 2**10
FAN = 16
BLOCK_BYTES = 8 * 2**20
FIRST_BYTES = 16 * 2**10  # several lines; of the first block that `backwards` reads

READINGS = 5  # of a file that is cut back each time; attempts of a run are minutes apart

T = TypeVar("T")
logger = logging.getLogger("rayapp.observe.metrics")


class CutBackError(StorageError):
    """The file has become shorter than it was when its reader looked."""


@dataclass(frozen=True)
class Part:
    """A file that holds bytes `start` to `end` of the whole."""

    name: str
    start: int
    end: int


def parts(storage: Storage) -> list[Part]:
    """Return the files that make up metrics.jsonl, in order; [] if there are none."""
    return _in_order(storage, _segments(storage))


def _segments(storage: Storage) -> list[Entry]:
    return [entry for entry in storage.list(SEGMENTS) if _start(entry.name) is not None]


def _in_order(storage: Storage, segments: list[Entry]) -> list[Part]:
    """`segments` were listed before this asks for the file, as `seal` writes it first."""
    whole = storage.size(METRICS)
    listed = [] if whole is None else [Part(METRICS, 0, whole)]
    for entry in segments:
        end = listed[-1].end if listed else 0
        if _start(entry.name) == end:
            listed.append(Part(entry.name, end, end + entry.size))
    return listed


def _name(start: int) -> str:
    return f"{SEGMENTS}/{start:015d}.jsonl"


def _start(name: str) -> int | None:
    digits = name.rpartition("/")[2].removesuffix(".jsonl")
    return int(digits) if digits.isdecimal() else None


def read(storage: Storage, start: int, end: int, listed: list[Part] | None = None) -> bytes:
    """Return the bytes from `start` to `end`; `listed` are the parts, if they are known.

    Raises:
        StorageError: they are not there, or cannot be read.
    """
    listed = parts(storage) if listed is None else listed
    while True:
        try:
            data = b"".join(
                storage.read(part.name, low - part.start, high - low)
                for part in listed
                if (low := max(start, part.start)) < (high := min(end, part.end))
            )
        except (FileNotFoundError, StorageError):  # it may have been merged, sealed or cut
            before, listed = listed, parts(storage)
            if listed == before:
                raise
            continue
        if len(data) < end - start:
            raise CutBackError("read", f"{storage.url}/{METRICS}", "it has been cut back meanwhile")
        return data


def uncut(reading: Callable[[], T]) -> T:
    """Return what is read; read again where an attempt that begins has cut the file meanwhile.

    Raises:
        StorageError: it cannot be read.
    """
    for _ in range(READINGS - 1):
        try:
            return reading()
        except CutBackError:
            continue
    return reading()


def blocks(
    storage: Storage, start: int = 0, listed: list[Part] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, whole lines) from `start` on, last what follows the last newline.

    `listed` are the parts, if they are known.
    """
    listed = parts(storage) if listed is None else listed
    end, rest = listed[-1].end if listed else 0, b""
    for low in range(start, end, BLOCK_BYTES):
        high = min(end, low + BLOCK_BYTES)
        data = rest + read(storage, low, high, listed)
        lines, newline, rest = data.rpartition(b"\n")
        if lines or newline:
            yield high - len(data), lines + newline
    if rest:
        yield end - len(rest), rest


def backwards(storage: Storage) -> Iterator[tuple[int, bytes]]:
    """Yield (byte behind it, line with its newline) from the last line to the first."""
    listed = parts(storage)
    end, rest, length = listed[-1].end if listed else 0, b"", FIRST_BYTES
    while end > 0:
        start = max(0, end - length)
        data = read(storage, start, end, listed) + rest
        stop = start + len(data)
        first, *lines = data.splitlines(keepends=True)
        if start == 0:
            lines, first = [first, *lines], b""
        for line in reversed(lines):
            yield stop, line
            stop -= len(line)
        end, rest, length = start, first, min(2 * length, BLOCK_BYTES)


def cut(storage: Storage, end: int) -> None:
    """Drop what comes after byte `end`; afterwards there is a metrics.jsonl, maybe an empty one."""
    segments = _segments(storage)
    part_of = {part.name: part for part in _in_order(storage, segments)}
    # From the last to the first, so that a kill in between leaves a longer file and no gap.
    for entry in reversed(segments):
        part = part_of.get(entry.name)
        if part is None or part.start >= end:
            storage.delete(entry.name)
        elif part.end > end:
            _copy(storage, [Part(part.name, part.start, end)], part.name)
    whole = part_of.get(METRICS)
    path = storage.local_path(METRICS)
    if whole is None:
        storage.write(METRICS, b"")
    elif whole.end > end:
        if path is None:
            _copy(storage, [Part(METRICS, 0, end)], METRICS)
        else:
            with open(path, "r+b") as file:
                file.truncate(end)
    if path is not None:  # a folder that was copied from S3
        seal(storage)


def seal(storage: Storage) -> None:
    """Make one metrics.jsonl of all parts.

    Raises:
        StorageError: the storage has refused it; the parts are still there.
    """
    segments = _segments(storage)
    if not segments:
        return
    before = _in_order(storage, segments)
    if [part.name for part in before] != [METRICS]:
        _copy(storage, before, METRICS)
    storage.delete_tree(SEGMENTS)


def _copy(storage: Storage, sources: list[Part], name: str) -> None:
    with storage.open_write(name) as out:
        for part in sources:
            for low in range(0, part.end - part.start, BLOCK_BYTES):
                high = min(low + BLOCK_BYTES, part.end - part.start)
                out.write(storage.read(part.name, low, high - low))


class Segments:
    """The segments of an S3 folder as its one writer sees them."""

    def __init__(self, storage: Storage) -> None:
        listed = parts(storage)
        self._storage, self._full = storage, [part for part in listed if part.name != METRICS]
        self._start = listed[-1].end if listed else 0

    def put(self, data: bytes) -> None:
        """Write the last segment anew; it begins where the last `end` was.

        Raises:
            StorageError: the storage has refused it.
        """
        self._storage.write(_name(self._start), data)

    def end(self, length: int) -> None:
        """End the last segment, whose bytes have been written, and begin another."""
        self._full.append(Part(_name(self._start), self._start, self._start + length))
        self._start += length
        try:
            while self._merge():
                pass
        except OSError as error:  # nothing is lost: another `end` tries again
            logger.warning("segments of %s are not merged yet: %s", METRICS, error)

    def _merge(self) -> bool:
        """Make one of the last FAN segments if they have one size."""
        last = self._full[-FAN:]
        if len(last) < FAN or len({_level(part.end - part.start) for part in last}) > 1:
            return False
        _copy(self._storage, last, last[0].name)
        self._full[-FAN:] = [Part(last[0].name, last[0].start, last[-1].end)]
        for part in last[1:]:
            self._storage.delete(part.name)
        return True


def _level(length: int) -> int:
    """Return how often segments of this length have been merged."""
    level = 0
    while length >= FAN * SEGMENT_BYTES:
        length, level = length // FAN, level + 1
    return level
