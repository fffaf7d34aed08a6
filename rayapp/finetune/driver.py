"""Run a config from the driver's side: check, start Ray, prepare the data, train, report.

result = finetune(load("configs/tiny_cpu.yaml"))
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from rich.console import Console

from rayapp import credentials, report
from rayapp.config import Config, ConfigError
from rayapp.connection import address_of
from rayapp.finetune import checks, display, micro_batch
from rayapp.finetune.fit import fit
from rayapp.finetune.forecast import forecast, misfit
from rayapp.finetune.inputs import (
    count_parameters,
    order_of,
    plan_of,
    prepare_rows,
    shared_tokenizer,
)
from rayapp.finetune.job import Job
from rayapp.finetune.journal import Journal
from rayapp.finetune.lease import held
from rayapp.finetune.observe import Observer
from rayapp.finetune.outcome import RunFailed, result_of
from rayapp.finetune.parts import model_shape, overridden, technique_problems
from rayapp.finetune.session import (
    ENVIRONMENT,
    connected,
    gpus_here,
    resolve_precision,
    uses_gpus,
)
from rayapp.progress import STOP_FILE

__all__ = ["RunFailed", "finetune"]


def finetune(
    config: Config, console: Console | None = None, started: float | None = None
) -> dict[str, Any]:
    """Run a config to its end, or to a stop, and return what result.json holds.

    `started` is when the command began, in Unix seconds, if that was before this call.

    Raises:
        ConfigError: it cannot run as described; nothing has been started.
        RunFailed: it failed on the way; running the same again resumes.
        SecretError: a secret that the job refers to cannot be read.
    """
    entered = time.time()
    credentials.load()
    started = started or entered
    console = console or Console()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = address_of(config)
    local = address == "local"
    ready = checks.check(
        config, (os.cpu_count() or 1) if local else None, gpus_here() if local else 0
    )
    problem = misfit(forecast(ready.config, overridden(ready.model, config)))
    if problem and not config.cluster.ignore_plan:
        raise ConfigError([problem])
    phases = {"import": entered - started, "check": time.time() - entered}
    config = ready.config
    with held(ready.run, lambda text: console.print(text, highlight=False)) as lease:
        with connected(config, address):
            phases["ray"] = time.time() - started - sum(phases.values())
            config = resolve_precision(config, gpus := uses_gpus(config))
            if wrong := technique_problems(config, ready.model, "cuda" if gpus else "cpu"):
                raise ConfigError(wrong)
            if checks.same_run(ready.run, config) == "done":
                result = json.loads(ready.run.read("result.json"))
                console.print(f"run {config.run.name} is already done", highlight=False)
                display.result(console, result)
                return result
            journal = Journal(ready.run)
            ready.run.delete(STOP_FILE)
            try:
                with journal.command(config, started):
                    job = _prepare(ready, config, gpus, console, phases, started)
                    with Observer(job, ready.run) as observer:
                        summary = fit(job, ready.run, lease, journal, console)
                        observer.ended(summary)
                    journal.ended(summary["status"], summary["seconds"])
            except RunFailed:
                report.write_for(ready.run)
                raise
            phases["workers"] = summary.pop("group_s")  # of the last group, if there were several
        result = result_of(config, ready.run, summary, phases, journal.events)
        ready.run.write("result.json", json.dumps(result, indent=1).encode())
        report.write_for(ready.run)
        display.result(console, result)
    return result


def _prepare(
    ready: checks.Ready,
    config: Config,
    gpus: bool,
    console: Console,
    phases: dict[str, float],
    started: float,
) -> Job:
    """Prepare the rows, write down what is to be done, and show it."""
    tokenizer_url, tokenizer = shared_tokenizer(ready, console)
    prepared = prepare_rows(ready, config, tokenizer_url, tokenizer, console)
    phases["data"] = time.time() - started - sum(phases.values())
    shape = model_shape(ready.model, config, len(tokenizer))
    auto = config.train.micro_batch is None
    config = micro_batch.chosen(config, shape, ready.run, gpus, console)
    order = order_of(config, prepared)
    parameters = count_parameters(shape)
    planned = forecast(config, shape, order.num_steps)
    plan = plan_of(config, prepared, order, parameters)
    ready.run.write("config.yaml", config.to_yaml().encode())
    values = (planned.as_dict() if planned else {}) | plan
    ready.run.write("plan.json", json.dumps(values, indent=1).encode())
    display.plan(console, config, prepared, order, parameters)
    phases["plan"] = time.time() - started - sum(phases.values())
    return Job(config, prepared, tokenizer_url, order, ready.run.url, auto)
