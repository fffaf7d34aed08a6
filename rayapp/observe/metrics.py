"""Write and read metrics.jsonl, which has one JSON line for each step.

    log = MetricsLog(storage, first_step=resumed_at)
    log.write(TokenRecord(step=1, loss=..., ...)); log.close()

Rank 0 writes `metrics.jsonl` itself, not through Ray. It appends to a local file. On S3 a thread
writes new lines to segments beside the file (see rayapp.observe.segments), at most every FLUSH_S
seconds, sooner only for a checkpoint that waits for its step; `close` makes one file of them. While
S3 fails, training goes on and the lines wait. A resume drops the lines after the resumed step, so
that each step is there once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import cast

from pydantic import ValidationError

from rayapp.observe import run_files, segments
from rayapp.observe.records import MetricsLine, Sample
from rayapp.observe.run_files import MOST_COUNT, MOST_TIME
from rayapp.observe.run_folder import METRICS
from rayapp.storage import Storage, StorageError

FLUSH_S = 5.0
# Fields that every line has, and their largest values.
NEEDED = {"step": MOST_COUNT, "attempt": MOST_COUNT, "time": MOST_TIME}
STORED_S = 150.0  # longer than the storage retries a request

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
    own_loss: float | None = None
    """The mean of `train.loss` over the loss-bearing tokens; None without one."""
    router_loss: float | None = None
    """The experts' load-balancing loss, without its weight; None if it is not in the objective."""
    expert_imbalance: float | None = None
    """The busiest expert's tokens over the mean, in the layer where this is the most; None without
    experts."""
    eval_loss_per_byte: float | None = None
    eval_metrics: dict[str, float | None] | None = None
    """Means over the held-out tokens of the functions in eval.metrics, by their names."""
    loss_by_source: dict[str, float | None] | None = None
    """Of several sources, by their paths: nats per loss-bearing token of the source, None where the
    step has none of it. The next two: these tokens, and the same loss of its held-out rows."""
    tokens_by_source: dict[str, int] | None = None
    eval_loss_by_source: dict[str, float | None] | None = None
    eval_samples: list[Sample] | None = None
    """The prompts of eval.prompts with the likeliest tokens after them."""


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

    Of a long run `rayapp.observe.columns` holds less. Lines that are not readable are left out: a
    process that was killed leaves a partial last line.
    """

    def reading() -> list[MetricsLine]:
        lines = list[MetricsLine]()
        for start, data in segments.blocks(storage):
            lines += [line for _, line in lines_of(data, start, storage, len(lines))]
        return lines

    return segments.uncut(reading)


def last(storage: Storage) -> MetricsLine | None:
    """Return the last line of metrics.jsonl, if any; reads only the end of the file."""

    def reading() -> MetricsLine | None:
        lines = (parsed(text) for _, text in segments.backwards(storage))
        return next((line for line in lines if line is not None), None)

    return segments.uncut(reading)


def lines_of(
    data: bytes, start: int, storage: Storage, before: int
) -> Iterator[tuple[int, MetricsLine]]:
    """Yield (byte behind it, line) of data at byte `start` of a file, after `before` lines.

    Lines that are not readable are left out, and the log names them; a last line without an end
    is left out silently.
    """
    for number, text in enumerate(data.splitlines(keepends=True), before + 1):
        start += len(text)
        line = parsed(text)
        if line is not None:
            yield start, line
        elif text.endswith(b"\n"):  # after a power loss, or an edit
            logger.warning("%s/%s: line %d is not readable", storage.url, METRICS, number)


def parsed(text: bytes) -> MetricsLine | None:
    """Return the line that a text is, with None for what is not of a field's type.

    None: the text is no JSON object, or one of NEEDED is not of its type.
    """
    odd = set[object]()
    try:
        line = json.loads(text)
        run_files.schema(MetricsLine).validate_python(line)
    except ValidationError as error:
        odd = {each["loc"][0] for each in error.errors() if each["loc"]}
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not odd.isdisjoint(NEEDED):
        return None
    return cast(MetricsLine, line | dict.fromkeys(odd))


class MetricsLog:
    """Append step records to metrics.jsonl; of the lines there, keep those up to `first_step`."""

    def __init__(self, storage: Storage, first_step: int) -> None:
        self.storage = storage
        newest, end, self._data = _end_of(storage, first_step)
        self.attempt = newest + 1
        segments.cut(storage, end)
        path = storage.local_path(METRICS)
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        # `_data` is, of a local file, what waits to be appended, and on S3 the last segment.
        self._changed, self._last, self._closed = (threading.Event() for _ in range(3))
        self._newest = self._stored = first_step
        self._progress, self._hurry, self._awaited = threading.Condition(), threading.Event(), 0
        self._error: Exception | None = None
        self._thread = None
        if path is None:
            self._segments = segments.Segments(storage)
            self._thread = threading.Thread(target=self._flush, name="metrics", daemon=True)
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
            try:
                segments.seal(self.storage)
            except OSError as error:  # every reader reads the segments too
                logger.warning("segments are not in %s yet: %s", METRICS, error)

    def _flush(self) -> None:
        """Write the last segment whenever there are new lines, and once more at `close`."""
        last = False
        while not last:
            self._changed.wait()
            self._changed.clear()  # before `_last` is read, or the wake-up of `close` could be lost
            last = self._last.is_set()
            newest = self._newest  # before the data is copied, which may then hold more steps
            data = bytes(self._data)
            try:
                if data:
                    self._segments.put(data)
                self._error = None
                self._have_stored(newest)
            except Exception as error:  # the storage has retried; close() raises the last error
                self._error = error
                self._changed.set()
                logger.warning("metrics are not stored yet: %s", error)
            else:
                if len(data) >= segments.SEGMENT_BYTES:
                    self._segments.end(len(data))
                    del self._data[: len(data)]
            if not last:
                self._hurry.wait(FLUSH_S)
                self._hurry.clear()

    def _storage_error(self, why: str | None) -> StorageError:
        return StorageError("write", f"{self.storage.url}/{METRICS}", str(why), "Free some space")


def _end_of(storage: Storage, first_step: int) -> tuple[int, int, bytearray]:
    """Return the newest attempt, the byte behind the line of `first_step`, and what it lacks there.

    Reads from the end: a resume does few steps again.
    """
    attempt: int | None = None
    for stop, text in segments.backwards(storage):
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
