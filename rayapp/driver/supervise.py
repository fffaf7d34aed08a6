"""Train in attempts: watch each one, and start another if it ended early and that is of use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from rich.console import Console

from rayapp.driver import display
from rayapp.driver.growth import describe, take
from rayapp.driver.lease import Lease
from rayapp.driver.output import AttemptLogs, Reserve, Tail
from rayapp.driver.ray_workers import RayAttempt, RayWorkers, Validator
from rayapp.driver.recovery import GiveUp, Recovery
from rayapp.driver.stop import POLL_S, Budget, Stop, StopAsked
from rayapp.observe import metrics, run_folder
from rayapp.observe.activity import STARTING_WORKERS, TRAINING, WAITING_FOR_ROOM, Phases
from rayapp.observe.attempts import FAILURE, NO_ROOM, STORAGE, Ending, ending_of
from rayapp.observe.clock import CLOCK, Call, Clock
from rayapp.observe.events import Journal
from rayapp.observe.metrics import MetricsLine
from rayapp.observe.records import Summary
from rayapp.observe.result import failed
from rayapp.observe.run_folder import DONE, FAILED, LEASE_STOPPED_S, MOVED, REJECTED, STOPPED
from rayapp.storage import Storage, StorageError
from rayapp.train.checkpoint.marker import steps_done
from rayapp.train.spec import AnySpec, BackgroundWork

ANSWER_S = 10.0  # workers that have not done a step are ended so long after a STOP
S3_POLL_S = 2.0  # between two looks at a run on S3
OUTAGE_POLL_S = 5.0

T = TypeVar("T")

logger = logging.getLogger("rayapp.driver")

AfterFailure = Callable[[Any, Summary | Exception], AnySpec | None]
"""(spec, how the attempt ended): return a spec that may avoid the failure; None: there is none."""


@dataclass(frozen=True)
class Command:
    """What a command holds while it prepares and trains."""

    run: Storage
    """The run's folder, which refuses writes once the lease is lost."""
    lease: Lease
    stop: Stop
    journal: Journal
    clock: Clock = CLOCK
    tail: Tail = field(default_factory=Tail)
    """The end of what this command has printed."""
    budget: Budget | None = None
    phases: Phases = field(default_factory=Phases)
    shown_by: Callable[[Callable[[str], None]], AbstractContextManager[Any]] = nullcontext
    """Inside the block, its activity is shown by the given function."""

    @cached_property
    def logs(self) -> AttemptLogs:
        return AttemptLogs(self.run, self.journal, self.tail, self.clock)

    @cached_property
    def reserve(self) -> Reserve:
        return Reserve(self.run)

    def check(self) -> None:
        """Raise RunFailed if the lease is lost, StopAsked if a stop was requested."""
        self.lease.check()
        self.check_budget()
        self.stop.check()

    def check_budget(self) -> None:
        if self.budget is not None:
            self.budget.check()


def fit(
    command: Command,
    spec: AnySpec,
    workers: RayWorkers,
    console: Console,
    after_failure: AfterFailure,
    make_validator: Callable[[AnySpec, Storage, Callable[[str], None]], Any] = Validator,
    beside: BackgroundWork | None = None,
) -> Summary:
    """Train in as many attempts as it takes; return rank 0's summary.

    Before each attempt it waits for room for the workers. A stop that is requested while there are
    no workers, or that ended them, gives the summary of `as_it_stands`.

    Raises:
        RunFailed: training failed for good, with the first worker's reason, or the lease is lost.
    """
    bar = display.ProgressBar(console, spec.order.num_steps, spec.config.run.name)
    supervisor = _Supervisor(command, spec, workers, bar, after_failure, beside)
    if spec.config.eval.checkpoints and spec.data.held_out:
        supervisor.validator = make_validator(spec, command.run, bar.say)
    try:
        with workers.asked_for(), command.shown_by(bar.note):
            return supervisor.train()
    except StopAsked:
        return supervisor.patiently(lambda: as_it_stands(command.run))
    except GiveUp as error:
        command.reserve.free()
        reason = str(error)
        raise supervisor.patiently(lambda: failed(command.run, reason)) from error
    finally:
        bar.close()


