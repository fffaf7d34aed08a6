"""Which checkpoints a run has, and whether their files are what was saved. Imports no torch."""

from __future__ import annotations

import hashlib
import io
import json
import re
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NotRequired, TypedDict, cast

from rayapp.observe.run_folder import CHECKPOINTS, RUN_ID
from rayapp.storage import Storage
from rayapp.storage.base import READ_BLOCK, Reader

MARKER = "COMMITTED"
REFUSED = "REFUSED"  # in place of the marker once a file was found damaged: the reason
STATE = "state.json"
METADATA = ".metadata"
BLOCK_BYTES = 8 * 2**20  # of a file that have a checksum of their own
KEPT_BLOCKS = 2  # of a file that is read


class CheckpointError(RuntimeError):
    """The run cannot be saved, or what was saved cannot be read; the message says why."""


class Damaged(CheckpointError):
    """A file of a committed checkpoint is not what was saved; the message names it."""


class NoneUsable(CheckpointError):
    """Checkpoints were committed, and none can be used; the message names each with its reason."""


class Amounts(TypedDict, total=False):
    """What so many steps amount to, in what the run is counted in."""

    tokens: int
    images: int


class State(Amounts):
    """What state.json holds: a position, and what must be as it was."""

    step: int
    cursor: dict[str, int | str]
    """rayapp.order.Cursor."""
    data: dict[str, object]
    """What the rows were made from, by name."""
    workers: int
    losses: list[float]
    """The last ones, which spikes are compared with."""
    skips: NotRequired[int]
    """Bad steps in a row that were skipped last; older versions have none."""
    versions: dict[str, str]


class FileValues(TypedDict):
    """A File as the marker has it."""

    size: int
    sha256: list[str]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint whose files are all there in full."""

    name: str
    """Folder under `checkpoints/`."""
    step: int
    state: State
    run: str | None
    """Id of the run that saved it; None: saved by a version that gave runs no id."""


@dataclass(frozen=True)
class SavedFile:
    """A file as the marker has it."""

    size: int
    """Bytes."""
    sha256: tuple[str, ...]
    """Of each block of BLOCK_BYTES; one of nothing for an empty file."""

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> SavedFile:
        """Read what `to_dict` has written; raises ValueError, KeyError or TypeError."""
        file = cls(_whole_number(facts["size"]), tuple(map(str, facts["sha256"])))
        if len(file.sha256) != max(1, -(-file.size // BLOCK_BYTES)):
            raise ValueError(f"{len(file.sha256)} checksums of {file.size} bytes")
        return file

    def to_dict(self) -> FileValues:
        return {"size": self.size, "sha256": list(self.sha256)}


class Digest:
    """Size and checksums of a file, taken as it is written."""

    def __init__(self) -> None:
        self.size, self._blocks = 0, [hashlib.sha256()]

    def update(self, data: Any) -> None:
        """Take the next bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            room = BLOCK_BYTES * len(self._blocks) - self.size
            if not room:
                self._blocks.append(hashlib.sha256())
                continue
            self._blocks[-1].update(view[:room])
            self.size += len(view[:room])
            view = view[room:]

    def file(self) -> SavedFile:
        return SavedFile(self.size, tuple(block.hexdigest() for block in self._blocks))


def open_checked(storage: Storage, name: str, file: SavedFile) -> BinaryIO:
    """Open a file as `Storage.open_read` does; each block that is read must be what was saved.

    The reader raises Damaged when one is not.
    """
    return io.BufferedReader(Reader(_Blocks(storage, file).read, name, file.size), READ_BLOCK)


class _Blocks:
    """Read any part of a file as its blocks, checked; keep the last ones."""

    def __init__(self, storage: Storage, file: SavedFile) -> None:
        self._storage, self._file = storage, file
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def read(self, name: str, offset: int, length: int) -> bytes:
        parts, end = [], offset + length
        while offset < end:
            number, first = divmod(offset, BLOCK_BYTES)
            parts.append(self._block(name, number)[first : first + end - offset])
            offset += len(parts[-1])
        return b"".join(parts)

    def _block(self, name: str, number: int) -> bytes:
        if number not in self._kept:
            short, start = name.rpartition("/")[2], number * BLOCK_BYTES
            length = min(BLOCK_BYTES, self._file.size - start)
            try:
                block = self._storage.read(name, start, length)
            except FileNotFoundError:  # deleted meanwhile
                raise Damaged(f"{short} is missing") from None
            if hashlib.sha256(block).hexdigest() != self._file.sha256[number]:
                raise Damaged(f"{short} has another checksum than when it was saved")
            self._kept[number] = block
            if len(self._kept) > KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return self._kept[number]


@dataclass(frozen=True)
class Committed:
    """A checkpoint that has its marker."""

    name: str
    """Folder under `checkpoints/`."""
    step: int
    at_s: float
    """Unix time of the commit."""


def newest_committed(storage: Storage) -> Committed | None:
    """Return the newest checkpoint that has a marker; whether it can be used `latest` says."""
    folder = storage / CHECKPOINTS
    for name in newest_first(folder):
        marker, order = folder.stat(f"{name}/{MARKER}"), order_of(name)
        if marker is not None and order is not None:
            return Committed(name, order[0], marker.modified_s)
    return None


