"""Tell code of the user's what happens in a run: `run.hooks` (docs/own_code.md).

    hooks = Hooks(opened(config, run.url))
    hooks.follow(len(lines.steps), lines.lines)     # metrics.jsonl
    hooks.update(count, kept)
    hooks.checkpoint(500, "s3://bucket/runs/demo/checkpoints/step-00000500")
    hooks.end(result)

One thread of the driver calls the hooks, in the order of events, so that none holds up a step. An
error of a hook is logged and ends nothing. Steps that a recovery does again are told again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from rayapp.config import ConfigError, RunConfig
from rayapp.config.code import CodeError, load_code
from rayapp.observe.metrics import MetricsLine
from rayapp.observe.words import last_line

PART = 500  # lines that are read at once
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
        self._hooks = hooks
        self._todo = SimpleQueue[Callable[[], None] | None]()
        self._done = self._count = 0  # lines that hooks know, and lines there are
        self._lines: Callable[[int, int], list[MetricsLine]] = lambda start, stop: []
        self._checkpoint = 0  # the step of the newest checkpoint
        self._ended = not hooks
        self._thread = threading.Thread(target=self._work, name="hooks", daemon=True)
        if hooks:
            self._thread.start()

    def follow(self, before: int, lines: Callable[[int, int], list[MetricsLine]]) -> None:
        """Take `lines(start, stop)` of metrics.jsonl; `before` lines are of earlier commands."""
        self._lines, self._done, self._count = lines, before, before

    def update(self, count: int, kept: int) -> None:
        """Say that there are `count` lines, of which the first `kept` are as before."""
        self._count = count
        self._todo.put(partial(self._tell, count, kept))

    def checkpoint(self, step: int, url: str) -> None:
        """Say which checkpoint is the newest that is committed."""
        if step != self._checkpoint:
            self._checkpoint = step
            self._todo.put(partial(self._call, "on_checkpoint", step, url))

    def end(self, result: Mapping[str, Any]) -> None:
        """Tell the result after all else, and wait for that up to CLOSE_S."""
        if self._ended:
            return
        self._ended = True
        self._todo.put(partial(self._tell, self._count, self._count))
        self._todo.put(partial(self._call, "on_end", result))
        self._todo.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("hooks have not ended within %.0f s, and are left", CLOSE_S)

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            call()

    def _tell(self, count: int, kept: int) -> None:
        """Tell the lines up to `count`; those that cannot be read are left to what is next."""
        self._done = min(self._done, kept)
        while self._done < count:
            stop = min(count, self._done + PART)
            try:
                lines = self._lines(self._done, stop)
            except OSError as error:
                logger.warning("steps are not told to hooks: %s", error)
                if not self._todo.empty():  # these lines may have been cut
                    return
                time.sleep(1.0)
                continue
            self._done = stop
            for line in lines:
                self._call("on_step", line)

    def _call(self, method: str, *values: object) -> None:
        for hook in self._hooks:
            try:
                getattr(hook, method, lambda *_: None)(*values)
            except Exception as error:  # the user's code may raise anything: training goes on
                name = type(hook).__name__
                logger.warning("%s.%s failed: %s", name, method, last_line(error), exc_info=error)
