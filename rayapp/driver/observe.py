"""Report a run to Prometheus, trackers and hooks while it trains, from the files in its folder.

One thread of the driver reads metrics.jsonl as it grows; one thread per tracker sends the lines, so
that a server that hangs delays no other. None of this delays or ends the training. Lines that a
tracker refuses are sent again later; lines that are still unsent CLOSE_S seconds after the end are
given up, and the log says so. No line is kept here: what a tracker lacks is read again. One thread
calls all hooks, in the order of events. An error of a hook is logged and ends nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

from rayapp.config import ConfigError, RunConfig
from rayapp.config.code import CodeError, load_code
from rayapp.observe import goodput, trackers
from rayapp.observe.columns import Follower
from rayapp.observe.gauges import Driver, checkpoint_every_s
from rayapp.observe.metrics import MetricsLine, Sample
from rayapp.observe.records import Summary
from rayapp.observe.run_folder import CHECKPOINTS, FAILED, DamagedFile
from rayapp.observe.status import left_s, planned_step_s
from rayapp.observe.words import last_line
from rayapp.planner.calibration import calibrate
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import newest_committed
from rayapp.train.spec import AnySpec

POLL_S, POLL_S3_S = 1.0, 5.0
ACCOUNT_S = 10.0  # between two updates of time, cost and checkpoints
TELL_S = 10.0  # between two requests to a tracker: one costs the same for one step as for many
RETRY_S = 5.0
CLOSE_S = 30.0  # to send what is left when the command ends
HOOKS_CLOSE_S = 60.0  # for what hooks are not told yet when the command ends
PART = 500  # lines that are read, or sent, at once

LinesOf: TypeAlias = Callable[[int, int], list[MetricsLine]]

logger = logging.getLogger("rayapp.observe")


class TrackerFeed:
    """A tracker and how many lines it has; a thread opens the tracker, feeds it and closes it."""

    def __init__(self, name: str, run: Storage, spec: AnySpec, lines: LinesOf) -> None:
        """`lines(start, stop)` returns lines of metrics.jsonl; the feed keeps none."""
        self.name, self._run, self._spec, self._lines = name, run, spec, lines
        self._changed = threading.Condition()
        self._count = 0  # lines in metrics.jsonl
        self._done = self._valid = 0  # lines sent, and how many of them still stand
        self._ending: tuple[str, list[Sample]] | None = None
        self._tracker: trackers.Tracker | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def update(self, count: int, kept: int) -> None:
        """Say that there are `count` lines; the first `kept` are the same as before."""
        with self._changed:
            self._valid = min(self._valid, kept)
            self._count = count
            self._changed.notify()

    def close(self, status: str, samples: list[Sample], until: float) -> None:
        """Have the rest sent, and wait for that until `until` (time.monotonic, seconds) at most."""
        with self._changed:
            self._ending = (status, samples)
            self._changed.notify()
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s has not received all lines", self.name)

    def _work(self) -> None:
        failing = False
        while True:
            try:
                if self._step():
                    return
                failing = False
            except Exception as error:  # any failure of a network or server: training goes on
                if not failing:
                    first = str(error).strip().splitlines()[:1] or [repr(error)]
                    logger.warning("%s: %s; trying again", self.name, first[0])
                failing = True
                time.sleep(RETRY_S)

    def _step(self) -> bool:
        """Send up to PART lines, or else how the run ended; return whether the feed is finished.

        Waits until there is something to send. If lines that were sent are no longer in
        metrics.jsonl, the tracker is first cut back to those that are.
        """
        if self._tracker is None:
            self._tracker = trackers.OPEN[self.name](self._run, self._spec.config)
        with self._changed:
            self._changed.wait_for(
                lambda: self._valid != self._done or self._count > self._done or self._ending
            )
            valid, cut_back = self._valid, self._valid < self._done
            stop = min(valid + PART, self._count)
            self._done = self._valid = stop
        try:
            if cut_back:
                kept = self._lines(valid - 1, valid) if valid else []
                self._tracker.cut_back(kept[0]["step"] if kept else 0)
            if stop > valid:
                self._tracker.write(self._lines(valid, stop))
        except BaseException:
            with self._changed:  # some of it may have arrived: cut back to before it and resend
                self._valid = min(self._valid, valid)
                self._done = max(self._done, valid + 1)
            raise
        if stop == valid:
            if self._ending is not None:
                self._tracker.close(*self._ending)
            return self._ending is not None
        if stop - valid < PART:
            with self._changed:
                self._changed.wait_for(lambda: self._ending, TELL_S)
        return False


class Observer:
    """Follow a run, from the start of its first attempt to the end of the command."""

    def __init__(self, spec: AnySpec, run: Storage, hooks: Hooks | None = None) -> None:
        self._spec, self._run, self._started = spec, run, time.time()
        self._hooks = hooks or Hooks([])
        self._num_steps = spec.order.num_steps
        self._planned_step_s = planned_step_s(run)
        self._driver = Driver(spec.config.run.name, self._num_steps, self._started)
        self._lines = Follower(run)
        self._told: int | None = None  # lines that hooks know; None before the first look
        self._checkpoint = 0  # the newest that hooks know
        self._trackers = [
            TrackerFeed(name, run, spec, self._lines.lines) for name in spec.config.run.trackers
        ]
        self._stop = threading.Event()
        self._status = FAILED
        self._samples: list[Sample] = []
        self._account_at = 0.0
        self._thread = threading.Thread(target=self._follow, name="observe", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def ended(self, summary: Summary) -> None:
        """Take rank 0's summary; if this is never called, the run is reported as failed."""
        self._status = summary["status"]
        self._samples = summary.get("samples", [])

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + CLOSE_S
        self._stop.set()
        self._thread.join(CLOSE_S)
        self._driver.close()
        for tracker in self._trackers:
            tracker.close(self._status, self._samples, until)

    def _follow(self) -> None:
        last = False
        while True:
            try:
                self._look(last)
            except (OSError, DamagedFile) as error:  # e.g. a line of events.jsonl that is no JSON
                logger.warning("cannot look at the run: %s", error)
            if last:
                return
            last = self._stop.wait(POLL_S if self._run.local_path() else POLL_S3_S)

    def _look(self, last: bool) -> None:
        before = len(self._lines.steps)
        kept = self._lines.poll()
        steps = self._lines.steps
        self._tell_hooks(len(steps), kept, last)
        if kept < before or len(steps) > kept:
            for tracker in self._trackers:
                tracker.update(len(steps), kept)
        began = time.monotonic()
        if began < self._account_at and not last:
            return
        newest = newest_committed(self._run)
        if newest is not None and newest.step != self._checkpoint and self._told == len(steps):
            self._checkpoint, url = newest.step, f"{self._run.url}/{CHECKPOINTS}/{newest.name}"
            self._hooks.call("on_checkpoint", newest.step, url)
        sums = goodput.account(goodput.read_events(self._run), steps, now=time.time())
        saving = self._spec.config.checkpoint
        self._driver.set(
            sums,
            steps.last["time"] if steps.last else None,
            None if newest is None else (newest.step, newest.at_s),
            checkpoint_every_s=checkpoint_every_s(
                saving.every_s, saving.every_steps, steps["step_s"]
            ),
            planned_step_s=self._planned_step_s,
            calibrated_step_s=fitted.step_s if (fitted := calibrate(steps)) else None,
            cost_at_end_usd=sums.cost_after(left_s(steps, self._num_steps)),
        )
        took_s = time.monotonic() - began
        self._account_at = began + max(ACCOUNT_S, 20 * took_s)

    def _tell_hooks(self, count: int, kept: int, last: bool) -> None:
        """Tell the lines up to `count`; steps that a recovery does again are told again.

        Slow hooks get further lines at a later look, so that few wait in memory. At the first look
        the workers have done no step yet: the lines are of earlier commands.
        """
        self._told = count if self._told is None else min(self._told, kept)
        while self._told < count and (last or self._hooks.calls.qsize() < PART):
            stop = min(count, self._told + PART)
            for line in self._lines.lines(self._told, stop):
                self._hooks.call("on_step", line)
            self._told = stop


