"""Fine-tune by a config, from the driver's side.

result = finetune(load("configs/tiny_cpu.yaml"))
"""

from __future__ import annotations

import json

from rich.console import Console

from rayapp.config import Config, ConfigError
from rayapp.driver import command
from rayapp.driver.command import Phases
from rayapp.driver.ray_session import fastest_precision
from rayapp.finetune import checks, display, micro_batch
from rayapp.finetune.forecast import forecast
from rayapp.finetune.inputs import (
    count_parameters,
    order_of,
    plan_of,
    prepare_rows,
    shared_tokenizer,
)
from rayapp.finetune.job import Job
from rayapp.finetune.parts import model_shape, technique_problems
from rayapp.observe.records import RunResult
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import CONFIG, PLAN
from rayapp.planner import misfit

__all__ = ["RunFailed", "finetune"]


def finetune(
    config: Config, console: Console | None = None, started: float | None = None
) -> RunResult:
    """Run a config to its end, or to a stop, and return what result.json holds.

    `started` is when the command began, in Unix seconds, if that was before this call.

    Raises:
        ConfigError: it cannot run as described; nothing has been started.
        RunFailed: it failed on the way; running the same again resumes.
        SecretError: a secret that the job refers to cannot be read.
    """
    return command.run(Finetune(config), console, started)


class Finetune(command.Kind):
    """A run that fine-tunes a language model."""

    config: Config
    ready: checks.Ready

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, local_cores: int | None, local_gpus: int) -> None:
        """Look at storage, data, model and cluster size, and whether the plan fits."""
        self.ready = checks.check(self.config, local_cores, local_gpus)
        self.config, self.run = self.ready.config, self.ready.run
        tokenizer = self.ready.tokenizer
        tokens = None if tokenizer is None else len(tokenizer)
        problem = misfit(forecast(self.config, model_shape(self.ready.model, self.config, tokens)))
        if problem and not self.config.cluster.ignore_plan:
            raise ConfigError([problem])

    def settle(self, gpus: bool) -> None:
        """Choose the precision; refuse what the workers cannot do."""
        train = self.config.train
        if train.precision == "auto":
            found = {"precision": fastest_precision(gpus)}
            self.config = self.config.model_copy(update={"train": train.model_copy(update=found)})
        if wrong := technique_problems(self.config, self.ready.model, "cuda" if gpus else "cpu"):
            raise ConfigError(wrong)

    def prepare(self, gpus: bool, console: Console, phases: Phases) -> Job:
        """Prepare the rows, write down what is to be done, and show it."""
        ready, config = self.ready, self.config
        tokenizer_url, tokenizer = shared_tokenizer(ready, console)
        prepared = prepare_rows(ready, config, tokenizer_url, tokenizer, console)
        phases.end("data")
        shape = model_shape(ready.model, config, len(tokenizer))
        auto = config.train.micro_batch is None
        config = micro_batch.chosen(config, shape, ready.run, gpus, console)
        order = order_of(config, prepared)
        parameters = count_parameters(shape)
        planned = forecast(config, shape, order.num_steps, on_cpu=not gpus)
        trainable = None if planned is None else planned.question.layout.trainable
        plan = plan_of(config, prepared, order, parameters)
        ready.run.write(CONFIG, config.to_yaml().encode())
        values = (planned.as_dict() if planned else {}) | plan
        ready.run.write(PLAN, json.dumps(values, indent=1).encode())
        display.plan(console, config, prepared, order, parameters, trainable)
        phases.end("plan")
        return Job(config, prepared, tokenizer_url, order, ready.run.url, auto)
