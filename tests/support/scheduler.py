"""A deterministic scheduler: threads that run one at a time, on a virtual clock.

    scheduler = Scheduler(seed)
    process = Process("driver 1", machine="a")
    scheduler.start(process, lambda: ..., "main")
    scheduler.run(until_s=3600.0)

A thread runs until it calls `pause`, which every simulated clock and storage does. The scheduler
then chooses the next thread by the seed, and moves the time on when none can run. So a seed gives
one history. A process can be killed (its threads raise Killed at their next pause) or suspended.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rayapp.observe.clock import Clock


class Killed(BaseException):
    """The process of this thread has been killed."""


@dataclass(eq=False)
class Process:
    """A simulated process: its threads live and die together."""

    name: str
    machine: str
    clock_skew_s: float = 0.0
    alive: bool = True
    suspended_until: float = 0.0
    cut_off_until: float = 0.0
    """Until then its requests to the storage get no answer."""
    children: list[Process] = field(default_factory=list)

    def kill(self) -> None:
        self.alive = False
        for child in self.children:
            child.kill()


class Task:
    """One thread of a process."""

    def __init__(self, process: Process, target: Callable[[], Any], name: str) -> None:
        self.process, self.name = process, name
        self.wake_at: float | None = 0.0
        self.event: SimulatedEvent | None = None
        self.go = threading.Semaphore(0)
        self.ended = False
        self.target = target


class Scheduler:
    """Run tasks one at a time, in an order that the seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.errors: list[BaseException] = []
        """What threads have raised that nothing caught."""
        self._back = threading.Semaphore(0)
        self.after_each: Callable[[], None] = lambda: None

    def start(self, process: Process, target: Callable[[], Any], name: str) -> Task:
        """Add a thread to a process; it begins at the current time."""
        task = Task(process, target, name)
        task.wake_at = self.now
        self.tasks.append(task)
        threading.Thread(target=self._body, args=(task,), daemon=True).start()
        return task

    def _body(self, task: Task) -> None:
        task.go.acquire()
        try:
            if task.process.alive:
                task.target()
        except Killed:
            pass
        except BaseException as error:  # judged by whoever runs the scheduler
            self.errors.append(error)
        task.ended = True
        self._back.release()

    def pause(self, seconds: float | None = 0.0, event: SimulatedEvent | None = None) -> None:
        """Let others run for so many seconds (None: for ever), or until the event is set."""
        task = self.current
        assert task is not None
        if not task.process.alive:
            raise Killed
        task.wake_at = None if seconds is None else self.now + seconds
        task.event = event
        self._back.release()
        task.go.acquire()
        if not task.process.alive:
            raise Killed

    def run(self, until_s: float) -> bool:
        """Run until all tasks have ended, or to a time; return whether all have ended."""
        while True:
            self.tasks = [task for task in self.tasks if not task.ended]
            if not self.tasks:
                return True
            times = [(self._time(task), task) for task in self.tasks]
            first = min(at for at, _ in times)
            if first > until_s:
                return False
            self.now = max(self.now, first)
            task = self.random.choice([task for at, task in times if at <= self.now])
            task.event, self.current = None, task
            task.go.release()
            self._back.acquire()
            self.current = None
            self.after_each()

    def close(self) -> None:
        """End all threads that are left."""
        for task in self.tasks:
            task.process.alive = False
        self.after_each = lambda: None
        self.run(float("inf"))

    def _time(self, task: Task) -> float:
        """Return the time at which a task can run next."""
        if not task.process.alive:
            return self.now
        set_ = task.event is not None and task.event.is_set()
        at = self.now if set_ else float("inf") if task.wake_at is None else task.wake_at
        return max(at, task.process.suspended_until)


class SimulatedEvent:
    """threading.Event on a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False

    def set(self) -> None:
        task = self._scheduler.current
        if task is not None and not task.process.alive:
            raise Killed
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._scheduler.pause(timeout, self)
        return self._set


class SimulatedClock(Clock):
    """The clock of one process: its own Unix time, and threads of the scheduler."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self.scheduler, self.process = scheduler, process

    def monotonic(self) -> float:
        return self.scheduler.now

    def time(self) -> float:
        return 1.8e9 + self.scheduler.now + self.process.clock_skew_s

    def sleep(self, seconds: float) -> None:
        self.scheduler.pause(seconds)

    def event(self) -> Any:
        return SimulatedEvent(self.scheduler)

    def thread(self, target: Callable[[], Any], name: str) -> None:
        self.scheduler.start(self.process, target, f"{self.process.name}: {name}")
