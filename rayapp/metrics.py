"""What happened, step by step: one JSON line each in metrics.jsonl, and sums over a run.

    log = MetricsLog(storage, first_step=resumed_at)
    log.write(StepRecord(step=1, loss=..., ...)); log.close()

`metrics.jsonl` is the run's own record and does not go through Ray. A local file is appended to; an
S3 object cannot be, so it is rewritten by a thread, at most every few seconds and less often as it
grows. After a resume each step is there once: lines past the resumed step are dropped, and the time
that they had taken is kept as lost work.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rayapp.storage import Storage

FILE = "metrics.jsonl"
FLUSH_S = 5.0
BYTES_PER_S = 2 * 2**20  # of rewriting an S3 object, on average


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl."""

    step: int
    """Optimizer steps done, from 1."""
    epoch: float
    loss: float
    """Nats per loss-bearing token of the global batch."""
    loss_per_byte: float | None
    """Nats per UTF-8 byte of the loss-bearing tokens."""
    grad_norm: float
    lr: float
    tokens: int
    """Loss-bearing tokens of the global batch."""
    tokens_per_s: float
    """Input tokens (no padding) of all workers per second of step_s."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    """Model FLOP/s over the hardware's peak, 0-1; None where no peak is known."""
    step_s: float
    """Wall time since the step before, data wait and checkpoint stall included."""
    data_wait_s: float
    checkpoint_stall_s: float
    eval_s: float
    peak_gib: float
    """Most memory that any worker held: of the GPU, else resident."""
    workers: int
    attempt: int
    batch_digest: str
    time: float
    """Unix time in seconds."""
    eval_loss: float | None = None
    eval_loss_per_byte: float | None = None


def read(storage: Storage) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; none if there is no such file yet."""
    try:
        data = storage.read(FILE)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in data.decode().splitlines() if line.endswith("}")]


class MetricsLog:
    """Append step records; keep the steps up to `first_step` of what is there."""

    def __init__(self, storage: Storage, first_step: int) -> None:
        self.storage = storage
        before = read(storage)
        kept = [line for line in before if line["step"] <= first_step]
        dropped = [line for line in before if line["step"] > first_step]
        self.lost_s = sum(line["step_s"] for line in dropped)
        """Seconds of work that the resume threw away."""
        self.lost_steps = len(dropped)
        self.attempt = 1 + max((line["attempt"] for line in before), default=0)
        self._buffer = "".join(json.dumps(line) + "\n" for line in kept)
        self.storage.write(FILE, self._buffer.encode())
        path = storage.local_path(FILE)
        self._file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115
        self._changed = threading.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = None
        if path is None:
            self._thread = threading.Thread(target=self._rewrite, name="metrics", daemon=True)
            self._thread.start()

    def write(self, record: StepRecord) -> None:
        """Append one record.

        Raises:
            StorageError: the storage has refused the lines before this one.
        """
        if self._error is not None:
            raise self._error
        line = json.dumps(_finite(asdict(record))) + "\n"
        if self._file:
            self._file.write(line)
            self._file.flush()
        else:
            self._buffer += line
            self._changed.set()

    def close(self) -> None:
        """Make everything written durable."""
        if self._file:
            self._file.close()
            return
        self._closed = True
        self._changed.set()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _rewrite(self) -> None:
        try:
            while not self._closed:
                self._changed.wait()
                self._changed.clear()
                data = self._buffer.encode()
                self.storage.write(FILE, data)
                deadline = time.monotonic() + max(FLUSH_S, len(data) / BYTES_PER_S)
                while not self._closed and time.monotonic() < deadline:
                    time.sleep(0.1)
            self.storage.write(FILE, self._buffer.encode())
        except OSError as error:  # raised again by the next write or close
            self._error = error


def goodput(lines: Iterable[dict[str, Any]], wall_s: float, known_s: dict[str, float]) -> dict[str, float]:
    """Return fractions of wall time by cause; they sum to 1.

    `known_s` are seconds measured elsewhere (start, export, lost_work, recovery ...); what nothing
    accounts for is `other`.
    """
    lines = list(lines)
    seconds = {
        "data_wait": math.fsum(line["data_wait_s"] for line in lines),
        "checkpoint_stall": math.fsum(line["checkpoint_stall_s"] for line in lines),
        "evaluation": math.fsum(line["eval_s"] for line in lines),
    }
    total_step_s = math.fsum(line["step_s"] for line in lines)
    seconds["step"] = total_step_s - sum(seconds.values())
    seconds |= known_s
    wall_s = max(wall_s, math.fsum(seconds.values()), 1e-9)
    seconds["other"] = wall_s - math.fsum(seconds.values())
    return {cause: value / wall_s for cause, value in seconds.items()}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a value that is not finite becomes null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
