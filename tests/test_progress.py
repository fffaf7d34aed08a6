"""Check what is said of a run from its folder alone, at every turn of its life."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rayapp import progress
from rayapp.progress import LEASE_FILE, STOP_FILE, NoRun, read
from rayapp.storage import open_storage


def test_a_life(tmp_path: Path) -> None:
    run, now = open_storage(str(tmp_path)), time.time()
    with pytest.raises(NoRun, match="holds no run"):
        read(run)
    run.write(LEASE_FILE, b"{}")
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

    run.write(STOP_FILE, b"")
    assert read(run).status == "stopping"
    past = now - progress.LIVE_S - 1
    os.utime(tmp_path / LEASE_FILE, (past, past))
    found = read(run)
    assert (found.status, found.live) == ("lost", False)
    assert found.reason is not None and "run the same command again" in found.reason

    happens("ended", status="failed", reason="rank 1 died", seconds={})
    found = read(run)
    assert (found.status, found.reason, found.left_s) == ("failed", "rank 1 died", None)
    run.delete(LEASE_FILE)
    happens("started", usd_per_hour=None, seen_until=now + 6)
    assert read(run).status == "lost"
    happens("ended", status="done", reason=None, seconds={})
    assert read(run).status == "done"
