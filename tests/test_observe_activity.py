"""What a run does at the moment, as its folder tells it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rayapp.observe import activity
from rayapp.observe.activity import (
    STARTING_WORKERS,
    TRAINING,
    WAITING_FOR_ROOM,
    Phases,
    Reporter,
    read_activity,
)
from rayapp.observe.columns import Columns
from rayapp.observe.goodput import ENDED, INTERRUPTED, PHASE, RESUMED, STARTED, WORKERS, account
from rayapp.observe.run_folder import ACTIVITY, CONFIG, EVENTS, LEASE, RANK_ACTIVITY
from rayapp.observe.status import read
from rayapp.storage import Storage, open_storage


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def put(run: Storage, name: str, phase: str, began: float = 100.0) -> None:
    run.write(name, json.dumps({"phase": phase, "began": began, "detail": ""}).encode())


def test_an_activity_is_told_once_and_keeps_its_beginning() -> None:
    phases = Phases()
    phases.begin("tokenising a")
    began = phases.current
    phases.begin("tokenising a")
    assert phases.current is began
    phases.bytes_done(1_500_000, 3_000_000)
    assert phases.current.began == began.began and phases.current.detail == "1.50 MB of 3.00 MB"
    phases.begin("planning")
    assert phases.current.phase == "planning" and phases.current.detail == ""


def test_what_lasts_is_stored_and_what_passes_is_not(run: Storage) -> None:
    phases = Phases()
    reporter = Reporter(run, ACTIVITY, phases)
    phases.begin("checking")
    reporter.store()
    assert read_activity(run) is None
    phases.current = activity.Activity("starting Ray", time.time() - 2.0)
    reporter.store()
    stored = read_activity(run)
    assert stored == phases.current
    phases.update("half")  # a detail alone waits for STORE_EVERY_S
    reporter.store()
    assert read_activity(run) == stored
    reporter._stored_at -= activity.STORE_EVERY_S
    reporter.store()
    assert read_activity(run) == phases.current


def test_a_storage_that_refuses_delays_nothing(
    run: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(run, "write", refuse)
    phases = Phases(time.time() - 5.0)
    with Reporter(run, ACTIVITY, phases) as reporter:
        phases.current = activity.Activity("exporting", time.time() - 2.0)
        reporter.store()
    assert "no room" in caplog.text and not run.list()
    assert not any(thread.name == "activity" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("driver", "rank", "shown"),
    [
        (STARTING_WORKERS, "loading the model", "loading the model"),
        (TRAINING, "evaluating", "evaluating"),
        (TRAINING, TRAINING, TRAINING),
        ("writing the report", "exporting", "writing the report"),
        (WAITING_FOR_ROOM, "evaluating", WAITING_FOR_ROOM),
    ],
)
def test_rank_0_counts_while_workers_take_no_steps(
    run: Storage, driver: str, rank: str, shown: str
) -> None:
    put(run, ACTIVITY, driver)
    put(run, RANK_ACTIVITY, rank)
    found = read_activity(run)
    assert found is not None and found.phase == shown


def test_a_damaged_file_is_no_activity(run: Storage, caplog: pytest.LogCaptureFixture) -> None:
    for text in (b"{", b"[]", b'{"phase": "a"}', b'{"phase": "a", "began": "x", "detail": ""}'):
        run.write(ACTIVITY, text)
        assert read_activity(run) is None
    assert caplog.text.count("is damaged") == 4


def events(*given: tuple[str, float, dict[str, Any]]) -> Any:
    return [{"event": name, "time": at, **facts} for name, at, facts in given]


def test_waiting_for_room_is_an_account_of_its_own() -> None:
    """Before the first step and between attempts; the start and the recovery are without it."""
    waits = {"phase": WAITING_FOR_ROOM}
    resumed = {"step": 0, "first_step_s": 1.0, "lost_steps": 0, "lost_s": 0.0}
    ended = {"kind": "failure", "reason": "x", "step": 1, "workers": 1, "trained_until": 50.0}
    found = account(
        events(
            (STARTED, 0.0, {"seen_until": None, "usd_per_hour": None}),
            (PHASE, 3.0, {"phase": "starting Ray"}),
            (PHASE, 10.0, waits),
            (WORKERS, 30.0, {}),
            (RESUMED, 36.0, resumed),
            (INTERRUPTED, 52.0, ended),
            (PHASE, 60.0, waits),
            (WORKERS, 65.0, {}),
            (RESUMED, 71.0, resumed),
            (ENDED, 100.0, {"status": "stopped", "reason": None, "seconds": {}}),
        ),
        Columns.of([]),
    )
    seconds = {cause: share * found.wall_s for cause, share in found.goodput.items()}
    assert seconds["start"] == pytest.approx(15.0)  # 0 to 10, and 30 to 35
    assert seconds["waiting"] == pytest.approx(25.0)
    assert seconds["recovery"] == pytest.approx(15.0)  # 50 to 60, and 65 to 70


def test_a_wait_counts_while_it_lasts() -> None:
    begun = events(
        (STARTED, 0.0, {"seen_until": None, "usd_per_hour": None}),
        (PHASE, 10.0, {"phase": WAITING_FOR_ROOM}),
    )
    found = account(begun, Columns.of([]), now=40.0)
    assert found.goodput["waiting"] == pytest.approx(0.75)
    assert found.goodput["start"] == pytest.approx(0.25)


def test_waiting_is_a_status_and_an_old_activity_is_none(run: Storage) -> None:
    run.write(CONFIG, b"run: {}\n")
    run.write(LEASE, b"{}")
    started = {"event": STARTED, "time": 50.0, "seen_until": None, "usd_per_hour": None}
    run.write(EVENTS, json.dumps(started).encode() + b"\n")
    put(run, ACTIVITY, WAITING_FOR_ROOM)
    now = read(run)
    assert now.status == "waiting" and now.activity is not None and now.live
    put(run, ACTIVITY, WAITING_FOR_ROOM, began=40.0)  # of a command before
    now = read(run)
    assert now.status == "preparing" and now.activity is None
    run.delete(LEASE)
    assert read(run).activity is None
