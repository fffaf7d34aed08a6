"""Run a config from the driver's side: check, start Ray, prepare the data, train, report.

result = run(config, KIND, console, started)
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from rayapp import report
from rayapp.config import ConfigError, RunConfig
from rayapp.driver import display
from rayapp.driver.checks import check_resumable, same_run
from rayapp.driver.lease import held
from rayapp.driver.observe import Observer
from rayapp.driver.output import captured
from rayapp.driver.ray_session import connected, gpus_here, tell_ray, uses_gpus
from rayapp.driver.ray_workers import RayWorkers
from rayapp.driver.stop import Stop, StopAsked, short_wait, watching
from rayapp.driver.supervise import AfterFailure, Command, as_it_stands, fit
from rayapp.jobs import secrets
from rayapp.jobs.ray_address import address_of
from rayapp.observe.events import Journal, submission_id
from rayapp.observe.records import RunResult, Summary
from rayapp.observe.result import Phases, RunFailed, result_of
from rayapp.observe.run_folder import DONE, RESULT
from rayapp.observe.status import read_result
from rayapp.storage import Storage, StorageError
from rayapp.train.spec import AnySpec


@dataclass(frozen=True)
class CheckedRun:
    """What the checks read and resolved; each kind of run adds its own fields."""

    config: Any
    """The config with absolute paths, and with `auto` in `data` resolved where that is possible."""
    run: Storage
    """The run's folder."""


@dataclass(frozen=True)
class Kind:
    """What a kind of run does before its workers train."""

    check: Callable[[Any, int | None, int], Any]
    """(config, cores, GPUs of this machine): check data, model, storage; return a CheckedRun.

    Cores are None where the workers run on a running cluster. Raises ConfigError with every
    problem.
    """
    settle: Callable[[Any, bool], Any]
    """(CheckedRun, whether workers have GPUs): replace `auto` by what the workers can compute.

    Raises ConfigError: they cannot do what is asked.
    """
    prepare: Callable[[Any, bool, Console, Phases], AnySpec]
    """(CheckedRun, whether workers have GPUs, console, phases): prepare the rows, write config.yaml
    and plan.json, print the plan, and return the spec."""
    after_failure: AfterFailure = lambda spec, ended: None


def run(config: RunConfig, kind: Kind, console: Console | None, started: float | None) -> RunResult:
    """Run a config until it is done or stopped, and return the content of result.json.

    `started` is the Unix time in seconds at which the command began, if that was before this call.

    Raises:
        ConfigError: it cannot run as described, or a file in its folder is damaged.
        RunFailed: it failed on the way; running the same again resumes.
        SecretError: a secret that the job refers to cannot be read.
    """
    phases = Phases(started or time.time())
    with captured() as tail:
        secrets.load()
        console = console or Console(force_jupyter=False)  # text, which `tail` can keep
        tell_ray()
        address = address_of(config)
        local = address == "local"
        phases.end("import")
        ready = kind.check(
            config, (os.cpu_count() or 1) if local else None, gpus_here() if local else 0
        )
        phases.end("check")
        stop = Stop(ready.run)
        with (
            held(ready.run, lambda text: console.print(text, highlight=False)) as lease,
            stop.on_signal(console),
        ):
            stop.forget_old()
            run = lease.fence(ready.run)
            if same_run(run, ready.config, settled=False) == DONE:
                result = read_result(run)
                console.print(f"run {ready.config.run.name} is already done", highlight=False)
                display.result(console, result)
                return result
            with connected(ready.config, address):
                phases.end("ray")
                gpus = uses_gpus(ready.config)
                ready = kind.settle(ready, gpus)
                same_run(run, ready.config)
                check_resumable(run)
                command = Command(run, lease, stop, Journal(run), tail=tail)
                with _logged(command, console):
                    return _to_the_end(kind, ready, command, gpus, console, phases)


@contextmanager
def _logged(command: Command, console: Console) -> Iterator[None]:
    """Store the log of the last attempt; after a failure also write the report, and name the log.

    The caller prints the reason of a failure, so that it is the last line on a terminal.
    """
    try:
        yield
    except BaseException as error:
        known = isinstance(error, RunFailed | StorageError | ConfigError)
        url = command.logs.close(f"failed: {error}" if known else traceback.format_exc())
        if isinstance(error, RunFailed):
            report.write_for(command.run)
        if url is not None:
            console.print(f"the log is {url}", highlight=False, soft_wrap=True)
        raise
    command.logs.close("the command ended without an error")


def _to_the_end(
    kind: Kind,
    ready: CheckedRun,
    command: Command,
    gpus: bool,
    console: Console,
    phases: Phases,
) -> RunResult:
    """Train, write result.json and the report, and return the result."""
    if warning := short_wait(submission_id()):
        console.print(f"[yellow]{display.plain(warning)}[/yellow]", soft_wrap=True)
    run, journal = command.run, command.journal
    with journal.command(ready.config, phases.started):
        with command.reserve:
            summary = _train(kind, ready, command, gpus, console, phases)
        journal.ended(summary["status"], summary["seconds"])
    phases.seconds["workers"] = summary.pop("group_s")  # of the last group
    result = result_of(ready.config, run, summary, phases.seconds, journal.events)
    run.write(RESULT, json.dumps(result, indent=1).encode())
    report.write_for(run)
    if result.get("model_path"):
        report.write_card(run)
    display.result(console, result)
    return result


def _train(
    kind: Kind,
    ready: CheckedRun,
    command: Command,
    gpus: bool,
    console: Console,
    phases: Phases,
) -> Summary:
    """Prepare and train; return rank 0's summary, or `as_it_stands` if no worker could give one."""
    try:
        spec = watching(lambda: kind.prepare(ready, gpus, console, phases), command.check)
    except StopAsked:
        return as_it_stands(command.run)
    with Observer(spec, command.run) as observer:
        summary = fit(command, spec, RayWorkers(spec.config), console, kind.after_failure)
        observer.ended(summary)
    return summary
