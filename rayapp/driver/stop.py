"""Requests to stop a run: a file named STOP in its folder, a signal to its driver, a budget."""

from __future__ import annotations

import builtins
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console

from rayapp.config import ConfigError, Place, Run, RunConfig
from rayapp.jobs.client import RAY_STOP_WAIT_S
from rayapp.jobs.package import STOP_WAIT, STOP_WAIT_S
from rayapp.observe import run_folder
from rayapp.observe.clock import CLOCK, Call, Clock
from rayapp.observe.events import Journal, machines
from rayapp.observe.goodput import ENDED, commands, read_events
from rayapp.observe.run_folder import RETRIED
from rayapp.storage import Storage

POLL_S = 0.5
LEAST_WAIT_S = 60.0
SIGNALLED = b"signal\n"  # content of a STOP file that a driver has written itself
TOLD = "sweep"  # content of a STOP file begins so where a sweep ends its trial, and says why
SIGNALS = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger("rayapp.driver")

T = TypeVar("T")


def short_wait(submission_id: str | None) -> str | None:
    """Return a warning if `ray job stop` may kill this run before it has saved, else None."""
    wait_s = float(os.environ.get(STOP_WAIT, RAY_STOP_WAIT_S))
    if submission_id is None or wait_s >= LEAST_WAIT_S:
        return None
    return (
        f"`ray job stop` kills this run after {wait_s:g} s, maybe too few to save: stop it "
        f"with `rayapp stop`, or submit it with --runtime-env-json "
        f'\'{{"env_vars": {{"{STOP_WAIT}": "{STOP_WAIT_S}"}}}}\''
    )


class StopAsked(Exception):
    """A stop was requested while the run has no workers that could save."""


