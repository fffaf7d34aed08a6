"""Prepare a source window by window, in the order in which a run visits them.

    windows = Windows(recipe, storage / ".prepared", seed)
    prepared = windows.prepare(rows=10_000)      # or all, if there are fewer

Each window is a unit of the recipe (rayapp.data.prepare), and done when its summary is stored. So a
preparation that is cut off goes on where it was, and other processes see windows as they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from rayapp.data.prepare import UnitTask, jobs_of, merge, run_tasks, unit_name, whole_units
from rayapp.data.prepared import USED, Prepared
from rayapp.data.recipe import RowRecipe
from rayapp.data.report import UnitSummary
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

    def prepare(self, rows: int | None = None) -> Prepared:
        """Prepare the windows that hold the first rows of the run, or all; needs a running Ray.

        Raises:
            SourceError: the data cannot be read, or a part of them ends every process that reads
                it.
        """
        total = sum(unit.num_bytes for _, unit in self.jobs)
        left = sum(unit.num_bytes for n, (_, unit) in enumerate(self.jobs) if n not in self.whole)
        if not self.holds(rows):
            tasks = list(self._tasks())
            for task in run_tasks(self.recipe, self.root.url, tasks, self.concurrency):
                if task.packs:
                    name = unit_name(task.index)
                    self.whole[task.index] = json.loads(self.storage.read(name))
                left -= task.unit.num_bytes
                if self.progress:
                    self.progress(total - left, total)
                if self.holds(rows):
                    break
        return self.prepared()

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
