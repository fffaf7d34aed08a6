"""Tell code of the user's what happens in a run: `run.hooks` (docs/own_code.md).

    hooks = Hooks(opened(config, run.url))
    hooks.call("on_step", line)
    hooks.call("on_checkpoint", 500, "s3://bucket/runs/demo/checkpoints/step-00000500")
    hooks.end(result)

One thread of the driver calls the hooks, in the order of events, so that none holds up a step. An
error of a hook is logged and ends nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from rayapp.config import ConfigError, RunConfig
from rayapp.config.code import CodeError, load_code
from rayapp.observe.metrics import MetricsLine
from rayapp.observe.words import last_line

CLOSE_S = 60.0  # for what is not told yet when the command ends

logger = logging.getLogger("rayapp.observe")


class Hook(Protocol):
    """What the object that a `run.hooks` entry makes may have; it needs one of them."""

    def on_step(self, line: MetricsLine, /) -> None:
        """Take a line of metrics.jsonl."""

    def on_checkpoint(self, step: int, url: str, /) -> None:
        """Take the newest committed checkpoint; with short intervals some are left out."""

    def on_end(self, result: Mapping[str, Any], /) -> None:
        """Take the content of result.json, once, when the command ends."""


METHODS = ("on_step", "on_checkpoint", "on_end")


def opened(config: RunConfig, run: str) -> list[object]:
    """Make the hooks of a config for a run in this folder.

    Raises:
        ConfigError: one cannot be imported or made, or has none of METHODS.
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
        if not any(hasattr(hook, method) for method in METHODS):
            problems.append(
                f"run.hooks={name} is without effect: what it returns has none of "
                f"{', '.join(METHODS)}. Define one of them"
            )
    if problems:
        raise ConfigError(problems)
    return hooks


class Hooks:
    """Call hooks from a thread, in the order in which it is told what happens."""

    def __init__(self, hooks: Sequence[object]) -> None:
        self._hooks, self._ended = hooks, not hooks
        self._calls = SimpleQueue[tuple[Any, ...] | None]()
        self._thread = threading.Thread(target=self._work, name="hooks", daemon=True)
        if hooks:
            self._thread.start()

    def call(self, method: str, *values: object) -> None:
        """Have one of METHODS of each hook called."""
        if not self._ended:
            self._calls.put((method, *values))

    def end(self, result: Mapping[str, Any]) -> None:
        """Tell the result after all else, and wait for that up to CLOSE_S."""
        if self._ended:
            return
        self.call("on_end", result)
        self._ended = True
        self._calls.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("hooks have not ended within %.0f s, and are left", CLOSE_S)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._call(*call)

    def _call(self, method: str, *values: object) -> None:
        for hook in self._hooks:
            try:
                getattr(hook, method, lambda *_: None)(*values)
            except Exception as error:  # the user's code may raise anything: training goes on
                name = type(hook).__name__
                logger.warning("%s.%s failed: %s", name, method, last_line(error), exc_info=error)