class Stop:
    """Requests to stop this command; a STOP file from before it was meant for an earlier one."""

    def __init__(self, run: Storage, clock: Clock = CLOCK) -> None:
        """Remember the etag of an existing STOP file; to be called before the lease is taken.

        Only the file with that etag counts as old: clocks of two machines are never compared.
        """
        self._run, entry = run, run.stat(run_folder.STOP)
        self._old = entry.etag if entry else None
        self._signalled = clock.event()

    def forget_old(self) -> None:
        """Delete the STOP file that was there before, unless it has changed since.

        One that a user has asked for stays if this is another try after a driver that was lost
        before it had stopped.
        """
        if self._old is None or (RETRIED in os.environ and self._unanswered()):
            return
        self._run.delete_if(run_folder.STOP, self._old)

    def asked(self) -> bool:
        """Say whether a stop was requested, by signal or by file; a storage that fails says no."""
        if self._signalled.is_set():
            return True
        try:
            return self._run.exists(run_folder.STOP)
        except OSError as error:
            logger.warning("cannot look for %s: %s", run_folder.STOP, error)
            return False

    def ask(self) -> None:
        self._signalled.set()
        # In a thread: the caller may be in the middle of a request to the same storage.
        threading.Thread(target=self._tell_workers, name="stop", daemon=True).start()

    def told(self) -> str | None:
        """Return why a sweep has asked for the stop; None: nobody has told why."""
        try:
            reason = self._run.read(run_folder.STOP)
        except FileNotFoundError:
            return None
        return reason.decode(errors="replace").strip() if reason.startswith(TOLD.encode()) else None

    def check(self) -> None:
        """Raise StopAsked if a stop was requested."""
        if self.asked():
            raise StopAsked

    @contextmanager
    def on_signal(self, console: Console) -> Iterator[None]:
        """Inside the block, let the first SIGINT or SIGTERM write a STOP file.

        It also restores the previous handlers, so that a second signal ends the process at once.
        In IPython, SIGINT raises KeyboardInterrupt at the end of the block, as it ends a loop of
        runs, too.
        Outside the main thread, where handlers cannot be set, this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        received = list[int]()

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)

        def stop(number: int, frame: Any) -> None:
            received.append(number)
            restore()
            console.print("stopping after this step (once more to end at once)", highlight=False)
            self.ask()

        for number in SIGNALS:
            signal.signal(number, stop)
        try:
            yield
        finally:
            restore()
        if signal.SIGINT in received and hasattr(builtins, "__IPYTHON__"):
            raise KeyboardInterrupt(f"{self._run.url} has ended; the same call resumes it")

    def _unanswered(self) -> bool:
        """Say whether a user has asked to stop, and the last command of the run has no end."""
        events = commands(read_events(self._run))
        if not events or any(event["event"] == ENDED for event in events[-1]):
            return False
        try:
            return self._run.read(run_folder.STOP) != SIGNALLED
        except FileNotFoundError:
            return False

    def _tell_workers(self) -> None:
        try:
            self._run.write(run_folder.STOP, SIGNALLED)
        except OSError as error:
            logger.error("the workers cannot be asked to stop: %s", error)


def reached(
    max_usd: float | None, max_hours: float | None, wall_s: float, usd: float | None, who: str
) -> str | None:
    """Return which budget is reached by these seconds and USD; None: none is."""
    hours = ("max_hours", max_hours, wall_s / 3600.0, "hours")
    for name, limit, spent, unit in (("max_usd", max_usd, usd, "USD"), hours):
        if limit is not None and spent is not None and spent >= limit:
            return f"{name}={limit:g} is reached: {who} taken {spent:.2f} {unit}"
    return None


class Budget:
    """What all commands of a run may spend together."""

    def __init__(self, run: Run, journal: Journal, stop: Stop, clock: Clock = CLOCK) -> None:
        """Raise ConfigError if an earlier command of the run has an unknown cost."""
        self._run, self._journal, self._stop, self._clock = run, journal, stop, clock
        self.reason: str | None = None
        """Why the run was asked to stop; None while every budget lasts."""
        if run.max_usd is not None and journal.spent(clock.time())[1] is None:
            why = "an earlier command of this run had no price"
            fix = "Set run.max_hours, or another run.name"
            raise ConfigError([f"run.max_usd={run.max_usd:g} is impossible: {why}. {fix}"])

    def check(self) -> None:
        """Ask the run to stop if a budget is reached."""
        if self.reason is None and (reason := self._reached()):
            self.reason = reason
            self._stop.ask()

    def _reached(self) -> str | None:
        if self._run.max_usd is None and self._run.max_hours is None:
            return None
        spent = self._journal.spent(self._clock.time())
        told = reached(self._run.max_usd, self._run.max_hours, *spent, "the run has")
        more = told and f"The same command with a larger run.{told.partition('=')[0]} goes on"
        return told and f"run.{told}. {more}"


def budget_problems(
    config: RunConfig, places: Callable[[], Sequence[Place]] | None = None
) -> list[str]:
    """Return why the cost of a run with `run.max_usd` would not be known.

    `places` returns those of a running cluster's nodes, for a list in cluster.instance.
    """
    each, least, usd = config.alternatives(), config.cluster.min_workers, config.run.max_usd
    if usd is None or (places is not None and len(config.cluster.choices) < 2):
        return []
    if places is not None:
        known = machines(config, least, places())["usd_per_hour"] is not None
        why = f"no nodes for {least} workers say which of cluster.instance they are"
        fix = "Set the one that they are, or render the cluster from this config"
    else:
        known = all(machines(one, 1)["usd_per_hour"] for one in each)
        why = "the price of the machines is not known"
        fix = "Set cluster.instance, and cluster.usd_per_hour for one without a list price"
        if len(each) > 1:
            fix = "Set the price of each that has no list price, e.g. p4d.24xlarge:spot@9.5"
    return [] if known else [f"run.max_usd={usd:g} is impossible: {why}. {fix}"]


def watching(work: Callable[[], T], check: Callable[[], None], clock: Clock = CLOCK) -> T:
    """Run `work` in a thread and return its result.

    `check` is called every POLL_S seconds and may end the wait by raising.
    """
    # Not in the main thread: that handles signals, and a wait for Ray would delay them.
    call = Call(clock, work, "work")
    while not call.wait(POLL_S):
        check()
    return call.result()
