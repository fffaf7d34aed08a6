"""Predict the seconds of a run's later steps from the median of its own first ten.

found = calibrate(lines)              # of metrics.jsonl; None while there are too few
found.step_s, rest_s(lines, found)    # what was foretold, and what came
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

STEPS = 10  # number of steps that are measured


class Timed(TypedDict):
    """The fields of a line of metrics.jsonl that calibration reads."""

    step: int
    attempt: int
    workers: int
    step_s: float
    checkpoint_stall_s: float
    eval_s: float


@dataclass(frozen=True)
class Calibration:
    """The step time predicted from ten measured steps."""

    step_s: float
    """Median of the ten in seconds, without saves and evaluations."""
    last: int
    """Number of the last of the ten steps."""
    workers: int
    """How many workers trained; the prediction holds for this number only."""


def calibrate(lines: Sequence[Timed]) -> Calibration | None:
    """Return the calibration from the first ten steps with the current number of workers.

    The first step of each attempt is left out, because it compiles and warms up caches. None while
    there are fewer than ten such steps.

    >>> fields = {"checkpoint_stall_s": 0.0, "eval_s": 0.0, "workers": 2, "attempt": 1}
    >>> lines = [{"step": i, "step_s": 9.0 if i == 1 else 1.0, **fields} for i in range(1, 12)]
    >>> calibrate(lines), calibrate(lines[:10])
    (Calibration(step_s=1.0, last=11, workers=2), None)
    """
    if not lines:
        return None
    workers = lines[-1]["workers"]
    attempt, timed = 0, list[Timed]()
    for line in lines:
        first, attempt = line["attempt"] != attempt, line["attempt"]
        if line["workers"] == workers and not first:
            timed.append(line)
            if len(timed) == STEPS:
                step_s = statistics.median(map(busy_s, timed))
                return Calibration(step_s, line["step"], workers)
    return None


def rest_s(lines: Sequence[Timed], calibration: Calibration) -> float | None:
    """Return the mean seconds of the steps after the calibration's ten; None if there is none.

    It counts steps with the same number of workers, without saves and evaluations, and leaves out
    the first step of each attempt.
    """
    took, attempt = [], 0
    for line in lines:
        first, attempt = line["attempt"] != attempt, line["attempt"]
        if line["step"] > calibration.last and line["workers"] == calibration.workers and not first:
            took.append(busy_s(line))
    return statistics.fmean(took) if took else None


def busy_s(line: Timed) -> float:
    """Return the seconds of a step without checkpoint stall and evaluation."""
    return float(line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"])
