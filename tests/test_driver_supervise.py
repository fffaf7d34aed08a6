"""Check how the driver watches over attempts, without Ray: the workers are stand-ins."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rayapp.config import from_dict
from rayapp.driver import supervise
from rayapp.driver.recovery import Recovery
from rayapp.driver.stop import StopAsked
from rayapp.driver.supervise import Command, fit
from rayapp.observe import metrics
from rayapp.observe.activity import Phases
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import METRICS, RESULT
from rayapp.order import Order
from rayapp.storage import Storage, StorageError, open_storage

WAITS = 60  # after which an attempt ends by itself
LINE = {"attempt": 2, "loss": 2.0, "tokens_per_s": 1.0, "mfu": None, "step_s": 1.0, "time": 9e9}
DONE = {"status": "done", "steps": 9, "entered": 0.0, "seconds": {}}


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "POLL_S", 0.005)
    monkeypatch.setattr(supervise, "OUTAGE_POLL_S", 0.005)
    monkeypatch.setattr(supervise, "ANSWER_S", 0.0)


class Attempt:
    """Workers that end after WAITS waits, or when they are ended."""

    def __init__(self, look: Callable[[int], None]) -> None:
        self.count, self.ended, self._look = 0, 0, look

    def wait(self, seconds: float) -> bool:
        import time

        time.sleep(seconds)
        self.count += 1
        self._look(self.count)
        return self.count >= WAITS or bool(self.ended)

    def outcome(self) -> Any:
        return RuntimeError("its node has died") if self.ended else dict(DONE)

    def end(self) -> None:
        self.ended += 1


class Driver:
    """A driver whose workers, lease and stops a test decides about."""

    def __init__(self, run: Storage, look: Callable[[int], None] = lambda count: None) -> None:
        self.run, self.look = run, look
        self.attempts: list[Attempt] = []
        self.shown: list[int] = []
        self.fresh = True
        self.stop_asked = False
        self.lost = False
        self.console = Console(file=io.StringIO())
        self.beside: Any = None

    @property
    def told(self) -> str:
        """What it has printed."""
        file: Any = self.console.file
        return str(file.getvalue())

    def fit(self) -> dict[str, Any]:
        def check() -> None:
            if self.lost:
                raise RunFailed("another driver has taken over")

        def wait_until_fresh(note: Any = None, check: Any = None) -> None:
            self.fresh = True

        def start(spec: Any, workers: int) -> Attempt:
            self.attempts.append(Attempt(self.look))
            return self.attempts[-1]

        def stop_check() -> None:
            if self.stop_asked:
                raise StopAsked

        lease: Any = SimpleNamespace(
            check=check, is_fresh=lambda: self.fresh, wait_until_fresh=wait_until_fresh, full=None
        )
        stop: Any = SimpleNamespace(asked=lambda: self.stop_asked, check=stop_check)
        journal: Any = SimpleNamespace(
            saw=lambda line: self.shown.append(line["step"]),
            attempt=lambda config, workers: None,
            last=metrics.last(self.run),
            catch_up=lambda: metrics.last(self.run),
            attempts=1,
            interrupted=lambda ending, workers: None,
        )
        workers: Any = SimpleNamespace(
            asked_for=nullcontext, wait_for_room=lambda note, check: 1, start=start
        )
        config = from_dict({"run": {"name": "demo"}, "eval": {"checkpoints": False}})
        spec: Any = SimpleNamespace(config=config, order=Order.for_steps(64, 4, 2, 3, 9))
        command = Command(self.run, lease, stop, journal)
        given = (command, spec, workers, self.console, lambda *ended: None)
        summary: Any = fit(*given, beside=self.beside)
        return summary


def add_line(run: Storage, step: int) -> None:
    before = run.read(METRICS) if run.exists(METRICS) else b""
    run.write(METRICS, before + json.dumps({**LINE, "step": step}).encode() + b"\n")


def test_rows_that_cannot_be_prepared_end_the_run(run: Storage) -> None:
    """Its workers would wait for them."""
    driver = Driver(run, lambda count: setattr(driver.beside, "problem", "a.jsonl is not JSON"))
    driver.beside = SimpleNamespace(problem=None)
    with pytest.raises(RunFailed, match="is not JSON"):
        driver.fit()
    assert [attempt.ended for attempt in driver.attempts] == [1]


def test_steps_are_shown_and_written_down(run: Storage) -> None:
    """Not the last one of an attempt before."""
    add_line(run, 1)

    def look(count: int) -> None:
        if count in (20, 40):
            add_line(run, count)

    driver = Driver(run, look)
    assert driver.fit()["status"] == "done"
    assert driver.shown == [20, 40] and not driver.attempts[0].ended


@pytest.mark.parametrize("before", [None, 1])
def test_the_last_step_is_shown_though_nobody_looked_again(
    run: Storage, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    if before:
        add_line(run, before)
    outcome = Attempt.outcome

    def ends(self: Attempt) -> Any:
        add_line(run, 9)
        return outcome(self)

    monkeypatch.setattr(Attempt, "outcome", ends)
    driver = Driver(run)
    driver.fit()
    assert driver.told.count("step 9/") == 1 and "step 1/" not in driver.told


def test_a_step_of_an_earlier_attempt_is_not_shown(run: Storage) -> None:
    add_line(run, 1)
    driver = Driver(run)
    driver.fit()
    assert driver.attempts and "step 1/" not in driver.told


def test_a_driver_that_has_lost_its_run_ends_the_attempt(run: Storage) -> None:
    def look(count: int) -> None:
        driver.lost = count == 3

    driver = Driver(run, look)
    with pytest.raises(RunFailed, match="taken over"):
        driver.fit()


def test_a_failure_of_all_workers_ends_the_run_with_their_reason(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rayapp.driver.worker returns it: without the facts of training."""
    failure = {"status": "failed", "reason": "none of its checkpoints can be used"}
    monkeypatch.setattr(Attempt, "outcome", lambda self: failure)
    driver = Driver(run)
    with pytest.raises(RunFailed, match="none of its checkpoints can be used"):
        driver.fit()
    assert len(driver.attempts) == 1
    assert json.loads(run.read(RESULT)) == {**failure, "steps": 0}