def as_it_stands(run: Storage) -> Summary:
    """Return the summary of a run that stops without workers: its newest usable checkpoint's."""
    step = steps_done(run)
    summary: Summary = {"status": STOPPED, "steps": step, "first_step": step, "seconds": {}}
    return {**summary, "group_s": 0.0, "stall_s": None, "commit_s": None}


@dataclass
class _Supervisor:
    command: Command
    spec: AnySpec
    workers: RayWorkers
    bar: display.ProgressBar
    after_failure: AfterFailure
    beside: BackgroundWork | None
    validator: Any = None

    def __post_init__(self) -> None:
        command, spec = self.command, self.spec
        self.clock, self.journal, self.phases = command.clock, command.journal, command.phases
        self.recovery = Recovery(spec.config.cluster, spec.order, self.clock)

    def train(self) -> Summary:
        """Make attempts until one is not to be followed by another; return its summary."""
        while True:
            count = self.workers.wait_for_room(self._wait_for_room, self.command.check)
            self.command.lease.wait_until_fresh(self.phases.begin, self._check_while_stale)
            self.command.check()
            self.phases.begin(STARTING_WORKERS, f"{count} worker{'s' if count > 1 else ''}")
            began, before = self.clock.time(), self.journal.last
            self.journal.attempt(self.spec.config, count)
            self.command.logs.begin_attempt()
            attempt = self.workers.start(self.spec, count)
            stale = self._watch(attempt)
            ended = attempt.outcome()
            if isinstance(ended, Exception):
                self.command.logs.keep_errors(ended)
            self.phases.begin("reading the steps of the workers")
            self.command.lease.wait_until_fresh(self.phases.begin, self._check_room)
            last = self.patiently(self.journal.catch_up)
            done = isinstance(ended, dict) and ended["status"] in (DONE, REJECTED)
            self.patiently(partial(take, self.command.run, done))
            if last is not None and last != before:
                self.bar.update(last)  # a short attempt ends between two looks
            if isinstance(ended, dict) and ended["status"] != MOVED:
                if self.validator is not None:
                    self.phases.begin("validating the last checkpoint")
                    self.validator.close()
                if ended["status"] == FAILED:
                    raise GiveUp(ended["reason"])
                group_s = ended.pop("entered") - began
                return ended | {"group_s": group_s}
            self.command.check()  # a run that was asked to stop is not started again
            ending = ending_of(ended, last, began)
            if stale:
                ending = replace(ending, kind=FAILURE, cause=STORAGE, final=False, reason=stale)
            self._prepare_next(ending, ended, count)

    def _wait_for_room(self, fits: str) -> None:
        if self.phases.current.phase == WAITING_FOR_ROOM:
            self.phases.update(fits)
        else:
            self.phases.begin(WAITING_FOR_ROOM, fits)
            self.journal.waiting()

    def _check_while_stale(self) -> None:
        self.command.stop.check()
        self._check_room()

    def _check_room(self) -> None:
        """Raise GiveUp if a full disk is why the lease is not renewed: no wait would end that."""
        if self.command.lease.full is not None:
            raise GiveUp(str(self.command.lease.full))

    def patiently(self, function: Callable[[], T]) -> T:
        """Return the function's result; wait out an outage of the storage.

        Raises: RunFailed: the lease is lost; StorageError: an error that does not pass.
        """
        while True:
            try:
                return function()
            except StorageError as error:
                if not error.outage:
                    raise
                self.phases.begin("waiting for the storage", str(error))
            self.command.lease.check()
            self.clock.sleep(OUTAGE_POLL_S)

    def _prepare_next(self, ending: Ending, ended: Summary | Exception, workers: int) -> None:
        """Record an ending, decide about another attempt, and wait until it may begin."""
        if ending.kind != NO_ROOM:
            self.patiently(lambda: self.journal.interrupted(ending, workers))
        if smaller := self.after_failure(self.spec, ended):
            self.spec = smaller
            self.patiently(lambda: describe(self.command.run, smaller.config))
            self._say_again(ending, f"again with {smaller.accumulation(workers)}")
            return
        pause_s = self.recovery.after(ending)
        self._say_again(ending, f"again in {pause_s:.0f} s" if pause_s else "again")
        until = self.clock.monotonic() + pause_s
        self.phases.begin("pausing before another attempt", f"{pause_s:.0f} s")
        while self.clock.monotonic() < until:
            self.command.check()
            self.clock.sleep(POLL_S)

    def _say_again(self, ending: Ending, again: str) -> None:
        text = f"after step {ending.step}: {ending.reason}; {again}"
        self.bar.say(text)
        if ending.kind != NO_ROOM:
            self.command.logs.end_attempt(text)

    def _watch(self, attempt: RayAttempt) -> str | None:
        """Show the last line of metrics.jsonl until the attempt ends.

        A thread reads the storage, so that a request that hangs does not hold up this loop: it ends
        the workers if the lease is not renewed, and returns that reason then.

        Workers that take steps answer a STOP themselves. Before the first step they may be loading,
        compiling or waiting for rows, and have nothing to save: they are ended after ANSWER_S.
        """
        lease = self.command.lease
        poll = _FolderPoll(self)
        stale = None
        while not attempt.wait(POLL_S):
            lease.check()
            if self.beside is not None and self.beside.problem is not None:
                attempt.end()
                raise GiveUp(self.beside.problem)
            if stale is None and not lease.is_fresh():
                stale = f"the lease could not be renewed for {LEASE_STOPPED_S:.0f} s"
                logger.warning("%s: the workers are ended until it is renewed", stale)
                attempt.end()
            poll.start()
            if line := poll.take():
                self.bar.update(line)
                self.phases.begin(TRAINING, self.bar.summary(line))
            if poll.unanswered:
                attempt.end()
                poll.asked_at, poll.unanswered = None, False
        while not poll.finish():
            lease.check()
        return stale


