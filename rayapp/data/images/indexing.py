"""Decode every file once, and write an index of the images' places, labels and digests.

    images = prepare(recipe, storage / ".prepared", concurrency=None, progress=print)

Ray Data runs one task per unit of files. A task writes its part of the index, then a small JSON
summary, which marks the unit as done. Files that are damaged or no images are counted and named,
and are not in the index. The manifest, which marks the index as complete, is written last.
"""

from __future__ import annotations

import json
import pickle
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import numpy as np

from rayapp.data.images import sources
from rayapp.data.images.index import (
    EVAL_ROOT,
    MANIFEST,
    OWN_ROOT,
    READERS,
    RECORD,
    SPLITS,
    TRAIN_ROOT,
    ImageRecipe,
    Images,
    Records,
    digest_of,
    load,
    packed,
    unpacked,
)
from rayapp.data.prepared import MAX_EXAMPLES
from rayapp.data.sources import SourceError
from rayapp.storage import Storage, open_storage

Job = tuple[int, tuple[sources.ImageFile, ...]]  # root, files
Progress = Callable[[int, int], None]


def prepare(
    recipe: ImageRecipe,
    root: Storage,
    concurrency: int | None = None,
    progress: Progress | None = None,
) -> Images:
    """Return the index of a recipe, indexing missing units first; needs a running Ray.

    `progress` is called with (bytes done, bytes in all).

    Raises:
        SourceError: a container cannot be read, memory is full, or held-out images are of unknown
            classes.
    """
    storage = root / recipe.fingerprint
    index = load(storage)
    if index is not None:
        return index
    jobs: list[Job] = [(TRAIN_ROOT, unit) for unit in sources.units(recipe.source)]
    if recipe.eval_source is not None:
        jobs += [(EVAL_ROOT, unit) for unit in sources.units(recipe.eval_source)]
    sizes = [sum(file.size for file in files) for _, files in jobs]
    missing = [n for n in range(len(jobs)) if not storage.exists(_summary_name(n))]
    finished = sum(sizes) - sum(sizes[n] for n in missing)
    for number in _run_units(recipe, storage.url, jobs, missing, concurrency):
        finished += sizes[number]
        if progress:
            progress(finished, sum(sizes))
    _merge(recipe, storage, len(jobs))
    loaded = load(storage)
    assert loaded is not None, f"{storage.url}/{MANIFEST} vanished as it was made"
    return loaded


def index_unit(recipe: ImageRecipe, url: str, number: int, job: Job) -> None:
    """Read and decode the files of one unit, and write its part of the index.

    Memory: one file, and of Parquet all images of the unit.
    """
    origin, files = job
    storage = open_storage(url)
    source = recipe.source if origin == TRAIN_ROOT else recipe.eval_source
    assert source is not None
    rows: dict[str, list[tuple[Any, ...]]] = {split: [] for split in SPLITS}
    names: dict[str, int] = {}
    labels: dict[str, int] = {}
    copies: list[bytes] = []
    copied = 0
    bad: Counter[str] = Counter()
    examples: list[tuple[str, str]] = []
    records = 0
    try:
        for image in sources.read(source.root, source.format, files):
            records += 1
            try:
                problem = sources.problem_of(image)
            except MemoryError as error:
                raise SourceError(
                    f"{image.name} cannot be decoded: this machine's memory is full. Set a lower "
                    "data.workers, or take a machine with more"
                ) from error
            if problem is not None:
                bad[problem] += 1
                if len(examples) < MAX_EXAMPLES:
                    examples.append((image.name, problem))
                continue
            root, file, offset = origin, image.file, image.offset
            if offset < 0:  # of Parquet
                root, file, offset = OWN_ROOT, _copies_name(number), copied
                copies.append(image.data)
                copied += len(image.data)
            held = origin == EVAL_ROOT or is_held_out(image.name, recipe.eval_fraction)
            name = names.setdefault(file, len(names))
            label = labels.setdefault(unicodedata.normalize("NFC", image.label), len(labels))
            size, digest = len(image.data), digest_of(image.data)
            rows["eval" if held else "train"].append((root, name, 0, offset, size, label, digest))
    except SourceError as error:
        storage.write(_summary_name(number), json.dumps({"error": str(error)}).encode())
        return
    if copies:
        storage.write(_copies_name(number), b"".join(copies))
    for split in SPLITS:
        part = packed(np.array(rows[split], RECORD), list(names), list(labels))
        storage.write(f"{split}-{number:05d}.npz", part)
    summary = {"records": records, "bad": dict(bad), "examples": examples}
    storage.write(_summary_name(number), json.dumps(summary).encode())


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether an image is held out, by a hash of its name."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def class_names(labels: set[str]) -> list[str]:
    """Sort the classes: by value if all are numbers, else by name.

    >>> class_names({"10", "9"}), class_names({"10", "9", "cat"})
    (['9', '10'], ['10', '9', 'cat'])
    """
    numbers = all(label.isdecimal() for label in labels)
    return sorted(labels, key=lambda label: (int(label) if numbers else 0, label))


