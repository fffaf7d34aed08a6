"""Time and threads of a driver, behind one object that a simulation replaces.

    clock = Clock()
    call = Call(clock, lambda: run.stat("LEASE"), "look")      # in a thread
    while not call.wait(0.5): ...
    entry = call.result()

The lease, stops, recovery and supervision read the time, sleep and start threads only through a
Clock. tests/simulation.py runs them on a virtual clock, where one seed gives one history.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Clock:
    """The time and threads of this machine."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def time(self) -> float:
        """Return the Unix time in seconds."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> threading.Event:
        """Return an event that is not set."""
        return threading.Event()

    def thread(self, target: Callable[[], Any], name: str) -> None:
        """Run `target` in a daemon thread: one that hangs does not hold up the process's end."""
        threading.Thread(target=target, name=name, daemon=True).start()


CLOCK = Clock()


class Call(Generic[T]):
    """A function that runs in a thread, and its result."""

    def __init__(self, clock: Clock, function: Callable[[], T], name: str) -> None:
        self._function, self._ended = function, clock.event()
        self._result: list[T] = []
        self.error: BaseException | None = None
        """What the function raised; None until it has."""
        clock.thread(self._run, name)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the function, at most so long; return whether it has ended."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """Wait for the end, and return the function's result or raise its error."""
        self._ended.wait()
        if self.error is not None:
            raise self.error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:  # raised where the result is asked for
            self.error = error
        finally:
            self._ended.set()
