"""Write objects to S3: whole, in parts, and only if a condition holds."""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from rayapp.storage.base import HIDDEN, StorageError
from rayapp.storage.s3_client import Answer, head, place_of, proven, send, status_of

log = logging.getLogger("rayapp.storage")
T = TypeVar("T")

upload_threads = 4  # upload threads per open file
MIN_PART_BYTES = 8 * 2**20
TOKEN = "rayapp-token"  # metadata key by which a writer recognises its own object


def put_if(url: str, data: bytes, patient: bool = True, **condition: str) -> str | None:
    """Put an object if the condition holds; return its ETag, or None if it does not hold."""
    key, token = place_of(url), uuid.uuid4().hex
    request = {**key, **condition, "Body": data, "Metadata": {TOKEN: token}}

    def put(client: Any) -> str | None:
        return cast(str, proven(client.put_object(**request))["ETag"])

    def find(client: Any) -> str | None:
        info = head(key, client)
        return info["ETag"] if info["Metadata"].get(TOKEN) == token else None

    refused: dict[str, str | None] = {"PreconditionFailed": None, "NoSuchKey": None}
    etag = send("write", url, put, refused, patient)
    # Refused, but perhaps because our own first request succeeded and its answer was lost.
    return etag or send("read", url, find, refused, patient)


def check_writable(folder: str) -> None:
    """Write, read and delete a probe below a URL, also conditionally.

    Raises: StorageError.
    """
    data = os.urandom(64)
    url = f"{folder}/{HIDDEN}{uuid.uuid4().hex}.probe"
    where = place_of(url)

    def call(what: str, request: Callable[[Any], T], answers: dict[str, T] | None = None) -> T:
        return send(what, folder, request, answers, patient=False)

    def put(**condition: str) -> str | None:
        return put_if(url, data, patient=False, **condition)

    etag = call("write", lambda c: proven(c.put_object(**where, Body=data[:1]))["ETag"])
    try:
        # Without permission to list the bucket, an absent name gives 403, not 404.
        absent = {**where, "Key": f"{where['Key']}-absent"}
        nothing: dict[str, Answer] = {"NoSuchKey": {}}
        call("read", lambda client: head(absent, client), nothing)
        if put(IfNoneMatch="*"):
            raise _unconditional(folder, "If-None-Match", "wrote over an object that exists")
        if not put(IfMatch=bare(etag)):
            raise _unconditional(folder, "If-Match", "refused the ETag that an object has")
        if put(IfMatch=bare(etag)):
            raise _unconditional(folder, "If-Match", "took an ETag that an object has no more")
        if call("read", lambda client: client.get_object(**where)["Body"].read()) != data:
            why = "what was read back differs"
            raise StorageError("write", folder, why, "Check the store")
    finally:
        call("delete", lambda client: client.delete_object(**where))


def _unconditional(folder: str, header: str, what: str) -> StorageError:
    """Return the error for a store without conditional writes, which leases need."""
    why = f"the store does not hold to {header}: it {what}, so two drivers could own one run"
    fix = "Use a bucket without versioning if it is Ceph's, or a store with conditional writes"
    return StorageError("write", folder, why, fix)


class S3Writer(io.RawIOBase):
    """Sends a stream as one PUT if it is small, else as a multipart upload on a few threads.

    Memory: upload_threads + 2 parts. If the process is killed, the parts of its upload are
    invisible, but S3 bills them until the bucket's lifecycle rule aborts incomplete uploads.
    """

    def __init__(self, url: str) -> None:
        self._url, self._key = url, place_of(url)
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
            raise ValueError(f"write to the closed file {self._url}")
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            left = part_bytes(self._written) - len(self._pending)
            taken = view[done : done + left]
            self._pending += taken
            done += len(taken)
            self._written += len(taken)
            if len(taken) >= left:
                self._send()
        return done

    def _call(self, request: Callable[[Any], T]) -> T:
        return send("write", self._url, request)

    def _send(self) -> None:
        """Submit the pending bytes as a part; if all threads are busy, wait for the oldest."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(upload_threads, "upload")
            begin = {**self._key, "Metadata": {TOKEN: self._token}}
            begun = self._call(lambda c: proven(c.create_multipart_upload(**begin), "UploadId"))
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
        self._complete(parts)

    def _complete(self, parts: list[Answer]) -> None:
        from botocore.exceptions import ClientError

        def complete(client: Any) -> bool:
            whole = {"MultipartUpload": {"Parts": parts}}
            try:
                # Ceph's first answer leaves the ETag empty.
                proven(client.complete_multipart_upload(**self._upload, **whole), "Key")
            except ClientError as error:
                if status_of(error) == 500:  # also Ceph's answer for an upload that is gone
                    client.list_parts(**self._upload, MaxParts=1)
                raise
            return True

        def holds(client: Any) -> bool:
            return bool(head(self._key, client)["Metadata"].get(TOKEN) == self._token)

        # If the first completion's answer was lost, a repeated one finds no upload.
        gone = {"NoSuchUpload": False, "NoSuchKey": False}  # the latter is Ceph's
        done = send("write", self._url, complete, gone, attempts=1)
        if not done and not send("read", self._url, holds, {"NoSuchKey": False}):
            why, fix = "the multipart upload was aborted by someone else", "Write it again"
            raise StorageError("write", self._url, why, fix)

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


def bare(etag: str) -> str:
    """Return an ETag without quotes for If-Match: Ceph would take quotes as part of it."""
    return etag.strip('"')
