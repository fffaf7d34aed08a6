"""What a command shows while it takes no steps."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayapp.config import Config
from rayapp.driver import heartbeat as activity
from rayapp.driver.heartbeat import Heartbeat
from rayapp.driver.main import main
from rayapp.driver.output import Tail
from rayapp.observe.activity import (
    STARTING_WORKERS,
    TRAINING,
    Activity,
    Phases,
    Reporter,
    read_activity,
)
from rayapp.observe.run_folder import ACTIVITY, DONE, RANK_ACTIVITY
from rayapp.storage import open_storage


class Shown:
    """A heartbeat whose beats the test makes, and the lines that it shows."""

    def __init__(self) -> None:
        self.phases, self.tail, self.text = Phases(0.0), Tail(), io.StringIO()
        self.heartbeat = Heartbeat(self.phases, Console(file=self.text, width=200), self.tail)

    def beat(self, phase: str, began: float, now: float, detail: str = "") -> list[str]:
        """Let the heartbeat look at an activity; return the lines that it showed."""
        before = len(self.text.getvalue())
        self.heartbeat._beat(Activity(phase, began, detail), now)
        return self.text.getvalue()[before:].splitlines()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(activity.time, "monotonic", lambda: now[0])
    return now


def test_a_phase_is_shown_once_and_again_after_silence(clock: list[float]) -> None:
    shown = Shown()
    assert shown.beat("starting Ray", 0.0, 0.5) == []  # most phases are over in a second
    assert shown.beat("starting Ray", 0.0, 1.0) == ["starting Ray"]
    clock[0] = 9.0
    assert shown.beat("starting Ray", 0.0, 10.0) == []
    clock[0] = 10.0
    assert shown.beat("starting Ray", 0.0, 11.0) == ["starting Ray, 0:11"]
    clock[0] = 19.0
    shown.tail.add("stdout", "a line of somebody else\n")
    assert shown.beat("starting Ray", 0.0, 20.0) == []
    clock[0] = 28.0
    assert shown.beat("starting Ray", 0.0, 29.0) == []
    clock[0] = 29.0
    assert shown.beat("starting Ray", 0.0, 30.0, "2 of 3") == ["starting Ray, 0:30: 2 of 3"]
    assert shown.beat("planning", 31.0, 32.0) == ["planning"]


def test_slow_steps_are_told_and_are_no_phases_of_the_journal(clock: list[float]) -> None:
    shown = Shown()
    shown.phases.begin(TRAINING, "3 of 9 steps")
    shown.beat("starting workers", 0.0, 1.0)
    assert shown.beat(TRAINING, 10.0, 11.0, "3 of 9 steps") == []  # its step has a line
    clock[0] = 10.0
    assert shown.beat(TRAINING, 10.0, 22.0, "3 of 9 steps") == ["training, 0:12: 3 of 9 steps"]
    assert shown.beat("evaluating", 30.0, 31.0) == ["evaluating"]
    assert not shown.heartbeat.passed


def test_what_goes_on_meanwhile_has_a_line_each_minute(clock: list[float]) -> None:
    shown, beside = Shown(), "preparing window 3 of ~40, 1.20 GB of ~4.00 GB"
    lines: list[str] = []
    for second in range(0, 200, 5):
        clock[0] = float(second)
        shown.tail.add("stdout", "a line of a step\n")
        before = len(shown.text.getvalue())
        told = Activity(TRAINING, 0.0, f"step {second}", beside if second < 150 else "")
        shown.heartbeat._beat(told, 10.0 + second)
        lines += shown.text.getvalue()[before:].splitlines()
    assert lines == [beside] * 2


def test_what_goes_on_meanwhile_is_told_with_rank_0_and_in_status(tmp_path: Path) -> None:
    shown, run = Shown(), open_storage(str(tmp_path))
    told = {"phase": "waiting for rows that are being prepared", "began": 100.0, "detail": ""}
    shown.phases.begin(TRAINING, "step 4/9")
    shown.phases.beside = "preparing window 3 of 3"
    shown.phases.current = replace(shown.phases.current, began=100.0)
    run.write(RANK_ACTIVITY, json.dumps(told).encode())
    reporter = Reporter(run, ACTIVITY, shown.phases)
    reporter.store()
    found = read_activity(run)
    assert found is not None
    expected = "waiting for rows that are being prepared, 0:21; preparing window 3 of 3"
    assert found.text(121.0) == expected
    shown.heartbeat._run = run
    shown.heartbeat._of_workers = shown.phases.current
    assert shown.heartbeat._activity().text(121.0) == expected
    shown.phases.beside = ""
    assert shown.heartbeat._activity().text(121.0) == expected.partition(";")[0]


def test_phases_go_to_the_journal(clock: list[float]) -> None:
    shown = Shown()
    shown.beat("starting Ray", 0.0, 1.0)
    shown.beat("starting Ray", 0.0, 2.0)
    shown.beat("tokenising a", 5.0, 6.0)
    assert [each.phase for each in shown.heartbeat.passed] == ["starting Ray", "tokenising a"]


def test_rank_0_is_shown_and_what_the_last_workers_told_is_not(tmp_path: Path) -> None:
    shown, run = Shown(), open_storage(str(tmp_path))
    told = {"phase": "exporting the model", "began": time.time() - 9.0, "detail": ""}
    run.write(RANK_ACTIVITY, json.dumps(told).encode())
    heartbeat = shown.heartbeat
    heartbeat._run = run
    shown.phases.begin(STARTING_WORKERS, "2")
    assert heartbeat._activity().phase == STARTING_WORKERS and not run.exists(RANK_ACTIVITY)
    run.write(RANK_ACTIVITY, json.dumps({**told, "phase": "loading the model"}).encode())
    heartbeat._read_at = 0.0
    assert heartbeat._activity().phase == "loading the model"
    shown.phases.begin("writing the report")
    assert heartbeat._activity().phase == "writing the report"


def test_a_bar_shows_it_in_place_of_the_console(clock: list[float]) -> None:
    shown, notes = Shown(), list[str]()
    with shown.heartbeat.shown_by(notes.append):
        assert shown.beat("starting workers", 0.0, 1.0, "2") == []
    assert notes == ["starting workers: 2"]
    assert shown.beat("writing the report", 5.0, 6.0) == ["writing the report"]


def test_imports_that_last_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def load_run() -> Any:
        time.sleep(3.5)
        return lambda *_: {"status": DONE}

    assert main([], "", Config, load_run, None) == 0
    assert capsys.readouterr().out.splitlines() == ["importing torch, ray and transformers"]


def test_the_thread_shows_a_phase_that_lasts() -> None:
    shown = Shown()
    with shown.heartbeat:
        shown.phases.begin("starting [Ray]")
        until = time.monotonic() + 20.0
        while not shown.text.getvalue() and time.monotonic() < until:
            time.sleep(0.1)
    assert shown.text.getvalue() == "starting [Ray]\n"
