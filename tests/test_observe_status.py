"""Check what is said of a run from its folder alone, at every turn of its life."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rayapp import report
from rayapp.config import ConfigError
from rayapp.observe import status
from rayapp.observe.activity import STARTING_WORKERS, Activity
from rayapp.observe.run_folder import ACTIVITY, LEASE, STOP
from rayapp.observe.status import NoRun, read
from rayapp.storage import open_storage


def test_a_life(tmp_path: Path) -> None:
    run, now = open_storage(str(tmp_path)), time.time()
    with pytest.raises(NoRun, match="holds no run"):
        read(run)
    run.write(LEASE, b"{}")
    assert read(run).status == "preparing"

    events: list[dict[str, Any]] = []

    def happens(event: str, **facts: Any) -> None:
        events.append({"event": event, "time": now, **facts})
        run.write("events.jsonl", "".join(json.dumps(e) + "\n" for e in events).encode())

    happens("started", usd_per_hour=None, seen_until=None)
    run.write("plan.json", b'{"steps": 10}')
    found = read(run)
    assert (found.status, found.step, found.num_steps, found.left_s) == ("preparing", 0, 10, None)
    idle = {"data_wait_s": 0.0, "checkpoint_stall_s": 0.0, "eval_s": 0.0, "attempt": 1}
    lines = [idle | {"step": n, "step_s": 2.0, "time": now + 2 * n} for n in (1, 2, 3)]
    run.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    happens("resumed", step=0, first_step_s=2.0, lost_steps=0, lost_s=0.0)
    found = read(run)
    assert (found.status, found.step, found.left_s, found.live) == ("running", 3, 14.0, True)
    assert found.line == lines[-1] and found.updated_s == now + 6

    run.write(STOP, b"")
    assert read(run).status == "stopping"
    past = now - status.LIVE_S - 1
    os.utime(tmp_path / LEASE, (past, past))
    found = read(run)
    assert (found.status, found.live) == ("lost", False)
    assert found.reason is not None and "run the same command again" in found.reason

    happens("ended", status="failed", reason="rank 1 died", seconds={})
    found = read(run)
    assert (found.status, found.reason, found.left_s) == ("failed", "rank 1 died", None)
    run.delete(LEASE)
    happens("started", usd_per_hour=None, seen_until=now + 6)
    assert read(run).status == "lost"
    happens("ended", status="done", reason=None, seconds={})
    assert read(run).status == "done"


def test_workers_that_take_steps_are_not_said_to_start(tmp_path: Path) -> None:
    """The driver stores its activity now and then, and may be late."""
    run = open_storage(str(tmp_path))
    run.write(LEASE, b"{}")
    starting = {"phase": STARTING_WORKERS, "began": 100.0, "detail": "2 workers"}
    run.write(ACTIVITY, json.dumps(starting).encode())
    idle = {"step_s": 1.0, "data_wait_s": 0.0, "checkpoint_stall_s": 0.0, "eval_s": 0.0}
    shown = []
    for stepped_at in (90.0, 110.0):  # a step of the attempt before, one of this attempt
        line = idle | {"step": 1, "time": stepped_at, "attempt": 1}
        run.write("metrics.jsonl", f"{json.dumps(line)}\n".encode())
        shown.append(read(run).activity)
    assert shown == [Activity(**starting), None]  # type: ignore[arg-type]


STARTED = {"event": "started", "time": 1.0, "usd_per_hour": None, "seen_until": None}
ENDED = {"event": "ended", "time": 2.0, "status": "done", "reason": None, "seconds": {}}


def lines(*events: Any) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("events.jsonl", b"{\n"),
        ("events.jsonl", b"\0\0\0\n"),
        ("events.jsonl", b"[" * 50_000 + b"\n"),
        ("events.jsonl", lines([])),
        ("events.jsonl", lines({"event": "ended"})),
        ("events.jsonl", lines(ENDED)),
        ("events.jsonl", lines(STARTED, {"event": "moved", "time": 2.0})),
        ("events.jsonl", lines(STARTED, ENDED | {"time": None})),
        ("events.jsonl", lines(STARTED, ENDED | {"seconds": {"export": "x"}})),
        ("events.jsonl", lines(STARTED, ENDED | {"status": "<img src=x onerror=alert(1)>"})),
        ("events.jsonl", lines(STARTED | {"usd_per_hour": "x"}, ENDED)),
        ("plan.json", b'{"steps": 1'),
        ("plan.json", b"null"),
        ("plan.json", b'{"steps": "x"}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    run = open_storage(str(tmp_path))
    run.write("events.jsonl", lines(STARTED, ENDED))
    assert read(run).status == "done"
    run.write(name, data)
    with pytest.raises(ConfigError) as error:
        read(run)
    (problem,) = error.value.problems
    assert problem.startswith(f"{tmp_path}/{name} is damaged: ") and "\n" not in problem


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("result.json", b'{"status": "do'),
        ("result.json", b"[]"),
        ("validation.jsonl", b'{"step": 2, "eval_loss": 3.0}\nnull\n'),
        ("plan.json", b"\0" * 20),
    ],
)
def test_a_report_names_the_damaged_file(tmp_path: Path, name: str, data: bytes) -> None:
    run = open_storage(str(tmp_path))
    run.write("events.jsonl", lines(STARTED, ENDED))
    run.write(name, data)
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        report.write(run)
    report.write_for(run)  # a run that has trained is not failed by its report
