"""Hold the figures of a run's steps as columns: some 70 bytes a step.

steps = Columns.read(run)              # of metrics.jsonl, in a stream
steps["step_s"], steps.last          # an array with NaN for what is not known, and a line

follower = Follower(run); kept = follower.poll(); follower.steps; follower.lines(kept, kept + 9)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rayapp.observe import metrics
from rayapp.observe.metrics import MetricsLine, evaluated, figure
from rayapp.observe.run_folder import METRICS
from rayapp.storage import Storage, StorageError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

# Parts of a step's wall time, with the field of metrics.jsonl that measures each; the rest is
# `step`.
OF_A_STEP = {
    "data_wait": "data_wait_s",
    "checkpoint_stall": "checkpoint_stall_s",
    "evaluation": "eval_s",
}
ACCOUNTED = ("step", "attempt", "workers", "time", "step_s", *OF_A_STEP.values())
# Of a line. The number of an attempt is not enough: if the next attempt cuts its lines and dies
# before its first step, the one after that has the same number.
KNOWN_BY = ("attempt", "step", "time")


class Columns:
    """Columns of metrics.jsonl: [steps], NaN where a line lacks the field."""

    def __init__(self, names: Sequence[str] = ACCOUNTED) -> None:
        self.last: MetricsLine | None = None
        """The last line, with all of its fields."""
        self.rank_s: Mapping[str, float | None] = {}
        """The own time of each rank, as last told."""
        self.held: list[MetricsLine] = []
        """The lines with held-out figures, with all of their fields."""
        self.ends = array("q")
        """The byte of metrics.jsonl behind each line."""
        self._columns = {name: array("d") for name in names}

    @classmethod
    def of(cls, lines: Iterable[MetricsLine], names: Sequence[str] = ACCOUNTED) -> Columns:
        columns = cls(names)
        for line in lines:
            columns._add(line, 0)
        return columns

    @classmethod
    @metrics.read_again
    def read(cls, storage: Storage, names: Sequence[str] = ACCOUNTED) -> Columns:
        """Read a run's metrics.jsonl, block by block; an unfinished last line is left out.

        A figure of one source of a mixture is named `loss_by_source/PATH`.

        Raises: StorageError: it cannot be read.
        """
        columns = cls(names)
        for start, data in metrics.blocks(storage):
            columns.extend(data, start, storage)
        return columns

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, name: str) -> Array:
        return np.array(self._columns[name], np.float64)

    def extend(self, data: bytes, start: int, storage: Storage) -> None:
        """Append the whole lines of `data`, which is at byte `start` of a run's metrics.jsonl.

        Lines that are not readable are left out, and the log names them.
        """
        data = data[: data.rfind(b"\n") + 1]
        for end, line in metrics.lines_of(data, start, storage, len(self)):
            self._add(line, end)

    def _add(self, line: MetricsLine, end: int) -> None:
        for name, column in self._columns.items():
            field, _, key = name.partition("/")
            inside = line.get(field) if key else None
            value = figure(inside, key) if isinstance(inside, Mapping) else figure(line, name)
            column.append(math.nan if value is None else value)
        self.ends.append(end)
        self.last = line
        self.rank_s = line.get("rank_s") or self.rank_s
        if evaluated(line):
            self.held.append(line)


class Follower:
    """Follow a metrics.jsonl that grows: read each line once, and all again if a resume cut it."""

    def __init__(self, storage: Storage, names: Sequence[str] = ACCOUNTED) -> None:
        """`names` are the columns; those of KNOWN_BY are among them."""
        self.steps = Columns(names)
        """Replaced by others when a resume has cut the file."""
        self._storage, self._names, self._end, self._last = storage, names, 0, b""

    def poll(self) -> int:
        """Take the new lines into `steps`; return how many of the old lines are still there.

        Raises: StorageError: the file cannot be read.
        """
        return self._poll(len(self.steps))

    @metrics.read_again
    def _poll(self, known: int) -> int:
        parts = metrics.parts(self._storage)
        if (parts[-1].end if parts else 0) >= self._end and self._take(parts):
            return known
        return self._again(parts)  # the file was cut back, and may have grown since

    def lines(self, start: int, stop: int) -> list[MetricsLine]:
        """Return lines `start` to `stop` of those that `steps` holds, from the storage.

        Raises: StorageError: it cannot be read, or these lines are not there any more.
        """
        steps = self.steps
        first, end = steps.ends[start - 1] if start else 0, steps.ends[stop - 1]
        data = metrics.read_bytes(self._storage, first, end)
        lines = [line for _, line in metrics.lines_of(data, first, self._storage, start)]
        if _known(Columns.of(lines, KNOWN_BY), 0) != _known(steps, start, stop):
            raise StorageError("read", f"{self._storage.url}/{METRICS}", "it has been cut")
        return lines

    def _again(self, parts: list[metrics.Part]) -> int:
        before, self.steps = self.steps, Columns(self._names)
        self._end, self._last = 0, b""
        self._take(parts)
        both = min(len(before), len(self.steps))
        same = np.ones(both, bool)
        for name in KNOWN_BY:
            same &= before[name][:both] == self.steps[name][:both]
        return both if same.all() else int(np.argmin(same))

    def _take(self, parts: list[metrics.Part]) -> bool:
        """Take what follows the last line; False if that line is not where it was."""
        held = self._end - len(self._last)
        for start, data in metrics.blocks(self._storage, held, parts):
            if start == held and not data.startswith(self._last):
                return False
            whole = data[: data.rfind(b"\n") + 1]
            self.steps.extend(
                whole[max(0, self._end - start) :], max(start, self._end), self._storage
            )
            if whole:
                self._last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
                self._end = start + len(whole)
        return True


def _known(steps: Columns, start: int, stop: int | None = None) -> list[list[float]]:
    return [steps[name][start:stop].tolist() for name in KNOWN_BY]
