"""Prepare sources window by window, in the order in which a run visits them.

    windows = [Windows(recipe, storage / ".prepared", seed) for recipe in recipes]
    preparation = Preparation(windows)
    every = preparation.prepare([10_000, 300])    # rows of each source, or all, if there are fewer

    preparation.start([10_000, 300], check=refuse, cpus=8)     # or: the same in a thread
    every = preparation.wait_for([32, 1])                      # before the first step

    growing = GrowingRows(prepared, order)                     # in the tasks of the stream
    rows, order = growing.at(step)              # waits for the windows that the step needs

Each window is a unit of the recipe (rayapp.data.preparation), and done when its summary is stored.
So an interrupted preparation goes on where it was, and other processes see windows as they come.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from rayapp.data.preparation import UnitTask, jobs_of, merge, whole_units
from rayapp.data.prepared import USED, Prepared, account_of, unit_name
from rayapp.data.ray_tasks import run_tasks
from rayapp.data.recipe import RowRecipe
from rayapp.data.report import UnitSummary
from rayapp.data.sources import SourceError
from rayapp.data.token_rows import TokenRows
from rayapp.order import Order, visits
from rayapp.storage import Storage, open_storage

BLOCKS_OF_TASK = 4  # of tokens
POLL_S = 0.5

Check = Callable[[list[Prepared]], str | None]


class WindowProgress(NamedTuple):
    """How far the windows are that hold the first rows of a run."""

    ready: int
    needed: int
    """An estimate unless it is `of`."""
    of: int
    """Windows in all."""
    done: int
    """Bytes."""
    total: int
    """Bytes of those that are needed; an estimate as they are."""


class Windows:
    """The windows of a source, of which some are prepared."""

    def __init__(self, recipe: RowRecipe, root: Storage, seed: int) -> None:
        """Find what is prepared.

        Raises:
            SourceError: the data cannot be read.
        """
        self.recipe, self.root = recipe, root
        self.storage = root / recipe.fingerprint
        self.storage.write(USED, b"")
        self.jobs = jobs_of(recipe)
        self.count = sum(origin == "train" for origin, _ in self.jobs)
        self.held_out = list(range(self.count, len(self.jobs)))
        """Units of the files that are held out: a run evaluates on all of them."""
        self.order = [*self.held_out, *(visits(self.count, seed) if self.count else [])]
        sizes = recipe.seq_len, len(recipe.values)
        self.whole = whole_units(self.storage, len(self.jobs), *sizes)
        self._begun: dict[int, int] = {}
        """Bytes tokenised of each window that is not packed."""

    def bytes_left(self) -> int:
        return sum(self._size(index) for index in self.order if index not in self.whole)

    def end(self, task: UnitTask) -> None:
        begun = self._begun.get(task.index, 0)
        self._begun[task.index] = begun + task.unit.num_bytes
        if task.packs:
            done = account_of(self.storage, unit_name(task.index), UnitSummary)
            assert done is not None, f"unit {task.index} in {self.storage.url} was just written"
            self.whole[task.index] = done

    def progress(self, rows: int) -> WindowProgress:
        """Return how far the windows are that hold the first rows of the run."""
        known = self._known()
        ready, so_far = self._ready(known), _rows(known)
        needed = math.ceil(rows * ready / so_far) if so_far else self.count
        needed = min(max(needed, ready + (not self.holds(rows))), self.count)
        asked = self.order[: len(self.held_out) + needed]
        done = sum(self._size(i) if i in known else self._begun.get(i, 0) for i in asked)
        return WindowProgress(ready, needed, self.count, done, sum(map(self._size, asked)))

    def holds(self, rows: int | None) -> bool:
        """Return whether the first rows of the run, or all, are prepared."""
        known = self._known()
        if len(known) == len(self.jobs):
            return True
        if rows is None or not all(index in known for index in self.held_out):
            return False
        return _rows(known) >= rows

    def prepared(self) -> Prepared:
        """Return the windows that are prepared, up to the first that is not."""
        known = self._known()
        merged = merge(self.recipe, self.storage, known)
        return replace(merged, windows=(self.count,), known=(self._ready(known),))

    def missing(self, rows: int | None) -> list[tuple[float, int]]:
        """Return (share of the run before it is needed, unit) of the units that are missing.

        If the run needs only a part of the data, these are the units that are estimated to hold its
        rows: at least one, and exactly one until a window gives an estimate.
        """
        if self.holds(rows):
            return []
        known = self._known()
        trained = sum(self._size(index) for index in known if index < self.count)
        per_byte = _rows(known) / trained if trained else 0.0
        found: list[tuple[float, int]] = []
        before = float(_rows(known))
        for index in self.order:
            if index in self.whole:
                before += 0 if index in known else self.whole[index]["counts"]["train"]["rows"]
                continue
            share = 0.0 if rows is None else before / max(rows, 1)
            held_out = index >= self.count
            after_one = any(other < self.count for _, other in found)
            if rows is not None and after_one and (share >= 1 or not per_byte):
                break
            found.append((0.0 if held_out else share, index))
            before += 0 if held_out else self._size(index) * per_byte
        return found

    def tasks(self, index: int) -> Iterator[UnitTask]:
        """Yield the tasks of a unit: the tokens first."""
        origin, unit = self.jobs[index]
        for first in range(0, len(unit.blocks), BLOCKS_OF_TASK):
            blocks = unit.blocks[first : first + BLOCKS_OF_TASK]
            pieces = tuple(piece for block in blocks for _, piece in block.taken)
            share = unit.num_bytes * len(blocks) // len(unit.blocks)
            part = replace(unit, pieces=pieces, blocks=blocks, num_bytes=share)
            yield UnitTask(index, origin, part, packs=False)
        yield UnitTask(index, origin, replace(unit, num_bytes=0))

    def _known(self) -> dict[int, UnitSummary]:
        found = {}
        for index in self.order:
            if index not in self.whole:
                break
            found[index] = self.whole[index]
        return found

    def _ready(self, known: dict[int, UnitSummary]) -> int:
        return max(0, len(known) - len(self.held_out))

    def _size(self, index: int) -> int:
        return self.jobs[index][1].num_bytes


def _rows(units: dict[int, UnitSummary]) -> int:
    return sum(unit["counts"]["train"]["rows"] for unit in units.values())


class Preparation:
    """Prepares the windows of one source, or of those of a mixture."""

    def __init__(
        self,
        sources: Sequence[Windows],
        concurrency: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run at most `concurrency` tasks; call `progress` with (bytes done, bytes in all)."""
        self.sources, self.concurrency, self.progress = list(sources), concurrency, progress
        self.problem: str | None = None
        """Why the preparation in the thread has failed."""
        self.ended = False
        """Whether that thread has nothing left to do."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, rows: Sequence[int], check: Check, cpus: int) -> None:
        """Begin to prepare the first rows of the run in a thread, in tasks beside the training.

        `check` returns why all that was prepared is not to be trained on, or None. At most `cpus`
        tasks run at once. They reserve no CPU in Ray: the workers may hold every one, and wait for
        their rows.
        """
        self.concurrency = self.concurrency or cpus
        args = (rows, check)
        self._thread = threading.Thread(target=self._run, args=args, name="windows", daemon=True)
        self._thread.start()

    def wait_for(self, rows: Sequence[int]) -> list[Prepared]:
        """Wait until the thread has prepared the first rows of the run; return each source's.

        Raises:
            SourceError: as `prepare`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.problem is not None or self.holds(rows))
        if self.problem is not None:
            raise SourceError(self.problem)
        return [each.prepared() for each in self.sources]

    def close(self) -> None:
        """End the thread after the task that ends next."""
        self._closed = True

    def _run(self, rows: Sequence[int], check: Check) -> None:
        try:
            problem = check(self.prepare(rows, num_cpus=0))
        except Exception as error:  # of any kind: the run must not wait for rows for ever
            problem = str(error) or type(error).__name__
        with self._changed:
            self.problem, self.ended = problem, True
            self._changed.notify_all()
        if self.progress:
            self.progress(0, 0)

    def prepare(
        self, rows: Sequence[int] | None = None, num_cpus: float | None = None
    ) -> list[Prepared]:
        """Prepare the windows that hold the first rows of each source, or all; needs a running Ray.

        Each task reserves `num_cpus` in Ray, by default one.

        Raises:
            SourceError: the data cannot be read, or a part of them ends every process that reads
                it.
        """
        total = sum(unit.num_bytes for each in self.sources for _, unit in each.jobs)
        left = sum(each.bytes_left() for each in self.sources)
        while not (self._closed or self.holds(rows)):
            of_tasks = (self._tasks(rows), self.concurrency, num_cpus)
            recipes = [each.recipe for each in self.sources]
            for task in run_tasks(recipes, self.sources[0].root.url, *of_tasks):
                with self._changed:
                    self.sources[task.source].end(task)
                    self._changed.notify_all()
                left -= task.unit.num_bytes
                if self.progress:
                    self.progress(total - left, total)
                if self._closed or self.holds(rows):
                    break
        return [each.prepared() for each in self.sources]

    def holds(self, rows: Sequence[int] | None) -> bool:
        """Return whether the first rows of each source, or all, are prepared."""
        return all(each.holds(count) for each, count in self._with(rows))

    def state(self, rows: Sequence[int]) -> WindowProgress:
        """Return how far the windows of all sources are that hold the first rows of the run."""
        each = [windows.progress(count) for windows, count in zip(self.sources, rows, strict=True)]
        return WindowProgress(*map(sum, zip(*each, strict=True)))

    def _with(self, rows: Sequence[int] | None) -> Iterator[tuple[Windows, int | None]]:
        asked: Sequence[int | None] = rows or [None] * len(self.sources)
        yield from zip(self.sources, asked, strict=True)

    def _tasks(self, rows: Sequence[int] | None) -> list[UnitTask]:
        """Return the next tasks, those that are needed first in front.

        A single source gets all of its tasks; the caller stops once the first rows exist. One of
        several gets the tasks that the run is estimated to need, so that none is done in vain.
        """
        asked = None if len(self.sources) == 1 else rows
        missing = [
            (share, source, index)
            for source, (windows, count) in enumerate(self._with(asked))
            for share, index in windows.missing(count)
        ]
        ordered = sorted(missing, key=lambda each: each[0])  # stable: a source's visits keep order
        return [
            replace(task, source=source)
            for _, source, index in ordered
            for task in self.sources[source].tasks(index)
        ]


