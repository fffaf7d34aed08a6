"""Run a config from the driver's side: check, start Ray, prepare the data, train, report."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.markup import escape

from rayapp import report
from rayapp.config import ConfigError, RunConfig
from rayapp.driver import display, placement
from rayapp.driver.checks import check_resumable, same_run
from rayapp.driver.growth import changed_data, refuse_other_data, take
from rayapp.driver.heartbeat import Heartbeat
from rayapp.driver.lease import held
from rayapp.driver.observe import Hooks, Observer, opened
from rayapp.driver.output import captured
from rayapp.driver.ray_session import connected, gpus_here, tell_ray, uses_gpus
from rayapp.driver.ray_workers import RayWorkers
from rayapp.driver.stop import Budget, Stop, StopAsked, budget_problems, short_wait, watching
from rayapp.driver.supervise import AfterFailure, Command, as_it_stands, fit
from rayapp.jobs import secrets
from rayapp.jobs.client import ray_address
from rayapp.jobs.results import Result
from rayapp.observe.activity import Phases
from rayapp.observe.events import Journal, submission_id
from rayapp.observe.gauges import tell_end
from rayapp.observe.metrics import MetricsLine
from rayapp.observe.plain import Console as PlainConsole
from rayapp.observe.records import RunResult, Summary
from rayapp.observe.result import RunFailed, result_of, stays
from rayapp.observe.run_folder import ASKED, DONE, FAILED, RESULT, STOPPED
from rayapp.observe.status import read_result
from rayapp.storage import Storage, StorageError
from rayapp.train.spec import AnySpec, BackgroundWork


@dataclass(frozen=True)
class CheckedRun:
    """What the checks read and resolved; each kind of run adds its own fields."""

    config: Any
    """The config with absolute paths, and with `auto` in `data` resolved where that is possible."""
    run: Storage
    """The run's folder."""

    @property
    def parts(self) -> dict[str, object]:
        """The parts of the data's fingerprint that are known before the data are prepared."""
        return {}


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
    prepare: Callable[[Any, bool, Console, Phases], tuple[AnySpec, BackgroundWork | None]]
    """(CheckedRun, whether workers have GPUs, console, phases): prepare the rows, `describe` the
    run, print the plan, and return the spec, and what goes on beside the training."""
    after_failure: AfterFailure = lambda spec, ended: None

    def run(
        self,
        config: RunConfig,
        console: Console | None = None,
        started: float | None = None,
        on_step: Callable[[MetricsLine], None] | None = None,
    ) -> Result:
        """Run a config until it is done or stopped; return its result: what is in result.json.

        `started` is the Unix time in seconds at which the command began, if that was before this
        call. `on_step` gets each line of metrics.jsonl as a dict; a thread calls it, so it holds up
        no step.

        Raises:
            ConfigError: it cannot run as described, or a file in its folder is damaged.
            RunFailed: it failed on the way; running the same again resumes.
            SecretError: a secret that the job refers to cannot be read.
        """
        phases = Phases(started or time.time())
        with captured() as tail:
            secrets.load()
            # Text, which `tail` can keep; a kernel asks for colours (FORCE_COLOR) and is no
            # terminal.
            terminal = None if sys.stdout is None else sys.stdout.isatty()
            console = console or PlainConsole(force_jupyter=False, force_terminal=terminal)
            tell_ray()
            with Heartbeat(phases, console, tail) as heartbeat:
                return Result(_run(config, self, console, heartbeat, on_step))


def _run(
    config: RunConfig,
    kind: Kind,
    console: Console,
    heartbeat: Heartbeat,
    on_step: Callable[[MetricsLine], None] | None,
) -> RunResult:
    phases, address = heartbeat.phases, ray_address(config)
    local = address == "local"
    cores, gpus_of_machine = (os.cpu_count() or 1, gpus_here()) if local else (None, 0)
    phases.end("import")
    phases.begin("checking config, model and data")
    ready = kind.check(config, cores, gpus_of_machine)
    phases.end("check")
    stop = Stop(ready.run)
    phases.begin("taking the lease of the run")
    with (
        held(ready.run, lambda text: console.print(text, highlight=False)) as lease,
        stop.on_signal(console),
    ):
        stop.forget_old()
        run = lease.fence(ready.run)
        take(run)  # a driver may have been killed before it has
        if same_run(run, ready.config, settled=False) == DONE:
            return _done_already(run, ready, console, phases)
        refuse_other_data(run, ready.parts)
        phases.begin("starting Ray" if local else f"connecting to Ray at {address}")
        with (
            connected(ready.config, address),
            heartbeat.stored(run, ready.config.run.name, stop.ask),
        ):
            phases.end("ray")
            phases.begin("checking the run's folder")
            gpus = uses_gpus(ready.config)
            if wrong := budget_problems(ready.config, placement.places):
                raise ConfigError(wrong)
            ready = kind.settle(ready, gpus)
            same_run(run, ready.config)
            check_resumable(run)
            journal = Journal(run, placement.places)
            journal.passed = heartbeat.passed
            budget = Budget(ready.config.run, journal, stop)
            shown: Any = {"tail": heartbeat.tail, "shown_by": heartbeat.shown_by}
            command = Command(run, lease, stop, journal, budget=budget, phases=phases, **shown)
            more = [SimpleNamespace(on_step=on_step)] if on_step is not None else []
            hooks = Hooks([*opened(ready.config, run.url), *more])
            with _logged(command, ready.config.run.name, console, hooks):
                return _to_the_end(kind, ready, command, gpus, console, hooks)


