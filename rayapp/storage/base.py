"""The base classes of inputs and storages, with their entries, error and seekable reader."""

from __future__ import annotations

import errno
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeAlias

READ_BLOCK = 2**20  # bytes that open_read fetches per request
HIDDEN = ".rayapp-"  # prefix of temporary, lock and probe files, which are never listed


class StorageError(OSError):
    """An operation on a URL failed; says which, why, and what to do about it."""

    def __init__(self, what: str, url: str, why: str, fix: str = "") -> None:
        super().__init__(f"cannot {what} {url}: {why}." + (f" {fix}." if fix else ""))
        self.what, self.url, self.why, self.fix = what, url, why, fix
        self.outage = False
        """Whether the storage has failed in ways that pass, for as long as requests are retried."""

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"errno": self.errno, "outage": self.outage}
        return type(self), (self.what, self.url, self.why, self.fix), state


@dataclass(frozen=True)
class Entry:
    """One file. Its etag changes whenever the content does; compare etags for equality only."""

    name: str
    size: int
    etag: str
    modified_s: float


Entries: TypeAlias = list[Entry]  # the method named `list` hides the builtin inside the classes
Names: TypeAlias = list[str]


@dataclass(frozen=True)
class Readable(ABC):
    """One folder of named bytes that can be read; see the package's docstring for the rules."""

    url: str

    def open_read(self, name: str, etag: str | None = None) -> BinaryIO:
        """Open a seekable reader that fetches blocks of READ_BLOCK bytes as they are read.

        All blocks are of one version of the file: that of `etag`, or that which is there.
        Raises: FileNotFoundError.
        """
        entry = self.stat(name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._url(name))
        read = partial(self.read, etag=etag or entry.etag)
        return io.BufferedReader(Reader(read, name, entry.size), READ_BLOCK)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it is absent."""
        entry = self.stat(name)
        return None if entry is None else entry.size

    def exists(self, name: str) -> bool:
        """Return whether a file (not a folder) of this name exists."""
        return self.stat(name) is not None

    def _url(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{checked(name)}"

    def _folder_url(self, prefix: str) -> str:
        return self._url(prefix.rstrip("/")) if prefix else self.url

    @abstractmethod
    def read(
        self, name: str, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> bytes:
        """Return `length` bytes from `offset` on, or all of the rest.

        Raises: FileNotFoundError; StorageError if a given length goes beyond the end, or the file
        has another ETag than the given one.
        """

    @abstractmethod
    def stat(self, name: str) -> Entry | None:
        """Return size, etag and time of one file; None if it is absent.

        For a compare-and-swap call stat, then read, then replace_if with stat's etag.
        """

    @abstractmethod
    def local_path(self, name: str = "") -> str | None:
        """Return the path on this machine's disk; None on S3."""

    @abstractmethod
    def list(self, prefix: str = "") -> Entries:
        """Return all files below a folder, sorted by name; [] if there are none."""


