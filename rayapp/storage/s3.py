"""A storage under a prefix of an S3 bucket."""

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
from rayapp.storage.s3_client import STALE, Answer, error_code, proven, send

log = logging.getLogger("rayapp.storage")
T = TypeVar("T")
Keys: TypeAlias = list[dict[str, str]]

upload_threads = 4  # upload threads per open file
page_keys = 1000  # most keys in a page of a listing and in a deletion
MIN_PART_BYTES = 8 * 2**20
DIGESTS = ("ChecksumCRC32", "ChecksumSHA1", "ChecksumSHA256")  # botocore always verifies them
TOKEN = "rayapp-token"  # metadata key by which a writer recognises its own object


class S3Storage(Storage):
    """A prefix of a bucket, in Amazon S3 or a compatible store."""

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
            answer = proven(
                client.get_object(**request), "ContentRange" if "Range" in request else "ETag"
            )
            data = cast(bytes, answer["Body"].read())
            if length is None:
                self._check_whole(name, offset + len(data), answer, client)
            return data

        data = self._call("read", name, get, {"InvalidRange": b""})  # begins at or past the end
        return cut(self._url(name), data, length)

    def _check_whole(self, name: str, end: int, answer: Answer, client: Any) -> None:
        """Raise ConnectionError if a read to the end stopped short, so that it is retried.

        `end` is compared with the object's size, unless botocore has verified a checksum. A proxy
        may truncate an answer and adapt its headers.
        """
        if "ContentRange" in answer:
            size = int(answer["ContentRange"].rpartition("/")[2])
        elif any("-" not in answer.get(digest, "-") for digest in DIGESTS):  # botocore verified it
            return
        else:
            head = self._head(self._key(name), client)
            size = head["ContentLength"] if head["ETag"] == answer["ETag"] else end
        if size != end:
            raise ConnectionError(f"the answer ends at byte {end} of {size}")

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

    def create(self, name: str, data: bytes) -> str | None:
        return self._put_if(name, self._key(name), data, IfNoneMatch="*")

    def replace_if(self, name: str, data: bytes, etag: str) -> str | None:
        return self._put_if(name, self._key(name), data, IfMatch=bare(etag))

    def _put_if(
        self, name: str, key: dict[str, str], data: bytes, patient: bool = True, **condition: str
    ) -> str | None:
        """Put an object if the condition holds; return its ETag, or None if it does not hold."""
        token = uuid.uuid4().hex
        request = {**key, **condition, "Body": data, "Metadata": {TOKEN: token}}

        def put(client: Any) -> str | None:
            return cast(str, proven(client.put_object(**request))["ETag"])

        def head(client: Any) -> str | None:
            found = self._head(key, client)
            return found["ETag"] if found["Metadata"].get(TOKEN) == token else None

        refused: dict[str, str | None] = {"PreconditionFailed": None, "NoSuchKey": None}
        etag = self._call("write", name, put, refused, patient)
        # Refused, but perhaps because our own first request succeeded and its answer was lost.
        return etag or self._call("read", name, head, refused, patient)

    def _holds(self, name: str, token: str) -> bool:
        """Return whether the object is the one that was written with this token."""

        def head(client: Any) -> bool:
            return bool(self._head(self._key(name), client)["Metadata"].get(TOKEN) == token)

        return self._call("read", name, head, {"NoSuchKey": False})

    def stat(self, name: str) -> Entry | None:
        def head(client: Any) -> Entry | None:
            found = self._head(self._key(name), client)
            return _object_entry(name, found["ContentLength"], found)

        nothing: dict[str, Entry | None] = {"NoSuchKey": None}
        return self._call("read", name, head, nothing)

    def _head(self, key: dict[str, str], client: Any) -> Answer:
        """Send a HEAD; if it is refused, send a GET, whose answer contains the reason."""
        from botocore.exceptions import ClientError

        try:
            return proven(client.head_object(**key))
        except ClientError as error:
            if error.response["Error"]["Code"] in ("400", "403"):
                try:
                    client.get_object(**key, Range="bytes=0-0")
                except ClientError as reason:
                    if error_code(reason) in STALE:
                        raise reason from error
            raise

    def dirs(self, prefix: str = "") -> Names:
        pages = self._pages(prefix, Delimiter="/")
        return sorted(p["Prefix"].split("/")[-2] for page in pages for p in page["CommonPrefixes"])

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda client: client.delete_object(**self._key(name)))

    def delete_if(self, name: str, etag: str) -> bool:
        key = self._key(name)

        def delete(client: Any) -> bool:
            if self._head(key, client)["ETag"] != etag:
                return False
            client.delete_object(**key, IfMatch=bare(etag))
            return True

        return self._call("delete", name, delete, {"NoSuchKey": False, "PreconditionFailed": False})

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
        try:
            errors = client.delete_objects(Bucket=self._bucket, Delete=wanted).get("Errors", [])
        except ClientError as error:
            if error_code(error) != "AccessDenied":
                raise
            # Ceph checks permission on the whole bucket; a role may have it on its prefix only.
            for key in keys:
                client.delete_object(Bucket=self._bucket, **key)
            return
        if errors:  # S3 answers 200 all the same; an exception is retried or explained
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

    def _pages(self, prefix: str, **request: Any) -> Iterator[Answer]:
        """Yield the pages of a folder's listing; each is retried on its own."""
        folder = f"{self._folder_url(prefix)}/".split("/", 3)[3]
        request |= {"Bucket": self._bucket, "Prefix": folder}
        while True:
            page = self._call("list", prefix, partial(_page, {**request, "MaxKeys": page_keys}))
            yield {"Contents": [], "CommonPrefixes": [], **page}
            if not page["IsTruncated"]:
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def check_writable(self) -> None:
        data = os.urandom(64)
        probe = f"{self.url}/{HIDDEN}{uuid.uuid4().hex}.probe".split("/", 3)[3]
        where = {"Bucket": self._bucket, "Key": probe}

        def call(what: str, request: Callable[[Any], T], answers: dict[str, T] | None = None) -> T:
            return self._call(what, "", request, answers, patient=False)

        def put_if(**condition: str) -> str | None:
            return self._put_if("", where, data, patient=False, **condition)

        etag = call("write", lambda c: proven(c.put_object(**where, Body=data[:1]))["ETag"])
        try:
            # Without permission to list the bucket, an absent name gives 403, not 404.
            absent = {**where, "Key": f"{probe}-absent"}
            nothing: dict[str, Answer] = {"NoSuchKey": {}}
            call("read", lambda client: self._head(absent, client), nothing)
            if put_if(IfNoneMatch="*"):
                raise self._unconditional("If-None-Match", "wrote over an object that exists")
            if not put_if(IfMatch=bare(etag)):
                raise self._unconditional("If-Match", "refused the ETag that an object has")
            if put_if(IfMatch=bare(etag)):
                raise self._unconditional("If-Match", "took an ETag that an object has no more")
            if call("read", lambda client: client.get_object(**where)["Body"].read()) != data:
                why = "what was read back differs"
                raise StorageError("write", self.url, why, "Check the store")
        finally:
            call("delete", lambda client: client.delete_object(**where))

    def _unconditional(self, header: str, what: str) -> StorageError:
        """Return the error for a store without conditional writes, which leases need."""
        why = f"the store does not hold to {header}: it {what}, so two drivers could own one run"
        fix = "Use a bucket without versioning if it is Ceph's, or a store with conditional writes"
        return StorageError("write", self.url, why, fix)

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
    """Sends a stream as one PUT if it is small, else as a multipart upload on a few threads.

    Memory: upload_threads + 2 parts. If the process is killed, the parts of its upload are
    invisible, but S3 bills them until the bucket's lifecycle rule aborts incomplete uploads.
    """

    def __init__(self, storage: S3Storage, name: str) -> None:
        self._storage, self._name, self._key = storage, name, storage._key(name)
        self._token = uuid.uuid4().hex
        self._pending = bytearray()
        self._written = 0
        self._upload: dict[str, str] = {}  # bucket, key and id, once it has begun
        self._sending: deque[Future[Answer]] = deque()
        self._sent: list[Answer] = []
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
        """Submit the pending bytes as a part; if all threads are busy, wait for the oldest."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(upload_threads, "upload")
            begin = {**self._key, "Metadata": {TOKEN: self._token}}
            begun = self._call(
                lambda client: proven(client.create_multipart_upload(**begin), "UploadId")
            )
            self._upload = {**self._key, "UploadId": begun["UploadId"]}
        if len(self._sending) > upload_threads:
            self._sent.append(self._sending.popleft().result())
        number = len(self._sent) + len(self._sending) + 1
        part, self._pending = self._pending, bytearray()
        self._sending.append(self._pool.submit(self._put_part, number, part))

    def _put_part(self, number: int, part: bytearray) -> Answer:
        request = {**self._upload, "PartNumber": number, "Body": part}
        answer = self._call(lambda client: proven(client.upload_part(**request)))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def commit(self) -> None:
        """Complete the upload, which makes the file appear."""
        if self._pool is None:
            body = bytes(self._pending)
            self._call(lambda client: proven(client.put_object(**self._key, Body=body)))
            return
        if self._pending:
            self._send()
        parts = [*self._sent, *(sending.result() for sending in self._sending)]
        self._pool.shutdown()

        def complete(client: Any) -> bool:
            whole = {"MultipartUpload": {"Parts": parts}}
            # Ceph's first answer leaves the ETag empty.
            proven(client.complete_multipart_upload(**self._upload, **whole), "Key")
            return True

        # If the first completion's answer was lost, a repeated one finds no upload.
        done = self._call(complete, {"NoSuchUpload": False})
        if not done and not self._storage._holds(self._name, self._token):
            why, fix = "the multipart upload was aborted by someone else", "Write it again"
            raise StorageError("write", self._storage._url(self._name), why, fix)

    def abort(self) -> None:
        """Abort the upload; a failure is only logged, because another error is being raised."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # waits: a part may land after an abort
        if self._upload:
            try:
                self._call(lambda client: client.abort_multipart_upload(**self._upload))
            except OSError as error:
                log.warning("an incomplete upload stays in the bucket: %s", error)


def part_bytes(written: int) -> int:
    """Return the size of the part that follows `written` bytes of a multipart upload.

    8 MiB up to 10 GiB, then 1/1250 of `written`: 10,000 parts reach beyond 5 TiB. Source: limits
    of 10,000 parts of at most 5 GiB, docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html.
    """
    return max(MIN_PART_BYTES, written // 1250)


def _page(request: Answer, client: Any) -> Answer:
    return proven(client.list_objects_v2(**request), "IsTruncated")


def bare(etag: str) -> str:
    """Return an ETag without quotes for If-Match: Ceph would take quotes as part of it."""
    return etag.strip('"')


def _object_entry(name: str, size: int, found: Answer) -> Entry:
    modified = found["LastModified"].replace(microsecond=0)  # Ceph's HEAD has whole seconds only
    return Entry(name, size, found["ETag"], modified.timestamp())
