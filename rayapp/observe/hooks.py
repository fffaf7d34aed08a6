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


class HookFactory(Protocol):
    """What `run.hooks` names: a class or function."""

    def __call__(self, config: RunConfig, run: str, /) -> object:
        """Return a Hook for a run with this config in this folder or s3:// URL."""
        ...


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
    """Call hooks from a thread."""

    def __init__(self, hooks: Sequence[object]) -> None:
        self._hooks = hooks
        self._changed = threading.Condition()
        self._count = self._done = 0
        self._lines: Callable[[int, int], list[MetricsLine]] = lambda start, stop: []
        self._checkpoint: tuple[int, str] | None = None
        self._last_checkpoint = 0  # the step of the last checkpoint that hooks know
        self._result: Mapping[str, Any] | None = None
        self._thread = threading.Thread(target=self._work, name="hooks", daemon=True)
        if hooks:
            self._thread.start()

    def follow(self, before: int, lines: Callable[[int, int], list[MetricsLine]]) -> None:
        """Take `lines(start, stop)` of metrics.jsonl; `before` lines are of earlier commands."""
        self._lines, self._done, self._count = lines, before, before

    def update(self, count: int, kept: int) -> None:
        """Say that there are `count` lines, of which the first `kept` are as before."""
        with self._changed:
            self._done, self._count = min(self._done, kept), count
            self._changed.notify()

    def checkpoint(self, step: int, url: str) -> None:
        """Say which checkpoint is the newest that is committed."""
        with self._changed:
            self._checkpoint = (step, url)
            self._changed.notify()

    def end(self, result: Mapping[str, Any]) -> None:
        """Tell the result after all else, and wait for that up to CLOSE_S."""
        if not self._hooks or self._result is not None:
            return
        with self._changed:
            self._result = result
            self._changed.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("hooks have not ended within %.0f s, and are left", CLOSE_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._count > self._done
                        or (
                            self._checkpoint is not None
                            and self._checkpoint[0] != self._last_checkpoint
                        )
                        or self._result is not None
                    )
                )
                start, stop = self._done, min(self._count, self._done + PART)
                self._done, checkpoint, result = stop, self._checkpoint, self._result
            if stop > start:
                for line in self._read(start, stop):
                    self._call("on_step", line)
            elif checkpoint is not None and checkpoint[0] != self._last_checkpoint:
                self._last_checkpoint = checkpoint[0]
                self._call("on_checkpoint", *checkpoint)
            elif result is not None:
                self._call("on_end", result)
                return

    def _read(self, start: int, stop: int) -> list[MetricsLine]:
        try:
            return self._lines(start, stop)
        except OSError as error:
            logger.warning("steps are not told to hooks: %s", error)
            time.sleep(1.0)
            with self._changed:
                self._done = min(self._done, start)
            return []

    def _call(self, method: str, *values: object) -> None:
        for hook in self._hooks:
            call = getattr(hook, method, None)
            if call is None:
                continue
            try:
                call(*values)
            except Exception as error:  # the user's code may raise anything: training goes on
                name = type(hook).__name__
                logger.warning("%s.%s failed: %s", name, method, last_line(error), exc_info=error)