def latest(storage: Storage) -> tuple[SavedCheckpoint | None, list[str]]:
    """Return the newest checkpoint of which all files are there, and why newer ones were skipped.

    Raises:
        StorageError: the storage does not answer, which is no reason to go back in time.
    """
    skipped: list[str] = []
    folder, run = storage / CHECKPOINTS, run_id(storage)
    for name in newest_first(folder):
        try:
            return looked_at(folder / name, name, run), skipped
        except CheckpointError as problem:
            skipped.append(f"{CHECKPOINTS}/{name} is skipped: {problem}")
    return None, skipped


def steps_done(storage: Storage) -> int:
    """Return the steps of the newest checkpoint that can be used, 0 where there is none."""
    found, _ = latest(storage)
    return found.step if found else 0


def resume_point(storage: Storage) -> tuple[SavedCheckpoint | None, list[str]]:
    """Return what `latest` does; None means that no checkpoint was ever committed.

    Raises:
        NoneUsable: some were, and training from step 1 would throw away what the run has done.
        StorageError: the storage does not answer.
    """
    found, skipped = latest(storage)
    if found is None:
        folder = storage / CHECKPOINTS
        lost = [
            line.removeprefix(f"{CHECKPOINTS}/").replace(" is skipped: ", ": ", 1)
            for name, line in zip(newest_first(folder), skipped, strict=True)
            if folder.exists(f"{name}/{MARKER}") or folder.exists(f"{name}/{REFUSED}")
        ]
        if lost:
            raise NoneUsable(
                f"{folder.url} is not usable: no checkpoint in it is whole ({'; '.join(lost)}). "
                f"Restore the files of one, its {MARKER} too, from a copy, or move the folder away "
                "to train from step 1 again"
            )
    return found, skipped


def run_id(storage: Storage) -> str | None:
    """Return the id of a run; None before its first save, or if an older version saved it."""
    try:
        return storage.read(RUN_ID).decode(errors="replace")
    except FileNotFoundError:
        return None


def claim_run_id(storage: Storage) -> str:
    """Return the id of a run; where it has none, give it that of its newest checkpoint, or one."""
    known = run_id(storage)
    if known is None:
        found, _ = latest(storage)
        known = (found and found.run) or uuid.uuid4().hex
        if not storage.create(RUN_ID, known.encode()):  # another process was first
            known = storage.read(RUN_ID).decode()
    return known


def refuse(storage: Storage, name: str, why: str) -> None:
    """Let no one choose a damaged checkpoint again."""
    folder = storage / CHECKPOINTS / name
    folder.write(REFUSED, why.encode())
    folder.delete(MARKER)


@dataclass(frozen=True)
class Marker:
    """What the marker of a checkpoint says."""

    step: int
    files: dict[str, SavedFile]
    run: str | None
    """Id of the run that saved it."""


def read_marker(folder: Storage, name: str) -> Marker:
    """Read the marker of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        marker = json.loads(folder.read(MARKER))
        step, run = _whole_number(marker["step"]), marker.get("run")
        files = {file: SavedFile.from_dict(facts) for file, facts in marker["files"].items()}
        whole = marker["name"] == name and (step, 0) <= (order_of(name) or (0, 0)) < (step + 1, 0)
        whole = whole and {STATE, METADATA} <= files.keys()
        whole = whole and isinstance(run, str | None)
    except FileNotFoundError:
        why = f"it has no {MARKER} (the save was cut off)"
        if folder.exists(REFUSED):
            why = folder.read(REFUSED).decode(errors="replace")
        raise CheckpointError(why) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise Damaged(f"{MARKER} is damaged")
    return Marker(step, files, run)


def _whole_number(value: Any) -> int:
    """Return what is an int, and not negative; JSON also has floats, Infinity and NaN."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value} is no whole number")
    return value


def looked_at(folder: Storage, name: str, run: str | None) -> SavedCheckpoint:
    """Check the sizes of a checkpoint's files, and the content of those that say what it is.

    `run` is the id of the run that it must be of; None: it may be of any.

    Raises:
        CheckpointError: saying what is wrong with it.
    """
    marked = read_marker(folder, name)
    files = marked.files
    if run is not None and marked.run is not None and marked.run != run:
        raise CheckpointError(f"it is of another run: {marked.run}, and {RUN_ID} has {run}")
    sizes = {entry.name: entry.size for entry in folder.list()}
    for each, file in files.items():
        if each not in sizes:
            raise Damaged(f"{each} is missing")
        if sizes[each] != file.size:
            raise Damaged(f"{each} has {sizes[each]} bytes instead of {file.size}")
    with open_checked(folder, METADATA, files[METADATA]) as metadata:
        metadata.read()
    with open_checked(folder, STATE, files[STATE]) as stream:
        try:
            state = json.loads(stream.read())
        except (ValueError, RecursionError):
            state = None
    if not isinstance(state, dict):
        raise Damaged(f"{STATE} is damaged")
    return SavedCheckpoint(name, marked.step, cast(State, state), marked.run)


def name_of(step: int, attempt: int) -> str:
    """Return the name of a checkpoint's folder, which `order_of` reads."""
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def order_of(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a checkpoint's folder; None for a folder that is not ours."""
    match = re.fullmatch(r"step-([0-9]{8,})(?:\.([1-9][0-9]*))?", name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def newest_first(folder: Storage) -> list[str]:
    """Return the names of a run's checkpoint folders, committed or not."""
    found = {name: order_of(name) for name in folder.dirs()}
    ours = {name: order for name, order in found.items() if order is not None}
    return sorted(ours, key=ours.__getitem__, reverse=True)
