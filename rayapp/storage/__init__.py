"""Read and write files in one folder, on a local disk or under s3://, with the same behaviour.

    storage = open_storage("s3://bucket/runs") / "demo"
    with storage.open_write("model/weights.bin") as out:  # streamed, in bounded memory
        out.write(chunk)
    [(entry.name, entry.size) for entry in storage.list("model")]

A storage holds named bytes. Names are relative and '/'-separated, and a folder exists only while a
file in it does. A write appears whole or not at all, also after a crash: locally by fsync and
rename, on S3 because an object appears when its upload completes. Leases are built on two atomic
conditional writes, `create` and `replace_if`. A prefix is a whole folder name, never part of one. A
storage holds only its URL, so it pickles; S3 clients belong to the process and read the standard
AWS variables. Reading an absent file raises FileNotFoundError, every other failure StorageError.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import urllib.parse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rayapp.storage.base import READ_BLOCK, Entry, Readable, Storage, StorageError
from rayapp.storage.local import LocalStorage
from rayapp.storage.s3 import S3Storage
from rayapp.storage.s3_writer import MIN_PART_BYTES, part_bytes

__all__ = [
    "COPY_BYTES",
    "MIN_PART_BYTES",
    "READ_BLOCK",
    "Entry",
    "Readable",
    "Storage",
    "StorageError",
    "local_copy",
    "open_input",
    "open_storage",
    "part_bytes",
    "read_json",
]

COPY_BYTES = 8 * 2**20


def open_storage(url: str) -> Storage:
    """Open s3://bucket/prefix, file:///folder or a local path, without accessing it.

    Raises: StorageError if the URL is of another kind or malformed.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", url)
    if scheme is None:
        if not url:
            raise StorageError("open", "''", "the path is empty", "Give a folder or s3://bucket")
        return LocalStorage(os.path.abspath(os.path.expanduser(url)))
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStorage(os.path.abspath(urllib.parse.unquote(parts.path)))
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket:
        why = "only local folders and s3://bucket/prefix are supported"
        raise StorageError("open", url, why, "Write it as s3://bucket/prefix or as a local path")
    try:
        return S3Storage(f"s3://{bucket}").child(prefix.strip("/"))
    except ValueError as error:
        raise StorageError("open", url, str(error), "Correct the prefix") from None


def open_input(url: str) -> Readable:
    """Open what a run does not write: data, models, tokenizers; see `open_storage`.

    Links to files are listed as files, as the cache of a hub has them.

    Raises: StorageError if the URL is of another kind or malformed.
    """
    storage = open_storage(url)
    if isinstance(storage, LocalStorage):
        storage.links = True
    return storage


def read_json(folder: Readable, name: str) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file.

    Raises: ValueError if it holds something else.
    """
    try:
        values = json.loads(folder.read(name))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        why = f"is not valid JSON: {error}. Copy it anew"
        raise ValueError(f"{name} in {folder.url} {why}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} in {folder.url} is not a JSON object. Copy it anew")
    return values


def local_copy(folder: Readable, stack: ExitStack) -> str:
    """Return a path on this machine's disk: the folder itself, or a temporary copy of it."""
    path = folder.local_path("")
    if path is not None:
        return path
    copy = stack.enter_context(tempfile.TemporaryDirectory())
    for entry in folder.list():
        target = Path(copy, entry.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder.open_read(entry.name) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, COPY_BYTES)
    return copy
