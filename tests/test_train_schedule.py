"""Check when a run saves, and when its workers leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rayapp.config import load
from rayapp.observe import run_folder
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.train import schedule
from rayapp.train.schedule import Cadence, LeaveWatcher
from rayapp.train.step_sync import CONTINUE, RESTART, STOP


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "STOP_POLL_S", 0.01)
    monkeypatch.setattr(schedule, "ROOM_POLL_S", 0.05)
    monkeypatch.setattr(schedule, "NOTICE_POLL_S", 0.05)


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


@pytest.fixture
def leaving(run: Storage) -> Iterator[Callable[..., LeaveWatcher]]:
    made: list[LeaveWatcher] = []

    def make(room: Callable[[], int] | None = None) -> LeaveWatcher:
        made.append(LeaveWatcher(run, room))
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stop_is_seen(run: Storage, leaving: Callable[..., LeaveWatcher]) -> None:
    watch = leaving()
    time.sleep(0.1)
    assert watch.due() == CONTINUE
    run.write(run_folder.STOP, b"")
    until(lambda: watch.due() == STOP)


def test_a_storage_that_fails_is_asked_again(
    run: Storage, leaving: Callable[..., LeaveWatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def exists(self: Storage, name: str) -> bool:
        asked.append(name)
        if len(asked) < 3:
            raise StorageError("stat", name, "no answer")
        return True

    monkeypatch.setattr(type(run), "exists", exists)
    watch = leaving()
    until(lambda: watch.due() == STOP)
    assert len(asked) == 3


def test_room_must_be_there_twice_in_a_row(leaving: Callable[..., LeaveWatcher]) -> None:
    rooms = iter([2, 0, 1, 0, 3, 1])
    watch = leaving(lambda: next(rooms))
    until(lambda: watch.due() == RESTART)
    assert watch.reason == "1 more worker fits" and list(rooms) == []


def test_a_stop_goes_before_room(run: Storage, leaving: Callable[..., LeaveWatcher]) -> None:
    run.write(run_folder.STOP, b"")
    watch = leaving(lambda: 5)
    until(lambda: watch.due() != CONTINUE)
    assert watch.due() == STOP


def test_notices_are_asked_for_now_and_then(leaving: Callable[..., LeaveWatcher]) -> None:
    watch = leaving()
    assert not watch.poll_due()
    time.sleep(0.06)
    assert watch.poll_due() and not watch.poll_due()


def test_saves_are_due_by_steps_by_time_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(schedule.time, "monotonic", lambda: now)
    config = load(None, {"checkpoint.every_steps": "4", "checkpoint.every_s": "60"})
    cadence = Cadence(config, num_steps=14)
    due = []
    for step in range(1, 15):
        now += 25.0 if step in (5, 6, 7) else 1.0  # 60 s after the save of step 4
        if cadence.save_due(step):
            due.append(step)
    assert due == [4, 7, 8, 12, 14]


def test_an_evaluation_that_is_owed_follows_the_next_step() -> None:
    """But the last step, which the final evaluation follows, and only while there are any."""
    cadence = Cadence(load(None, {"eval.every_steps": "3"}), num_steps=9)
    assert [step for step in range(1, 10) if cadence.eval_due(step)] == [3, 6]
    assert cadence.eval_due(4, owed=True) and not cadence.eval_due(9, owed=True)
    assert not Cadence(load(), num_steps=9).eval_due(4, owed=True)
