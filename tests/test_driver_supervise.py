"""Check how the driver watches over an attempt, without one: Ray's part is a future."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayapp.driver import supervise
from rayapp.driver.stop import StopAsked
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import METRICS
from rayapp.storage import Storage, open_storage

LOOKS = 50  # after which an attempt ends by itself


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Be quick, and note when workers are ended."""
    done: list[str] = []
    monkeypatch.setattr(supervise, "POLL_S", 0.001)
    monkeypatch.setattr(supervise, "ANSWER_S", 0.0)
    monkeypatch.setattr(supervise, "end_workers", lambda: done.append("ended"))
    return done


def watch(
    run: Storage, stop_asked: bool = False, look: Callable[[int], None] = lambda count: None
) -> list[int]:
    """Watch an attempt of LOOKS looks, calling `look` at each; return the steps that were shown."""
    fit: Future[None] = Future()
    shown: list[int] = []
    looks, asks = itertools.count(1), itertools.count(1)

    def check() -> None:
        count = next(looks)
        look(count)
        if count == LOOKS:
            fit.set_result(None)

    def asked() -> bool:
        if next(asks) == 2 * LOOKS:  # `check` is not called
            fit.set_result(None)
        return stop_asked

    journal: Any = SimpleNamespace(saw=lambda line: shown.append(line["step"]))
    bar: Any = SimpleNamespace(update=lambda line: None, note=lambda text: None)
    stop: Any = SimpleNamespace(asked=asked)
    lease: Any = SimpleNamespace(check=check)
    supervise._watch(run, bar, fit, lease, stop, journal, None)
    return shown


def test_steps_are_shown_and_written_down(run: Storage, ended: list[str]) -> None:
    """Not the last one of an attempt before."""
    run.write(METRICS, b'{"step": 1}\n')

    def look(count: int) -> None:
        if count in (10, 20):
            run.write(METRICS, run.read(METRICS) + json.dumps({"step": count}).encode() + b"\n")

    assert watch(run, look=look) == [10, 20] and not ended


def test_a_driver_that_has_lost_its_run_ends_the_attempt(run: Storage, ended: list[str]) -> None:
    def look(count: int) -> None:
        if count == 3:
            raise RunFailed("another driver has taken over")

    with pytest.raises(RunFailed, match="taken over"):
        watch(run, look=look)


def test_workers_without_a_step_are_ended_by_a_stop(run: Storage, ended: list[str]) -> None:
    run.write(METRICS, b'{"step": 7}\n')  # of an attempt before
    watch(run, stop_asked=True)
    assert ended


def test_workers_that_do_steps_answer_a_stop_themselves(run: Storage, ended: list[str]) -> None:
    """They save first."""

    def look(count: int) -> None:
        if count == 1:
            run.write(METRICS, b'{"step": 7}\n')

    assert watch(run, stop_asked=True, look=look) == [7] and not ended


def test_a_pause_can_be_stopped(ended: list[str]) -> None:
    def check() -> None:
        raise StopAsked

    with pytest.raises(StopAsked):
        supervise._pause(1.0, check)
