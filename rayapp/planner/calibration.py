"""A run's own first steps say how long the others take: the plan, corrected by what was measured.

found = calibrate(lines)              # of metrics.jsonl; None while there are too few
found.step_s, rest_s(lines, found)    # what was foretold, and what came
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

STEPS = 10


class Timed(TypedDict):
    """What is asked of a line of metrics.jsonl."""

    step: int
    attempt: int
    workers: int
    step_s: float
    checkpoint_stall_s: float
    eval_s: float


@dataclass(frozen=True)
class Calibration:
    """What ten steps say of a step."""

    step_s: float
    """Their median in seconds, saves and evaluations left out."""
    last: int
    """The last of the ten."""
    workers: int
    """How many trained; others take another time."""


def calibrate(lines: Sequence[Timed]) -> Calibration | None:
    """Look at the first ten steps that as many workers made as train now.

    The first step of each attempt is left out: it compiles, and fills what later ones reuse.

    >>> fields = {"checkpoint_stall_s": 0.0, "eval_s": 0.0, "workers": 2, "attempt": 1}
    >>> lines = [{"step": i, "step_s": 9.0 if i == 1 else 1.0, **fields} for i in range(1, 12)]
    >>> calibrate(lines), calibrate(lines[:10])
    (Calibration(step_s=1.0, last=11, workers=2), None)
    """
    if not lines:
        return None
    workers = lines[-1]["workers"]
    attempt, found = 0, list[Timed]()
    for line in lines:
        first, attempt = line["attempt"] != attempt, line["attempt"]
        if line["workers"] == workers and not first:
            found.append(line)
            if len(found) == STEPS:
                step_s = statistics.median(map(busy_s, found))
                return Calibration(step_s, line["step"], workers)
    return None


def rest_s(lines: Sequence[Timed], found: Calibration) -> float | None:
    """Return the mean seconds of the steps after those, None before there is one.

    By as many workers; saves and evaluations are left out, and the first step of each attempt.
    """
    took, attempt = [], 0
    for line in lines:
        first, attempt = line["attempt"] != attempt, line["attempt"]
        if line["step"] > found.last and line["workers"] == found.workers and not first:
            took.append(busy_s(line))
    return statistics.fmean(took) if took else None


def busy_s(line: Timed) -> float:
    """Return the seconds of a step without its stalls by a save and an evaluation."""
    return float(line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"])