def _done_already(run: Storage, ready: CheckedRun, console: Console, phases: Phases) -> RunResult:
    """Show the result of a run that is done; forget a longer one that has not done a step."""
    result, journal = read_result(run), Journal(run)
    run.delete(ASKED)
    if journal.events and journal.events[-1].get("status") != DONE:
        with journal.command(ready.config, phases.started):
            journal.ended(DONE, {})
    console.print(f"run {ready.config.run.name} is already done", highlight=False)
    display.result(console, result)
    if changed := changed_data(run, ready.parts, done=True):
        fix = "To train on them, set another run.name, or another length and train.schedule_from"
        console.print(f"[yellow]{escape(changed)}. {fix}[/yellow]", soft_wrap=True)
    return result


@contextmanager
def _logged(command: Command, name: str, console: Console, hooks: Hooks) -> Iterator[None]:
    """Store the log of the last attempt; after a failure also write the report, and name the log.

    Hooks and Prometheus get a failure here, whether it was before, in or after training.

    The caller prints the reason of a failure, so that it is the last line on a terminal.
    """
    try:
        yield
    except BaseException as error:
        known = isinstance(error, RunFailed | StorageError | ConfigError)
        url = command.logs.close(f"failed: {error}" if known else traceback.format_exc())
        tell_end(name, FAILED)
        hooks.end({"status": FAILED, "reason": str(error) or type(error).__name__})
        if isinstance(error, RunFailed):
            report.write_for(command.run)
        if url is not None:
            console.print(f"the log is {url}", highlight=False, soft_wrap=True)
        raise
    command.logs.close("the command ended without an error")


def _to_the_end(
    kind: Kind, ready: CheckedRun, command: Command, gpus: bool, console: Console, hooks: Hooks
) -> RunResult:
    if warning := short_wait(submission_id()):
        console.print(f"[yellow]{escape(warning)}[/yellow]", soft_wrap=True)
    run, journal, phases = command.run, command.journal, command.phases
    with journal.command(ready.config, phases.started):
        with command.reserve:
            summary = _train(kind, ready, command, gpus, console, hooks)
        of_budget = command.budget and command.budget.reason
        if summary["status"] == STOPPED and (reason := of_budget or command.stop.told()):
            summary["reason"] = reason
        journal.ended(summary["status"], summary["seconds"], summary.get("reason"))
        tell_end(ready.config.run.name, summary["status"])
    phases.seconds["workers"] = summary.pop("group_s")  # of the last group
    phases.begin("writing the report")
    result = result_of(ready.config, run, summary, phases.seconds, journal.events)
    if not stays(run, summary["status"]):
        run.write(RESULT, json.dumps(result, indent=1).encode())
    report.write_for(run)
    if result.get("model_path"):
        report.write_card(run)
    phases.begin("waiting for the hooks")
    hooks.end(result)
    phases.begin("")
    display.result(console, result)
    return result


def _train(
    kind: Kind, ready: CheckedRun, command: Command, gpus: bool, console: Console, hooks: Hooks
) -> Summary:
    """Prepare and train; return rank 0's summary, or `as_it_stands` if no worker could give one."""
    endless = placement.refusing_endless_waits(ready.config)  # for room to prepare the data

    def tend() -> None:
        command.check()
        endless()
        command.logs.refresh()

    try:
        spec, beside = watching(lambda: kind.prepare(ready, gpus, console, command.phases), tend)
    except StopAsked:
        return as_it_stands(command.run)
    with (
        Observer(spec, command.run, hooks) as observer,
        closing(beside) if beside else nullcontext(),
    ):
        workers = RayWorkers(spec.config)
        summary = fit(command, spec, workers, console, kind.after_failure, beside=beside)
        observer.ended(summary)
    return summary