class GrowingRows:
    """The training rows that are known, which become more."""

    def __init__(self, prepared: Prepared, order: Order) -> None:
        self.prepared, self.order = prepared, order
        self.rows, self.known = prepared.rows("train"), list(prepared.known)
        self._shards = prepared.shards_of_windows

    def at(self, step: int) -> tuple[TokenRows, Order]:
        """Return rows and order that have a step; they are longer from call to call."""
        if self.order.more:
            known = sum(self.known)
            for source, rows in enumerate(self.order.needed(step)):
                self._extend(source, rows)
            if sum(self.known) > known:
                self._renew()
        return self.rows, self.order

    def _extend(self, source: int, rows: int) -> None:
        """Wait until the windows of a source have so many rows, or are all known."""
        folder = f"{self.prepared.places[source]}/" if self.prepared.places else ""
        windows, shards = self.prepared.windows[source], self._shards[source]
        while self.known[source] < windows and sum(count for _, count in shards) < rows:
            index = visits(windows, self.order.seed)[self.known[source]]
            shard = _shard_of(f"{self.prepared.url}/{folder}".rstrip("/"), index)
            self.known[source] += 1
            if shard is not None:
                name, count = shard
                shards.append((folder + name, count))

    def _renew(self) -> None:
        sizes = tuple(sum(count for _, count in shards) for shards in self._shards)
        shards = self.prepared.shards | {"train": [*itertools.chain(*self._shards)]}
        grown = replace(self.prepared, shards=shards, sizes=sizes, known=tuple(self.known))
        self.rows = grown.rows("train")
        self.order = replace(
            self.order,
            num_rows=sum(sizes),
            sizes=sizes if self.order.sizes else (),
            windows=grown.windows_rows,
            follow=grown.follow,
        )


@lru_cache(maxsize=2**16)
def _shard_of(url: str, index: int) -> tuple[str, int] | None:
    """Wait for a window; return its training shard with its number of rows, None if it has none."""
    storage, name = open_storage(url), unit_name(index)
    while (unit := account_of(storage, name, UnitSummary)) is None:
        time.sleep(POLL_S)
    shard = unit["shards"].get("train")
    return None if shard is None else (shard, unit["counts"]["train"]["rows"])
