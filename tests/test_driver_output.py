"""Check what is kept of a command's output, and in which attempt's log it is."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.train.v2.api.exceptions import WorkerGroupError
from rich.console import Console

from rayapp.config import load
from rayapp.driver import display
from rayapp.driver.display import ProgressBar
from rayapp.driver.output import (
    KEPT,
    STORE_EVERY_S,
    TAIL_BYTES,
    AttemptLogs,
    Tail,
    captured,
)
from rayapp.observe import attempts
from rayapp.observe.clock import Clock
from rayapp.observe.events import Journal
from rayapp.observe.result import RunFailed
from rayapp.storage import Storage, open_storage

LINE: Any = {"loss": 2.0, "tokens_per_s": 1.0, "mfu": None, "time": 0.0}


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def test_what_is_printed_is_shown_and_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By print, logging and rich, to both streams, in order; nothing after the block."""
    logger = logging.getLogger("rayapp.nobody")
    monkeypatch.setattr(logger, "propagate", False)  # to pytest's handlers
    with captured() as tail:
        print("one", end=" ")
        print("two")
        logger.warning("three")
        print("four", file=sys.stderr)
        Console().print("five", style="red")
        sys.stdout.writelines(["six\n", "seven"])
    print(" eight")
    logger.warning("nine")
    assert tail.text().splitlines() == ["one two", "three", "four", "five", "six"]
    shown = capsys.readouterr()
    assert shown.out == "one two\nfive\nsix\nseven eight\n"
    assert shown.err == "three\nfour\nnine\n"


def test_a_stream_of_a_notebook_has_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stdout", cell)
    with captured() as tail:
        print("in a cell")
        assert not sys.stdout.isatty()
    assert sys.stdout is cell
    assert cell.getvalue() == tail.text() == "in a cell\n"


def test_little_memory_keeps_the_end() -> None:
    tail = Tail()
    for number in range(60_000):
        tail.add("stdout", f"line {number}\n")
    text = tail.text()
    assert TAIL_BYTES - 20 <= len(text.encode()) <= TAIL_BYTES
    assert text.startswith("line ") and text.endswith("line 59998\nline 59999\n")
    tail.add("stdout", "ü" * TAIL_BYTES + "end\n")
    assert len(tail.text().encode()) <= TAIL_BYTES and tail.text().endswith("üend\n")
    for _ in range(20):
        tail.add("stderr", "no end of a line" * 10_000)
    assert len(tail._open["stderr"]) <= TAIL_BYTES


def test_a_bar_is_kept_as_it_was_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten frames a second would push all else out in a minute."""
    monkeypatch.setattr(sys, "stdout", terminal := io.StringIO())
    with captured() as tail:
        console = Console(force_terminal=True, width=100)
        bar = ProgressBar(console, 500, "demo")
        for step in range(1, 501):
            bar.update(LINE | {"step": step})
            bar._progress.refresh()  # type: ignore[union-attr]
            if step == 250:
                bar.say("after step 250: rank 1: boom; again")
        bar.close()
    assert terminal.getvalue().count("/500") >= 500
    said, last = tail.text().splitlines()
    assert said == "after step 250: rank 1: boom; again"
    assert "500/500" in last and "\x1b" not in last


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (["a\r", "b\r", "c\n"], "c\n"),
        (["10 %\r20", " %\r\n"], "20 %\n"),
        (["\ra", "\rb\n"], "b\n"),
        (["one\r\ntwo\r\n"], "one\ntwo\n"),
        (["\x1b[3", "1mred\x1b[0m\n"], "red\n"),
    ],
)
def test_lines_that_are_redrawn(written: list[str], kept: str) -> None:
    tail = Tail()
    for text in written:
        tail.add("stdout", text)
    assert tail.text() == kept


def lost_peers() -> WorkerGroupError:
    """Rank 2 has failed; the errors of the others follow from that."""
    closed = "Traceback\nRuntimeError: Connection closed by peer [10.0.0.2]:4711"
    nccl = "Traceback\ntorch.distributed.DistBackendError: NCCL error in: x.cpp"
    errors: dict[int, Exception] = {0: RuntimeError(closed), 1: RuntimeError(nccl)}
    errors[2] = RuntimeError("Traceback\n  loss.backward()\nValueError: boom")
    return WorkerGroupError("3 failed", errors)


def test_each_attempt_has_its_log(run: Storage) -> None:
    config, journal, tail = load(), Journal(run), Tail()
    with journal.command(config, 1.0):
        logs = AttemptLogs(run, journal, tail)
        tail.add("stdout", "the plan\n")
        journal.attempt(config, 2)
        logs.begin_attempt()
        tail.add("stdout", "step 1\n")
        logs.keep_errors(lost_peers())
        logs.end_attempt("again in 2 s")
        tail.add("stdout", "waiting\n")
        for _ in range(2):  # the first had no room
            journal.attempt(config, 2)
            logs.begin_attempt()
        tail.add("stdout", "step 2\n")
        assert logs.close("failed: boom") == f"{run.url}/logs/attempt-3.txt"
    assert attempts.logged(run) == [1, 3]
    first, third = attempts.read_log(run, 1), attempts.read_log(run, 3)
    assert "\nthe plan\nstep 1\n==== rank 1\n" in first
    assert first.endswith(
        "==== rank 2\nTraceback\n  loss.backward()\nValueError: boom\n==== end\nagain in 2 s\n"
    )
    assert third.endswith("==== driver\nwaiting\nstep 2\n==== end\nfailed: boom\n")
    later = AttemptLogs(run, Journal(run), Tail())
    assert later.close("x") == f"{run.url}/logs/attempt-4.txt", (
        "of the next command's first attempt"
    )


def test_a_crash_loop_keeps_the_newest(run: Storage) -> None:
    config, journal = load(), Journal(run)
    with journal.command(config, 1.0):
        logs = AttemptLogs(run, journal, Tail())
        for _ in range(KEPT + 5):
            journal.attempt(config, 2)
            logs.begin_attempt()
            logs.end_attempt("again")
    assert attempts.logged(run) == list(range(6, KEPT + 6))


def test_a_killed_driver_leaves_a_log_too(run: Storage) -> None:
    class Standing(Clock):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock, tail = Standing(), Tail()
    logs = AttemptLogs(run, Journal(run), tail, clock)
    clock.now = STORE_EVERY_S
    logs.refresh()
    assert attempts.logged(run) == [], "nothing was printed"
    tail.add("stdout", "step 1\n")
    logs.refresh()
    assert "step 1" in attempts.read_log(run)
    tail.add("stdout", "step 2\n")
    logs.refresh()
    assert "step 2" not in attempts.read_log(run)
    clock.now += STORE_EVERY_S
    logs.refresh()
    assert "step 2" in attempts.read_log(run)


def test_a_secret_is_not_in_a_log(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    tail = Tail()
    tail.add("stderr", "401 for hf_0123456789, use_cache=false\n")
    AttemptLogs(run, Journal(run), tail).close("failed")
    assert "401 for [HF_TOKEN], use_cache=false\n" in attempts.read_log(run)


def test_a_log_that_cannot_be_stored_hides_nothing(
    run: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is another driver's, or a file stands where the logs belong."""

    class Lost:
        url = run.url

        def write(self, name: str, data: bytes) -> None:
            raise RunFailed("another driver has taken over")

    lost: Any = Lost()
    assert AttemptLogs(lost, Journal(run), Tail()).close("failed: boom") is None
    run.write("logs", b"a file")
    assert AttemptLogs(run, Journal(run), Tail()).close("failed: boom") is None
    assert [record.message.split(" is not stored: ")[0] for record in caplog.records] == [
        "logs/attempt-1.txt"
    ] * 2


