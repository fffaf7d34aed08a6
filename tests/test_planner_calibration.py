"""Check what a run's first steps are taken to say of the others."""

from __future__ import annotations

from typing import Any

import pytest

from rayapp.observe.columns import Columns
from rayapp.planner.calibration import STEPS, Calibration, calibrate, rest_s


def line(step: int, step_s: float, **values: Any) -> dict[str, Any]:
    fields = {"workers": 2, "attempt": 1, "checkpoint_stall_s": 0.0, "eval_s": 0.0}
    return {"step": step, "step_s": step_s, **fields, **values}


def test_saves_evaluations_and_the_first_step_do_not_count() -> None:
    lines = [line(1, 30.0)]
    lines += [line(step, 2.0) for step in range(2, 8)]
    lines += [line(8, 5.0, checkpoint_stall_s=3.0), line(9, 12.0, eval_s=10.0)]
    lines += [line(10, 2.0), line(11, 2.0)]
    found = calibrate(Columns.of(lines))
    assert found == Calibration(2.0, last=11, workers=2)
    assert rest_s(Columns.of(lines), found) is None
    lines += [line(12, 2.5), line(13, 6.5, eval_s=3.0)]
    assert calibrate(Columns.of(lines)) == found and rest_s(
        Columns.of(lines), found
    ) == pytest.approx(3.0)


def test_one_slow_step_does_not_change_it() -> None:
    lines = [line(step, 50.0 if step == 5 else 1.0) for step in range(1, 30)]
    found = calibrate(Columns.of(lines))
    assert found is not None and found.step_s == 1.0


def test_other_workers_are_calibrated_anew_and_restarts_are_left_out() -> None:
    lines = [line(step, 1.0) for step in range(1, 21)]
    lines += [
        line(step, 9.0 if step == 21 else 3.0, workers=1, attempt=2) for step in range(21, 31)
    ]
    assert calibrate(Columns.of(lines)) is None, "nine steps of one worker"
    lines += [line(31, 3.0, workers=1, attempt=2), line(32, 8.0, workers=1, attempt=3)]
    found = calibrate(Columns.of(lines))
    assert found == Calibration(3.0, last=31, workers=1)
    assert rest_s(Columns.of(lines), found) is None, "only the first step of an attempt came after"
    lines += [line(33, 3.3, workers=1, attempt=3)]
    assert rest_s(Columns.of(lines), found) == pytest.approx(3.3)


def test_before_there_are_enough() -> None:
    assert calibrate(Columns()) is None
    assert calibrate(Columns.of(line(step, 1.0) for step in range(1, STEPS + 1))) is None
