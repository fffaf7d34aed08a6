"""Fine-tune a language model from the driver's side.

result = finetune(load("configs/tiny_cpu.yaml"))
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from rayapp.config import Config
from rayapp.driver import command
from rayapp.finetune.check import check, settle
from rayapp.finetune.micro_batch import after_failure
from rayapp.finetune.prepared_run import prepare
from rayapp.jobs.results import Result
from rayapp.observe.records import MetricsLine
from rayapp.observe.result import RunFailed

__all__ = ["RunFailed", "finetune"]

KIND = command.Kind(check, settle, prepare, after_failure)


def finetune(
    config: Config,
    console: Console | None = None,
    started: float | None = None,
    on_step: Callable[[MetricsLine], None] | None = None,
) -> Result:
    """Run a config until it is done or stopped, and return its result: the content of result.json.

    `started` is the Unix time in seconds at which the command began, if that was before this call.
    `on_step` gets each line of metrics.jsonl as a dict; a thread calls it, so it holds up no step.

    Raises:
        ConfigError: it cannot run as described, or a file in its folder is damaged.
        RunFailed: it failed on the way; running the same again resumes.
        SecretError: a secret that the job refers to cannot be read.
    """
    return Result(command.run(config, KIND, console, started, on_step))