@pytest.mark.parametrize(
    ("step", "at", "left"),
    [(6, 101.0, ", 0:04 left"), (4, 101.0, ""), (5, 101.0, ""), (6, 90.0, ", 0:00 left")],
)
def test_time_left_is_never_negative(step: int, at: float, left: str) -> None:
    """After a recovery steps are done again; the clock of another node may be behind."""
    bar = ProgressBar(Console(file=io.StringIO(), force_terminal=False), 10, "demo")
    bar.update({"step": 5, "time": 100.0, "loss": 1.0})
    line = {"step": step, "time": at, "loss": 1.0}
    assert bar.summary(line) == f"step {step}/10, loss 1.0000{left}"


def test_scores_are_printed_before_and_after_with_answers_side_by_side() -> None:
    console = Console(file=(piped := io.StringIO()), force_terminal=False, width=80)
    item = {"asked": "[a]?", "before": None, "after": "x\ny " * 99, "wanted": "y"}
    right = {"score": "json", "items": 64, "before": None, "shown": [item] * 5}
    right |= {"after": {"value": 0.9, "low": 0.8, "high": 0.95}}
    loss = {"score": "loss", "items": 3, "after": {"value": 1.2, "low": 1.0, "high": 1.5}}
    loss |= {"before": {"value": 1.25, "low": 1.0, "high": 1.5}}
    done: Any = {"status": "done", "steps": 1, "wall_s": 1.0, "run": "/a"}
    display.result(console, {**done, "tasks": {"dates": right, "general": loss}})
    rows = [line.split() for line in piped.getvalue().splitlines()]
    assert ["dates", "64", "right", "(json)", "-", "90", "%", "(80", "to", "95)"] in rows
    assert [
        "general",
        "3",
        "nats/token",
        "1.25",
        "(1.00",
        "to",
        "1.50)",
        "1.20",
        "(1.00",
        "to",
        "1.50)",
    ] in rows
    assert rows.count(["asked", "[a]?"]) == 3 and rows.count(["wanted", "y"]) == 3
    assert max(map(len, piped.getvalue().splitlines())) < 180


def test_a_folder_in_brackets_is_printed_as_it_is() -> None:
    console = Console(file=(piped := io.StringIO()), force_terminal=False)
    done = {"status": "done", "steps": 1, "wall_s": 1.0, "run": "[/a]/[b]", "model_path": "[/a]/m"}
    display.result(console, done)
    assert "results in [/a]/[b]\n" in piped.getvalue()
    bar = ProgressBar(Console(file=(seen := io.StringIO()), force_terminal=True), 10, "demo")
    for each in (bar, ProgressBar(console, 10, "demo")):
        each.note("reading [/b].jsonl")
        each.close()
    assert "reading [/b].jsonl" in piped.getvalue()
    assert "reading [/b].jsonl" in seen.getvalue()
