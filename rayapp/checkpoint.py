"""Distributed checkpoints that exist if and only if their marker does.

    checkpointer = Checkpointer(run_storage, keep=2, asynchronous=True)
    stall_s = checkpointer.save(step, tensors, state)       # returns once the copy is made
    found, skipped = latest(run_storage)                    # newest that is whole; why not newer
    load(run_storage, found.name, tensors)

Rank 0 takes a fresh folder `checkpoints/step-00000500/` by creating `state.json` in it. Each rank
writes its own shards straight there with torch.distributed.checkpoint, from a copy in host memory
and in a thread, while training goes on. When all ranks are done, rank 0 writes the marker
`COMMITTED`: every file with its size and SHA-256. A folder without a valid marker is nothing: it
is skipped, named, and swept away after a later commit. What fails on one rank fails on all.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from rayapp.storage import Storage, StorageError

FOLDER = "checkpoints"
MARKER = "COMMITTED"
STATE = "state.json"
METADATA = ".metadata"
MAX_FAILURES = 3  # saves that fail in a row before the run stops
READERS = 8  # files that are verified at once
READ_BYTES = 16 * 2**20  # of a file in memory while it is verified

# CheckpointException is torch's, for what fails on any rank, and no Exception but a BaseException.
FAILURES = (Exception, CheckpointException)

logger = logging.getLogger("rayapp.checkpoint")


class CheckpointError(RuntimeError):
    """The run cannot be saved, or what was saved cannot be read; the message says why."""


@dataclass(frozen=True)
class Found:
    """A committed checkpoint whose files all have their size and checksum."""

    name: str
    """Folder under `checkpoints/`."""
    step: int
    state: dict[str, Any]
    """What `state.json` holds."""


class Checkpointer:
    """Save a run's state; every rank makes one and calls `save` at the same steps."""

    def __init__(self, storage: Storage, *, keep: int, asynchronous: bool) -> None:
        self.storage, self.keep, self.asynchronous = storage / FOLDER, keep, asynchronous
        self.group = dist.new_group(backend="gloo")  # of its own: used from the upload thread
        self.rank = dist.get_rank()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.cuda.is_available(),
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=torch.cuda.is_available(),
            )
        )
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the last save
        self._failures = 0
        self.saved_step: int | None = None
        """Step of the last commit that this process saw."""
        self.commit_s: float | None = None
        """Seconds that the last commit took from the call to the marker."""

    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> float:
        """Copy `tensors` to host memory, start the upload, and return the seconds stalled.

        A save that is still under way is waited for first, so that one copy exists at most.
        `state` goes to state.json as rank 0 has it.

        Raises:
            CheckpointError: this and the saves before it have failed MAX_FAILURES times in a row.
        """
        start = time.perf_counter()
        self.wait()
        data = json.dumps(state, indent=1).encode()  # now: the caller may change it later
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        self._thread = threading.Thread(
            target=self._write, args=(step, staged, data, start), name="checkpoint"
        )
        self._thread.start()
        if not self.asynchronous:
            self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until nothing is under way.

        Raises:
            CheckpointError: saves have failed MAX_FAILURES times in a row.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is None:
            return
        self._failures += 1
        why = _reason(self._error)
        logger.warning("checkpoint not saved (%d in a row): %s", self._failures, why)
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be saved in "
                f"{self.storage.url}: {why}"
            ) from self._error

    def close(self) -> None:
        """Wait, and fail if the last save did not reach its marker.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stager.close()
        if self._error is not None:
            why = _reason(self._error)
            raise CheckpointError(f"the last checkpoint could not be saved: {why}") from self._error

    def _write(self, step: int, staged: dict[str, Any], state: bytes, start: float) -> None:
        """Run in the thread; every way out is the same on all ranks."""
        try:
            name = self._on_rank_0(lambda: self._claim(step, state))
            writer = _Writer(self.storage, name)
            dcp_save(staged, storage_writer=writer, process_group=self.group)
            parts: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
            dist.gather_object(writer.files, parts, dst=0, group=self.group)
            self._on_rank_0(lambda: self._commit(name, step, state, parts or []))
        except FAILURES as error:  # any cause: handed to the training thread by wait() or close()
            self._error = error
            return
        self.saved_step, self._failures, self._error = step, 0, None
        self.commit_s = time.perf_counter() - start
        if self.rank == 0:
            try:
                self._sweep(name)
            except OSError as error:  # the checkpoint is there all the same
                logger.warning("old checkpoints are not deleted: %s", error)

    def _on_rank_0(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0; return its result, or raise its failure, on all ranks."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = function()
            except Exception as error:  # any cause: the others wait for an answer
                logger.debug("rank 0 failed", exc_info=error)
                answer[1] = str(error) or repr(error)
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]

    def _claim(self, step: int, state: bytes) -> str:
        """Take a folder that no attempt before has taken, and that sorts after all of them.

        Creating state.json is the claim: a rank of a dead attempt that still uploads shards has a
        folder of its own, even if none of its files was visible when this one was chosen.
        """
        orders = filter(None, map(_order, self.storage.dirs()))
        number = max((number + 1 for other, number in orders if other == step), default=0)
        while True:
            name = f"step-{step:08d}" + (f".{number}" if number else "")
            if self.storage.create(f"{name}/{STATE}", state):
                return name
            number += 1

    def _commit(self, name: str, step: int, state: bytes, parts: list[dict[str, Any]]) -> None:
        files = {file: facts for part in parts for file, facts in part.items()}
        files[STATE] = {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}
        marker = {"name": name, "step": step, "files": files}
        self.storage.write(f"{name}/{MARKER}", json.dumps(marker, indent=1).encode())

    def _sweep(self, newest: str) -> None:
        """Delete what is older than a commit, save the `keep - 1` newest committed ones."""
        names = _newest_first(self.storage)
        older = names[names.index(newest) + 1 :]
        committed = [name for name in older if self.storage.exists(f"{name}/{MARKER}")]
        for name in older:
            if name not in committed[: self.keep - 1]:
                # The marker goes first: a sweep that is cut off leaves no half checkpoint behind.
                self.storage.delete(f"{name}/{MARKER}")
                self.storage.delete_tree(name)


def latest(storage: Storage) -> tuple[Found | None, list[str]]:
    """Return the newest checkpoint that is whole, and why newer ones were skipped.

    Raises:
        StorageError: the storage does not answer, which is no reason to go back in time.
    """
    skipped: list[str] = []
    folder = storage / FOLDER
    for name in _newest_first(folder):
        try:
            return _verified(folder / name, name), skipped
        except CheckpointError as problem:
            skipped.append(f"{FOLDER}/{name} is skipped: {problem}")
    return None, skipped


def load(storage: Storage, name: str, tensors: dict[str, Any]) -> None:
    """Read a checkpoint into `tensors` in place; each rank reads what its shards need.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    reader = _Reader(storage / FOLDER, name)
    try:
        dcp_load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except FAILURES as error:
        raise CheckpointError(
            f"{storage.url}/{FOLDER}/{name} could not be loaded: {_reason(error)}"
        ) from error


