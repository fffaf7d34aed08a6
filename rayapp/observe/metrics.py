"""Write and read metrics.jsonl, which has one JSON line for each step.

    log = MetricsLog(storage, first_step=resumed_at)
    log.write(TokenRecord(step=1, loss=..., ...)); log.close()

Rank 0 writes `metrics.jsonl` itself, not through Ray. It appends to a local file. An S3 object
cannot be appended to, so a thread rewrites it, at most every FLUSH_S seconds (sooner only for a
checkpoint that waits for its step) and less often as it grows; while S3 fails, training goes on and
the lines wait. A resume drops the lines after the resumed step, so that each step is there once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from rayapp.observe.records import MetricsLine
from rayapp.observe.run_folder import METRICS
from rayapp.storage import Storage, StorageError

FLUSH_S = 5.0
STORED_S = 150.0  # longer than the storage retries a request
TAIL_BYTES = 16 * 2**10  # several lines
BYTES_PER_S = 2 * 2**20  # the average rate of rewriting an S3 object

logger = logging.getLogger("rayapp.observe.metrics")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The fields that every line of metrics.jsonl has."""

    step: int
    """Optimizer steps done, from 1."""
    epoch: float
    loss: float
    """Nats per loss-bearing token, or per image, of the global batch."""
    grad_norm: float
    lr: float
    mfu: float | None
    """Model FLOP/s over the hardware's peak, 0-1; None where no peak is known."""
    step_s: float
    """Wall time since the step before, with data wait, checkpoint stall and evaluation."""
    data_wait_s: float
    checkpoint_stall_s: float
    eval_s: float
    skipped: bool
    """Whether the weights are unchanged because the step was bad: a spike, or not finite."""
    peak_gib: float
    """Most memory that this rank has held so far: of the GPU, else resident."""
    peak_forward_gib: float
    """The peak of this step's forward passes; the next two: of its backward passes and update."""
    peak_backward_gib: float
    peak_optimizer_gib: float
    workers: int
    attempt: int
    batch_digest: str
    time: float
    """Unix time in seconds."""
    eval_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class TokenRecord(StepRecord):
    """A step of a language model."""

    loss_per_byte: float | None
    """Nats per UTF-8 byte of the loss-bearing tokens."""
    tokens: int
    """Loss-bearing tokens of the global batch."""
    tokens_per_s: float
    """Input tokens (no padding) of all workers per second without checkpoint stall and eval."""
    tokens_per_s_per_gpu: float
    eval_loss_per_byte: float | None = None


@dataclass(frozen=True, kw_only=True)
class ImageRecord(StepRecord):
    """A step of image classification."""

    images: int
    """Images of the global batch."""
    images_per_s: float
    """Images of all workers per second without checkpoint stall and eval."""
    images_per_s_per_gpu: float
    eval_top1: float | None = None
    """Share of the held-out images whose class the model finds likeliest, 0-1."""
    eval_top5: float | None = None
    """Share of those whose class is among the five likeliest, 0-1."""


def read(storage: Storage) -> list[MetricsLine]:
    """Return the lines of a run's metrics.jsonl, an empty list if there is no such file yet.

    Lines that are not readable are left out: a process that was killed leaves a partial last line.
    """
    try:
        data = storage.read(METRICS)
    except FileNotFoundError:
        return []
    return _whole_lines(storage, data)


def last(storage: Storage) -> MetricsLine | None:
    """Return the last line of metrics.jsonl, if any; reads only the last TAIL_BYTES of the file."""
    size = storage.size(METRICS)
    if not size:
        return None
    start = max(0, size - TAIL_BYTES)
    data = storage.read(METRICS, start)
    if start:
        data = data[data.find(b"\n") + 1 :]
    lines = _whole_lines(storage, data)
    return lines[-1] if lines else None