class Hook(Protocol):
    """What the object that a `run.hooks` entry makes may have; it needs one of them."""

    def on_step(self, line: MetricsLine, /) -> None:
        """Take a line of metrics.jsonl."""

    def on_checkpoint(self, step: int, url: str, /) -> None:
        """Take the newest committed checkpoint; with short intervals some are left out."""

    def on_end(self, result: Mapping[str, Any], /) -> None:
        """Take the content of result.json, once, when the command ends."""


HOOK_METHODS = ("on_step", "on_checkpoint", "on_end")


def opened(config: RunConfig, run: str) -> list[object]:
    """Make the hooks of a config for a run in this folder.

    Raises:
        ConfigError: one cannot be imported or made, or has none of HOOK_METHODS.
    """
    hooks, problems = list[object](), list[str]()
    for name in config.run.hooks:
        try:
            hook = load_code("run.hooks", name)(config, run)
        except CodeError as error:
            problems.append(str(error))
            continue
        except Exception as error:  # the user's code may raise anything
            why = f"{type(error).__name__}: {last_line(error)}"
            problems.append(f"run.hooks={name} failed when it was called with (config, run): {why}")
            continue
        hooks.append(hook)
        if not any(hasattr(hook, method) for method in HOOK_METHODS):
            problems.append(
                f"run.hooks={name} is without effect: what it returns has none of "
                f"{', '.join(HOOK_METHODS)}. Define one of them"
            )
    if problems:
        raise ConfigError(problems)
    return hooks


class Hooks:
    """Call hooks from a thread, in the order in which it is told what happens."""

    def __init__(self, hooks: Sequence[object]) -> None:
        self._hooks, self._ended = hooks, not hooks
        self.calls = SimpleQueue[tuple[Any, ...] | None]()
        self._thread = threading.Thread(target=self._work, name="hooks", daemon=True)
        if hooks:
            self._thread.start()

    def call(self, method: str, *values: object) -> None:
        """Have one of HOOK_METHODS of each hook called."""
        if not self._ended:
            self.calls.put((method, *values))

    def end(self, result: Mapping[str, Any]) -> None:
        """Tell the result after all else, and wait for that up to HOOKS_CLOSE_S."""
        if self._ended:
            return
        self.call("on_end", result)
        self._ended = True
        self.calls.put(None)
        self._thread.join(HOOKS_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("hooks have not ended within %.0f s, and are left", HOOKS_CLOSE_S)

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            self._call(*call)

    def _call(self, method: str, *values: object) -> None:
        for hook in self._hooks:
            try:
                getattr(hook, method, lambda *_: None)(*values)
            except Exception as error:  # the user's code may raise anything: training goes on
                name = type(hook).__name__
                logger.warning("%s.%s failed: %s", name, method, last_line(error), exc_info=error)
