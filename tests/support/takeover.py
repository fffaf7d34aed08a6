"""What a run's folder and its first driver's workers do until a second driver has taken over."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import psutil
from drill import Drill

from rayapp.observe.run_folder import LEASE
from rayapp.storage import Storage

LOOK_S = 0.2
SETTLED_S = 2.0  # what the server had been sent before the cut is carried out by then


@dataclass
class Takeover:
    """Unix times of the first driver's workers and of the second driver's lease."""

    trained_until: float = 0.0
    """Until then the workers took CPU time as training does."""
    ended_at: float | None = None
    """No worker was left."""
    taken_at: float = 0.0
    before: dict[str, str] = field(default_factory=dict)
    """The etag of each file but the lease, just after the cut."""
    changed: set[str] = field(default_factory=set)
    """Files that were written or deleted from then until the lease was taken."""


def watch(first: Drill, cut_at: float) -> Takeover:
    """Watch from the cut until another driver holds the lease."""
    run, found, holder = first.run, Takeover(), holder_of(first.run)
    workers = [psutil.Process(pid) for pid in first.workers()]
    assert workers, first.log.read_text()
    time.sleep(max(0.0, cut_at + SETTLED_S - time.time()))
    found.before = files_of(run)
    used_s, used_at = sum(map(cpu_s, workers)), time.time()

    def taken() -> bool:
        nonlocal used_s, used_at
        now, used = time.time(), sum(map(cpu_s, workers))
        if now - used_at >= 1.0:
            if used - used_s > 0.2 * (now - used_at):
                found.trained_until = now
            used_s, used_at = used, now
        if found.ended_at is None and not any(map(alive, workers)):
            found.ended_at = now
        now_there, asked_at = files_of(run), time.time()
        if holder_of(run) != holder:
            found.taken_at = asked_at
            return True
        found.changed |= {name for name, _ in found.before.items() ^ now_there.items()}
        return False

    first.wait_until(taken)
    return found


def wait_for_renewal(run: Storage) -> None:
    """Return when the holder of a run's lease has just renewed it."""
    first = run.stat(LEASE)
    while run.stat(LEASE) == first:
        time.sleep(LOOK_S)


def holder_of(run: Storage) -> str:
    return str(json.loads(run.read(LEASE))["id"])


def files_of(run: Storage) -> dict[str, str]:
    return {entry.name: entry.etag for entry in run.list() if entry.name != LEASE}


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
