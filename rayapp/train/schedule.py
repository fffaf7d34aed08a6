"""Decide when ranks save and evaluate, and when rank 0 has a reason for all to leave."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rayapp.config import RunConfig
from rayapp.observe import run_folder
from rayapp.storage import Storage
from rayapp.train.step_sync import MOVE, STAY, STOP

STOP_POLL_S = 2.0
NOTICE_POLL_S = 2.0
ROOM_POLL_S = 10.0

logger = logging.getLogger("rayapp.training")


class Cadence:
    """Decide after which steps to save and to evaluate."""

    def __init__(self, config: RunConfig, num_steps: int) -> None:
        self.config, self.num_steps = config, num_steps
        self.saved_at = time.monotonic()

    def save_due(self, step: int) -> bool:
        """Say whether to save after this many steps; only rank 0 is asked, and all ranks follow."""
        every_steps, every_s = self.config.checkpoint.every_steps, self.config.checkpoint.every_s
        due = step == self.num_steps or bool(every_steps and step % every_steps == 0)
        due = due or bool(every_s and time.monotonic() - self.saved_at >= every_s)
        if due:
            self.saved_at = time.monotonic()
        return due

    def eval_due(self, step: int) -> bool:
        """Say whether to evaluate after this many steps; not after the last one, where the final
        evaluation follows the loop."""
        every = self.config.eval.every_steps
        return bool(every and step % every == 0 and step < self.num_steps)


class LeaveWatcher:
    """Look for reasons to leave in a thread of rank 0.

    Every STOP_POLL_S seconds it looks for the STOP file in the run's folder, and every ROOM_POLL_S
    seconds it asks `room` how many more workers the cluster has room for. If some fit twice in a
    row, the workers leave (MOVE), so that the driver starts more of them.
    """

    def __init__(self, storage: Storage, room: Callable[[], int] | None = None) -> None:
        self._storage, self._room = storage, room
        self._leave, self._closed = STAY, threading.Event()
        self._noticed_at = time.monotonic()
        self.reason = ""
        """Why the workers move, as text for the user."""
        self._thread = threading.Thread(target=self._watch, name="leaving", daemon=True)
        self._thread.start()

    def due(self) -> int:
        """Return STAY, STOP or MOVE, as the thread found it last."""
        return self._leave

    def poll_due(self) -> bool:
        """Say whether all ranks should ask for preemptions: every NOTICE_POLL_S seconds."""
        now = time.monotonic()
        due = now - self._noticed_at >= NOTICE_POLL_S
        if due:
            self._noticed_at = now
        return due

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        asked, fitted = time.monotonic(), 0
        while not self._closed.wait(STOP_POLL_S):
            try:
                if self._storage.exists(run_folder.STOP):
                    self._leave = STOP
                    return
            except OSError as error:
                logger.warning("cannot look for %s: %s", run_folder.STOP, error)
            now = time.monotonic()
            if self._room is not None and now - asked >= ROOM_POLL_S:
                asked, before, fitted = now, fitted, self._room()
                if before and fitted:
                    more = min(before, fitted)
                    self.reason = f"{more} more worker{'s fit' if more > 1 else ' fits'}"
                    self._leave = MOVE
