"""Find a run's checkpoints and check that their files are what was saved. Imports no torch."""

from __future__ import annotations

import hashlib
import io
import json
import re
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from typing_extensions import TypedDict

from rayapp.observe.records import LoopState
from rayapp.observe.run_folder import CHECKPOINTS, RUN_ID, Count, parsed
from rayapp.storage import Storage
from rayapp.storage.base import READ_BLOCK, Reader

MARKER = "COMMITTED"
REFUSED = "REFUSED"  # replaces the marker of a damaged checkpoint, and holds the reason
STATE, METADATA = "state.json", ".metadata"
BLOCK_BYTES = 8 * 2**20  # each block of a file has its own checksum
KEPT_BLOCKS = 2  # in memory, of a file that is read


class CheckpointError(RuntimeError):
    """The run cannot be saved, or what was saved cannot be read; the message says why."""


class Damaged(CheckpointError):
    """A file of a committed checkpoint is not what was saved; the message names it."""


class NoneUsable(CheckpointError):
    """Checkpoints were committed, and none can be used; the message names each with its reason."""


class Amounts(TypedDict, total=False):
    """The tokens or images of so many steps, whichever the run counts in."""

    tokens: int
    images: int


class State(Amounts, LoopState, total=False):
    """The content of state.json: the position in the data, and what a resume checks or restores."""

    step: int
    cursor: dict[str, int | str]
    """rayapp.order.Cursor."""
    stages: list[list[int]]
    """rayapp.order.Order.stages; absent if there are none."""
    data: dict[str, object]
    """The parts of the data's fingerprint, by name."""
    workers: int
    versions: dict[str, str]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint whose files all have the right size."""

    name: str
    """Folder under `checkpoints/`."""
    step: int
    state: State


@dataclass(frozen=True)
class SavedFile:
    """The size and checksums of a file, as the marker lists them."""

    size: Count
    """Bytes."""
    sha256: tuple[str, ...]
    """One for each block of BLOCK_BYTES; an empty file has one, of no bytes."""

    def is_whole(self) -> bool:
        """Return whether each block has its checksum."""
        return len(self.sha256) == max(1, -(-self.size // BLOCK_BYTES))


class Digest:
    """Compute the size and checksums of a file while it is written."""

    def __init__(self) -> None:
        self.size, self._blocks = 0, [hashlib.sha256()]

    def update(self, data: Any) -> None:
        """Add the next bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            left = BLOCK_BYTES * len(self._blocks) - self.size
            if not left:
                self._blocks.append(hashlib.sha256())
                continue
            self._blocks[-1].update(view[:left])
            self.size += len(view[:left])
            view = view[left:]

    def file(self) -> SavedFile:
        return SavedFile(self.size, tuple(block.hexdigest() for block in self._blocks))


def open_checked(storage: Storage, name: str, file: SavedFile) -> BinaryIO:
    """Open a file as `Storage.open_read` does, and check each block that is read.

    The reader raises Damaged if a block has another checksum.
    """
    return io.BufferedReader(Reader(_Blocks(storage, file).read, name, file.size), READ_BLOCK)


class _Blocks:
    """Read any part of a file block by block, check each block, and keep the last KEPT_BLOCKS."""

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
    """Return the newest checkpoint with a marker; unlike `latest`, do not look at its files."""
    folder = storage / CHECKPOINTS
    for name in newest_first(folder):
        marker, order = folder.stat(f"{name}/{MARKER}"), order_of(name)
        if marker is not None and order is not None:
            return Committed(name, order[0], marker.modified_s)
    return None


