"""What a command and its workers do at the moment, and the seconds of each phase.

    phases = Phases()
    phases.begin("tokenising data/a.jsonl", "1.2 of 3.4 GB")    # what is shown meanwhile
    phases.end("data")                                          # phases.seconds["data"]

    with Reporter(run, ACTIVITY, phases):                       # stored, for `status` and others
        ...

The driver stores its activity in `activity.json`, and rank 0 of the workers its own in
`activity-rank-0.json`, which counts while the workers take no steps.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from rayapp.observe import run_folder
from rayapp.observe.run_folder import ACTIVITY, RANK_ACTIVITY, UnixTime
from rayapp.observe.words import clock, number_of_bytes
from rayapp.storage import Storage

WAITING_FOR_ROOM = "waiting for room"
STARTING_WORKERS = "starting workers"
TRAINING = "training"
AT_WORK = (STARTING_WORKERS, TRAINING)  # of the driver, while rank 0 tells what it does

SHOWN_S = 5.0  # from which on a line says how long it lasts
LEAST_S = 1.0  # an activity that is over sooner is not stored
STORE_EVERY_S = 10.0  # between two writes of an activity whose detail changes

logger = logging.getLogger("rayapp.observe")


@dataclass(frozen=True)
class Activity:
    """What a process does."""

    phase: str
    began: UnixTime
    """Unix time in seconds."""
    detail: str = ""
    beside: str = ""
    """What goes on meanwhile."""

    def text(self, now: float) -> str:
        """Return a line about it; `now` is a Unix time in seconds.

        >>> Activity("tokenising a.txt", 100.0, "1.2 of 3.4 GB").text(now=121.0)
        'tokenising a.txt, 0:21: 1.2 of 3.4 GB'
        >>> Activity("training", 100.0, "step 4/9", "preparing window 3 of ~40").text(now=101.0)
        'training: step 4/9; preparing window 3 of ~40'
        """
        lasts_s = now - self.began
        lasts = f", {clock(lasts_s)}" if lasts_s >= SHOWN_S else ""
        beside = self.beside and f"; {self.beside}"
        return f"{self.phase}{lasts}{self.detail and ': '}{self.detail}{beside}"


class Phases:
    """The current activity of a process, and the seconds of consecutive phases since a start."""

    def __init__(self, started: float | None = None) -> None:
        """Start the first phase at a Unix time, by default now."""
        self.started, self.seconds = started or time.time(), dict[str, float]()
        self._ended = self.started
        self.current = Activity("", self.started)
        """Threads may read it at any time; its phase is empty before the first `begin`."""
        self.beside = ""
        """What goes on meanwhile, whatever the phase; a thread may set it."""

    def snapshot(self) -> Activity:
        """Return the current activity with what goes on meanwhile."""
        return replace(self.current, beside=self.beside) if self.beside else self.current

    def begin(self, phase: str, detail: str = "") -> None:
        """Say what the process does from now on; nothing changes if it says so already."""
        if (phase, detail) != (self.current.phase, self.current.detail):
            self.current = Activity(phase, time.time(), detail)

    def update(self, detail: str) -> None:
        """Say how far the current activity is."""
        self.current = replace(self.current, detail=detail)

    def bytes_done(self, done: int, total: int) -> None:
        """Say how many bytes of all are done."""
        self.update(f"{number_of_bytes(done)} of {number_of_bytes(total)}")

    def end(self, name: str) -> None:
        """End the current phase now under this name; seconds of the same name add up."""
        now = time.time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._ended
        self._ended = now


class Reporter:
    """Store the activity of a process in the run's folder, from a thread."""

    def __init__(self, run: Storage, name: str, phases: Phases) -> None:
        self._run, self._name, self._phases = run, name, phases
        self._stored: Activity | None = None
        self._stored_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="activity", daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the file: the process does nothing any more."""
        self._closed.set()
        self._thread.join(STORE_EVERY_S)
        if self._stored is not None:
            self._try(lambda: self._run.delete(self._name))

    def _follow(self) -> None:
        while not self._closed.wait(LEAST_S):
            self.store()

    def store(self) -> None:
        """Store the current activity if it is new and lasts, or its detail has changed."""
        activity, now = self._phases.snapshot(), time.time()
        before = self._stored
        if activity == before or now - activity.began < LEAST_S:
            return
        same = before is not None and before.phase == activity.phase
        if same and now - self._stored_at < STORE_EVERY_S:
            return
        self._stored, self._stored_at = activity, now
        self._try(lambda: self._run.write(self._name, json.dumps(asdict(activity)).encode()))

    def _try(self, change: Callable[[], object]) -> None:
        try:
            change()
        except (OSError, RuntimeError) as error:  # an outage, or the lease is lost
            logger.warning("%s is not stored: %s", self._name, error)


def read_activity(run: Storage) -> Activity | None:
    """Return what a live run does, as it last stored it; None if it has stored nothing."""
    driver = _read(run, ACTIVITY)
    return driver and of_workers(run, driver)


def of_workers(run: Storage, driver: Activity) -> Activity:
    """Return what rank 0 does if workers are at work and it tells more than the driver does."""
    rank = _read(run, RANK_ACTIVITY) if driver.phase in AT_WORK else None
    if rank is None or rank.phase == driver.phase:
        return driver
    return replace(rank, beside=driver.beside)


def _read(run: Storage, name: str) -> Activity | None:
    try:
        return run_folder.read(run, name, Activity)
    except run_folder.DamagedFile as error:  # it says only what a live run does
        logger.warning("%s", error)
        return None
