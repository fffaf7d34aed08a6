"""Check where a run's time and money go, through failures, restarts and killed drivers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.observe.columns import Columns
from rayapp.observe.goodput import Event, account, goodput, read_events
from rayapp.observe.run_folder import EVENTS
from rayapp.storage import open_storage

IDLE = {"data_wait_s": 0.0, "checkpoint_stall_s": 0.0, "eval_s": 0.0}


def line(step: int, at: float, attempt: int, **more: float) -> dict[str, Any]:
    return IDLE | {"step": step, "time": at, "attempt": attempt, "step_s": 5.0} | more


def event(name: str, at: float, **facts: Any) -> Event:
    return {"event": name, "time": at, **facts}


def started(at: float, usd_per_hour: float | None = 36.0, seen_until: float | None = None) -> Event:
    return event("started", at, usd_per_hour=usd_per_hour, seen_until=seen_until)


def resumed(at: float, step: int, lost_steps: int = 0) -> Event:
    facts = {"step": step, "first_step_s": 5.0, "lost_steps": lost_steps}
    return event("resumed", at, **facts, lost_s=5.0 * lost_steps)


def interrupted(at: float, step: int, trained_until: float) -> Event:
    facts = {"kind": "failure", "reason": "rank 1 died", "workers": 2}
    return event("interrupted", at, step=step, trained_until=trained_until, **facts)


def ended(at: float, **seconds: float) -> Event:
    return event("ended", at, status="done", reason=None, seconds=seconds)


ONE = [
    started(0.0),
    resumed(20.0, 0),
    interrupted(37.0, 4, trained_until=35.0),
    event("workers", 40.0, workers=2, usd_per_hour=72.0),
    resumed(65.0, 2, lost_steps=2),
    ended(100.0, export=4.0, evaluation=1.0),
]
KEPT = [line(1, 20.0, 1), line(2, 25.0, 1)] + [line(n, 50.0 + 5 * n, 2) for n in range(3, 9)]


def test_lost_work_and_recovery_are_told_apart_from_the_start() -> None:
    """100 s: 15 to the first of 2 kept and 2 lost steps, 25 from there to another, 6 kept."""
    found = account(ONE, Columns.of(KEPT))
    assert found.wall_s == 100.0
    shares = {cause: round(100 * share) for cause, share in found.goodput.items()}
    assert (shares["start"], shares["lost_work"], shares["recovery"]) == (15, 10, 25)
    assert (shares["step"], shares["export"], shares["evaluation"]) == (40, 4, 1)
    assert shares["other"] == 5
    assert found.lost_steps == 2
    assert found.interruptions == [
        {
            "time": 37.0,
            "kind": "failure",
            "reason": "rank 1 died",
            "step": 4,
            "workers": 2,
            "lost_steps": 2,
            "to_first_step_s": 28.0,
        }
    ]


def test_machines_cost_from_the_command_to_its_end() -> None:
    assert account(ONE, Columns.of(KEPT)).cost_usd == pytest.approx((40 * 36 + 60 * 72) / 3600)
    assert account(ONE, Columns.of(KEPT)).usd_per_hour == 72.0
    assert account([started(0.0, None), ended(5.0)], Columns.of([])).cost_usd is None
    assert account([], Columns.of([])).cost_usd is None


def test_between_commands_nothing_is_counted() -> None:
    again = [started(1000.0, 36.0, seen_until=95.0), resumed(1010.0, 8), ended(1020.0)]
    found = account([*ONE, *again], Columns.of([*KEPT, line(9, 1010.0, 3)]))
    assert found.wall_s == 120.0
    assert found.goodput["start"] == pytest.approx(20 / 120)
    assert found.cost_usd == pytest.approx((40 * 36 + 60 * 72 + 20 * 36) / 3600)


def test_a_killed_driver_ends_with_its_last_sign_of_life() -> None:
    """Its last steps are found lost by the next command, and count as its time."""
    killed = [started(0.0), resumed(10.0, 0)]
    kept = [line(1, 10.0, 1), line(2, 15.0, 1)]
    assert account(killed, Columns.of(kept)).wall_s == 15.0
    assert account(killed, Columns.of(kept), now=40.0).wall_s == 40.0
    later = [started(500.0, 36.0, seen_until=30.0), resumed(510.0, 2, lost_steps=3), ended(515.0)]
    found = account([*killed, *later], Columns.of([*kept, line(3, 510.0, 2), line(4, 515.0, 2)]))
    assert found.wall_s == 30.0 + 15.0
    seconds = {cause: share * found.wall_s for cause, share in found.goodput.items()}
    assert seconds["lost_work"] == pytest.approx(15.0)
    assert seconds["step"] == pytest.approx(20.0)
    assert seconds["start"] == pytest.approx(5.0 + 5.0)
    assert seconds["other"] == pytest.approx(0.0)


def test_attempts_that_never_train_are_recovery_of_the_one_that_did() -> None:
    """An attempt that ends before its first step has no time of its own."""
    events = [
        started(0.0),
        resumed(10.0, 0),
        interrupted(12.0, 1, trained_until=10.0),
        interrupted(30.0, 1, trained_until=10.0),
        resumed(55.0, 1),
        ended(55.0),
    ]
    found = account(events, Columns.of([line(1, 10.0, 1), line(2, 55.0, 3)]))
    assert found.goodput["recovery"] * found.wall_s == pytest.approx(40.0)
    never = [started(0.0), interrupted(30.0, 0, trained_until=0.0), ended(40.0)]
    assert account(never, Columns.of([])).goodput["start"] == 1.0


def test_a_torn_last_event_is_left_out(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    assert read_events(run) == []
    text = "".join(json.dumps(each) + "\n" for each in ONE)
    run.write(EVENTS, (text + '{"event": "sta').encode())
    assert read_events(run) == ONE


seconds = st.floats(0, 1e5)
step_lines = st.fixed_dictionaries(
    {
        "step_s": seconds,
        "data_wait_s": seconds,
        "checkpoint_stall_s": seconds,
        "eval_s": st.none() | seconds,
    }
)


@settings(deadline=None)
@given(
    lines=st.lists(step_lines, max_size=6),
    wall_s=st.floats(-1, 1e6),
    known=st.dictionaries(
        st.sampled_from(["start", "export", "recovery", "lost_work", "evaluation"]),
        st.floats(-10, 1e5),
    ),
)
def test_goodput_adds_up(
    lines: list[dict[str, Any]], wall_s: float, known: dict[str, float]
) -> None:
    found = goodput(Columns.of(lines), wall_s, known)
    assert set(found) == {
        "data_wait", "checkpoint_stall", "evaluation", "step", "other", *known
    }  # fmt: skip
    assert all(0 <= fraction <= 1 for fraction in found.values()), found
    assert math.fsum(found.values()) == pytest.approx(1, abs=1e-9)


def test_goodput_of_a_small_run() -> None:
    step = {"step_s": 10.0, "data_wait_s": 1.0, "checkpoint_stall_s": 2.0, "eval_s": 3.0}
    assert goodput(Columns.of([step, step]), 40.0, {"start": 8.0}) == {
        "data_wait": 0.05,
        "checkpoint_stall": 0.1,
        "evaluation": 0.15,
        "step": 0.2,
        "start": 0.2,
        "other": 0.3,
    }
