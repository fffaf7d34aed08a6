"""Read, tokenise and pack a source once, and store the rows beside the runs.

    prepared = prepare(recipe, storage / ".prepared", progress=print)
    rows = prepared.rows("train")

Ray Data runs one task per unit of the source. A task reads the unit's tokens, which are made once
for a content and a tokenizer (rayapp.data.token_store), packs them into rows, and writes these as
one shard per split, then a small JSON summary, which marks the unit as done. All writes are atomic
and their content depends on the recipe only: the next run completes an interrupted preparation, and
two runs that prepare at once write the same bytes. The manifest, which names every shard, is
written last.

In a recipe with window_bytes a unit is a window (rayapp.data.prepared_windows): tasks of their own
make its tokens, before the task that packs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from rayapp.data import sources
from rayapp.data.prepared import (
    BLOCKS,
    MANIFEST,
    MAX_EXAMPLES,
    SPLITS,
    USED,
    Prepared,
    account_of,
    duplicate_share,
    load,
    unit_name,
    write_account,
)
from rayapp.data.ray_tasks import run_tasks
from rayapp.data.recipe import RowRecipe
from rayapp.data.report import UnitSummary, added, summed
from rayapp.data.token_rows import stored_bytes
from rayapp.data.token_sections import TokenisedRecord, TokenSection
from rayapp.data.token_store import FOLDER, TokenStore, name_of
from rayapp.data.tokenising import tokenised
from rayapp.data.unit_rows import UnitRows
from rayapp.storage import Storage, open_storage

READERS = 16  # unit summaries read at once


def prepare(
    recipe: RowRecipe,
    root: Storage,
    concurrency: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Return the data set of a recipe, preparing missing units first; needs a running Ray.

    `progress` is called with (bytes done, bytes in all).

    Raises:
        SourceError: the data cannot be read, or a part of them ends every process that reads it.
    """
    assert recipe.window_bytes is None, "rayapp.data.prepared_windows prepares windows"
    storage = root / recipe.fingerprint
    storage.write(USED, b"")
    found = load(storage)
    if found is not None:
        return found
    jobs = jobs_of(recipe)
    total = sum(unit.num_bytes for _, unit in jobs)
    whole = whole_units(storage, len(jobs), recipe.seq_len, len(recipe.values))
    missing = [index for index in range(len(jobs)) if index not in whole]
    finished = total - sum(jobs[i][1].num_bytes for i in missing)
    if missing:  # two runs at once begin at other units
        first = int.from_bytes(os.urandom(4)) % len(missing)
        missing = missing[first:] + missing[:first]
    tasks = [UnitTask(index, *jobs[index]) for index in missing]
    for task in run_tasks([recipe], root.url, tasks, concurrency):
        finished += task.unit.num_bytes
        if progress:
            progress(finished, total)
    whole = whole_units(storage, len(jobs), recipe.seq_len, len(recipe.values))
    assert len(whole) == len(jobs), f"shards in {storage.url} changed while they were being made"
    merged = merge(recipe, storage, dict(sorted(whole.items())))
    write_account(storage, MANIFEST, vars(merged))
    loaded = load(storage)
    assert loaded is not None, f"{storage.url}/{MANIFEST} does not match the shards just written"
    return loaded


Job = tuple[str, sources.ReadUnit]  # `train` or `eval`, and a unit of that source


@dataclass(frozen=True)
class UnitTask:
    """What a Ray task does."""

    index: int
    """Of the unit."""
    origin: str
    """`train` or `eval`."""
    unit: sources.ReadUnit
    """The unit, or a part of its blocks."""
    packs: bool = True
    """It writes the rows of a unit; else it makes tokens alone."""
    source: int = 0
    """Which of several recipes it is of."""

    def run(self, recipe: RowRecipe, url: str, folder: str) -> None:
        """Do it by its recipe; with `packs`, write a shard of each split, then `unit-<index>.json`.

        These lie in `folder` of the URL, beside the hashes of the documents. Blocks of tokens,
        which lie at the URL, are made where they are missing. Memory: the tokens of this unit, or
        of a batch of a stream.

        Raises:
            SourceError: a file is not of its format, so that the rest cannot be read.
        """
        source = self._source(recipe)
        store = TokenStore(open_storage(url) / FOLDER / recipe.tokens_key(source))
        if self.packs:
            self._pack(recipe, open_storage(url) / folder, source, store)
            return
        for block in self.unit.blocks:
            key, pieces = sources.content_key(source, block.pieces)
            store.make(key, partial(tokenised, recipe, source, pieces))

    def _pack(
        self, recipe: RowRecipe, storage: Storage, source: sources.DataSource, store: TokenStore
    ) -> None:
        fraction = _fraction(recipe) if self.origin == "train" else 1.0
        evaluated = self.origin == "eval" or recipe.window_bytes is None or self.index == 0
        evaluated = evaluated and not recipe.packing
        with ExitStack() as stack:
            rows = UnitRows(recipe, source, storage, self.index, stack)
            for block in self.unit.blocks:
                key, pieces = sources.content_key(source, block.pieces)
                rows.blocks.append(f"{recipe.tokens_key(source)}/{name_of(key)}")
                made = store.sections(key, partial(tokenised, recipe, source, pieces))
                for piece, record in _taken(source, block, made):
                    rows.count(piece, record)
                    if record.document is not None:
                        held_out = sources.is_eval(piece, record.drawn, fraction)
                        if evaluated or not held_out:
                            split = "eval" if held_out else "train"
                            rows.add(split, piece, record)
            summary = rows.summary()
        storage.write(_hashes_name(self.index), bytes(rows.hashes))
        write_account(storage, unit_name(self.index), summary)

    def _source(self, recipe: RowRecipe) -> sources.DataSource:
        source = recipe.source if self.origin == "train" else recipe.eval_source
        assert source is not None
        return source

    def place(self, recipe: RowRecipe) -> str:
        """Return the first piece that it reads, and the number of the others."""
        source = self._source(recipe)
        first, more = self.unit.pieces[0], len(self.unit.pieces) - 1
        if first.is_stream:
            place = f"{source.root}/{first.file}"
        elif source.format in ("text", "jsonl"):
            place = f"{source.root}/{first.file} bytes {first.start} to {first.end}"
        elif source.format == "parquet":
            place = f"{source.root}/{first.file} row group {first.start}"
        else:
            place = f"{first.file}[{first.start}]"
        return place + (f" (and {more} more parts)" if more else "")


