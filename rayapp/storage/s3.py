"""A storage under a prefix of an S3 bucket."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from rayapp.storage import base
from rayapp.storage.s3_client import Answer, error_code, head, place_of, proven, send
from rayapp.storage.s3_writer import S3Writer, bare, check_writable, put_if

T = TypeVar("T")
Keys: TypeAlias = list[dict[str, str]]

page_keys = 1000  # most keys in a page of a listing and in a deletion


class S3Storage(base.Storage):
    """A prefix of a bucket, in Amazon S3 or a compatible store."""

    def local_path(self, name: str = "") -> None:
        return None

    @property
    def _bucket(self) -> str:
        return self.url.split("/")[2]

    def _key(self, name: str) -> dict[str, str]:
        return place_of(self._url(name))

    def read(
        self, name: str, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> bytes:
        base.check_range(offset, length)
        request = self._key(name)
        if length == 0:  # HTTP has no empty range
            if not self.exists(name):
                raise FileNotFoundError(errno.ENOENT, "no such file", self._url(name))
            return b""
        if offset or length is not None:
            last = "" if length is None else offset + length - 1
            request["Range"] = f"bytes={offset}-{last}"

        def get(client: Any) -> bytes:
            told = "ContentRange" if "Range" in request else "ETag"
            answer = proven(client.get_object(**request), told)
            if etag not in (None, answer["ETag"]):
                raise base.changed(self._url(name))
            return cast(bytes, answer["Body"].read())

        data = self._call("read", name, get, {"InvalidRange": b""})  # begins at or past the end
        return base.cut(self._url(name), data, length)

    @contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        out = S3Writer(self._url(name))
        try:
            yield cast(BinaryIO, out)
            out.commit()
        except BaseException:
            out.abort()
            raise
        finally:
            out.close()

    def create(self, name: str, data: bytes) -> str | None:
        return put_if(self._url(name), data, IfNoneMatch="*")

    def replace_if(self, name: str, data: bytes, etag: str) -> str | None:
        return put_if(self._url(name), data, IfMatch=bare(etag))

    def stat(self, name: str) -> base.Entry | None:
        def find(client: Any) -> base.Entry | None:
            info = head(self._key(name), client)
            return _object_entry(name, info["ContentLength"], info)

        nothing: dict[str, base.Entry | None] = {"NoSuchKey": None}
        return self._call("read", name, find, nothing)

    def dirs(self, prefix: str = "") -> base.Names:
        pages = self._pages(prefix, Delimiter="/")
        names = (p["Prefix"].split("/")[-2] for page in pages for p in page["CommonPrefixes"])
        return sorted(filter(base.valid, names))

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda client: client.delete_object(**self._key(name)))

    def delete_if(self, name: str, etag: str) -> bool:
        key = self._key(name)

        def delete(client: Any) -> bool:
            if head(key, client)["ETag"] != etag:
                return False
            client.delete_object(**key, IfMatch=bare(etag))
            return True

        return self._call("delete", name, delete, {"NoSuchKey": False, "PreconditionFailed": False})

    def delete_tree(self, prefix: str) -> None:
        if self._folder_url(prefix).count("/") == 2:
            fix = "Name a folder, or empty the bucket with other tools"
            raise base.StorageError("delete", self.url, "that is the whole bucket", fix)
        for page in self._pages(prefix):
            keys = [{"Key": entry["Key"]} for entry in page["Contents"]]
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

    def list(self, prefix: str = "") -> base.Entries:
        start = len(self.url.split("/", 3)[3]) + 1 if self.url.count("/") > 2 else 0
        entries = [
            _object_entry(item["Key"][start:], item["Size"], item)
            for page in self._pages(prefix)
            for item in page["Contents"]
            if base.valid(item["Key"][start:])
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def _pages(self, prefix: str, **request: Any) -> Iterator[Answer]:
        """Yield the pages of a folder's listing; each is retried on its own."""
        folder = f"{self._folder_url(prefix)}/".split("/", 3)[3]
        request |= {"Bucket": self._bucket, "Prefix": folder, "MaxKeys": page_keys}

        def list_page(client: Any) -> Answer:
            return proven(client.list_objects_v2(**request), "IsTruncated")

        while True:
            page = self._call("list", prefix, list_page)
            yield {"Contents": [], "CommonPrefixes": [], **page}
            if not page["IsTruncated"]:
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def check_writable(self) -> None:
        check_writable(self.url)

    def _call(
        self, what: str, name: str, request: Callable[[Any], T], answers: dict[str, T] | None = None
    ) -> T:
        return send(what, self._folder_url(name), request, answers)


def _object_entry(name: str, size: int, info: Answer) -> base.Entry:
    modified = info["LastModified"].replace(microsecond=0)  # Ceph's HEAD has whole seconds only
    return base.Entry(name, size, info["ETag"], modified.timestamp())