def saved_names(storage: Storage, name: str) -> set[str]:
    """Return the names of the tensors and objects that a checkpoint holds."""
    return set(_Reader(storage / FOLDER, name).read_metadata().state_dict_metadata)


def _order(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a checkpoint's folder; None for a folder that is not ours."""
    match = re.fullmatch(r"step-([0-9]{8,})(?:\.([1-9][0-9]*))?", name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def _newest_first(folder: Storage) -> list[str]:
    found = {name: _order(name) for name in folder.dirs()}
    ours = {name: order for name, order in found.items() if order is not None}
    return sorted(ours, key=ours.__getitem__, reverse=True)


def _reason(error: BaseException) -> str:
    """Return the words of an error; torch's own hold the tracebacks of all ranks as well."""
    if not isinstance(error, CheckpointException):
        return str(error) or repr(error)
    whys: dict[str, list[str]] = {}
    for rank, (cause, _) in error.failures.items():
        whys.setdefault(str(cause) or repr(cause), []).append(str(rank))
    return "; ".join(f"{why} (rank {', '.join(ranks)})" for why, ranks in whys.items())


def _verified(folder: Storage, name: str) -> Found:
    """Read every byte of a checkpoint and return what it is.

    Raises:
        CheckpointError: saying what is wrong with it.
    """
    try:
        marker = json.loads(folder.read(MARKER))
        step = int(marker["step"])
        files = {file: (int(f["size"]), str(f["sha256"])) for file, f in marker["files"].items()}
        whole = marker["name"] == name and (step, 0) <= (_order(name) or (0, 0)) < (step + 1, 0)
        whole = whole and {STATE, METADATA} <= files.keys()
    except FileNotFoundError:
        raise CheckpointError(f"it has no {MARKER} (the save was cut off)") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{MARKER} is damaged")
    sizes = {entry.name: entry.size for entry in folder.list()}
    for file, (size, _) in files.items():
        if file not in sizes:
            raise CheckpointError(f"{file} is missing")
        if sizes[file] != size:
            raise CheckpointError(f"{file} has {sizes[file]} bytes instead of {size}")
    with ThreadPoolExecutor(READERS, thread_name_prefix="verify") as pool:
        for file, digest in {f: pool.submit(_sha256, folder, f, sizes[f]) for f in files}.items():
            try:
                same = digest.result() == files[file][1]
            except FileNotFoundError:  # deleted meanwhile
                same = False
            if not same:
                pool.shutdown(cancel_futures=True)
                raise CheckpointError(f"{file} has another checksum than when it was saved")
    return Found(name, step, json.loads(folder.read(STATE)))


def _sha256(folder: Storage, file: str, size: int) -> str:
    digest = hashlib.sha256()
    for offset in range(0, size, READ_BYTES):
        digest.update(folder.read(file, offset, min(READ_BYTES, size - offset)))
    return digest.hexdigest()


class _Files(FileSystemBase):
    """torch.distributed.checkpoint's idea of a file system, over Storage; paths are names in it."""

    def __init__(self, storage: Storage, files: dict[str, Any] | None = None) -> None:
        self.storage, self.files = storage, files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        name = str(path)
        if mode == "rb":
            with self.storage.open_read(name) as stream:
                yield stream
            return
        assert mode == "wb" and self.files is not None, mode
        with self.storage.open_write(name) as raw:
            hashing = _Hashing(raw)
            yield hashing
            self.files[name.rpartition("/")[2]] = {
                "size": hashing.size,
                "sha256": hashing.digest.hexdigest(),
            }

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Folders come with their files."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self.storage.exists(str(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.storage.delete(str(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise StorageError("rename", str(path), "a committed name is never moved", "")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Hashing(io.RawIOBase):
    """Pass bytes on, counting and hashing them."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.size, self.digest = raw, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.raw.write(data)
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        """Leave closing to the owner of `raw`, which publishes the file."""


class _Writer(FileSystemWriter):
    """Write shards to `<storage>/<name>` and remember the size and checksum of each file."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(name, sync_files=False, thread_count=1)
        self.files: dict[str, Any] = {}
        self.fs = _Files(storage, self.files)  # type: ignore[assignment]
        self.path = name

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; unlike the base class there is no rename, which S3 has not."""
        metadata.storage_data = {r.index: r.storage_data for part in results for r in part}
        metadata.storage_meta = self.storage_meta()
        with self.fs.create_stream(f"{self.path}/{METADATA}", "wb") as stream:
            pickle.dump(metadata, stream)


class _Reader(FileSystemReader):
    """Read shards from `<storage>/<name>`."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(name)
        self.fs = _Files(storage)  # type: ignore[assignment]
        self.path = name
