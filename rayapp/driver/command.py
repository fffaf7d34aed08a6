"""Run a config from the driver's side: check, start Ray, prepare the data, train, report.

result = run(config, kind, console, started)
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod

from rich.console import Console

from rayapp import report
from rayapp.config import RunConfig
from rayapp.driver import display
from rayapp.driver.checks import check_resumable, same_run
from rayapp.driver.lease import Lease, held
from rayapp.driver.observe import Observer
from rayapp.driver.ray_session import connected, gpus_here, tell_ray, uses_gpus
from rayapp.driver.stop import Stop, StopAsked, short_wait, watching
from rayapp.driver.supervise import as_it_stands, fit
from rayapp.jobs import secrets
from rayapp.jobs.ray_address import address_of
from rayapp.observe.events import Journal, submission_id
from rayapp.observe.records import RunResult, Summary
from rayapp.observe.result import RunFailed, result_of
from rayapp.observe.run_folder import DONE, RESULT
from rayapp.storage import Storage
from rayapp.train.spec import Job


class Kind(ABC):
    """What a kind of run does before it trains; one is made for each command."""

    config: RunConfig
    """With absolute paths once it has been checked."""
    run: Storage
    """The run's folder, once it has been checked."""

    @abstractmethod
    def check(self, local_cores: int | None, local_gpus: int) -> None:
        """Look at all that is outside; None cores: on a cluster that runs.

        Raises:
            ConfigError: with every problem found.
        """

    @abstractmethod
    def settle(self, gpus: bool) -> None:
        """Replace what is `auto` by what the workers have to compute with.

        Raises:
            ConfigError: they cannot do what is asked.
        """

    @abstractmethod
    def prepare(self, gpus: bool, console: Console, phases: Phases) -> Job:
        """Prepare the rows, write down what is to be done, and show it."""


class Phases:
    """Seconds by phase since a command began, one after another."""

    def __init__(self, started: float) -> None:
        self.started, self.seconds = started, dict[str, float]()

    def end(self, phase: str) -> None:
        """End a phase now."""
        self.seconds[phase] = time.time() - self.started - sum(self.seconds.values())


def run(kind: Kind, console: Console | None, started: float | None) -> RunResult:
    """Run a config to its end, or to a stop, and return what result.json holds.

    `started` is when the command began, in Unix seconds, if that was before this call.

    Raises:
        ConfigError: it cannot run as described; nothing has been started.
        RunFailed: it failed on the way; running the same again resumes.
        SecretError: a secret that the job refers to cannot be read.
    """
    phases = Phases(started or time.time())
    secrets.load()
    console = console or Console()
    tell_ray()
    address = address_of(kind.config)
    local = address == "local"
    phases.end("import")
    kind.check((os.cpu_count() or 1) if local else None, gpus_here() if local else 0)
    phases.end("check")
    stop = Stop(kind.run)
    with (
        held(kind.run, lambda text: console.print(text, highlight=False)) as lease,
        stop.on_signal(console),
    ):
        stop.forget_old()
        with connected(kind.config, address):
            phases.end("ray")
            gpus = uses_gpus(kind.config)
            kind.settle(gpus)
            if same_run(kind.run, kind.config) == DONE:
                result: RunResult = json.loads(kind.run.read(RESULT))
                console.print(f"run {kind.config.run.name} is already done", highlight=False)
                display.result(console, result)
                return result
            check_resumable(kind.run)
            if warning := short_wait(submission_id()):
                console.print(f"[yellow]{display.plain(warning)}[/yellow]", soft_wrap=True)
            journal = Journal(kind.run)
            try:
                with journal.command(kind.config, phases.started):
                    summary = _train(kind, lease, stop, journal, gpus, console, phases)
                    journal.ended(summary["status"], summary["seconds"])
            except RunFailed:
                report.write_for(kind.run)
                raise
            phases.seconds["workers"] = summary.pop("group_s")  # of the last group
        result = result_of(kind.config, kind.run, summary, phases.seconds, journal.events)
        kind.run.write(RESULT, json.dumps(result, indent=1).encode())
        report.write_for(kind.run)
        display.result(console, result)
    return result


def _train(
    kind: Kind,
    lease: Lease,
    stop: Stop,
    journal: Journal,
    gpus: bool,
    console: Console,
    phases: Phases,
) -> Summary:
    """Prepare and train; return rank 0's summary, or that of a run stopped before it had one."""

    def check() -> None:
        lease.check()
        stop.check()

    try:
        job = watching(lambda: kind.prepare(gpus, console, phases), check)
    except StopAsked:
        return as_it_stands(kind.run)
    with Observer(job, kind.run) as observer:
        summary = fit(job, kind.run, lease, stop, journal, console)
        observer.ended(summary)
    return summary
