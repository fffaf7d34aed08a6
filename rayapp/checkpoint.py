"""Distributed checkpoints that exist if and only if their marker does.

    checkpointer = Checkpointer(run_storage, keep=2, asynchronous=True)
    stall_s = checkpointer.save(step, tensors, state)       # returns once the copy is made
    found = latest(run_storage)                             # newest that is whole, and what it skipped
    load(run_storage, found.name, tensors)

Each rank writes its own shards straight to a fresh folder `checkpoints/step-00000500/` with
torch.distributed.checkpoint, from a copy in host memory and in a thread, while training goes on.
When all ranks are done, rank 0 writes `state.json` and, last, `COMMITTED`: every file with its
size and SHA-256. A folder without a valid marker is nothing: it is skipped, named, and swept away
after a later commit.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult

from rayapp.storage import Storage, StorageError

FOLDER = "checkpoints"
MARKER = "COMMITTED"
STATE = "state.json"
METADATA = ".metadata"
MAX_FAILURES = 3  # saves that fail in a row before the run stops

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
        self._error: Exception | None = None
        self._failures = 0
        self.saved_step: int | None = None
        """Step of the last commit that this process saw."""
        self.commit_s: float | None = None
        """Seconds that the last save took from the call to the marker."""

    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> float:
        """Copy `tensors` to host memory, start the upload, and return the seconds stalled.

        A save that is still under way is waited for first, so that one copy exists at most.

        Raises:
            CheckpointError: this and the saves before it have failed MAX_FAILURES times in a row.
        """
        start = time.perf_counter()
        self.wait()
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        self._thread = threading.Thread(
            target=self._write, args=(step, staged, state, start), name="checkpoint"
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
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is None:
            return
        error, self._error = self._error, None
        self._failures += 1
        logger.warning("checkpoint not saved (%d in a row): %s", self._failures, error)
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be saved in {self.storage.url}: {error}"
            ) from error

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
            raise CheckpointError(f"the last checkpoint could not be saved: {self._error}") from self._error

    def _write(self, step: int, staged: dict[str, Any], state: dict[str, Any], start: float) -> None:
        try:
            name = self._fresh_name(step)
            writer = _Writer(self.storage, name)
            dcp.save(staged, storage_writer=writer, process_group=self.group)
            files: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
            dist.gather_object(writer.files, files, dst=0, group=self.group)
            if files is not None:
                self._commit(name, {k: v for part in files for k, v in part.items()}, state)
            self.saved_step, self._failures = step, 0
            self.commit_s = time.perf_counter() - start
        except Exception as error:  # any cause: handed to the training thread by wait() or close()
            self._error = error

    def _fresh_name(self, step: int) -> str:
        """Choose a folder that no attempt before has written to; rank 0 decides."""
        choice = [""]
        if self.rank == 0:
            taken, base = set(self.storage.dirs()), f"step-{step:08d}"
            names = [base] + [f"{base}.{number}" for number in range(1, len(taken) + 2)]
            choice = [next(name for name in names if name not in taken)]
        dist.broadcast_object_list(choice, src=0, group=self.group)
        return choice[0]

    def _commit(self, name: str, files: dict[str, Any], state: dict[str, Any]) -> None:
        folder = self.storage / name
        data = json.dumps(state, indent=1).encode()
        folder.write(STATE, data)
        files[STATE] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        marker = {"name": name, "step": state["step"], "files": files}
        folder.write(MARKER, json.dumps(marker, indent=1).encode())
        self._sweep(name)

    def _sweep(self, newest: str) -> None:
        """Delete all but the newest `keep` committed checkpoints, and what was torn before them."""
        names = sorted(self.storage.dirs(), reverse=True)
        committed = [n for n in names if self.storage.exists(f"{n}/{MARKER}")]
        kept = set(committed[: self.keep]) | {newest}
        for name in names:
            if name not in kept and name < newest:
                # The marker goes first: a sweep that is cut off leaves no half checkpoint behind.
                self.storage.delete(f"{name}/{MARKER}")
                self.storage.delete_tree(name)


def latest(storage: Storage) -> tuple[Found | None, list[str]]:
    """Return the newest checkpoint that is whole, and why newer ones were skipped."""
    skipped = []
    folder = storage / FOLDER
    for name in sorted(folder.dirs(), reverse=True):
        problem = _problem(folder / name)
        if problem is None:
            state = json.loads(folder.read(f"{name}/{STATE}"))
            return Found(name, int(state["step"]), state), skipped
        skipped.append(f"{FOLDER}/{name} is skipped: {problem}")
    return None, skipped


def load(storage: Storage, name: str, tensors: dict[str, Any]) -> None:
    """Read a checkpoint into `tensors` in place; each rank reads what its shards need.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    try:
        dcp.load(tensors, storage_reader=_Reader(storage / FOLDER, name), no_dist=not dist.is_initialized())
    except Exception as error:  # DCP wraps each rank's own error; the chain keeps it
        raise CheckpointError(f"{storage.url}/{FOLDER}/{name} could not be loaded: {error}") from error


def saved_names(storage: Storage, name: str) -> set[str]:
    """Return the names of the tensors and objects that a checkpoint holds."""
    return set(_Reader(storage / FOLDER, name).read_metadata().state_dict_metadata)


def _problem(folder: Storage) -> str | None:
    """Say what is wrong with a checkpoint, or None; reads every byte."""
    try:
        marker = json.loads(folder.read(MARKER))
    except FileNotFoundError:
        return f"it has no {MARKER} (the save was cut off)"
    except ValueError:
        return f"{MARKER} is not JSON"
    for file, expected in marker["files"].items():
        size = folder.size(file)
        if size is None:
            return f"{file} is missing"
        if size != expected["size"]:
            return f"{file} has {size} bytes instead of {expected['size']}"
        if _sha256(folder, file) != expected["sha256"]:
            return f"{file} has another checksum than when it was saved"
    return None


def _sha256(folder: Storage, file: str) -> str:
    digest, offset, size = hashlib.sha256(), 0, folder.size(file) or 0
    while offset < size:
        chunk = folder.read(file, offset, min(16 * 2**20, size - offset))
        digest.update(chunk)
        offset += len(chunk)
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
            stream = _Hashing(raw)
            yield stream
            self.files[name.rpartition("/")[2]] = {
                "size": stream.size,
                "sha256": stream.digest.hexdigest(),
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


class _Writer(dcp.FileSystemWriter):
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


class _Reader(dcp.FileSystemReader):
    """Read shards from `<storage>/<name>`."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(name)
        self.fs = _Files(storage)  # type: ignore[assignment]
        self.path = name
