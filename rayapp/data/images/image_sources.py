"""Find labelled images: a folder per class, tar shards or Parquet, on a disk or under s3://.

    source = find("s3://bucket/imagenet/train")
    for unit in units(source): ...            # the files that one task reads
    for image in read(source, unit): image.name, image.label, image.data

Labels are text here. In folders it is the top folder's name; in a tar the content of `.cls` or
`.json` beside the image, else the folder in the tar, else the tar's own name; in Parquet the column
`label`. There -1 is no label, as in ClassLabel of datasets. Labels are numbered later, when all of
them are known.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, BinaryIO, cast

from rayapp.data.images import augment
from rayapp.data.sources import DataFile, DataSource, SourceError
from rayapp.data.sources.cutting import runs
from rayapp.storage import Readable, StorageError, open_input

UNIT_BYTES = 16 * 2**20
MAX_UNITS = 4096
SUFFIXES = {"tar": (".tar",), "parquet": (".parquet", ".pq")}
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "jpg", "png", "img"), ("label", "cls", "labels")
MAX_BYTES = 2**29  # of an image's file, which is held in memory
TOO_LARGE = f"of more than {MAX_BYTES:,} bytes"
MAX_HEADER_BYTES = 2**20  # of a long name or an extended header in a tar


class ImageSource(DataSource):
    """Files under one root, all of one format."""

    def digest(self) -> str:
        """Return 16 hex digits of all files' names and sizes; the index has digests of contents."""
        listing = json.dumps([{"name": file.name, "size": file.size} for file in self.files])
        return blake2b(listing.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class FoundImage:
    """What may be an image: its file, place there, name, label and bytes."""

    file: str
    offset: int
    name: str
    """Name in messages; its hash also decides whether the image is held out."""
    label: str
    """Empty if there is none."""
    data: bytes
    problem: str | None = None
    """Why the bytes were not read."""


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
        DataFile(entry.name, entry.size, "")
        for entry in entries
        if (entry.name.lower().endswith(suffixes) if suffixes else "/" in entry.name)
    )
    if not files:
        what = "in a folder of its class" if format == "folder" else f"with {suffixes}"
        raise SourceError(
            f"data.path={path} has nothing of data.format={format}: no file {what} is in it. "
            f"Set data.format to what lies there: {', '.join(('folder', *SUFFIXES))}"
        )
    return ImageSource(root.url, format, files)


