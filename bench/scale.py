"""What a large corpus costs the driver before its data are read: files are hard links to a few.

    python bench/scale.py [--gb 100 1000] [--file_mb 256 4] [--window_mib 256]

For each size of corpus and of its files, each in a fresh process: seconds and memory to list the
files, to cut them into units and into windows, and to make the tasks that the driver gives to Ray
Data; the largest task; and the objects that preparing leaves, per million tokens. Then the calls to
the storage that preparing takes per million tokens, counted on a small corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import corpus
import numpy as np

from rayapp.data import preparation as prepare
from rayapp.data import prepared
from rayapp.data.recipe import RowRecipe
from rayapp.data.sources import cutting, find
from rayapp.storage.base import Storage
from rayapp.storage.local import LocalStorage

LINKS = 30_000  # to one file
SEQ_LEN = 2048
CALLS = ("stat", "list", "read", "write", "create", "delete", "open_read", "open_write", "exists")
Made = TypeVar("Made")


def main() -> None:
    """Print a table of sizes, and the calls per million tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gb", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--file_mb", type=int, nargs="+", default=[256, 4])
    parser.add_argument("--window_mib", type=int, default=256)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.plan:
        plan(Path(asked.plan), asked.window_mib * 2**20)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        per_million, bytes_per_token = calls(folder / "small")
        for file_mb in asked.file_mb:
            for gb in asked.gb:
                data = folder / f"{gb}-{file_mb}"
                link(data, gb * 10**9 // (file_mb * 10**6), file_mb * 10**6)
                command = [sys.executable, __file__, "--plan", str(data)]
                command.append(f"--window_mib={asked.window_mib}")
                print(f"{gb} GB in files of {file_mb} MB", flush=True)
                own = {"PER_TOKEN": str(bytes_per_token), "XDG_CACHE_HOME": str(folder / "cache")}
                subprocess.run(command, check=True, env={**os.environ, **own})
        print("calls to the storage per million tokens prepared:", json.dumps(per_million))


def link(data: Path, count: int, size: int) -> None:
    """Make a folder of hard links to files of that size, which have no blocks on the disk."""
    data.mkdir()
    for number in range(count):
        source = data.with_name(f"{data.name}-{number // LINKS}.jsonl")
        if not source.exists():
            with source.open("wb") as file:
                file.truncate(size)
            os.utime(source, (0, 0))  # versions of files that just changed are not kept
        os.link(source, data / f"{number:07d}.jsonl")


def plan(data: Path, window_bytes: int) -> None:
    """Print what the driver does and holds before the first task of a corpus."""
    bytes_per_token = float(os.environ["PER_TOKEN"])
    source = timed("list", lambda: find(str(data)))
    millions = source.num_bytes / bytes_per_token / 1e6
    for name, make in (
        ("units", lambda: cutting.units(source, 0.0)),
        ("windows", lambda: cutting.windows(source, 0.0, window_bytes)),
    ):
        units = timed(name, make)
        blocks = sum(len(unit.blocks) for unit in units)
        tasks = [
            pickle.dumps(prepare.UnitTask(index, "train", unit)) for index, unit in enumerate(units)
        ]
        objects = blocks + 3 * len(units)  # a shard, its summary and its hashes
        print(
            f"    {len(units):,} of {blocks:,} blocks; tasks of {sum(map(len, tasks)) / 2**20:.0f} "
            f"MiB, the largest {max(map(len, tasks)) / 2**10:.0f} KiB; "
            f"{objects / millions:.2f} objects per million tokens",
            flush=True,
        )
        del units, tasks
    timed("digest", source.digest)
    timed("list again", lambda: find(str(data)))


def timed(name: str, make: Callable[[], Made]) -> Made:
    """Make a thing; print the seconds, and the memory of this process at most."""
    began = time.perf_counter()
    made = make()
    status = Path("/proc/self/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    seconds = time.perf_counter() - began
    print(f"  {name}: {seconds:.1f} s, the process at most {int(peak) / 1024:.0f} MiB", flush=True)
    return made


def calls(folder: Path) -> tuple[dict[str, float], float]:
    """Prepare a small corpus; return the calls per million tokens, and bytes a token."""
    rng = np.random.default_rng(0)
    pool = corpus.text_pool(rng)
    corpus.save_tokenizer(folder / "tokenizer", pool, 16_000)
    (folder / "data").mkdir()
    texts = corpus.documents(rng, pool, 400, 120_000)
    corpus.write(folder / "data" / "a.jsonl", texts, 48 * 2**20)
    recipe = corpus.recipe(str(folder / "data"), "text", str(folder / "tokenizer"), SEQ_LEN, 0.0)
    cutting.UNIT_BYTES, unit_bytes = 16 * 2**20, cutting.UNIT_BYTES
    try:
        counted = counting(lambda: prepared_rows(recipe, folder))
    finally:
        cutting.UNIT_BYTES = unit_bytes
    done = prepared.load(LocalStorage(str(folder / "rows" / recipe.fingerprint)))
    assert done is not None
    tokens = done.counts["train"]["tokens"]
    each = {name: round(1e6 * count / tokens, 2) for name, count in counted.items()}
    return each, recipe.source.num_bytes / tokens


def prepared_rows(recipe: RowRecipe, folder: Path) -> None:
    """Prepare every unit here, then write the manifest."""
    root = LocalStorage(str(folder / "rows"))
    for index, (origin, unit) in enumerate(prepare.jobs_of(recipe)):
        prepare.UnitTask(index, origin, unit).run(recipe, root.url, recipe.fingerprint)
    prepare.prepare(recipe, root)


def counting(work: Callable[[], Any]) -> Counter[str]:
    """Return how often each method of a storage was called."""
    counted: Counter[str] = Counter()
    plain: dict[str, Any] = {}

    def counter(name: str, call: Any) -> Any:
        def counted_call(self: Storage, *given: Any, **named: Any) -> Any:
            counted[name] += 1
            return call(self, *given, **named)

        return counted_call

    for name in CALLS:
        if name in vars(LocalStorage):
            plain[name] = vars(LocalStorage)[name]
            setattr(LocalStorage, name, counter(name, plain[name]))
    try:
        work()
    finally:
        for name, call in plain.items():
            setattr(LocalStorage, name, call)
    return counted


if __name__ == "__main__":
    main()