def jobs_of(recipe: RowRecipe) -> list[Job]:
    """Return the units of a recipe in the order of their numbers."""
    fraction = _fraction(recipe)
    if recipe.window_bytes is None:
        units = sources.units(recipe.source, fraction)
    else:
        units = sources.windows(recipe.source, fraction, recipe.window_bytes)
    jobs = [("train", unit) for unit in units]
    if recipe.eval_source is not None and not recipe.packing:
        jobs += [("eval", unit) for unit in sources.units(recipe.eval_source, 1.0)]
    return jobs


def _taken(
    source: sources.DataSource, block: sources.Block, made: Iterator[TokenSection]
) -> Iterator[tuple[sources.Piece, TokenisedRecord]]:
    """Yield the records of a block that are a unit's, each with the unit's piece."""
    taken = dict(block.taken)
    for record in (record for section in made for record in section.records()):
        piece = taken.get(record.piece)
        if piece is None:
            continue
        by_place = source.format == "jsonl" and not piece.is_stream  # of a cell, or the whole of it
        if not by_place or piece.start <= record.place < piece.end:
            yield piece, record


def _fraction(recipe: RowRecipe) -> float:
    return 0.0 if recipe.eval_source is not None else recipe.eval_fraction


def _hashes_name(index: int) -> str:
    return f"hashes-{index:05d}.bin"


def merge(recipe: RowRecipe, storage: Storage, units: dict[int, UnitSummary]) -> Prepared:
    """Return the data set of units by their numbers, whose rows follow one another in this order.

    Write which blocks of tokens they came from.
    """
    shards: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
    examples: dict[str, str] = {}
    for unit in units.values():
        for split in SPLITS:
            if split in unit["shards"]:
                shards[split].append((unit["shards"][split], unit["counts"][split]["rows"]))
        for place, why in unit["examples"]:
            examples.setdefault(why, place)
    blocks = {name for unit in units.values() for name in unit.get("blocks", [])}
    storage.write(BLOCKS, "".join(f"{name}\n" for name in sorted(blocks)).encode())
    hashes = (storage.read(_hashes_name(index)) for index in units)
    duplicates = duplicate_share(np.frombuffer(data, np.uint64) for data in hashes)
    return Prepared(
        url=storage.url,
        fingerprint=recipe.fingerprint,
        parts=recipe.parts(),
        seq_len=recipe.seq_len,
        shards=shards,
        counts={s: summed(unit["counts"][s] for unit in units.values()) for s in SPLITS},
        bad=added(unit["bad"] for unit in units.values()),
        examples=[(place, why) for why, place in examples.items()][:MAX_EXAMPLES],
        records=sum(unit["records"] for unit in units.values()),
        duplicates=duplicates,
        notes=added(unit.get("notes", {}) for unit in units.values()),
    )


def whole_units(
    storage: Storage, count: int, seq_len: int, columns: int = 0
) -> dict[int, UnitSummary]:
    """Return, by unit, the summaries of units that are done, with shards of the right size."""
    sizes = {entry.name: entry.size for entry in storage.list()}
    present = [index for index in range(count) if unit_name(index) in sizes]
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda index: account_of(storage, unit_name(index), UnitSummary), present)
        summaries = dict(zip(present, found, strict=True))
    return {
        index: summary
        for index, summary in summaries.items()
        if summary is not None
        and sizes.get(_hashes_name(index)) == 8 * summary["counts"]["train"]["documents"]
        and all(
            sizes.get(name) == summary["counts"][split]["rows"] * stored_bytes(seq_len, columns)
            for split, name in summary["shards"].items()
        )
    }
