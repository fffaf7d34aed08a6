"""Decode every file once, and write an index of the images' places, labels and digests.

    images = prepare(recipe, storage / ".prepared", concurrency=None, progress=print)

Ray Data runs one task per unit of files. A task writes its part of the index, then a small JSON
summary, which marks the unit as done. Files that are damaged or no images are counted and named,
and are not in the index. The manifest, which marks the index as complete, is written last.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayapp.data.images import image_sources
from rayapp.data.images.index import (
    EVAL_ROOT,
    OWN_ROOT,
    READERS,
    RECORD,
    TRAIN_ROOT,
    ImageRecipe,
    Images,
    Records,
    digest_of,
    load,
    packed,
    unpacked,
)
from rayapp.data.prepared import MANIFEST, MAX_EXAMPLES, SPLITS
from rayapp.data.ray_tasks import run_tasks
from rayapp.data.sources import DataFile, SourceError, drawn_of
from rayapp.storage import Storage, open_storage


def prepare(
    recipe: ImageRecipe,
    root: Storage,
    concurrency: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Images:
    """Return the index of a recipe, indexing missing units first; needs a running Ray.

    `progress` is called with (bytes done, bytes in all).

    Raises:
        SourceError: a container cannot be read, memory is full, or held-out images are of unknown
            classes.
    """
    storage = root / recipe.fingerprint
    if (index := load(storage)) is not None:
        return index
    tasks = tasks_of(recipe)
    total = sum(task.num_bytes for task in tasks)
    missing = [task for task in tasks if not storage.exists(_name("unit", task.index, "json"))]
    finished = total - sum(task.num_bytes for task in missing)
    for task in run_tasks([recipe], root.url, missing, concurrency):
        finished += task.num_bytes
        if progress:
            progress(finished, total)
    _merge(recipe, storage, len(tasks))
    loaded = load(storage)
    assert loaded is not None, f"{storage.url}/{MANIFEST} vanished as it was made"
    return loaded


def tasks_of(recipe: ImageRecipe) -> list[IndexTask]:
    """Return a task for each unit, in the order of the images."""
    jobs = [("train", *unit) for unit in image_sources.units(recipe.source)]
    if recipe.eval_source is not None:
        jobs += [("eval", *unit) for unit in image_sources.units(recipe.eval_source)]
    return [IndexTask(number, *job) for number, job in enumerate(jobs)]


@dataclass(frozen=True)
class IndexTask:
    """What a Ray task does: decode the images of a unit, and write its part of the index."""

    index: int
    """Of the unit."""
    origin: str
    """`train`, or `eval` for the source of held-out images."""
    files: list[DataFile]
    num_bytes: int
    source: int = 0
    """There is one recipe."""

    def place(self, recipe: ImageRecipe) -> str:
        """Return the first file that it reads, and the number of the others."""
        return f"{self.files[0].name} (and {len(self.files) - 1} more files)"

    def run(self, recipe: ImageRecipe, url: str, folder: str) -> None:
        """Do it by its recipe, in `folder` of the URL.

        Memory: one file, and of Parquet all images of the unit.

        Raises:
            SourceError: a container cannot be read, or memory is full.
        """
        storage = open_storage(url) / folder
        source = recipe.source if self.origin == "train" else recipe.eval_source
        assert source is not None
        rows: dict[str, list[tuple[Any, ...]]] = {split: [] for split in SPLITS}
        names: dict[str, int] = {}
        labels: dict[str, int] = {}
        copies: list[bytes] = []
        copied = records = 0
        bad: Counter[str] = Counter()
        examples: list[tuple[str, str]] = []
        for image in image_sources.read(source, self.files):
            records += 1
            try:
                problem = image_sources.problem_of(image)
            except MemoryError as error:
                raise SourceError(
                    f"{image.name} cannot be decoded: this machine's memory is full. Set a lower "
                    "data.workers, or take a machine with more"
                ) from error
            if problem is not None:
                bad[problem] += 1
                examples.append((image.name, problem))
                continue
            root, file = TRAIN_ROOT if self.origin == "train" else EVAL_ROOT, image.file
            offset, size = image.offset, len(image.data)
            if offset < 0:  # of Parquet
                root, file, offset = OWN_ROOT, _name("images", self.index, "bin"), copied
                copies.append(image.data)
                copied += size
            drawn = drawn_of(image.name.encode())
            held = self.origin == "eval" or drawn < recipe.eval_fraction * 2**64
            name = names.setdefault(file, len(names))
            label = labels.setdefault(unicodedata.normalize("NFC", image.label), len(labels))
            digest = digest_of(image.data)
            rows["eval" if held else "train"].append((root, name, 0, offset, size, label, digest))
        if copies:
            storage.write(_name("images", self.index, "bin"), b"".join(copies))
        for split in SPLITS:
            part = packed(np.array(rows[split], RECORD), list(names), list(labels))
            storage.write(_name(split, self.index, "npz"), part)
        summary = {"records": records, "bad": dict(bad), "examples": examples[:MAX_EXAMPLES]}
        storage.write(_name("unit", self.index, "json"), json.dumps(summary).encode())


def class_names(labels: set[str]) -> list[str]:
    """Sort the classes: by value if all are numbers, else by name.

    >>> class_names({"10", "9"}), class_names({"10", "9", "cat"})
    (['9', '10'], ['10', '9', 'cat'])
    """
    numbers = all(label.isdecimal() for label in labels)
    return sorted(labels, key=lambda label: (int(label) if numbers else 0, label))


def _merge(recipe: ImageRecipe, storage: Storage, count: int) -> None:
    """Join the parts of all units, in their order, and write the manifest."""
    with ThreadPoolExecutor(READERS) as pool:
        texts = pool.map(storage.read, (_name("unit", n, "json") for n in range(count)))
        summaries = [json.loads(text) for text in texts]
        parts = {}
        for split in SPLITS:
            files = [_name(split, number, "npz") for number in range(count)]
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
    bad = sum((Counter(each["bad"]) for each in summaries), Counter[str]())
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
    joined, texts, at = [], list[bytes](), 0
    for records, names, labels in parts:
        used = sorted(set(records["label"].tolist()))
        unknown = [labels[i] for i in used if labels[i] not in numbers]
        if unknown:
            raise SourceError(
                f"data.eval_path has classes that the training data lack: "
                f"{', '.join(unknown[:5])}. Give held-out images of the same classes"
            )
        encoded = [name.encode() for name in names]
        sizes = np.array([len(name) for name in encoded], np.int64)
        table = np.array([numbers.get(label, -1) for label in labels], np.int32)
        records, files = records.copy(), records["name_at"].astype(np.int64)
        records["name_at"] = (at + np.cumsum(sizes) - sizes)[files]
        records["name_size"] = sizes[files]
        records["label"] = table[records["label"]]
        joined.append(records)
        texts += encoded
        at += int(sizes.sum())
    return np.concatenate(joined), b"".join(texts)


def _name(kind: str, number: int, ending: str) -> str:
    return f"{kind}-{number:05d}.{ending}"