class _FolderPoll:
    """Read what is new in a run's folder, in one thread after another."""

    def __init__(self, supervisor: _Supervisor) -> None:
        self._command, self._validator = supervisor.command, supervisor.validator
        self._before: MetricsLine | None = None
        self._new: MetricsLine | None = None
        self.stepped = False
        """Whether the attempt has done a step."""
        self._taken = False  # config.yaml and plan.json are of this command
        self.asked_at: float | None = None
        """The clock's seconds at which a stop was seen before the first step."""
        self.unanswered = False
        """Whether a read that began ANSWER_S later saw no step either."""
        self._every_s = POLL_S if self._command.run.local_path() else S3_POLL_S
        self._at = self._command.clock.monotonic()
        self._call: Call[None] | None = Call(self._command.clock, self._begin, "look")

    def start(self) -> None:
        """Read once more if the last read has ended; raise its error."""
        if not self.finish(0.0):
            return
        now = self._command.clock.monotonic()
        if now - self._at >= self._every_s:
            self._at, self._call = now, Call(self._command.clock, self._read, "look")

    def finish(self, wait_s: float = POLL_S) -> bool:
        """Wait for the end of the last read, at most `wait_s`; return whether it has ended."""
        if self._call is not None and self._call.wait(wait_s):
            call, self._call = self._call, None
            call.result()
        return self._call is None

    def take(self) -> MetricsLine | None:
        """Return the newest line of metrics.jsonl if there is one since the last call."""
        line, self._new = self._new, None
        return line

    def _begin(self) -> None:
        self._before = _last_line(self._command.run)

    def _read(self) -> None:
        began = self._command.clock.monotonic()
        self._command.check_budget()
        line = _last_line(self._command.run)
        if line is not None and line != self._before:
            self._before = self._new = line
            self.stepped = True
            self._command.journal.saw(line)
            try:
                self._taken = self._taken or take(self._command.run)
            except OSError as error:  # the next line is another chance
                logger.warning("%s stays as it is: %s", run_folder.CONFIG, error)
        elif not self.stepped and self._command.stop.asked():
            if self.asked_at is None:
                self.asked_at = self._command.clock.monotonic()
            self.unanswered = began - self.asked_at >= ANSWER_S
        if self._validator is not None:
            self._validator.poll()
        self._command.logs.refresh()


def _last_line(run: Storage) -> MetricsLine | None:
    try:
        return metrics.last(run)
    except OSError as error:
        logger.warning("cannot read %s: %s", run_folder.METRICS, error)
        return None