def latest(storage: Storage) -> tuple[SavedCheckpoint | None, list[str]]:
    """Return the newest usable checkpoint (None if there is none), and why newer ones were skipped.

    Usable means: a valid marker of this run, every file with its size, intact state and metadata.

    Raises: StorageError: the storage does not answer, which is no reason to go back in time.
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
    """Return the step of the newest usable checkpoint, 0 if there is none."""
    newest, _ = latest(storage)
    return newest.step if newest else 0


def resume_point(storage: Storage) -> tuple[SavedCheckpoint | None, list[str]]:
    """Return the same as `latest`; None means that no checkpoint was ever committed.

    Raises:
        NoneUsable: some were, and training from step 1 would throw away what the run has done.
        StorageError: the storage does not answer.
    """
    newest, skipped = latest(storage)
    if newest is None:
        folder = storage / CHECKPOINTS
        lost = [
            line.removeprefix(f"{CHECKPOINTS}/").replace(" is skipped: ", ": ", 1)
            for name, line in zip(newest_first(folder), skipped, strict=True)
            if folder.exists(f"{name}/{MARKER}") or folder.exists(f"{name}/{REFUSED}")
        ]
        if lost:
            raise NoneUsable(
                f"{folder.url} is not usable: none of its checkpoints can be used ("
                f"{'; '.join(lost)}). Restore the files of one from a copy, with its {MARKER}, or "
                "move the folder away to train from step 1 again"
            )
    return newest, skipped


def find(storage: Storage, step: int | None) -> SavedCheckpoint:
    """Return the newest usable checkpoint of a run, or of one of its steps.

    Raises: CheckpointError: there is none; the message says why, and does not name the run.
    """
    folder = storage / CHECKPOINTS
    if step is None:
        newest, skipped = latest(storage)
        if newest is None:
            raise CheckpointError(f"{CHECKPOINTS} has none: {'; '.join(skipped) or 'it is empty'}")
        return newest
    names, run, whys = newest_first(folder), run_id(storage), list[str]()
    for name in names:
        if (order_of(name) or (-1,))[0] == step:
            try:
                return looked_at(folder / name, name, run)
            except CheckpointError as problem:
                whys.append(f"{name}: {problem}")
    steps = sorted({order[0] for order in map(order_of, names) if order is not None})
    there = f"there are those of steps {', '.join(map(str, steps)) or 'none'}"
    raise CheckpointError(f"{CHECKPOINTS} has none of step {step}: {'; '.join(whys) or there}")


def run_id(storage: Storage) -> str | None:
    """Return a run's id; None before its first commit."""
    try:
        return storage.read(RUN_ID).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def claim_run_id(storage: Storage) -> str:
    """Return a run's id, a new one if it has none."""
    if (known := run_id(storage)) is not None:
        return known
    storage.create(RUN_ID, uuid.uuid4().hex.encode())  # unless another process was first
    return storage.read(RUN_ID).decode()


def refuse(storage: Storage, name: str, why: str) -> None:
    """Replace the marker of a damaged checkpoint by REFUSED, so that no resume chooses it again."""
    folder = storage / CHECKPOINTS / name
    folder.write(REFUSED, why.encode())
    folder.delete(MARKER)


@dataclass(frozen=True)
class Marker:
    """The content of a checkpoint's marker."""

    run: str
    """Id of the run that saved it."""
    name: str
    """Folder under `checkpoints/`."""
    step: Count
    files: dict[str, SavedFile]


def read_marker(folder: Storage, name: str) -> Marker:
    """Read the marker of a checkpoint.

    Raises: CheckpointError: there is none, or it is damaged.
    """
    try:
        text = folder.read(MARKER)
    except FileNotFoundError:
        why = f"it has no {MARKER} (the save was cut off)"
        if folder.exists(REFUSED):
            why = folder.read(REFUSED).decode(errors="replace")
        raise CheckpointError(why) from None
    try:
        marker: Marker = parsed(text, Marker)
    except ValueError as error:
        raise Damaged(f"{MARKER} is damaged") from error
    whole = marker.name == name and marker.step == (order_of(name) or (None,))[0]
    whole = whole and {STATE, METADATA} <= marker.files.keys()
    if not whole or not all(file.is_whole() for file in marker.files.values()):
        raise Damaged(f"{MARKER} is damaged")
    return marker


def looked_at(folder: Storage, name: str, run: str | None) -> SavedCheckpoint:
    """Check a checkpoint's marker, the sizes of its files, and the content of state and metadata.

    `run` is the id of the run that must have saved it; None: the run's folder has no id.

    Raises: CheckpointError: saying what is wrong with it.
    """
    marked = read_marker(folder, name)
    files = marked.files
    if run is None:
        raise CheckpointError(
            f"it may be of another run: {RUN_ID} is missing from the run's folder. If it is of "
            f"this run, write {marked.run} into that file"
        )
    if marked.run != run:
        raise CheckpointError(
            f"it is of another run: its id is {marked.run}, and {RUN_ID} has {run}"
        )
    sizes = {entry.name: entry.size for entry in folder.list()}
    for each, file in files.items():
        if each not in sizes:
            raise Damaged(f"{each} is missing")
        if sizes[each] != file.size:
            raise Damaged(f"{each} has {sizes[each]} bytes instead of {file.size}")
    with open_checked(folder, METADATA, files[METADATA]) as metadata:
        metadata.read()
    with open_checked(folder, STATE, files[STATE]) as stream:
        text = stream.read()  # an error of the storage is no damage
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise Damaged(f"{STATE} is damaged")
    return SavedCheckpoint(name, marked.step, cast(State, state))


def name_of(step: int, attempt: int) -> str:
    """Return the name of a checkpoint's folder; `order_of` is the inverse."""
    return f"step-{step:08d}" + (f".{attempt}" if attempt else "")


def order_of(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a checkpoint's folder name; None for any other name."""
    match = re.fullmatch(r"step-([0-9]{8,})(?:\.([1-9][0-9]*))?", name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def newest_first(folder: Storage) -> list[str]:
    """Return the names of a run's checkpoint folders, committed or not, newest first."""
    ours = {name: order for name in folder.dirs() if (order := order_of(name)) is not None}
    return sorted(ours, key=ours.__getitem__, reverse=True)
