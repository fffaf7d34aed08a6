"""What happened, step by step: one JSON line each in metrics.jsonl.

    log = MetricsLog(storage, first_step=resumed_at)
    log.write(TokenRecord(step=1, loss=..., ...)); log.close()

`metrics.jsonl` is the run's own record and does not go through Ray. A local file is appended to; an
S3 object cannot be, so it is rewritten by a thread, at most every few seconds and less often as it
grows; while S3 fails, training goes on and the lines wait. After a resume each step is there once:
lines past the resumed step are dropped.
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
STORED_S = 150.0  # longer than the storage repeats a request
TAIL_BYTES = 16 * 2**10  # hold several lines
BYTES_PER_S = 2 * 2**20  # of rewriting an S3 object, on average

logger = logging.getLogger("rayapp.observe.metrics")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What every line of metrics.jsonl has."""

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
    """Wall time since the step before, data wait and checkpoint stall included."""
    data_wait_s: float
    checkpoint_stall_s: float
    eval_s: float
    skipped: bool
    """The weights are as before the step: its loss was a spike or not finite."""
    peak_gib: float
    """Most memory that rank 0 has held so far: of the GPU, else resident."""
    peak_forward_gib: float
    """The same in the forward passes of this step alone; and so on."""
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
    """Input tokens (no padding) of all workers per second of step_s."""
    tokens_per_s_per_gpu: float
    eval_loss_per_byte: float | None = None


@dataclass(frozen=True, kw_only=True)
class ImageRecord(StepRecord):
    """A step of image classification."""

    images: int
    """Images of the global batch."""
    images_per_s: float
    """Images of all workers per second of step_s."""
    images_per_s_per_gpu: float
    eval_top1: float | None = None
    """Share of the held-out images whose class is the likeliest by the model, 0-1."""
    eval_top5: float | None = None
    """The same among the five likeliest."""


def read(storage: Storage) -> list[MetricsLine]:
    """Return the lines of a run's metrics.jsonl; none if there is no such file yet.

    What is not a whole line is left out: a process that was killed leaves a torn last line.
    """
    try:
        data = storage.read(METRICS)
    except FileNotFoundError:
        return []
    return _whole_lines(storage, data)


def last(storage: Storage) -> MetricsLine | None:
    """Return the last line of metrics.jsonl, if any, at the same cost however long it is."""
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
    """The lines of a metrics.jsonl that grows, read once each; also after a resume cut it."""

    def __init__(self, storage: Storage) -> None:
        self.lines: list[MetricsLine] = []
        self._storage, self._end, self._last = storage, 0, b""

    def poll(self) -> int:
        """Read what has come since; return how many of the lines that were known still hold."""
        known, size = len(self.lines), self._storage.size(METRICS) or 0
        if size < self._end:
            return self._again()
        data = self._storage.read(METRICS, self._end - len(self._last)) if size else b""
        if not data.startswith(self._last):  # it was cut back, and has grown since
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
        elif number < len(texts):  # in the midst: a disk that lost its power, an editor
            logger.warning("%s/%s: line %d is not readable", storage.url, METRICS, number)
    return lines


class MetricsLog:
    """Append step records; keep the steps up to `first_step` of what is there."""

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
            self._data.clear()  # from now on: what waits to be appended
        self._changed, self._last, self._closed = (threading.Event() for _ in range(3))
        self._newest = self._stored = first_step
        self._progress, self._hurry, self._awaited = threading.Condition(), threading.Event(), 0
        self._error: Exception | None = None
        self._thread = None
        if path is None:
            self._thread = threading.Thread(target=self._rewrite, name="metrics", daemon=True)
            self._thread.start()

    def write(self, record: StepRecord) -> None:
        """Append one record; what a full disk refuses waits for the next one, or for `close`."""
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
            if not waited:  # once, not at every step
                logger.warning("metrics are not stored yet: %s", error)

    def _append(self) -> None:
        """Write what waits to the local file."""
        assert self._file is not None
        try:
            while self._data:
                # Unbuffered: another process may read it now.
                del self._data[: self._file.write(self._data)]
        except OSError as error:
            raise self._storage_error(error.strerror) from error

    def wait_stored(self, step: int) -> None:
        """Wait until the record of a step is stored, also if it has still to be written.

        A checkpoint that is committed before would leave a gap behind when the run is killed: what
        resumes from it does not do that step again.

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
        """Make everything written durable.

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
        """Store what is there whenever it has changed, and once more when closed."""
        last = False
        while not last:
            self._changed.wait()
            self._changed.clear()  # before the look at `_last`, or its wake-up could be lost
            last = self._last.is_set()
            newest = self._newest  # before the data, which may then hold more
            data = bytes(self._data)
            try:
                self.storage.write(METRICS, data)
                self._error = None
                self._have_stored(newest)
            except Exception as error:  # storage has retried: close() raises the last one
                self._error = error
                self._changed.set()
                logger.warning("metrics are not stored yet: %s", error)
            if not last:
                self._hurry.wait(max(FLUSH_S, len(data) / BYTES_PER_S))
                self._hurry.clear()

    def _storage_error(self, why: str | None) -> StorageError:
        return StorageError("write", f"{self.storage.url}/{METRICS}", str(why), "Free some space")


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """JSON has no NaN: a value that is not finite becomes null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