def test_workers_are_ended_when_the_lease_is_stale_and_started_when_it_is_fresh(
    run: Storage,
) -> None:
    def look(count: int) -> None:
        if count == 3 and len(driver.attempts) == 1:
            driver.fresh = False

    driver = Driver(run, look)
    assert driver.fit()["status"] == "done"
    assert [attempt.ended for attempt in driver.attempts] == [1, 0]


def test_a_request_that_hangs_does_not_hide_a_stale_lease(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    last = supervise.metrics.last

    def hang(storage: Storage) -> Any:
        if driver.attempts:  # not what is read before the first
            assert answered.wait(20.0), "the workers have not been ended meanwhile"
        return last(storage)

    def look(count: int) -> None:
        if len(driver.attempts) == 1:
            driver.fresh = count < 3

    monkeypatch.setattr(supervise.metrics, "last", hang)
    driver = Driver(run, look)
    original = Attempt.end

    def end(self: Attempt) -> None:
        original(self)
        answered.set()

    monkeypatch.setattr(Attempt, "end", end)
    driver.fit()
    assert driver.attempts[0].ended == 1


def test_an_unknown_error_of_the_watch_ends_the_run(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise.metrics, "last", lambda run: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        Driver(run).fit()


def test_workers_without_a_step_are_ended_by_a_stop(run: Storage) -> None:
    add_line(run, 7)  # of an attempt before

    def look(count: int) -> None:
        driver.stop_asked = True

    driver = Driver(run, look)
    assert driver.fit()["status"] == "stopped"
    assert driver.attempts[0].ended


def test_workers_that_do_steps_answer_a_stop_themselves(run: Storage) -> None:
    """They save first."""

    def look(count: int) -> None:
        if count == 1:
            add_line(run, 7)
        driver.stop_asked = count > 30

    driver = Driver(run, look)
    assert driver.fit()["status"] == "done"
    assert driver.shown == [7] and not driver.attempts[0].ended


def test_workers_are_not_ended_for_a_step_that_nobody_has_read_yet(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step and the STOP come after a read; the next one takes long."""
    last, reads, looked = supervise.metrics.last, [], threading.Event()

    def slow(storage: Storage) -> Any:
        line = last(storage)
        if threading.current_thread() is not threading.main_thread():
            reads.append(line)
            if len(reads) == 2:  # the first is of what was there before
                add_line(run, 7)
                driver.stop_asked = True
            assert len(reads) != 3 or looked.wait(20.0), "the driver waits for the read"
        return line

    def look(count: int) -> None:
        if count == 30:
            looked.set()

    monkeypatch.setattr(supervise.metrics, "last", slow)
    driver = Driver(run, look)
    assert driver.fit()["status"] == "done"
    assert driver.shown == [7] and not driver.attempts[0].ended


def test_a_pause_before_another_attempt_ends_with_a_stop(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pause_s(self: Recovery, ending: Any) -> float:
        driver.stop_asked = True
        return 1e9

    monkeypatch.setattr(Recovery, "after", pause_s)
    driver = Driver(run, lambda count: driver.attempts[0].end())
    assert driver.fit()["status"] == "stopped"
    assert len(driver.attempts) == 1


def test_an_outage_between_two_attempts_is_waited_out(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an error that does not pass is raised at once."""
    supervisor = supervise._Supervisor.__new__(supervise._Supervisor)
    supervisor.phases = Phases()
    supervisor.clock = supervise.CLOCK
    supervisor.command = SimpleNamespace(lease=SimpleNamespace(check=lambda: None))  # type: ignore[assignment]
    answers = iter([outage(True), outage(True), 7])

    def ask() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert supervisor.patiently(ask) == 7
    assert supervisor.phases.current.phase == "waiting for the storage"
    answers = iter([outage(False)])
    with pytest.raises(StorageError):
        supervisor.patiently(ask)


def outage(passes: bool) -> StorageError:
    error = StorageError("read", "s3://bucket/x", "no answer")
    error.outage = passes
    return error
