"""Show what a command does, so that no wait is silent; tell the run's folder, Prometheus and Ray.

    with Heartbeat(phases, console, tail) as heartbeat:
        phases.begin("starting Ray")             # one line, if it takes a second
        ...                                      # "starting Ray, 0:20" after SAY_EVERY_S of silence
        with heartbeat.stored(run, name, stop.ask):  # from here on other processes see it too
            ...

On a terminal a line at the bottom is redrawn instead, until a progress bar takes its place.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from rayapp.driver.output import Tail
from rayapp.jobs.package import NAME_KEY, RUN_KEY
from rayapp.observe.activity import (
    AT_WORK,
    LEAST_S,
    STARTING_WORKERS,
    TRAINING,
    WAITING_FOR_ROOM,
    Activity,
    Phases,
    Reporter,
    of_workers,
)
from rayapp.observe.events import submission_id
from rayapp.observe.gauges import Exported
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import ACTIVITY, RANK_ACTIVITY
from rayapp.storage import Storage

logger = logging.getLogger("rayapp.driver")

SAY_EVERY_S = 10.0  # without any line
BESIDE_EVERY_S = 60.0  # what goes on meanwhile has a line of its own
POLL_S = 1.0
TELL_S = 10.0  # between two changes of the job's record
READ_EVERY_S = 5.0  # rank 0's activity on S3


class Heartbeat:
    """A thread that shows the activity of a command."""

    def __init__(self, phases: Phases, console: Console, tail: Tail) -> None:
        self.phases, self.tail, self._console = phases, tail, console
        self.passed: deque[Activity] = deque()
        """The phases that were shown, but for those between steps; the journal takes them."""
        self._show: Callable[[str], None] = lambda text: console.print(
            text, markup=False, highlight=False, soft_wrap=True
        )
        self._shown = phases.current
        self._lines, self._at = tail.added, time.monotonic()
        self._beside_at = self._at
        self._run: Storage | None = None
        self._of_workers: Activity | None = None
        self._read_at = 0.0
        self._gauge: Exported | None = None
        self._page: JobPage | None = None
        self._status: Status | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(SAY_EVERY_S)
        self._end_line()

    @contextmanager
    def stored(self, run: Storage, name: str, ask_to_stop: Callable[[], None]) -> Iterator[None]:
        """Inside the block, store the activity in the run's folder and export it to Prometheus.

        The connected Ray exports it, and shows it on its Jobs page if this is a job. `ask_to_stop`
        is called if Ray takes that job for stopped.
        """
        gauge, job = Exported(name), submission_id()
        self._page = None if job is None else JobPage(job, name, run.url, ask_to_stop)
        self._gauge, self._run = gauge, run
        try:
            with Reporter(run, ACTIVITY, self.phases):
                yield
        finally:
            self._gauge = self._run = self._page = None
            gauge.close()

    @contextmanager
    def shown_by(self, show: Callable[[str], None]) -> Iterator[None]:
        """Inside the block, show lines by this function in place of the console."""
        self._end_line()
        before, self._show = self._show, show
        try:
            yield
        finally:
            self._show = before

    def _activity(self) -> Activity:
        """Return what the run does; the file of rank 0 is read at most every READ_EVERY_S on S3."""
        own, run = self.phases.snapshot(), self._run
        if run is None or own.phase not in AT_WORK:
            self._of_workers = None
            return own
        now = time.monotonic()
        if self._of_workers is None and own.phase == STARTING_WORKERS:
            try:
                run.delete(RANK_ACTIVITY)  # of the last workers
            except (OSError, RunFailed) as error:
                logger.warning("%s is not deleted: %s", RANK_ACTIVITY, error)
            self._of_workers, self._read_at = own, now
        elif now - self._read_at >= (POLL_S if run.local_path() else READ_EVERY_S):
            self._read_at = now
            try:
                self._of_workers = of_workers(run, own)
            except OSError:  # an outage, which the renewals of the lease report
                self._of_workers = own
        reported = self._of_workers
        if reported is None or reported.phase in (STARTING_WORKERS, own.phase):
            return own
        return replace(reported, beside=own.beside)

    def _follow(self) -> None:
        while not self._closed.wait(POLL_S):
            activity, now = self._activity(), time.time()
            if (gauge := self._gauge) is not None:
                gauge.set_alone({"phase_s": now - activity.began}, phase=activity.phase)
            if (page := self._page) is not None and activity.phase:
                training = activity.phase == TRAINING and activity.detail
                page.tell(training or activity.text(now))  # a row of the page has room for little
            self._beat(activity, now)

    def _beat(self, activity: Activity, now: float) -> None:
        """Show the activity if it is another one, or if there was no line for SAY_EVERY_S."""
        at = time.monotonic()
        if self._status is not None and activity.phase:
            self._status.update(escape(activity.text(now)))
        if self.tail.added != self._lines:
            self._lines, self._at = self.tail.added, at
        if activity.beside and at - self._beside_at >= BESIDE_EVERY_S:
            self._beside_at = at
            self._show(activity.beside)
        other = activity.phase != self._shown.phase
        if not activity.phase or now - activity.began < LEAST_S:
            return
        if other or at - self._at >= SAY_EVERY_S:
            if other and self.phases.current.phase not in (TRAINING, WAITING_FOR_ROOM):
                self.passed.append(activity)
            self._shown, self._at = activity, at
            if self._status is None and not (other and activity.phase == TRAINING):
                self._show(activity.text(now))  # training begins with the line of its first step
            self._lines = self.tail.added

    def _end_line(self) -> None:
        if self._status is not None:
            status, self._status = self._status, None
            status.stop()


class JobPage:
    """The record of this driver's job on the Jobs page of Ray's dashboard.

    Ray has no public call that changes a job while it runs, so its record in Ray's key-value store
    is changed here. Ray writes the record itself only before this process starts and after it has
    ended, or after Ray has missed it: `ray job stop` may end the shell that starts a command alone.
    """

    def __init__(
        self, submission_id: str, name: str, run_url: str, ask_to_stop: Callable[[], None]
    ) -> None:
        """`ask_to_stop` is called if Ray takes this job for stopped, though its driver lives."""
        from ray.dashboard.modules.job.common import JobInfoStorageClient

        self._key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=submission_id).encode()
        self._ours = {NAME_KEY: name, RUN_KEY: run_url}
        self._last_shown, self._next_at = "", 0.0
        self._ask_to_stop = ask_to_stop

    def tell(self, text: str) -> None:
        """Make a text the job's status message, at most every TELL_S seconds."""
        now = time.monotonic()
        if text == self._last_shown or now < self._next_at:
            return
        self._last_shown, self._next_at = text, now + TELL_S
        from ray.exceptions import RayError

        try:
            self._change(text)
        except (RayError, OSError, RuntimeError, ValueError, TypeError) as error:
            self._next_at = math.inf
            logger.warning("Ray's Jobs page does not show how far the run is: %s", error)

    def _change(self, text: str) -> None:
        from ray._private.ray_constants import KV_NAMESPACE_JOB
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

        stored = _internal_kv_get(self._key, namespace=KV_NAMESPACE_JOB)
        record: dict[str, Any] = json.loads(stored or b"{}")
        if record.get("status") == "STOPPED":
            self._next_at = math.inf
            logger.warning("Ray has stopped this job, but not its command: it saves and leaves")
            self._ask_to_stop()
        if record.get("status") != "RUNNING":
            return
        record["message"] = text
        record["metadata"] = {**self._ours, **(record.get("metadata") or {})}
        value = json.dumps(record).encode()
        _internal_kv_put(self._key, value, overwrite=True, namespace=KV_NAMESPACE_JOB)
