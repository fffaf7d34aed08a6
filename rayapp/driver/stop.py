"""What asks a run to stop: a file named STOP in its folder, or a signal to its driver.

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
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console

from rayapp.jobs.client import RAY_STOP_WAIT_S
from rayapp.jobs.package import STOP_WAIT, STOP_WAIT_S
from rayapp.observe import run_folder
from rayapp.storage import Storage

POLL_S = 0.5
LEAST_WAIT_S = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger("rayapp.driver")

T = TypeVar("T")


def short_wait(submission_id: str | None) -> str | None:
    """Say that `ray job stop` would kill this run before it has saved; None: it would not."""
    wait_s = float(os.environ.get(STOP_WAIT, RAY_STOP_WAIT_S))
    if submission_id is None or wait_s >= LEAST_WAIT_S:
        return None
    return (
        f"`ray job stop` kills this run after {wait_s:g} s, maybe too few to save: stop it "
        f"with `python -m rayapp stop`, or submit it with --runtime-env-json "
        f'\'{{"env_vars": {{"{STOP_WAIT}": "{STOP_WAIT_S}"}}}}\''
    )


class StopAsked(Exception):
    """Someone has asked the run to stop while it has no workers that could save and leave."""


class Stop:
    """The requests to stop that come while a command runs; those before it were for another."""

    def __init__(self, run: Storage) -> None:
        """Note the STOP that is there; call it before the lease is taken.

        Clocks of two machines are never compared: only that very file is an old one.
        """
        self._run, entry = run, run.stat(run_folder.STOP)
        self._old = entry.etag if entry else None
        self._signalled = threading.Event()

    def forget_old(self) -> None:
        """Remove the STOP that was there before."""
        if self._old is None:
            return
        entry = self._run.stat(run_folder.STOP)
        if entry is not None and entry.etag == self._old:
            self._run.delete(run_folder.STOP)

    def asked(self) -> bool:
        """Say whether the run is to stop."""
        return self._signalled.is_set() or self._run.exists(run_folder.STOP)

    def check(self) -> None:
        """Raise StopAsked if the run is to stop."""
        if self.asked():
            raise StopAsked

    @contextmanager
    def on_signal(self, console: Console) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM into a STOP; a second one ends the process at once."""
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
            self._signalled.set()
            # Not here: the main thread may be in the middle of a request to the same storage.
            threading.Thread(target=self._tell_workers, name="stop", daemon=True).start()

        for number in SIGNALS:
            signal.signal(number, stop)
        try:
            yield
        finally:
            restore()

    def _tell_workers(self) -> None:
        try:
            self._run.write(run_folder.STOP, b"signal\n")
        except OSError as error:
            logger.error("workers are not told to stop: %s", error)


def watching(work: Callable[[], T], check: Callable[[], None]) -> T:
    """Run `work` in a thread and return what it returns; `check` may end the wait by raising."""
    # Not the main thread: signals are handled there, and what waits for Ray would hold them up.
    pool = ThreadPoolExecutor(1, thread_name_prefix="work")
    try:
        future = pool.submit(work)
        while not wait([future], timeout=POLL_S).done:
            check()
        return future.result()
    finally:
        pool.shutdown(wait=False)  # it ends when Ray does
