"""Prepare a source window by window, in the order in which a run visits them.

    windows = Windows(recipe, storage / ".prepared", seed)
    prepared = windows.prepare(rows=10_000)      # or all, if there are fewer

    windows.start(rows=10_000, check=refuse)     # or: the same in a thread
    prepared = windows.wait_for(rows=32)         # before the first step

Each window is a unit of the recipe (rayapp.data.prepare), and done when its summary is stored. So a
preparation that is cut off goes on where it was, and other processes see windows as they come.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from rayapp.data.prepare import UnitTask, jobs_of, merge, run_tasks, whole_units
from rayapp.data.prepared import USED, Prepared, unit_name
from rayapp.data.recipe import RowRecipe
from rayapp.data.report import UnitSummary
from rayapp.data.sources import SourceError
from rayapp.order import visits
from rayapp.storage import Storage

BLOCKS_OF_TASK = 4  # of tokens


class Windows:
    """The windows of a source, of which some are prepared."""

    def __init__(
        self,
        recipe: RowRecipe,
        root: Storage,
        seed: int,
        concurrency: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Find what is prepared. `progress` is called with (bytes done, bytes in all).

        Raises:
            SourceError: the data cannot be read.
        """
        self.recipe, self.root, self.concurrency = recipe, root, concurrency
        self.progress = progress
        self.storage = root / recipe.fingerprint
        self.storage.write(USED, b"")
        self.jobs = jobs_of(recipe)
        self.count = sum(origin == "train" for origin, _ in self.jobs)
        held_out = list(range(self.count, len(self.jobs)))
        """Units of the files that are held out: a run evaluates on all of them."""
        self.order = [*held_out, *(visits(self.count, seed) if self.count else [])]
        self.whole = whole_units(self.storage, len(self.jobs), recipe.seq_len)
        self.problem: str | None = None
        """Why the preparation in the thread has failed."""
        self.ended = False
        """Whether that thread has nothing left to do."""
        self._begun: dict[int, int] = {}
        """Bytes tokenised of each window that is not packed."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, rows: int, check: Callable[[Prepared], str | None], cpus: int) -> None:
        """Begin to prepare the first rows of the run in a thread, in tasks beside the training.

        `check` returns why all that was prepared is not to be trained on, or None. At most `cpus`
        tasks run at once. They reserve no CPU in Ray: the workers may hold every one, and wait for
        their rows.
        """
        self.concurrency = self.concurrency or cpus
        args = (rows, check)
        self._thread = threading.Thread(target=self._run, args=args, name="windows", daemon=True)
        self._thread.start()

    def wait_for(self, rows: int) -> Prepared:
        """Wait until the thread has prepared the first rows of the run, and return the windows.

        Raises:
            SourceError: as `prepare`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.problem is not None or self.holds(rows))
        if self.problem is not None:
            raise SourceError(self.problem)
        return self.prepared()

    def close(self) -> None:
        """End the thread after the task that ends next."""
        self._closed = True

    def _run(self, rows: int, check: Callable[[Prepared], str | None]) -> None:
        try:
            problem = check(self.prepare(rows, num_cpus=0))
        except Exception as error:  # of any kind: the run must not wait for rows for ever
            problem = str(error) or type(error).__name__
        with self._changed:
            self.problem, self.ended = problem, True
            self._changed.notify_all()
        if self.progress:
            self.progress(0, 0)

    def prepare(self, rows: int | None = None, num_cpus: float | None = None) -> Prepared:
        """Prepare the windows that hold the first rows of the run, or all; needs a running Ray.

        Each task reserves `num_cpus` in Ray, by default one.

        Raises:
            SourceError: the data cannot be read, or a part of them ends every process that reads
                it.
        """
        total = sum(unit.num_bytes for _, unit in self.jobs)
        left = sum(unit.num_bytes for n, (_, unit) in enumerate(self.jobs) if n not in self.whole)
        if not self.holds(rows):
            tasks = list(self._tasks())
            of_tasks = (self.root.url, tasks, self.concurrency, num_cpus)
            for task in run_tasks(self.recipe, *of_tasks):
                begun = self._begun.get(task.index, 0)
                self._begun[task.index] = begun + task.unit.num_bytes
                if task.packs:
                    summary = json.loads(self.storage.read(unit_name(task.index)))
                    with self._changed:
                        self.whole[task.index] = summary
                        self._changed.notify_all()
                left -= task.unit.num_bytes
                if self.progress:
                    self.progress(total - left, total)
                if self._closed or self.holds(rows):
                    break
        return self.prepared()

    def state(self, rows: int) -> tuple[int, int, int, int]:
        """Return how far the windows are that hold the first rows of the run.

        These are the number of the window that is being prepared, from 1, that of the last, and the
        bytes done and in all. The last two numbers are estimates unless all windows are needed.
        """
        known, held_out = self._known(), len(self.jobs) - self.count
        ready = max(0, len(known) - held_out)
        so_far = sum(unit["counts"]["train"]["rows"] for unit in known.values())
        needed = math.ceil(rows * ready / so_far) if so_far else self.count
        needed = min(max(needed, ready + 1), self.count)
        sizes = {index: self.jobs[index][1].num_bytes for index in self.order[: held_out + needed]}
        done = sum(s if i in known else self._begun.get(i, 0) for i, s in sizes.items())
        return min(ready + 1, needed), needed, done, sum(sizes.values())

    def holds(self, rows: int | None) -> bool:
        """Return whether the first rows of the run, or all, are prepared."""
        known = self._known()
        if len(known) == len(self.jobs):
            return True
        if rows is None or not all(index in known for index in self.order[: -self.count]):
            return False
        return sum(unit["counts"]["train"]["rows"] for unit in known.values()) >= rows

    def prepared(self) -> Prepared:
        """Return the windows that are prepared, up to the first that is not."""
        known = self._known()
        merged = merge(self.recipe, self.storage, known)
        ready = max(0, len(known) - (len(self.jobs) - self.count))
        return replace(merged, windows=self.count, known=ready)

    def _known(self) -> dict[int, UnitSummary]:
        found = {}
        for index in self.order:
            if index not in self.whole:
                break
            found[index] = self.whole[index]
        return found

    def _tasks(self) -> Iterator[UnitTask]:
        """Yield the tasks of the units that are missing: of each, the tokens first."""
        for index in self.order:
            if index in self.whole:
                continue
            origin, unit = self.jobs[index]
            for first in range(0, len(unit.blocks), BLOCKS_OF_TASK):
                blocks = unit.blocks[first : first + BLOCKS_OF_TASK]
                pieces = tuple(piece for block in blocks for _, piece in block.taken)
                share = unit.num_bytes * len(blocks) // len(unit.blocks)
                part = replace(unit, pieces=pieces, blocks=blocks, num_bytes=share)
                yield UnitTask(index, origin, part, packs=False)
            yield UnitTask(index, origin, replace(unit, num_bytes=0))
