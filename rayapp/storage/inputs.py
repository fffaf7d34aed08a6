"""Read what a run does not write: data, models and tokenizers, in a folder or under s3://.

    folder = open_input("s3://bucket/llama")
    entry = folder.stat("model.safetensors")
    folder.read("model.safetensors", 8, 1000, entry.etag)  # refused if the file is another by now

S3 is read through s3fs, which Ray Data, datasets and pandas use too, with the settings, the
patience and the errors of rayapp.storage.s3_client. s3fs keeps no listings here, and a file system
belongs to the process that made it, since s3fs has a thread for its requests.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from rayapp.storage import open_storage
from rayapp.storage.base import (
    HIDDEN,
    Entries,
    Entry,
    Readable,
    StorageError,
    changed,
    check_range,
    cut,
)
from rayapp.storage.local import LocalStorage
from rayapp.storage.s3_client import STALE, error_code, file_system, send

T = TypeVar("T")

COPY_BYTES = 8 * 2**20


def open_input(url: str) -> Readable:
    """Open s3://bucket/prefix, file:///folder or a local path for reading, without accessing it.

    Raises: StorageError if the URL is of another kind or malformed.
    """
    storage = open_storage(url)
    if not isinstance(storage, LocalStorage):
        return S3Input(storage.url)
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


class S3Input(Readable):
    """A prefix of a bucket, in Amazon S3 or a compatible store."""

    def local_path(self, name: str = "") -> None:
        return None

    def read(
        self, name: str, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> bytes:
        check_range(offset, length)
        if not length:
            entry = self.stat(name)
            if entry is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", self._url(name))
            etag = etag or entry.etag
            length = max(0, entry.size - offset) if length is None else 0
        if length == 0:  # HTTP has no empty range
            return b""
        get = partial(_get, self._url(name), offset, offset + length, etag)
        return cut(self._url(name), self._call("read", name, get, {"InvalidRange": b""}), length)

    def stat(self, name: str) -> Entry | None:
        nothing: dict[str, Entry | None] = {"NoSuchKey": None}
        try:
            return self._call("read", name, partial(_find_one, self._url(name), name), nothing)
        except FileNotFoundError:
            return None

    def list(self, prefix: str = "") -> Entries:
        folder, start = _path(self._folder_url(prefix)), len(_path(self.url)) + 1
        info_of = self._call("list", prefix, lambda files: files.find(folder, detail=True))
        return [
            _entry(path[start:], info)
            for path, info in sorted(info_of.items())
            if path.startswith(f"{folder}/") and not path.endswith("/") and f"/{HIDDEN}" not in path
        ]

    def _call(
        self,
        what: str,
        name: str,
        request: Callable[[Any], T],
        answers: dict[str, T] | None = None,
    ) -> T:
        def act(files: Any) -> T:
            with _botocore_errors():
                return request(files)

        url = self._folder_url(name)
        try:
            return send(what, url, act, answers, connect=file_system)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such file", url) from None


def _path(url: str) -> str:
    return url.removeprefix("s3://")


def _get(url: str, start: int, end: int, etag: str | None, files: Any) -> bytes:
    """Return bytes [start, end), or those up to the end of the file; with etag, of that version."""
    from s3fs.utils import FileExpired

    path = _path(url)
    if etag is None:
        data = cast(bytes, files.cat_file(path, start=start, end=end))
    else:
        with files.open(path, size=end, cache_type="none") as file:
            file.details = {"name": path, "size": end, "ETag": etag}  # else s3fs sends a HEAD
            file.seek(start)
            try:
                data = file.read(end - start)
            except FileExpired as error:
                raise changed(url) from error
    if len(data) < end - start and files.info(path)["size"] >= end:  # a proxy may truncate it
        raise ConnectionError(f"the answer ends at byte {start + len(data)} of {end}")
    return data


def _find_one(url: str, name: str, files: Any) -> Entry | None:
    """Return the entry of a file; if the HEAD is refused, a GET's answer contains the reason."""
    try:
        info = files.info(_path(url))
    except OSError as refused:
        if error_code(refused.__cause__) in ("400", "AccessDenied"):
            try:
                files.cat_file(_path(url), start=0, end=1)
            except OSError as reason:
                if error_code(reason.__cause__) in STALE:
                    raise
        raise refused
    return _entry(name, info) if info["type"] == "file" else None


def _entry(name: str, info: dict[str, Any]) -> Entry:
    modified = info["LastModified"].replace(microsecond=0)  # Ceph's HEAD has whole seconds only
    return Entry(name, info["size"], info["ETag"], modified.timestamp())


@contextmanager
def _botocore_errors() -> Iterator[None]:
    """Raise an error of s3fs as the one of botocore that it stands for, else as a lost connection.

    A file that is absent and a StorageError remain what they are.
    """
    from aiohttp import ClientError as HttpError
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    # TypeError: s3fs searches the message of a refused range, which Ceph leaves out.
    except (OSError, ValueError, TypeError, HttpError) as error:
        cause: BaseException | None = error
        while cause and not isinstance(cause, ClientError | BotoCoreError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        if isinstance(error, FileNotFoundError | StorageError | ValueError | TypeError):
            raise
        raise ConnectionError(str(error) or type(error).__name__) from error
