"""Record some steps of a rank into the run's folder: a trace, and on a GPU how memory was used.

profiler = Profiler(storage, range(20, 23), device)
profiler.after(19)        # begins: step 20 is next
profiler.after(22)        # stores profiles/steps-20-22.trace.json.gz
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import torch
from torch.profiler import profile

from rayapp.observe.run_folder import PROFILES
from rayapp.storage import Storage

MOST_ALLOCATIONS = 100_000  # of a snapshot, the newest

logger = logging.getLogger("rayapp.train")


class Profiler:
    """torch.profiler over the given steps; any error of it is a warning."""

    def __init__(self, storage: Storage, steps: range, device: torch.device) -> None:
        self._storage, self._steps, self._cuda = storage, steps, device.type == "cuda"
        self._running: tuple[int, profile] | None = None

    def after(self, done: int) -> None:
        """Begin or end, now that so many steps are done."""
        if (done + 1 in self._steps) == (self._running is not None):
            return
        try:
            if self._running is None:
                self._begin(done + 1)
            else:
                self._store(done)
        except Exception as error:  # torch's own, or the storage's: the run goes on
            self._steps, self._running = range(0), None
            logger.warning("train.profile_steps has no profile: %r", error)

    def close(self, done: int) -> None:
        """Store what was recorded, if the run ends within the steps; warn if it ends before."""
        if self._steps and done < self._steps.start:
            logger.warning("train.profile_steps has no profile: the run ends after step %d", done)
        self._steps = range(0)
        self.after(done)

    def _begin(self, first: int) -> None:
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        running = profile()
        running.start()
        self._running = first, running

    def _store(self, last: int) -> None:
        assert self._running is not None
        (first, running), self._running = self._running, None
        running.stop()
        if last < first:
            return
        with tempfile.TemporaryDirectory() as folder:
            running.export_chrome_trace(f"{folder}/trace.json.gz")
            if self._cuda:
                torch.cuda.memory._dump_snapshot(f"{folder}/memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
            for path in Path(folder).iterdir():
                name = f"{PROFILES}/steps-{first}-{last}.{path.name}"
                with path.open("rb") as file, self._storage.open_write(name) as out:
                    shutil.copyfileobj(file, out)
