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

    def after(self, done: int, last: bool = False) -> None:
        """Begin or end, now that so many steps are done; `last`: the run ends."""
        try:
            if self._running is not None and (last or done + 1 not in self._steps):
                self._store(*self._running, done)
            elif not last and self._running is None and done + 1 in self._steps:
                if self._cuda:
                    torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
                self._running = done + 1, profile()
                self._running[1].start()
            if last and done < self._steps.start:
                logger.warning("train.profile_steps has no profile: the run ends at step %d", done)
        except Exception as error:  # torch's, or the storage's: the run goes on
            logger.warning("train.profile_steps has no profile: %r", error)
            self._steps, self._running = range(0), None

    def _store(self, first: int, running: profile, last: int) -> None:
        self._running = None
        running.stop()
        with tempfile.TemporaryDirectory() as folder:
            running.export_chrome_trace(f"{folder}/trace.json.gz")
            if self._cuda:
                torch.cuda.memory._dump_snapshot(f"{folder}/memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
            for path in Path(folder).iterdir() if last >= first else ():
                name = f"{PROFILES}/steps-{first}-{last}.{path.name}"
                with path.open("rb") as file, self._storage.open_write(name) as out:
                    shutil.copyfileobj(file, out)
