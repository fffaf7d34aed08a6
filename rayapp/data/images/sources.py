"""Find labelled images: a folder per class, tar shards or Parquet, on a disk or under s3://.

    source = find("s3://bucket/imagenet/train")
    for unit in units(source): ...            # lists of files that one task reads
    for image in read(source, unit): image.name, image.label, image.data

Labels are text here. In folders it is the top folder's name; in a tar the content of `.cls` or
`.json` beside the image, else the folder in the tar, else the tar's own name; in Parquet the column
`label`. Labels are numbered later, when all of them are known.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from rayapp.data.sources import SourceError
from rayapp.storage import Readable
from rayapp.storage.inputs import open_input

UNIT_BYTES = 16 * 2**20
MAX_UNITS = 4096
SUFFIXES = {"tar": (".tar",), "parquet": (".parquet", ".pq")}
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "jpg", "png", "img"), ("label", "cls", "labels")
FORMATS = ("folder", "tar", "parquet")
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageFile:
    """One file of a source: `name` is relative to the source's root."""

    name: str
    size: int


@dataclass(frozen=True)
class ImageSource:
    """Files under one root, all of one format."""

    root: str
    format: str
    files: tuple[ImageFile, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)

    def digest(self) -> str:
        """Return 16 hex digits of all files' names and sizes; the index has digests of contents."""
        listing = json.dumps([asdict(file) for file in self.files])
        return blake2b(listing.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class FoundFiles:
    """A file that may be an image: its place, name, label and bytes."""

    file: str
    offset: int
    name: str
    """Name in messages; its hash also decides whether the image is held out."""
    label: str | None
    """None if no label was found."""
    data: bytes


def find(path: str, format: str = "auto") -> ImageSource:
    """List the files of `data.path`.

    Raises:
        SourceError: nothing is there, or nothing that is known.
        StorageError: the storage says no.
    """
    root = open_input(path)
    entries = [entry for entry in root.list() if entry.size and not hidden(entry.name)]
    if not entries:
        raise SourceError(
            f"data.path={path} is empty: there is no file in {root.url}. Give a folder that holds "
            "a folder of images for each class, tar shards or Parquet"
        )
    names = [entry.name for entry in entries]
    if format == "auto":
        format = format_of(names)
    suffixes = SUFFIXES.get(format)
    files = tuple(
        ImageFile(entry.name, entry.size)
        for entry in entries
        if (entry.name.lower().endswith(suffixes) if suffixes else "/" in entry.name)
    )
    if not files:
        what = "in a folder of its class" if format == "folder" else f"with {suffixes}"
        raise SourceError(
            f"data.path={path} has nothing of data.format={format}: no file {what} is in it. "
            f"Set data.format to what lies there: {', '.join(FORMATS)}"
        )
    return ImageSource(root.url, format, files)


def units(source: ImageSource) -> list[tuple[ImageFile, ...]]:
    """Group the files into runs of up to UNIT_BYTES (more if there would be many), by size only."""
    limit = max(UNIT_BYTES, source.num_bytes // MAX_UNITS)
    runs: list[tuple[ImageFile, ...]] = []
    run: list[ImageFile] = []
    held = 0
    for file in source.files:
        if run and held + file.size > limit:
            runs.append(tuple(run))
            run, held = [], 0
        run.append(file)
        held += file.size
    return [*runs, tuple(run)] if run else runs


def read(root: str, format: str, files: tuple[ImageFile, ...]) -> Iterator[FoundFiles]:
    """Yield the images in the files of a unit, in order."""
    storage = open_input(root)
    reader = {"folder": _read_file, "tar": _read_tar, "parquet": _read_parquet}[format]
    for file in files:
        yield from reader(storage, file.name)


def format_of(names: list[str]) -> str:
    """Return the format of more than half of the files by their names, else `folder`."""
    counts = {
        format: sum(name.lower().endswith(ends) for name in names)
        for format, ends in SUFFIXES.items()
    }
    best = max(counts, key=lambda format: counts[format])
    return best if 2 * counts[best] > len(names) else "folder"


def hidden(name: str) -> bool:
    """Return whether a file is to be ignored: its name or a folder of it begins with `.` or `_`."""
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _read_file(storage: Readable, name: str) -> Iterator[FoundFiles]:
    yield FoundFiles(name, 0, name, name.partition("/")[0], storage.read(name))


def _read_tar(storage: Readable, name: str) -> Iterator[FoundFiles]:
    """Read a tar in order; an image and its label files must be adjacent members.

    Raises:
        SourceError: it is no tar.
    """
    own = name.rpartition("/")[2].rpartition(".")[0]
    waiting: list[FoundFiles] = []
    key, label = "", None
    try:
        with storage.open_read(name) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                if not member.isfile() or hidden(member.name.removeprefix("./")):
                    continue
                path = member.name.removeprefix("./")
                folder, _, last = path.rpartition("/")
                stem, _, ending = last.partition(".")
                if f"{folder}/{stem}" != key:
                    yield from _labelled(waiting, label)
                    waiting, key, label = [], f"{folder}/{stem}", None
                extracted = archive.extractfile(member)
                assert extracted is not None, "a plain file has data"
                data = extracted.read()
                if ending.lower() in ("cls", "json"):
                    label = _label_of(ending.lower(), data) or label
                    continue
                fallback = folder.rpartition("/")[2] or own
                place = f"{name}:{path}"
                waiting.append(FoundFiles(name, member.offset_data, place, fallback, data))
        yield from _labelled(waiting, label)
    except tarfile.TarError as error:
        raise SourceError(
            f"{storage.url}/{name} is not a tar that can be read: {error}. Copy it anew, without "
            "compression: images are compressed already"
        ) from error


def _labelled(waiting: list[FoundFiles], label: str | None) -> Iterator[FoundFiles]:
    """Give the images of a sample the label of the file beside them, if it has one."""
    for image in waiting:
        own = image.label if label is None else label
        yield FoundFiles(image.file, image.offset, image.name, own, image.data)


def _label_of(ending: str, data: bytes) -> str | None:
    """Return the label in a `.cls` (text) or `.json` (field `label` or `cls`) file, or None."""
    text = data.decode("utf-8", "replace").strip()
    if ending == "cls":
        return text or None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    labels = [values[name] for name in LABEL_COLUMNS if isinstance(values, dict) and name in values]
    return str(labels[0]) if labels else None


def _read_parquet(storage: Readable, name: str) -> Iterator[FoundFiles]:
    """Read the images of a Parquet file in batches; their offset is -1, as they have none.

    Raises:
        SourceError: it is not Parquet, or its columns are others.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(storage.open_read(name))
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceError(f"{storage.url}/{name} is not Parquet: {error}. Copy it anew") from error
    columns = table.schema_arrow.names
    image = next((column for column in IMAGE_COLUMNS if column in columns), None)
    label = next((column for column in LABEL_COLUMNS if column in columns), None)
    if image is None or label is None:
        raise SourceError(
            f"{storage.url}/{name} has no images with labels: its columns are "
            f"{', '.join(columns)}. Name them image (bytes, or a struct with bytes) and label"
        )
    row = 0
    for batch in table.iter_batches(batch_size=64, columns=[image, label]):
        for value, name_of_class in zip(
            batch[image].to_pylist(), batch[label].to_pylist(), strict=True
        ):
            data: Any = value.get("bytes") if isinstance(value, dict) else value
            own = None if name_of_class is None else str(name_of_class)
            yield FoundFiles(name, -1, f"{name}:{row}", own, data or b"")
            row += 1