def units(source: ImageSource) -> Iterator[tuple[list[DataFile], int]]:
    """Yield runs of files of up to UNIT_BYTES (more if there would be many), with their bytes."""
    limit = max(UNIT_BYTES, source.num_bytes // MAX_UNITS)
    return runs(((file, file.size) for file in source.files), limit)


def read(source: ImageSource, files: Iterable[DataFile]) -> Iterator[FoundImage]:
    """Yield the images in files of a source, whose own list of files is not read."""
    storage = open_input(source.root)
    reader = {"folder": _read_file, "tar": _read_tar, "parquet": _read_parquet}[source.format]
    for file in files:
        yield from reader(storage, file)


def problem_of(found: FoundImage) -> str | None:
    """Return why what was found is no labelled image, or None if it is one."""
    problem = found.problem or augment.problem_of(found.data)
    return problem or (None if found.label else "without a label")


def format_of(names: list[str]) -> str:
    """Return the format of more than half of the files by their names, else `folder`."""
    for format, ends in SUFFIXES.items():
        if 2 * sum(name.lower().endswith(ends) for name in names) > len(names):
            return format
    return "folder"


def hidden(name: str) -> bool:
    """Return whether a file is to be ignored: its name or a folder of it begins with `.` or `_`."""
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _read_file(storage: Readable, file: DataFile) -> Iterator[FoundImage]:
    problem = TOO_LARGE if file.size > MAX_BYTES else None
    data = b"" if problem else storage.read(file.name)
    yield FoundImage(file.name, 0, file.name, file.name.partition("/")[0], data, problem)


class _Headers:
    """The stream of a tar as tarfile reads it: headers alone, never what a wrong size asks for."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            place = self.tell() - tarfile.BLOCKSIZE
            raise tarfile.ReadError(f"the header at byte {place:,} is of {size:,} bytes")
        return self.stream.read(size)


def _read_tar(storage: Readable, file: DataFile) -> Iterator[FoundImage]:
    """Read a tar in order; an image and its label files must be adjacent members.

    Raises:
        SourceError: it is no tar, or damaged.
    """
    own = file.name.rpartition("/")[2].rpartition(".")[0]
    waiting: list[FoundImage] = []
    key, label = "", None
    try:
        with (
            storage.open_read(file.name) as stream,
            tarfile.open(fileobj=cast(Any, _Headers(stream)), mode="r:", errors="replace") as tar,
        ):
            for member in tar:
                plain = member.isfile() and not member.issparse()
                end = member.offset_data + member.size if plain else tar.offset
                if not member.offset_data <= end <= file.size:
                    raise tarfile.ReadError(
                        f"{member.name} at byte {member.offset:,} says that it ends at byte "
                        f"{end:,}, and the file has {file.size:,} bytes"
                    )
                if not member.isfile() or hidden(member.name.removeprefix("./")):
                    continue
                path = member.name.removeprefix("./")
                folder, _, last = path.rpartition("/")
                stem, _, ending = last.partition(".")
                if f"{folder}/{stem}" != key:
                    yield from _labelled(waiting, label)
                    waiting, key, label = [], f"{folder}/{stem}", None
                large = TOO_LARGE if member.size > MAX_BYTES else None
                problem = "stored as a sparse file" if member.issparse() else large
                stream.seek(member.offset_data)
                data = b"" if problem else stream.read(member.size)
                if ending.lower() in ("cls", "json"):
                    beside = _label_beside(ending.lower(), data)
                    label = label if beside is None else beside
                    continue
                fallback, place = folder.rpartition("/")[2] or own, f"{file.name}:{path}"
                found = FoundImage(file.name, member.offset_data, place, fallback, data, problem)
                waiting.append(found)
            stream.seek(tar.offset)
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes it for the end
                raise tarfile.ReadError(f"the header at byte {tar.offset:,} is damaged")
        yield from _labelled(waiting, label)
    except tarfile.TarError as error:
        raise SourceError(
            f"{storage.url}/{file.name} is not a tar that can be read: {error}. Copy it anew, "
            "without compression: images are compressed already"
        ) from error


def _labelled(waiting: list[FoundImage], label: str | None) -> Iterator[FoundImage]:
    """Give the images of a sample the label of the file beside them, if it has one."""
    for image in waiting:
        yield image if label is None else replace(image, label=label)


def _label_beside(ending: str, data: bytes) -> str | None:
    """Return the label in a `.cls` (text) or `.json` (field `label` or `cls`) file, or None."""
    text = data.decode("utf-8", "replace").strip()
    if ending == "cls":
        return _label_of(text) if text else None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    labels = [values[name] for name in LABEL_COLUMNS if isinstance(values, dict) and name in values]
    return _label_of(labels[0]) if labels else None


def _label_of(value: object) -> str:
    """Return a label as text; empty for what says that there is none: null, NaN, -1."""
    text = "" if value is None or value != value else str(value)
    return "" if text in ("-1", "-1.0") else text


def _read_parquet(storage: Readable, file: DataFile) -> Iterator[FoundImage]:
    """Read the images of a Parquet file in batches; their offset is -1, as they have none.

    Raises:
        SourceError: it is not Parquet, it is damaged, or its columns are others.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = f"{storage.url}/{file.name}"
    try:
        table = pq.ParquetFile(storage.open_read(file.name))
        columns = table.schema_arrow.names
        image = next((column for column in IMAGE_COLUMNS if column in columns), None)
        label = next((column for column in LABEL_COLUMNS if column in columns), None)
        if image is None or label is None:
            raise SourceError(
                f"{where} has no images with labels: its columns are {', '.join(columns)}. Name "
                "them image (bytes, or a struct with bytes) and label"
            )
        row = 0
        for batch in table.iter_batches(batch_size=64, columns=[image, label]):
            pairs = zip(batch[image].to_pylist(), batch[label].to_pylist(), strict=True)
            for value, own in pairs:
                found: Any = value.get("bytes") if isinstance(value, dict) else value
                data = found if isinstance(found, bytes) else b""
                yield FoundImage(file.name, -1, f"{file.name}:{row}", _label_of(own), data)
                row += 1
    except StorageError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = "is not Parquet that can be read"
        raise SourceError(f"{where} {what}: {error}. Copy it anew") from error
