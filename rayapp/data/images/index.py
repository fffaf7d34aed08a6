"""The index of a set of images: the place, class and digest of each.

    images = load(storage / ".prepared" / fingerprint)
    images.rows("train").read(ids)          # bytes and labels, by number

Each image is one contiguous read from where it was found, so reading in any order costs the same.
Images of Parquet files, which have no byte range of their own, are copied into files beside the
index. Every read checks the digest: an image that changed is refused by name.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from xxhash import xxh3_64_intdigest

from rayapp.data import FOLDER
from rayapp.data.images.image_sources import ImageSource
from rayapp.data.prepared import MANIFEST
from rayapp.data.report import DataReport
from rayapp.order import fingerprint
from rayapp.storage import Readable, Storage, StorageError, open_input, open_storage

VERSION = 3  # version of the index and of how its images are decoded; part of the fingerprint
READERS, READERS_OF_DISKS = 16, 4  # images read at once; more threads cost more than they read
TRAIN_ROOT, EVAL_ROOT, OWN_ROOT = 0, 1, 2
NAMES = ["root", "name_at", "name_size", "offset", "size", "label", "digest"]
RECORD = np.dtype({"names": NAMES, "formats": ["u1", "<u8", "<u4", "<i8", "<i8", "<i4", "<u8"]})
Records = np.ndarray[Any, Any]
digest_of = xxh3_64_intdigest  # of an image's bytes: 64 bits


@dataclass(frozen=True)
class ImageRecipe:
    """Everything that determines the images, and which of them are held out."""

    source: ImageSource
    eval_source: ImageSource | None
    eval_fraction: float
    version: int = VERSION

    def parts(self) -> dict[str, object]:
        """Return the named parts of the fingerprint: if any changes, the set is another."""
        return {
            "files": self.source.digest(),
            "eval_files": self.eval_source.digest() if self.eval_source else None,
            "format": self.source.format,
            "eval_fraction": self.eval_fraction,
            "version": self.version,
        }

    @property
    def fingerprint(self) -> str:
        """16 hex digits of `parts()`."""
        return fingerprint(self.parts())


@dataclass(frozen=True)
class Images:
    """A finished index."""

    url: str
    fingerprint: str
    parts: dict[str, object]
    roots: tuple[str, str, str]
    """Folders of the training images, the held-out ones, and those copied from Parquet."""
    classes: tuple[str, ...]
    counts: dict[str, int]
    """Number of images by split."""
    class_counts: tuple[int, ...]
    """Number of training images by class."""
    bad: dict[str, int]
    """Number of unusable files by reason."""
    examples: list[tuple[str, str]]
    """(place, reason) of the first few unusable files."""
    records: int
    """Number of files that were read."""
    num_bytes: int
    """Bytes of the images of both splits."""
    duplicates: float
    """Share of the training images whose bytes equal those of another one, 0-1."""

    def rows(self, split: str) -> ImageRows:
        """Open the images of `train` or `eval`."""
        return _rows(self.url, self.roots, split, self.parts["version"] != VERSION)

    @property
    def held_out(self) -> int:
        return self.counts["eval"]

    @property
    def bad_share(self) -> float:
        """Share of the files that are unusable, 0-1."""
        return sum(self.bad.values()) / self.records if self.records else 0.0

    def report(self) -> DataReport:
        return {
            "images": self.counts,
            "classes": len(self.classes),
            "class_counts": dict(zip(self.classes, self.class_counts, strict=True)),
            "bytes": self.num_bytes,
            "duplicates": self.duplicates,
            "records": self.records,
            "bad": self.bad,
            "examples": self.examples,
        }


class ImageRows:
    """The images of one split, by number."""

    def __init__(self, url: str, roots: Sequence[str], split: str, as_stored: bool = False) -> None:
        """`as_stored`: of an index before version 3, whose images are decoded as before."""
        self._storage, self._roots, self._split = open_storage(url), roots, split
        self.as_stored = as_stored

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def records(self) -> Records:
        """The place of each image, `RECORD` [images]; read once per instance."""
        return np.frombuffer(self._storage.read(f"{self._split}.records"), RECORD)

    @cached_property
    def _names(self) -> bytes:
        return self._storage.read(f"{self._split}.names")

    @cached_property
    def _opened(self) -> list[Readable]:
        *inputs, own = self._roots
        return [*map(open_input, inputs), open_storage(own)]

    @cached_property
    def _pool(self) -> tuple[ThreadPoolExecutor, int]:
        """The threads that read images, and their number."""
        local = all(root.local_path() is not None for root in self._opened)
        count = READERS_OF_DISKS if local else READERS
        return ThreadPoolExecutor(count, thread_name_prefix="images"), count

    def __getstate__(self) -> dict[str, object]:
        kept = ("_storage", "_roots", "_split", "as_stored")
        return {name: self.__dict__[name] for name in kept}

    def name(self, number: int) -> str:
        """Return the file that contains an image, and the image's byte offset there if not 0."""
        record = self.records[number]
        file, offset = self._file(record), int(record["offset"])
        return f"{self._roots[record['root']]}/{file}" + (f" at byte {offset}" if offset else "")

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """Return the bytes of images, read by several threads.

        Raises:
            StorageError: one is gone, or is not what was indexed.
        """
        pool, step = self._pool
        parts = [numbers[first::step] for first in range(min(step, len(numbers)))]
        contents: list[bytes] = [b""] * len(numbers)
        for first, part in enumerate(pool.map(lambda p: list(map(self._read, p)), parts)):
            contents[first::step] = part
        return contents

    def _read(self, number: int) -> bytes:
        record = self.records[number]
        storage = self._opened[record["root"]]
        size = int(record["size"])
        try:
            data = storage.read(self._file(record), int(record["offset"]), size)
        except FileNotFoundError as error:
            raise StorageError("read", self.name(number), "it is gone", RESTORE) from error
        if digest_of(data) != record["digest"]:
            why = "its bytes are not those that were indexed"
            raise StorageError("train on", self.name(number), why, RESTORE)
        return data

    def _file(self, record: Any) -> str:
        start = int(record["name_at"])
        return self._names[start : start + int(record["name_size"])].decode()


RESTORE = f"Restore it, or start a new run after removing {FOLDER} beside the runs"


# An index is opened once per process, in which Ray Data runs many tasks.
_rows = lru_cache(maxsize=4)(ImageRows)


def load(storage: Storage) -> Images | None:
    """Return a finished index; None if there is none."""
    if not storage.exists(MANIFEST):
        return None
    values = json.loads(storage.read(MANIFEST))
    return TypeAdapter(Images).validate_python({**values, "url": storage.url})


def packed(records: Records, names: list[str], labels: list[str]) -> bytes:
    """Serialise one task's part of an index; its records' `label` is an index into `labels`."""
    out = io.BytesIO()
    text = json.dumps({"names": names, "labels": labels}).encode()
    np.savez(out, records=records, text=np.frombuffer(text, np.uint8))
    return out.getvalue()


def unpacked(data: bytes) -> tuple[Records, list[str], list[str]]:
    """Return (records, file names, labels) of `packed`; `name_at` is an index into the names."""
    with np.load(io.BytesIO(data), allow_pickle=False) as parts:
        text = json.loads(parts["text"].tobytes())
        return parts["records"], text["names"], text["labels"]
