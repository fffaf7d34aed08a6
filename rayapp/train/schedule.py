"""Decide when ranks save and evaluate, and when rank 0 has a reason for all to leave."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from rayapp.config import RunConfig
from rayapp.observe import run_folder
from rayapp.observe.clock import CLOCK, Call, Clock
from rayapp.storage import Storage
from rayapp.train.step_sync import CONTINUE, RESTART, STOP

STOP_POLL_S = 2.0
NOTICE_POLL_S = 2.0
ROOM_POLL_S = 10.0
LEASE_POLL_S = 10.0

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

    def eval_due(self, step: int, owed: bool = False) -> bool:
        """Say whether to evaluate after this many steps, if an earlier evaluation is `owed` too.

        There is none after the last step, where the final evaluation follows the loop.
        """
        every = self.config.eval.every_steps
        return bool(every and (owed or step % every == 0) and step < self.num_steps)


class LeaseLost(RuntimeError):
    """Another driver has taken the run over."""


class LeaveWatcher:
    """Look for reasons to leave in a thread of rank 0.

    Every STOP_POLL_S seconds it looks for the STOP file in the run's folder, and every ROOM_POLL_S
    seconds it asks `free_workers` how many more workers the cluster has room for. If some fit
    twice in a row, the workers leave (RESTART), so that the driver starts more of them.

    Every LEASE_POLL_S seconds it looks at the lease. If the driver has not renewed it for
    LEASE_LEFT_S seconds, the workers save and leave (RESTART). If another driver holds it, training
    must end at once, as the other driver's workers write the same files: `due` raises.
    """

    def __init__(
        self, storage: Storage, free_workers: Callable[[], int] | None = None, clock: Clock = CLOCK
    ) -> None:
        self._storage, self._free_workers, self._clock = storage, free_workers, clock
        self._leave, self._closed = CONTINUE, clock.event()
        self._noticed_at = clock.monotonic()
        self.reason = ""
        """Why the workers move, as text for the user."""
        self._holder: str | None = None
        self._renewed: tuple[str, float] | None = None  # etag of the lease, and since when
        self._watching = Call(clock, self._watch, "leaving")

    def due(self) -> int:
        """Return CONTINUE, STOP or RESTART, as the thread found it last.

        Raises:
            LeaseLost: another driver has taken the run over.
            Exception: the thread has failed.
        """
        if self._watching.error is not None:
            raise self._watching.error
        return self._leave

    def poll_due(self) -> bool:
        """Say whether all ranks should ask for preemptions: every NOTICE_POLL_S seconds."""
        now = self._clock.monotonic()
        due = now - self._noticed_at >= NOTICE_POLL_S
        if due:
            self._noticed_at = now
        return due

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._watching.wait()

    def _watch(self) -> None:
        now = self._clock.monotonic
        asked, fitted, leased = now(), 0, -LEASE_POLL_S
        while not self._closed.wait(STOP_POLL_S):
            try:
                if self._storage.exists(run_folder.STOP):
                    self._leave = STOP
                    return
                if now() - leased >= LEASE_POLL_S:
                    leased = now()
                    self._look_at_lease()
            except OSError as error:
                logger.warning("cannot look for %s: %s", run_folder.STOP, error)
            if self._free_workers is not None and now() - asked >= ROOM_POLL_S:
                asked, before, fitted = now(), fitted, self._free_workers()
                if before and fitted:
                    more = min(before, fitted)
                    self.reason = f"{more} more worker{'s fit' if more > 1 else ' fits'}"
                    self._leave = RESTART

    def _look_at_lease(self) -> None:
        """Leave if the driver no longer renews its lease; a run without a driver has none."""
        entry, now = self._storage.stat(run_folder.LEASE), self._clock.monotonic()
        if entry is None:
            return
        if self._renewed is None or self._renewed[0] != entry.etag:
            self._renewed = (entry.etag, now)
            holder = _holder_id(self._storage)
            if self._holder is not None and holder not in (None, self._holder):
                raise LeaseLost(f"another driver has taken over {self._storage.url}")
            self._holder = holder or self._holder
        elif now - self._renewed[1] >= run_folder.LEASE_LEFT_S:
            self.reason = f"the driver has not renewed its lease for {now - self._renewed[1]:.0f} s"
            self._leave = RESTART


def _holder_id(storage: Storage) -> str | None:
    """Return the id of the lease's holder; None if the file is gone or not readable."""
    try:
        return str(json.loads(storage.read(run_folder.LEASE))["id"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
