"""Keep a storage under a prefix of an S3 bucket."""

from __future__ import annotations

import errno
import io
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from rayapp.storage.base import (
    HIDDEN,
    Entries,
    Entry,
    Names,
    Storage,
    StorageError,
    check_range,
    cut,
    hidden,
)
from rayapp.storage.s3_client import send

log = logging.getLogger("rayapp.storage")
T = TypeVar("T")
Keys: TypeAlias = list[dict[str, str]]

upload_threads = 4  # per open file
MIN_PART_BYTES = 8 * 2**20
TOKEN = "rayapp-token"  # object metadata by which a writer knows its own object again


class S3Storage(Storage):
    """A prefix of a bucket of Amazon S3 or of anything that speaks its protocol."""

    def local_path(self, name: str = "") -> None:
        return None

    @property
    def _bucket(self) -> str:
        return self.url.split("/")[2]

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._url(name).split("/", 3)[3]}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        check_range(offset, length)
        request = self._key(name)
        if length == 0:  # HTTP has no empty range
            if not self.exists(name):
                raise FileNotFoundError(errno.ENOENT, "no such file", self._url(name))
            return b""
        if offset or length is not None:
            last = "" if length is None else offset + length - 1
            request["Range"] = f"bytes={offset}-{last}"

        def get(client: Any) -> bytes:
            return cast(bytes, client.get_object(**request)["Body"].read())

        data = self._call("read", name, get, {"InvalidRange": b""})  # begins at or past the end
        return cut(self._url(name), data, length)

    @contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        out = _S3Writer(self, name)
        try:
            yield cast(BinaryIO, out)
            out.commit()
        except BaseException:
            out.abort()
            raise
        finally:
            out.close()

    def create(self, name: str, data: bytes) -> bool:
        return self._put_if(name, data, IfNoneMatch="*")

    def replace_if(self, name: str, data: bytes, etag: str) -> bool:
        return self._put_if(name, data, IfMatch=etag)

    def _put_if(self, name: str, data: bytes, **condition: str) -> bool:
        token = uuid.uuid4().hex
        request = {**self._key(name), **condition, "Body": data, "Metadata": {TOKEN: token}}

        def put(client: Any) -> bool:
            client.put_object(**request)
            return True

        done = self._call("write", name, put, {"PreconditionFailed": False, "NoSuchKey": False})
        # Refused, but perhaps because of our own object, whose first answer was lost on the way.
        return done or self._holds(name, token)

    def _holds(self, name: str, token: str) -> bool:
        """Tell whether the object is the one that was written with this token."""

        def head(client: Any) -> bool:
            return bool(client.head_object(**self._key(name))["Metadata"].get(TOKEN) == token)

        return self._call("read", name, head, {"NoSuchKey": False})

    def stat(self, name: str) -> Entry | None:
        def head(client: Any) -> Entry | None:
            found = client.head_object(**self._key(name))
            return _object_entry(name, found["ContentLength"], found)

        nothing: dict[str, Entry | None] = {"NoSuchKey": None}
        return self._call("read", name, head, nothing)

    def dirs(self, prefix: str = "") -> Names:
        pages = self._pages(prefix, Delimiter="/")
        return sorted(p["Prefix"].split("/")[-2] for page in pages for p in page["CommonPrefixes"])

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda client: client.delete_object(**self._key(name)))

    def delete_tree(self, prefix: str) -> None:
        if self._folder_url(prefix).count("/") == 2:
            fix = "Name a folder, or empty the bucket with other tools"
            raise StorageError("delete", self.url, "that is the whole bucket", fix)
        for page in self._pages(prefix):
            keys = [{"Key": found["Key"]} for found in page["Contents"]]
            if keys:
                self._call("delete", prefix, partial(self._drop, keys))

    def _drop(self, keys: Keys, client: Any) -> None:
        from botocore.exceptions import ClientError

        wanted = {"Objects": keys, "Quiet": True}
        errors = client.delete_objects(Bucket=self._bucket, Delete=wanted).get("Errors", [])
        if errors:  # S3 answers 200 even so; as an exception it is retried or explained
            raise ClientError({"Error": errors[0]}, "DeleteObjects")

    def list(self, prefix: str = "") -> Entries:
        start = len(self.url.split("/", 3)[3]) + 1 if self.url.count("/") > 2 else 0
        found = [
            _object_entry(item["Key"][start:], item["Size"], item)
            for page in self._pages(prefix)
            for item in page["Contents"]
            if not item["Key"].endswith("/") and not hidden(item["Key"])
        ]
        return sorted(found, key=lambda entry: entry.name)

    def _pages(self, prefix: str, **request: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of a folder's listing, each retried by itself."""
        folder = f"{self._folder_url(prefix)}/".split("/", 3)[3]
        request |= {"Bucket": self._bucket, "Prefix": folder}
        while True:
            page = self._call("list", prefix, lambda client: client.list_objects_v2(**request))
            yield {"Contents": [], "CommonPrefixes": [], **page}
            if not page["IsTruncated"]:
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def check_writable(self) -> None:
        data = os.urandom(64)
        key = f"{self.url}/{HIDDEN}{uuid.uuid4().hex}.probe".split("/", 3)[3]
        where = {"Bucket": self._bucket, "Key": key}

        def put_again(client: Any) -> bool:
            client.put_object(**where, Body=data, IfNoneMatch="*")
            return True

        self._call("write", "", lambda c: c.put_object(**where, Body=data), patient=False)
        answers = {"PreconditionFailed": False, "NotImplemented": True}
        if self._call("write", "", put_again, answers, patient=False):
            log.warning("%s: the endpoint ignores If-None-Match, so create is not safe", self.url)
        back = self._call("read", "", lambda c: c.get_object(**where)["Body"].read(), patient=False)
        self._call("delete", "", lambda c: c.delete_object(**where), patient=False)
        if back != data:
            raise StorageError("write", self.url, "what was read back differs", "Check the store")

    def _call(
        self,
        what: str,
        name: str,
        request: Callable[[Any], T],
        answers: dict[str, T] | None = None,
        patient: bool = True,
    ) -> T:
        return send(what, self._folder_url(name), request, answers, patient)


class _S3Writer(io.RawIOBase):
    """Send a stream as one PUT if it is small, else as a multipart upload on a few threads.

    Memory: upload_threads + 2 parts. What a killed process leaves of a multipart upload is
    invisible, but S3 bills it until the bucket's lifecycle rule aborts incomplete uploads.
    """

    def __init__(self, storage: S3Storage, name: str) -> None:
        self._storage, self._name, self._key = storage, name, storage._key(name)
        self._token = uuid.uuid4().hex
        self._pending = bytearray()
        self._written = 0
        self._upload: dict[str, str] = {}  # names the multipart upload once it is begun
        self._sending: deque[Future[dict[str, Any]]] = deque()
        self._sent: list[dict[str, Any]] = []
        self._pool: ThreadPoolExecutor | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError(f"write to the closed file {self._storage._url(self._name)}")
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            room = part_bytes(self._written) - len(self._pending)
            taken = view[done : done + room]
            self._pending += taken
            done += len(taken)
            self._written += len(taken)
            if len(taken) >= room:
                self._send()
        return done

    def _call(self, request: Callable[[Any], T], answers: dict[str, T] | None = None) -> T:
        return self._storage._call("write", self._name, request, answers)

    def _send(self) -> None:
        """Hand the pending bytes to the threads, waiting for the oldest part if all are busy."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(upload_threads, "upload")
            begin = {**self._key, "Metadata": {TOKEN: self._token}}
            begun = self._call(lambda client: client.create_multipart_upload(**begin))
            self._upload = {**self._key, "UploadId": begun["UploadId"]}
        if len(self._sending) > upload_threads:
            self._sent.append(self._sending.popleft().result())
        number = len(self._sent) + len(self._sending) + 1
        part, self._pending = self._pending, bytearray()
        self._sending.append(self._pool.submit(self._put_part, number, part))

    def _put_part(self, number: int, part: bytearray) -> dict[str, Any]:
        request = {**self._upload, "PartNumber": number, "Body": part}
        answer = self._call(lambda client: client.upload_part(**request))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def commit(self) -> None:
        """Make the file appear."""
        if self._pool is None:
            body = bytes(self._pending)
            self._call(lambda client: client.put_object(**self._key, Body=body))
            return
        if self._pending:
            self._send()
        parts = [*self._sent, *(sending.result() for sending in self._sending)]
        self._pool.shutdown()

        def complete(client: Any) -> bool:
            client.complete_multipart_upload(**self._upload, MultipartUpload={"Parts": parts})
            return True

        # A repeated completion finds no upload if the first one's answer was lost.
        done = self._call(complete, {"NoSuchUpload": False})
        if not done and not self._storage._holds(self._name, self._token):
            why, fix = "the multipart upload was aborted by someone else", "Write it again"
            raise StorageError("write", self._storage._url(self._name), why, fix)

    def abort(self) -> None:
        """Drop the parts sent so far; a failure to do so is logged, as an error is on its way."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # waits: a part may land after an abort
        if self._upload:
            try:
                self._call(lambda client: client.abort_multipart_upload(**self._upload))
            except OSError as error:
                log.warning("an incomplete upload stays in the bucket: %s", error)


def part_bytes(written: int) -> int:
    """Return the size of the part that follows `written` bytes of a multipart upload.

    8 MiB up to 10 GiB, then 1/1250 of the file: 10,000 parts reach beyond 5 TiB. Source: limits
    of 10,000 parts of at most 5 GiB, docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html.
    """
    return max(MIN_PART_BYTES, written // 1250)


def _object_entry(name: str, size: int, found: dict[str, Any]) -> Entry:
    return Entry(name, size, found["ETag"], found["LastModified"].timestamp())
