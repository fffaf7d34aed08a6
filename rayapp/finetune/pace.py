"""When things happen on a rank: seconds by phase, the cadence of saves, a stop asked for."""

from __future__ import annotations

import logging
import threading
import time

from rayapp.config import Config
from rayapp.finetune.job import STOP_FILE
from rayapp.storage import Storage

STOP_POLL_S = 2.0

logger = logging.getLogger("rayapp.training")


class Clock:
    """Seconds by phase, one after another."""

    def __init__(self) -> None:
        self.last, self.seconds = time.perf_counter(), {}  # type: ignore[var-annotated]

    def lap(self, phase: str) -> None:
        """End a phase now."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


class Cadence:
    """When to save and evaluate."""

    def __init__(self, config: Config, num_steps: int) -> None:
        self.config, self.num_steps = config, num_steps
        self.saved_at = time.monotonic()

    def save_due(self, step: int) -> bool:
        """Say whether to save after this step; rank 0's answer is taken by all."""
        every_steps, every_s = self.config.checkpoint.every_steps, self.config.checkpoint.every_s
        due = step == self.num_steps or bool(every_steps and step % every_steps == 0)
        due = due or bool(every_s and time.monotonic() - self.saved_at >= every_s)
        if due:
            self.saved_at = time.monotonic()
        return due

    def eval_due(self, step: int) -> bool:
        """Say whether to evaluate after this step; the last evaluation comes after the loop."""
        every = self.config.eval.every_steps
        return bool(every and step % every == 0 and step < self.num_steps)


class StopFlag:
    """Look every few seconds, in a thread, whether someone has asked the run to stop."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._set, self._closed = storage, False, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-flag", daemon=True)
        self._thread.start()

    def is_set(self) -> bool:
        """Say whether the stop has been asked for."""
        return self._set

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(STOP_POLL_S):
            try:
                self._set = self._set or self._storage.exists(STOP_FILE)
            except OSError as error:
                logger.warning("cannot look for %s: %s", STOP_FILE, error)