def _run_units(
    recipe: ImageRecipe, url: str, jobs: list[Job], missing: list[int], concurrency: int | None
) -> Iterator[int]:
    """Run the missing units as Ray Data tasks and yield their numbers as they end."""
    if not missing:
        return
    import ray.data

    def bare(source: sources.ImageSource | None) -> Any:
        """Drop the list of files, which may be long: a unit names its own."""
        return source and sources.ImageSource(source.root, source.format, ())

    light = ImageRecipe(bare(recipe.source), bare(recipe.eval_source), recipe.eval_fraction)

    def work(row: dict[str, Any]) -> dict[str, Any]:
        index_unit(light, url, int(row["number"]), pickle.loads(row["job"]))
        return {"number": row["number"]}

    items = [{"number": number, "job": pickle.dumps(jobs[number])} for number in missing]
    dataset = ray.data.from_items(items, override_num_blocks=len(items))
    mapped = dataset.map(work, concurrency=concurrency)
    # By default Ray Data fails after 30 minutes without a result; one file may take longer.
    mapped.context.execution_no_progress_timeout_s = -1
    for row in mapped.iter_rows():
        yield int(row["number"])


def _merge(recipe: ImageRecipe, storage: Storage, count: int) -> None:
    """Join the parts of all units, in their order, and write the manifest."""
    with ThreadPoolExecutor(READERS) as pool:
        texts = list(pool.map(lambda n: storage.read(_summary_name(n)), range(count)))
        summaries = [json.loads(text) for text in texts]
        failed = [(n, each["error"]) for n, each in enumerate(summaries) if "error" in each]
        if failed:
            for number, _ in failed:  # so that the next command reads the unit again
                storage.delete(_summary_name(number))
            raise SourceError(failed[0][1])
        parts = {}
        for split in SPLITS:
            files = [f"{split}-{number:05d}.npz" for number in range(count)]
            parts[split] = [unpacked(data) for data in pool.map(storage.read, files)]
    classes = class_names(
        {labels[i] for records, _, labels in parts["train"] for i in set(records["label"].tolist())}
    )
    merged: dict[str, Records] = {}
    for split in SPLITS:
        merged[split], names = _joined(parts[split], classes)
        storage.write(f"{split}.records", merged[split].tobytes())
        storage.write(f"{split}.names", names)
    train = merged["train"]
    bad: Counter[str] = Counter()
    for each in summaries:
        bad.update(each["bad"])
    examples = [example for each in summaries for example in each["examples"]][:MAX_EXAMPLES]
    source, held = recipe.source, recipe.eval_source
    manifest = {
        "fingerprint": recipe.fingerprint,
        "parts": recipe.parts(),
        "roots": [source.root, held.root if held else source.root, storage.url],
        "classes": classes,
        "counts": {split: len(records) for split, records in merged.items()},
        "class_counts": np.bincount(train["label"], minlength=len(classes)).tolist(),
        "bad": dict(bad),
        "examples": examples,
        "records": sum(each["records"] for each in summaries),
        "num_bytes": sum(int(records["size"].sum()) for records in merged.values()),
        "duplicates": 1 - len(np.unique(train["digest"])) / len(train) if len(train) else 0.0,
    }
    storage.write(MANIFEST, json.dumps(manifest, indent=1).encode())


def _joined(
    parts: list[tuple[Records, list[str], list[str]]], classes: list[str]
) -> tuple[Records, bytes]:
    """Return the records of all units, and the file names that they refer to.

    Raises:
        SourceError: held-out images are of a class that no training image has.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    joined, texts, at = [], [], 0
    for records, names, labels in parts:
        used = sorted(set(records["label"].tolist()))
        unknown = [labels[i] for i in used if labels[i] not in numbers]
        if unknown:
            raise SourceError(
                f"data.eval_path has classes that the training data lack: "
                f"{', '.join(unknown[:5])}. Give held-out images of the same classes"
            )
        encoded = [name.encode() for name in names]
        starts = at + np.cumsum([0, *(len(name) for name in encoded)])
        records = records.copy()
        if len(records):
            places = records["name_at"].astype(np.int64)
            records["name_at"] = starts[places]
            records["name_size"] = np.array([len(name) for name in encoded])[places]
            table = np.zeros(max(used) + 1, np.int32)
            for i in used:
                table[i] = numbers[labels[i]]
            records["label"] = table[records["label"]]
        joined.append(records)
        texts += encoded
        at = int(starts[-1])
    return np.concatenate(joined), b"".join(texts)


def _summary_name(number: int) -> str:
    return f"unit-{number:05d}.json"


def _copies_name(number: int) -> str:
    return f"images-{number:05d}.bin"
