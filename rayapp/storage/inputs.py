"""Read what a run does not write: data, models and tokenizers, in a folder or under s3://.

folder = open_input("s3://bucket/llama")
entry = folder.stat("model.safetensors")
folder.read("model.safetensors", 8, 1000, entry.etag)  # refused if the file is another by now
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rayapp.storage import open_storage
from rayapp.storage.base import Readable
from rayapp.storage.local import LocalStorage

COPY_BYTES = 8 * 2**20


def open_input(url: str) -> Readable:
    """Open s3://bucket/prefix, file:///folder or a local path for reading, without accessing it.

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
        raise ValueError(
            f"{name} in {folder.url} is not valid JSON: {error}. Copy it anew"
        ) from error
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
