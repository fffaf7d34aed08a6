"""Requests to stop a run: a file named STOP in its folder, or a signal to its driver.

stop = Stop(run)                          # before the lease is taken
with held(run), stop.on_signal(console):
    stop.forget_old()
    job = watching(prepare, stop.check)   # raises StopAsked
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console

from rayapp.jobs.client import RAY_STOP_WAIT_S
from rayapp.jobs.package import STOP_WAIT, STOP_WAIT_S
from rayapp.observe import run_folder
from rayapp.observe.clock import CLOCK, Call, Clock
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
        """Ask the run to stop, as a signal does."""
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
        Outside the main thread, where handlers cannot be set, this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in SIGNALS}

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)

        def stop(number: int, frame: Any) -> None:
            restore()
            console.print("stopping after this step (once more to end at once)", highlight=False)
            self.ask()

        for number in SIGNALS:
            signal.signal(number, stop)
        try:
            yield
        finally:
            restore()

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


def watching(work: Callable[[], T], check: Callable[[], None], clock: Clock = CLOCK) -> T:
    """Run `work` in a thread and return its result.

    `check` is called every POLL_S seconds and may end the wait by raising.
    """
    # Not in the main thread: that handles signals, and a wait for Ray would delay them.
    call = Call(clock, work, "work")
    while not call.wait(POLL_S):
        check()
    return call.result()
