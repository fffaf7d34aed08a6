"""Check what trackers are told of a run that is cut back, resumed, or out of their reach."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE_S
from run_folders import RunFolder

from rayapp.config import load
from rayapp.driver import observe
from rayapp.driver.observe import Hooks, TrackerFeed
from rayapp.observe import trackers
from rayapp.storage import Storage, open_storage


def text_of(steps: Sequence[tuple[int, int]]) -> bytes:
    lines = [json.dumps({"attempt": attempt, "step": step}) for attempt, step in steps]
    return "".join(f"{line}\n" for line in lines).encode()


def pairs(lines: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(line["attempt"], line["step"]) for line in lines]


class Recorder:
    """A tracker that holds what it was told, and refuses when it is asked to."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.ended: tuple[str, Any] | None = None
        self.refuses = Event()

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            if self.refuses.is_set():  # in the midst of it
                raise ConnectionError("the server is away")
            self.steps.append((line["attempt"], line["step"]))

    def cut_back(self, step: int) -> None:
        self.steps = [each for each in self.steps if each[1] <= step]

    def close(self, status: str, samples: Sequence[tuple[str, str]]) -> None:
        self.ended = (status, samples)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(trackers.OPEN, "recorder", lambda run, config: made)
    monkeypatch.setattr(observe, "RETRY_S", 0.05)
    monkeypatch.setattr(observe, "TELL_S", 0.0)
    return made


class Told(TrackerFeed):
    """A feed whose lines are given instead of read."""

    def __init__(self, run: Storage) -> None:
        self.held: list[Any] = []
        job: Any = SimpleNamespace(config=load())
        super().__init__("recorder", run, job, lambda start, stop: self.held[start:stop])

    def have(self, lines: list[dict[str, Any]], kept: int) -> None:
        self.held = lines
        self.update(len(lines), kept)


def told_of(run: Storage) -> Told:
    return Told(run)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for(recorder: Recorder, steps: list[tuple[int, int]]) -> None:
    wait_until(lambda: recorder.steps == steps)


def lines_of(steps: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"attempt": attempt, "step": step} for attempt, step in steps]


def test_a_tracker_is_cut_back_and_told_the_rest(recorder: Recorder, tmp_path: Path) -> None:
    told = told_of(open_storage(str(tmp_path)))
    first = [(1, step) for step in range(1, 1201)]  # more than is handed on at once
    told.have(lines_of(first), 0)
    wait_for(recorder, first)
    second = first[:700] + [(2, step) for step in range(701, 720)]
    told.have(lines_of(second), 700)
    wait_for(recorder, second)
    third = [(3, 1)]
    told.have(lines_of(third), 0)
    wait_for(recorder, third)
    told.close("stopped", [("a", "b")], time.monotonic() + PATIENCE_S)
    assert recorder.ended == ("stopped", [("a", "b")])


def test_what_was_refused_is_told_once_when_the_server_is_back(
    recorder: Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = told_of(open_storage(str(tmp_path)))
    told.have(lines_of([(1, 1), (1, 2)]), 0)
    wait_for(recorder, [(1, 1), (1, 2)])
    recorder.refuses.set()
    steps = [(1, 1), (1, 2), (1, 3), (1, 4)]
    told.have(lines_of(steps), 2)
    time.sleep(0.3)
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warned == ["recorder: the server is away; trying again"]  # once, not at every try
    recorder.refuses.clear()
    wait_for(recorder, steps)
    told.close("done", [], time.monotonic() + PATIENCE_S)
    assert recorder.ended == ("done", [])


def test_steps_are_told_together_and_the_last_ones_at_once(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "TELL_S", PATIENCE_S)
    told = told_of(open_storage(str(tmp_path)))
    told.have(lines_of([(1, 1)]), 0)
    wait_for(recorder, [(1, 1)])
    steps = [(1, 1), (1, 2), (1, 3)]
    for count in (2, 3):
        told.have(lines_of(steps[:count]), count - 1)
    time.sleep(0.3)
    assert recorder.steps == [(1, 1)]
    began = time.monotonic()
    told.close("done", [], began + PATIENCE_S)
    assert recorder.steps == steps and recorder.ended == ("done", [])
    assert time.monotonic() - began < PATIENCE_S / 2


def test_a_server_that_hangs_holds_up_nobody(
    recorder: Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.refuses.set()
    told = told_of(open_storage(str(tmp_path)))
    began = time.monotonic()
    told.have(lines_of([(1, 1), (1, 2)]), 0)
    told.close("done", [], began + 0.5)
    assert time.monotonic() - began < 5
    assert recorder.ended is None
    assert caplog.records[-1].getMessage() == "recorder has not received all lines"
    recorder.refuses.clear()  # lets the thread end
    wait_for(recorder, [(1, 1), (1, 2)])


class NoGauges:
    def __init__(self, *_: Any) -> None: ...

    def set(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...


def test_hooks_are_told_of_the_steps_of_this_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of those that were there when it began; after an outage, and again after a recovery."""
    monkeypatch.setattr(observe, "Driver", NoGauges)
    monkeypatch.setattr(observe, "POLL_S", 0.01)
    folder, steps = RunFolder(open_storage(str(tmp_path)), "demo", steps=9), list[int]()
    folder.train(4)
    hooks = Hooks([SimpleNamespace(on_step=lambda line: steps.append(line["step"]))])
    spec: Any = SimpleNamespace(config=load(), order=SimpleNamespace(num_steps=9))
    spec.config = load(None, {"run.trackers": "none"})
    with observe.Observer(spec, folder.run, hooks) as observer:
        read, failures = observer._lines.lines, [OSError("away")]

        def lines(start: int, stop: int) -> Any:
            if failures:
                raise failures.pop()
            return read(start, stop)

        monkeypatch.setattr(observer._lines, "lines", lines)
        wait_until(lambda: observer._told is not None)
        folder.train(3)
        wait_until(lambda: len(steps) == 3)
        folder.train(2, at=6)
    hooks.end({"status": "done"})
    assert steps == [5, 6, 7, 7, 8] and not failures


def test_a_slow_hook_leaves_lines_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "Driver", NoGauges)
    monkeypatch.setattr(observe, "POLL_S", 0.01)
    monkeypatch.setattr(observe, "PART", 2)
    folder, steps, go_on = RunFolder(open_storage(str(tmp_path)), "demo", steps=9), [], Event()
    hook = SimpleNamespace(on_step=lambda line: go_on.wait(PATIENCE_S) and steps.append(line))
    hooks = Hooks([hook])
    spec: Any = SimpleNamespace(config=load(), order=SimpleNamespace(num_steps=9))
    with observe.Observer(spec, folder.run, hooks) as observer:
        wait_until(lambda: observer._told is not None)
        folder.train(9)
        wait_until(lambda: hooks.calls.qsize() >= 2)
        assert hooks.calls.qsize() <= 3
        go_on.set()
    hooks.end({"status": "done"})
    assert [line["step"] for line in steps] == list(range(1, 10))


def test_a_damaged_event_ends_no_observer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observe, "Driver", NoGauges)
    monkeypatch.setattr(observe, "POLL_S", 0.01)
    (tmp_path / "events.jsonl").write_text("no JSON\n")
    spec: Any = SimpleNamespace(config=load(), order=SimpleNamespace(num_steps=1))
    with observe.Observer(spec, open_storage(str(tmp_path))) as observer:
        until = time.monotonic() + PATIENCE_S
        while len(caplog.records) < 2 and observer._thread.is_alive():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert observer._thread.is_alive()
    assert "cannot look at the run" in caplog.text and "events.jsonl" in caplog.text