class Storage(Readable):
    """One folder of named bytes that can be written too."""

    def child(self, name: str) -> Storage:
        """Return the storage of a sub-folder (which need not exist)."""
        return type(self)(self._folder_url(name))

    __truediv__ = child

    def write(self, name: str, data: bytes) -> None:
        """Write a file; an existing one is replaced atomically."""
        with self.open_write(name) as out:
            out.write(data)

    @abstractmethod
    def open_write(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a writer; the file appears when the `with` block ends, unless it raises."""

    @abstractmethod
    def dirs(self, prefix: str = "") -> Names:
        """Return the sorted names of the immediate sub-folders that hold any file."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> str | None:
        """Write a file only if it is absent; return its etag, or None if it existed."""

    @abstractmethod
    def replace_if(self, name: str, data: bytes, etag: str) -> str | None:
        """Write a file only if it still has this etag; return the new etag, or None if not."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file; an absent one is no error."""

    @abstractmethod
    def delete_if(self, name: str, etag: str) -> bool:
        """Delete a file only if it still has this etag; return whether it was deleted.

        A server that ignores If-Match on deletions compares the etag just before instead.
        """

    @abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Delete everything below a folder, which may be absent; refuse a whole bucket or disk."""

    def strays(self) -> Names:
        """Return the names of what is no file: links, pipes, devices; S3 has none."""
        return []

    @abstractmethod
    def check_writable(self) -> None:
        """Write, read and delete small probe files within seconds, also by conditional writes.

        Raises: StorageError with the reason in the user's words.
        """


class Reader(io.RawIOBase):
    """A seekable file on top of ranged reads by `read(name, offset, length)`."""

    def __init__(self, read: Callable[[str, int, int], bytes], name: str, size: int) -> None:
        self._read, self._name, self._size, self._position = read, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readall(self) -> bytes:
        """Fetch the rest in one request; the base class would fetch 8 KiB at a time."""
        data = self._read(self._name, self._position, max(0, self._size - self._position))
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._position)
        if length <= 0:
            return 0
        buffer[:length] = self._read(self._name, self._position, length)
        self._position += length
        return length


def valid(name: str) -> bool:
    """Return whether a name means the same on a disk and on S3, and is not the storage's own."""
    parts = name.split("/")
    return not any(p in ("", ".", "..") or p.startswith(HIDDEN) or "\0" in p for p in parts)


def checked(name: str) -> str:
    """Return a name; raise ValueError if it is not valid."""
    if not valid(name):
        why = f"it has an empty part, '.', '..', or a part that starts with '{HIDDEN}'"
        raise ValueError(f"storage name {name!r} is not valid: {why}")
    return name


def cut(url: str, data: bytes, length: int | None) -> bytes:
    """Return data; raise StorageError if a read of known length did not get all of it."""
    if length is not None and len(data) != length:
        why = f"expected {length} bytes, the file had {len(data)}"
        raise StorageError("read", url, why, "It is truncated: restore it or use an older copy")
    return data


def changed(url: str) -> StorageError:
    """Return the error for a file that has another ETag than the one that is to be read."""
    why = "it was replaced since the run found it"
    return StorageError("read", url, why, "Leave it as it is, and run the command again")


def check_range(offset: int, length: int | None) -> None:
    """Raise ValueError for a range that no file can have."""
    if offset < 0 or (length is not None and length < 0):
        raise ValueError(f"offset={offset} and length={length} must not be negative")


LOCAL_REASONS = {  # errno -> (why, what to do)
    errno.ENOSPC: ("the disk is full", "Free some space or choose a folder on another disk"),
    errno.EDQUOT: ("your disk quota is used up", "Free some space or choose another folder"),
    errno.EACCES: ("permission denied", "Choose a folder you may write to or fix its mode"),
    errno.EPERM: ("the system does not permit it", "Choose a folder you may write to"),
    errno.EROFS: ("the file system is read-only", "Choose a folder on a writable disk"),
    errno.ENOENT: ("its parent folder does not exist and cannot be created", "Correct the path"),
    errno.ENOTDIR: ("a parent of it is a file, not a folder", "Correct the path"),
    errno.EEXIST: ("a file stands where a folder is needed", "Correct the path"),
    errno.EISDIR: ("it is no file, but a folder or a pipe", "Correct the path"),
    errno.ELOOP: ("a symbolic link is in the way, and is not followed", "Name what it leads to"),
}

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(what: str, path: str, *through: type[OSError]) -> Iterator[None]:
    """Raise errors of the system as StorageError, with what was done, the reason and a remedy.

    Errors of the types `through` are raised as they are.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, (StorageError, *through)):
            raise
        default = (str(error.strerror or error), "Check the disk or choose another folder")
        explained = StorageError(what, path, *LOCAL_REASONS.get(error.errno or 0, default))
        explained.errno = error.errno
        raise explained from error
