"""Write metrics.jsonl, which has one JSON line for each step; on S3 in parts while it grows.

    log = MetricsLog(storage, first_step=resumed_at)
    log.write(line); log.close()

Rank 0 writes `metrics.jsonl` itself, not through Ray. It appends to a local file. An S3 object
cannot be appended to, and rewriting the whole file every few seconds would write the square of its
size. So a thread writes what follows it to `metrics/<first byte>.jsonl`, of which the last one is
rewritten, at most every FLUSH_S seconds, until it has PART_BYTES; sooner only for a checkpoint that
waits for its step. `close` makes one file of them. While S3 fails, training goes on and the lines
wait. A resume drops the lines after the resumed step, so that each step is there once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping

from rayapp.observe.metrics import BLOCK_BYTES, MetricsLine, Part, backwards, entries, parsed, parts
from rayapp.observe.run_folder import METRICS, METRICS_PARTS
from rayapp.storage import Storage, StorageError

FLUSH_S = 5.0
PART_BYTES = 2**20
STORED_S = 150.0  # longer than the storage retries a request

logger = logging.getLogger("rayapp.observe.metrics")


class MetricsLog:
    """Append lines to metrics.jsonl; of the lines there, keep those up to `first_step`."""

    def __init__(self, storage: Storage, first_step: int) -> None:
        self.storage = storage
        newest, end, self._data = _end_of(storage, first_step)
        self.attempt = newest + 1
        cut(storage, end)
        path = storage.local_path(METRICS)
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        # `_data` is, of a local file, what waits to be appended, and on S3 the last part.
        self._changed = threading.Condition()  # guards all that follows
        self._newest = self._stored = first_step  # steps that were written, and that are stored
        self._awaited, self._closing, self._closed = 0, False, False
        self._error: Exception | None = None
        self._thread = None
        if path is None:
            listed = parts(storage)
            self._start = listed[-1].end if listed else 0  # of the last part
            self._thread = threading.Thread(target=self._flush, name="metrics", daemon=True)
            self._thread.start()

    def write(self, line: MetricsLine) -> None:
        """Append one line; if the disk is full, it waits for the next call or for `close`."""
        text = (json.dumps(_finite(line), allow_nan=False) + "\n").encode()
        with self._changed:
            self._data += text
            self._newest = line["step"]
            self._changed.notify_all()
        if self._file is None:
            return
        waited = len(self._data) > len(text)
        try:
            self._append()
            self._have_stored(self._newest)
        except StorageError as error:
            if not waited:  # warn once, not at every step
                logger.warning("metrics are not stored yet: %s", error)

    def _append(self) -> None:
        assert self._file is not None
        try:
            while self._data:
                # The file is unbuffered, so that other processes see the line at once.
                del self._data[: self._file.write(self._data)]
        except OSError as error:
            raise self._error_of(error.strerror) from error

    def wait_stored(self, step: int) -> None:
        """Wait until the record of a step is stored, even if `write` has still to be called for it.

        If a checkpoint were committed before that and the run were killed, the resumed run would
        not do that step again, and its line would be missing.

        Raises: StorageError: it takes too long, or the log was closed without it.
        """
        with self._changed:
            self._awaited = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stored >= step or self._closed, STORED_S)
            if self._stored < step:
                raise self._error_of(f"step {step} is not stored")

    def _have_stored(self, step: int) -> None:
        with self._changed:
            self._stored = step
            self._changed.notify_all()

    def close(self) -> None:
        """Store all records durably, and end the thread.

        Raises: StorageError: the storage has refused it.
        """
        try:
            self._store_the_rest()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _store_the_rest(self) -> None:
        if self._file is not None and not self._file.closed:
            with self._file:
                self._append()
                self._have_stored(self._newest)
                try:
                    os.fsync(self._file.fileno())
                except OSError as error:
                    raise self._error_of(error.strerror) from error
        if self._thread is not None:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            if self._error is not None:
                raise self._error
            try:
                seal(self.storage)
            except OSError as error:  # every reader reads the parts too
                logger.warning("its parts are not in %s yet: %s", METRICS, error)

    def _flush(self) -> None:
        """Write the last part whenever there are new lines, and once more at `close`."""
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._newest > self._stored)
                last, newest, data = self._closing, self._newest, bytes(self._data)
            try:
                if data:
                    self.storage.write(part_name(self._start), data)
                self._error = None
                self._have_stored(newest)
            except Exception as error:  # the storage has retried; close() raises the last error
                self._error = error
                logger.warning("metrics are not stored yet: %s", error)
            else:
                if len(data) >= PART_BYTES:
                    self._start += len(data)
                    with self._changed:
                        del self._data[: len(data)]
            if not last:
                self._pause(newest)

    def _pause(self, tried: int) -> None:
        """Wait FLUSH_S, less if the step that a checkpoint waits for is written after `tried`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or tried < self._awaited <= self._newest, FLUSH_S
            )

    def _error_of(self, why: str | None) -> StorageError:
        return StorageError("write", f"{self.storage.url}/{METRICS}", str(why), "Free some space")


def _end_of(storage: Storage, first_step: int) -> tuple[int, int, bytearray]:
    """Return the newest attempt, the byte behind the line of `first_step`, and what it lacks there.

    Reads from the end: a resume does few steps again.
    """
    attempt: int | None = None
    for stop, text in backwards(storage):
        line = parsed(text)
        if line is None:
            continue
        attempt = line["attempt"] if attempt is None else attempt
        if line["step"] <= first_step:
            return attempt, stop, bytearray(b"" if text.endswith(b"\n") else b"\n")
        if first_step == 0:
            break
    return attempt or 0, 0, bytearray()


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Replace floats that are not finite by None, also in mappings, as JSON has no NaN."""

    def finite(value: object) -> object:
        if isinstance(value, Mapping):
            return _finite(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: finite(value) for name, value in values.items()}


def part_name(start: int) -> str:
    """Return the file of the lines that begin at byte `start` of metrics.jsonl."""
    return f"{METRICS_PARTS}/{start:015d}.jsonl"


def cut(storage: Storage, end: int) -> None:
    """Drop what comes after byte `end`; afterwards there is a metrics.jsonl, maybe an empty one."""
    listed = entries(storage)
    part_of = {part.name: part for part in parts(storage, listed)}
    # From the last to the first, so that a kill in between leaves a longer file and no gap.
    for entry in reversed(listed):
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

    Raises: StorageError: the storage has refused it; the parts are still there.
    """
    listed = entries(storage)
    if not listed:
        return
    before = parts(storage, listed)
    if [part.name for part in before] != [METRICS]:
        _copy(storage, before, METRICS)
    storage.delete_tree(METRICS_PARTS)


def _copy(storage: Storage, sources: list[Part], name: str) -> None:
    with storage.open_write(name) as out:
        for part in sources:
            for low in range(0, part.end - part.start, BLOCK_BYTES):
                high = min(low + BLOCK_BYTES, part.end - part.start)
                out.write(storage.read(part.name, low, high - low))