class Follower:
    """Follow a metrics.jsonl that grows: read each line once, and all again if a resume cut it."""

    def __init__(self, storage: Storage) -> None:
        self.lines: list[MetricsLine] = []
        self._storage, self._end, self._last = storage, 0, b""

    def poll(self) -> int:
        """Read the new lines into `lines`; return how many of the old lines are still there."""
        known, size = len(self.lines), self._storage.size(METRICS) or 0
        if size < self._end:
            return self._again()
        data = self._storage.read(METRICS, self._end - len(self._last)) if size else b""
        if not data.startswith(self._last):  # the file was cut back and has grown since
            return self._again()
        self._take(data[len(self._last) :])
        return known

    def _again(self) -> int:
        before = self.lines
        self._end, self._last, self.lines = 0, b"", []
        self._take(self._storage.read(METRICS))
        kept = 0
        for old, new in zip(before, self.lines, strict=False):
            if (old["attempt"], old["step"]) != (new["attempt"], new["step"]):
                break
            kept += 1
        return kept

    def _take(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        self.lines += _whole_lines(self._storage, whole)
        self._last = whole.splitlines(keepends=True)[-1] if whole else self._last
        self._end += len(whole)


def _whole_lines(storage: Storage, data: bytes) -> list[MetricsLine]:
    lines, texts = list[MetricsLine](), data.split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(cast(MetricsLine, line))
        elif number < len(texts):  # not the last line: after a power loss, or an edit
            logger.warning("%s/%s: line %d is not readable", storage.url, METRICS, number)
    return lines


class MetricsLog:
    """Append step records to metrics.jsonl; of the lines there, keep those up to `first_step`."""

    def __init__(self, storage: Storage, first_step: int) -> None:
        self.storage = storage
        before = read(storage)
        kept = [line for line in before if line["step"] <= first_step]
        self.attempt = 1 + max((line["attempt"] for line in before), default=0)
        self._data = bytearray("".join(json.dumps(line) + "\n" for line in kept).encode())
        storage.write(METRICS, bytes(self._data))
        path = storage.local_path(METRICS)
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        if path:
            self._data.clear()  # of a local file, it holds only what waits to be appended
        self._changed, self._last, self._closed = (threading.Event() for _ in range(3))
        self._newest = self._stored = first_step
        self._progress, self._hurry, self._awaited = threading.Condition(), threading.Event(), 0
        self._error: Exception | None = None
        self._thread = None
        if path is None:
            self._thread = threading.Thread(target=self._rewrite, name="metrics", daemon=True)
            self._thread.start()

    def write(self, record: StepRecord) -> None:
        """Append one record; if the disk is full, it waits for the next call or for `close`."""
        line = (json.dumps(_finite(asdict(record)), allow_nan=False) + "\n").encode()
        self._data += line
        self._newest = record.step
        if self._file is None:
            if record.step == self._awaited:
                self._hurry.set()
            self._changed.set()
            return
        waited = len(self._data) > len(line)
        try:
            self._append()
            self._have_stored(record.step)
        except StorageError as error:
            if not waited:  # warn once, not at every step
                logger.warning("metrics are not stored yet: %s", error)

    def _append(self) -> None:
        """Append the waiting bytes to the local file."""
        assert self._file is not None
        try:
            while self._data:
                # The file is unbuffered, so that other processes see the line at once.
                del self._data[: self._file.write(self._data)]
        except OSError as error:
            raise self._storage_error(error.strerror) from error

    def wait_stored(self, step: int) -> None:
        """Wait until the record of a step is stored, even if `write` has still to be called for it.

        If a checkpoint were committed before that and the run were killed, the resumed run would
        not do that step again, and its line would be missing.

        Raises:
            StorageError: it takes too long, or the log was closed without it.
        """
        self._awaited = step
        self._hurry.set()
        with self._progress:
            self._progress.wait_for(lambda: self._stored >= step or self._closed.is_set(), STORED_S)
            if self._stored < step:
                raise self._storage_error(f"step {step} is not stored")

    def _have_stored(self, step: int) -> None:
        with self._progress:
            self._stored = step
            self._progress.notify_all()

    def close(self) -> None:
        """Store all records durably, and end the thread.

        Raises:
            StorageError: the storage has refused it.
        """
        try:
            self._store_the_rest()
        finally:
            with self._progress:
                self._closed.set()
                self._progress.notify_all()

    def _store_the_rest(self) -> None:
        if self._file is not None and not self._file.closed:
            with self._file:
                self._append()
                self._have_stored(self._newest)
                try:
                    os.fsync(self._file.fileno())
                except OSError as error:
                    raise self._storage_error(error.strerror) from error
        if self._thread is not None:
            self._last.set()
            self._changed.set()
            self._hurry.set()
            self._thread.join()
            if self._error is not None:
                raise self._error

    def _rewrite(self) -> None:
        """Rewrite the S3 object whenever there are new lines, and once more at `close`."""
        last = False
        while not last:
            self._changed.wait()
            self._changed.clear()  # before `_last` is read, or the wake-up of `close` could be lost
            last = self._last.is_set()
            newest = self._newest  # before the data is copied, which may then hold more steps
            data = bytes(self._data)
            try:
                self.storage.write(METRICS, data)
                self._error = None
                self._have_stored(newest)
            except Exception as error:  # the storage has retried; close() raises the last error
                self._error = error
                self._changed.set()
                logger.warning("metrics are not stored yet: %s", error)
            if not last:
                self._hurry.wait(max(FLUSH_S, len(data) / BYTES_PER_S))
                self._hurry.clear()

    def _storage_error(self, why: str | None) -> StorageError:
        return StorageError("write", f"{self.storage.url}/{METRICS}", str(why), "Free some space")


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Replace floats that are not finite by None, as JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
