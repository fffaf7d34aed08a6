"""Predict the seconds of a run's later steps from the median of its own first ten.

found = calibrate(steps)              # columns of metrics.jsonl; None while there are too few
found.step_s, rest_s(steps, found)    # what was foretold, and what came
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

STEPS = 10  # number of steps that are measured
NAMES = ("step", "attempt", "workers", "step_s", "checkpoint_stall_s", "eval_s")


Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


class Timed(Protocol):
    """The steps of a run as columns; calibration reads those of NAMES."""

    def __len__(self) -> int: ...

    def __getitem__(self, name: str, /) -> Array: ...


@dataclass(frozen=True)
class Calibration:
    """The step time predicted from ten measured steps."""

    step_s: float
    """Median of the ten in seconds, without saves and evaluations."""
    last: int
    """Number of the last of the ten steps."""
    workers: int
    """How many workers trained; the prediction holds for this number only."""


def calibrate(steps: Timed) -> Calibration | None:
    """Return the calibration from the first ten steps with the current number of workers.

    The first step of each attempt is left out, because it compiles and warms up caches. None while
    there are fewer than ten such steps.
    """
    if not len(steps):
        return None
    workers = steps["workers"][-1]
    found = np.flatnonzero(_alike(steps, workers))[:STEPS]
    if len(found) < STEPS:
        return None
    took_s = statistics.median(busy_s(steps)[found].tolist())
    return Calibration(took_s, int(steps["step"][found[-1]]), int(workers))


def rest_s(steps: Timed, calibration: Calibration) -> float | None:
    """Return the mean seconds of the steps after the calibration's ten; None if there is none.

    It counts steps with the same number of workers, without saves and evaluations, and leaves out
    the first step of each attempt.
    """
    later = _alike(steps, calibration.workers) & (steps["step"] > calibration.last)
    return float(busy_s(steps)[later].mean()) if later.any() else None


def busy_s(steps: Timed) -> Array:
    """Return the seconds of each step without checkpoint stall and evaluation."""
    return np.asarray(steps["step_s"] - steps["checkpoint_stall_s"] - steps["eval_s"])


def _alike(steps: Timed, workers: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which steps have so many workers and are not the first of their attempt."""
    first = np.diff(steps["attempt"], prepend=0) != 0
    return np.asarray((steps["workers"] == workers) & ~first)
