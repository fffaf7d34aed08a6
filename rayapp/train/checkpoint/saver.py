"""Save checkpoints of a run while it trains."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from rayapp.observe.run_folder import CHECKPOINTS
from rayapp.storage import Storage
from rayapp.train.checkpoint.checkpoint_files import FAILURES, Files, reason_of
from rayapp.train.checkpoint.commit import claim, commit, sweep
from rayapp.train.checkpoint.marker import METADATA, CheckpointError, SavedFile, State
from rayapp.train.checkpoint.staging import HostCopy, Tensors

MAX_FAILURES = 3  # saves that fail in a row before the run stops

logger = logging.getLogger("rayapp.train.checkpoint")


class Checkpointer:
    """Save a run's checkpoints; every rank has a Checkpointer and calls `save` at the same steps.

        checkpointer.save(step, tensors, state)
        loss(model(batch)).backward()  # meanwhile the tensors are copied, then uploaded
        checkpointer.settle()
        optimizer.step()  # from here on they may change

    Just before the marker is written, rank 0 calls `before_commit(step)` in the upload thread. It
    may wait for other output of the step, unless saves are synchronous. A save fails if a rank
    waits longer than `timeout_s` for another one.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        keep: int,
        asynchronous: bool,
        timeout_s: float | None = None,
        before_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.before_commit = before_commit
        self.run, self.storage = storage, storage / CHECKPOINTS
        self.keep, self.asynchronous = keep, asynchronous
        # Its own group, as the upload thread uses it.
        timeout = timedelta(seconds=timeout_s) if timeout_s else None
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.rank = dist.get_rank()
        self._copy = HostCopy()
        self._copied: Future[None] = Future()  # of the last save: its tensors are on the host
        self._copied.set_result(None)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the last save
        self._failures = 0
        self.saved_step: int | None = None
        """Step of the last commit that this process saw."""
        self.commit_s: float | None = None
        """Seconds from the call of `save` to the marker, of the last commit."""

    def save(self, step: int, tensors: Tensors, state: State) -> None:
        """Start a thread that copies `tensors` to host memory and uploads the copy, and return.

        The tensors must not change until `settle` returns. A save that is still under way is waited
        for first, so that at most one copy exists. Rank 0's `state` goes to state.json. A
        synchronous Checkpointer returns only when the save has ended.

        Raises:
            CheckpointError: this and the saves before it have failed MAX_FAILURES times in a row.
        """
        start = time.perf_counter()
        self.wait()
        data = json.dumps(state, indent=1).encode()  # now: the caller may change it later
        self._copied = Future()
        self._copy.follow()
        self._thread = threading.Thread(
            target=self._copy_and_write, args=(step, tensors, data, start), name="checkpoint"
        )
        self._thread.start()
        if not self.asynchronous:
            self.wait()

    def settle(self) -> None:
        """Wait until the tensors of the last save may change.

        Raises: Exception: they could not be copied, for lack of memory say.
        """
        self._copied.result()

    def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            CheckpointError: saves have failed MAX_FAILURES times in a row.
            Exception: what `settle` raises.
        """
        if self._thread is None:
            return
        self._join()
        if self._error is None:
            return
        self._failures += 1
        why = reason_of(self._error)
        logger.warning("checkpoint not saved (%d in a row): %s", self._failures, why)
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be saved in "
                f"{self.storage.url}: {why}"
            ) from self._error

    def close(self) -> None:
        """Wait for the last save, and raise an error if its marker was not written.

        Raises:
            CheckpointError: the last save failed.
            Exception: what `settle` raises.
        """
        if self._thread is not None:
            self._join()
        self._copy.close()
        if self._error is not None:
            why = reason_of(self._error)
            raise CheckpointError(f"the last checkpoint could not be saved: {why}") from self._error

    def _join(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        self.settle()

    def _copy_and_write(self, step: int, tensors: Tensors, state: bytes, start: float) -> None:
        """Copy the tensors and write the checkpoint; this runs in the upload thread."""
        try:
            staged = self._copy.take(tensors)
        except BaseException as error:  # any cause: settle() raises it in the training thread
            self._copied.set_exception(error)
            return
        self._copied.set_result(None)
        self._write(step, staged, state, start)

    def _write(self, step: int, staged: Tensors, state: bytes, start: float) -> None:
        """Upload a copy and commit it; it succeeds on all ranks or fails on all."""
        try:
            name = self._on_rank_0(lambda: claim(self.run, step, state))
            writer = _Writer(self.storage, name)
            dcp_save(staged, storage_writer=writer, process_group=self.group)
            parts: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
            dist.gather_object(writer.files, parts, dst=0, group=self.group)
            self._on_rank_0(lambda: self._commit(name, step, state, parts or []))
        except FAILURES as error:  # any cause: wait() or close() reports it in the training thread
            self._error = error
            return
        self.saved_step, self._failures, self._error = step, 0, None
        self.commit_s = time.perf_counter() - start
        if self.rank == 0:
            try:
                sweep(self.run, name, self.keep, json.loads(state).get("best", {}).get("step"))
            except OSError as error:  # the new checkpoint is valid all the same
                logger.warning("old checkpoints are not deleted: %s", error)

    def _commit(
        self, name: str, step: int, state: bytes, parts: list[dict[str, SavedFile]]
    ) -> None:
        written = {path: file for part in parts for path, file in part.items()}
        files = {path.rpartition("/")[2]: file for path, file in written.items()}
        self.before_commit(step)
        commit(self.run, name, step, state, files)

    def _on_rank_0(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0; return its result, or raise its failure, on all ranks."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = function()
            except Exception as error:  # any cause: the other ranks wait for an answer
                logger.debug("rank 0 failed", exc_info=error)
                answer[1] = str(error) or repr(error)
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]


class _Writer(FileSystemWriter):
    """Write shards to `<storage>/<name>` and remember the size and checksum of each file."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(name, sync_files=False, thread_count=1)
        self.files: dict[str, SavedFile] = {}
        self.fs = Files(storage, self.files)  # type: ignore[assignment]
        self.path = name

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata file; unlike the base class without a rename, which S3 lacks."""
        metadata.storage_data = {r.index: r.storage_data for part in results for r in part}
        metadata.storage_meta = self.storage_meta()
        with self.fs.create_stream(f"{self.path}/{METADATA}", "wb") as stream:
            pickle.dump(metadata, stream)
