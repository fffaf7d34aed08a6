"""A stop that is asked for while a command runs, and one that was asked of an earlier command."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE_S
from rich.console import Console

from rayapp.driver.stop import Stop, StopAsked, short_wait, watching
from rayapp.observe.run_folder import EVENTS, RETRIED, STOP
from rayapp.storage import Storage, open_storage


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path))
    return open_storage(f"s3://{request.getfixturevalue('s3_bucket')}/runs/demo")


def test_what_was_there_before_is_removed(run: Storage) -> None:
    run.write(STOP, b"asked\n")
    stop = Stop(run)
    stop.forget_old()
    assert not run.exists(STOP) and not stop.asked()
    stop.check()


@pytest.mark.parametrize(
    ("asked", "ended", "kept"),
    [
        (b"asked\n", False, True),
        (b"", False, True),
        (b"signal\n", False, False),
        (b"", True, False),
    ],
)
def test_another_try_answers_what_a_lost_driver_was_asked(
    run: Storage, asked: bytes, ended: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KubeRay starts a lost driver again; a user who starts a run again wants it to go on."""
    run.write(STOP, asked)
    events: list[dict[str, Any]] = [{"event": "started", "seen_until": None}]
    if ended:
        events.append({"event": "ended", "status": "stopped", "reason": None, "seconds": {}})
    lines = "".join(json.dumps({"time": 1.0, **one}) + "\n" for one in events)
    run.write(EVENTS, lines.encode())
    monkeypatch.setenv(RETRIED, "1")
    stop = Stop(run)
    stop.forget_old()
    assert stop.asked() is kept
    monkeypatch.delenv(RETRIED)
    stop.forget_old()
    assert not stop.asked()


def test_what_came_before_the_lease_was_held_counts(run: Storage) -> None:
    stop = Stop(run)
    run.write(STOP, b"asked\n")
    stop.forget_old()
    assert stop.asked()


def test_what_was_asked_again_counts(run: Storage) -> None:
    run.write(STOP, b"asked\n")
    stop = Stop(run)
    run.write(STOP, b"signal\n")
    stop.forget_old()
    with pytest.raises(StopAsked):
        stop.check()


def wait_until_exists(run: Storage) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not run.exists(STOP):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_the_workers_too(tmp_path: Path, number: signal.Signals) -> None:
    run, before = open_storage(str(tmp_path)), signal.getsignal(number)
    stop = Stop(run)
    with stop.on_signal(Console(quiet=True)):
        os.kill(os.getpid(), number)
        assert stop.asked()
        wait_until_exists(run)
        assert signal.getsignal(number) == before, "a second one must end the process"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_a_notebook_ends_its_loop_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    begun, expected = [], KeyboardInterrupt if number == signal.SIGINT else StopIteration
    with pytest.raises(expected):
        for name in ("a", "b"):
            stop = Stop(open_storage(str(tmp_path / name)))
            with stop.on_signal(Console(quiet=True)):
                begun.append(name)
                if name == "a":
                    os.kill(os.getpid(), number)
                    assert stop.asked(), "the run saves before the loop ends"
        raise StopIteration
    assert begun == (["a"] if number == signal.SIGINT else ["a", "b"])


def test_work_is_watched() -> None:
    looks: list[float] = []
    assert watching(lambda: 7, lambda: looks.append(0.0)) == 7
    with pytest.raises(ZeroDivisionError):
        watching(lambda: 1 // 0, lambda: None)


def test_work_that_does_not_end_can_be_stopped(tmp_path: Path) -> None:
    stop, ended = Stop(open_storage(str(tmp_path))), threading.Event()
    (tmp_path / STOP).touch()
    with pytest.raises(StopAsked):
        watching(lambda: ended.wait(PATIENCE_S), stop.check)
    ended.set()


@pytest.mark.parametrize(
    ("job", "wait", "said"),
    [(None, None, False), ("demo", None, True), ("demo", "30", True), ("demo", "600", False)],
)
def test_a_job_that_would_be_killed_before_it_has_saved_says_so(
    monkeypatch: pytest.MonkeyPatch, job: str | None, wait: str | None, said: bool
) -> None:
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    if wait is not None:
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", wait)
    found = short_wait(job)
    assert (found is not None) == said
    if found:
        assert f"after {wait or 3} s" in found and '{"RAY_JOB_STOP_WAIT_TIME_S": "600"}' in found


def test_a_signal_handler_makes_no_request() -> None:
    """The thread that it interrupts may be in the middle of one, with the client's lock."""
    asked: list[threading.Thread] = []

    def request(*arguments: object) -> None:
        asked.append(threading.current_thread())

    run: Any = SimpleNamespace(stat=lambda name: None, write=request, exists=request)
    with Stop(run).on_signal(Console(quiet=True)):
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while not asked:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert threading.main_thread() not in asked
