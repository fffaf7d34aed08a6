"""A storage in a folder of the local disk."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, BinaryIO

from rayapp.storage.base import (
    HIDDEN,
    Entries,
    Entry,
    Names,
    Storage,
    StorageError,
    changed,
    check_range,
    cut,
    hidden,
)


class LocalStorage(Storage):
    """A folder of a file system that supports rename, hard links and flock."""

    def local_path(self, name: str = "") -> str:
        return self._folder_url(name)

    def read(
        self, name: str, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> bytes:
        check_range(offset, length)
        path = self._url(name)
        try:
            with open(path, "rb") as file:
                if etag not in (None, _entry(name, os.fstat(file.fileno())).etag):
                    raise changed(path)
                file.seek(offset)
                return cut(path, file.read(-1 if length is None else length), length)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None
        except StorageError:
            raise
        except OSError as error:
            raise _local_error("read", path, error) from error

    def open_write(self, name: str) -> AbstractContextManager[BinaryIO]:
        def publish(temporary: str, path: str) -> None:
            with _locked(path, make=False):
                os.replace(temporary, path)

        return self._staged(name, publish)

    def create(self, name: str, data: bytes) -> str | None:
        etag: str | None = None

        def publish(temporary: str, path: str) -> None:
            nonlocal etag
            with suppress(FileExistsError):
                os.link(temporary, path)
                etag = _entry(name, os.stat(temporary)).etag

        with self._staged(name, publish) as out:
            out.write(data)
        return etag

    def replace_if(self, name: str, data: bytes, etag: str) -> str | None:
        new: str | None = None

        def publish(temporary: str, path: str) -> None:
            nonlocal new
            with _locked(path, make=True):
                entry = self.stat(name)
                if entry is not None and entry.etag == etag:
                    new = _entry(name, os.stat(temporary)).etag
                    os.replace(temporary, path)

        if not self.exists(name):
            return None
        with self._staged(name, publish) as out:
            out.write(data)
        return new

    @contextmanager
    def _staged(self, name: str, publish: Callable[[str, str], None]) -> Iterator[BinaryIO]:
        """Yield a writer to a temporary file; on success fsync it and call `publish`."""
        path = self._url(name)
        folder = os.path.dirname(path)
        temporary = f"{folder}/{HIDDEN}{uuid.uuid4().hex}.tmp"
        with explained("write", path):
            _make_folder(folder)
            out = _LocalWriter(temporary, path)
        try:
            with out:
                yield out
                with explained("write", path):
                    os.fsync(out.fileno())
            with explained("write", path):
                publish(temporary, path)
                _sync_folder(folder)
        finally:
            with explained("write", path), suppress(FileNotFoundError):  # renamed: published
                os.unlink(temporary)

    def stat(self, name: str) -> Entry | None:
        path = self._url(name)
        with explained("read", path):
            try:
                return None if os.path.isdir(path) else _entry(name, os.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def dirs(self, prefix: str = "") -> Names:
        path = self._folder_url(prefix)
        with explained("list", path):
            folders = [e for e in _scan(path) if e.is_dir(follow_symlinks=False)]
            return sorted(e.name for e in folders if any(_files(e.path)))

    def delete(self, name: str) -> None:
        path = self._url(name)
        absent = suppress(FileNotFoundError, NotADirectoryError)
        with explained("delete", path), _locked(path, make=False), absent:
            os.unlink(path)

    def delete_if(self, name: str, etag: str) -> bool:
        path = self._url(name)
        with explained("delete", path), _locked(path, make=True):
            entry = self.stat(name)
            if entry is None or entry.etag != etag:
                return False
            os.unlink(path)
            return True

    def delete_tree(self, prefix: str) -> None:
        def failed(_: object, path: str, info: Any) -> None:
            if not isinstance(info[1], FileNotFoundError):  # someone else deleted it: fine
                raise info[1]

        path = self._folder_url(prefix)
        if path == "/":
            raise StorageError("delete", path, "that is the whole disk", "Name a folder")
        with explained("delete", path):
            if os.path.isdir(path):
                shutil.rmtree(path, onerror=failed)

    def check_writable(self) -> None:
        data = os.urandom(64)
        with explained("write", self.url):
            _make_folder(self.url)
            probe = f"{self.url}/{HIDDEN}{uuid.uuid4().hex}.probe"
            out = _LocalWriter(probe, self.url)
            try:
                with out:
                    out.write(data)
                    os.fsync(out.fileno())
                with open(probe, "rb") as file:
                    cut(probe, file.read(), len(data))
                self._check_promises(probe)
            finally:
                for name in (probe, f"{probe}-link", f"{probe}-moved"):
                    with suppress(FileNotFoundError):
                        os.unlink(name)

    def _check_promises(self, probe: str) -> None:
        """Raise StorageError if the file system lacks what create, replace_if and write need."""
        with self._promised("hard links"):
            os.link(probe, f"{probe}-link")
        with self._promised("hard links", FileExistsError):
            os.link(probe, f"{probe}-link")
        with self._promised("flock"), open(probe, "rb") as first, open(probe, "rb") as second:
            fcntl.flock(first, fcntl.LOCK_EX)
            with self._promised("flock", BlockingIOError):
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with self._promised("atomic renaming"):
            os.replace(probe, f"{probe}-moved")
        with self._promised("fsync of folders"):
            _sync_folder(self.url)

    @contextmanager
    def _promised(self, what: str, refusal: type[OSError] | None = None) -> Iterator[None]:
        """Raise StorageError if the block fails; with `refusal`, if it does not fail like that."""
        why = f"its file system is without {what}"
        fix = "Choose a folder on a local disk, NFS, or Lustre mounted with -o flock"
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            if refusal is not None and isinstance(error, refusal):
                return
            why += f" ({error.strerror})"
            raise StorageError("write", self.url, why, fix) from error
        if refusal is not None:
            why = f"its file system does not hold to {what}, so two drivers could own one run"
            raise StorageError("write", self.url, why, fix)

    def list(self, prefix: str = "") -> Entries:
        path = self._folder_url(prefix)
        entries = []
        with explained("list", path):
            for file in _files(path):
                with suppress(FileNotFoundError):  # deleted since the folder was read
                    entries.append(_entry(os.path.relpath(file.path, self.url), file.stat()))
        return sorted(entries, key=lambda entry: entry.name)


class _LocalWriter(io.FileIO):
    """Writes all of its data; unbuffered, so that closing after an error cannot fail again."""

    def __init__(self, temporary: str, path: str) -> None:
        super().__init__(temporary, "xb")
        self._path = path

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        with explained("write", self._path):
            while done < len(view):
                done += super().write(view[done:]) or 0
        return done


def _entry(name: str, info: os.stat_result) -> Entry:
    etag = f"{info.st_mtime_ns:x}-{info.st_ino:x}-{info.st_size:x}"  # each write is a new inode
    return Entry(name, info.st_size, etag, info.st_mtime)


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files(path: str) -> Iterator[os.DirEntry[str]]:
    for entry in _scan(path):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        elif entry.is_file() and not hidden(entry.name):
            yield entry


def _make_folder(path: str) -> None:
    """Create a folder and its parents, and fsync each one's parent: they survive a power cut."""
    if not os.path.isdir(path):
        _make_folder(os.path.dirname(path))
        try:
            os.mkdir(path)
            _share(path)
        except FileExistsError:  # made by someone else meanwhile, or a file in the way
            if not os.path.isdir(path):
                raise
        _sync_folder(os.path.dirname(path))


def _share(path: str) -> None:
    """Give a new folder or lock file the group and group permissions of its parent, if writable.

    With the usual umask of 022 the next user of a shared folder could not write. A sticky parent
    such as /tmp is not shared.
    """
    above, own = os.stat(os.path.dirname(path)), os.stat(path)
    if not above.st_mode & stat.S_IWGRP or above.st_mode & stat.S_ISVTX:
        return
    given = stat.S_ISGID | stat.S_IRWXG | stat.S_IRWXO if stat.S_ISDIR(own.st_mode) else 0o066
    # A file system without owners allows neither; check_writable then reports who cannot write.
    with suppress(PermissionError, NotImplementedError):
        os.chown(path, -1, above.st_gid)
    with suppress(PermissionError, NotImplementedError):
        os.chmod(path, stat.S_IMODE(own.st_mode) | above.st_mode & given)


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _locked(path: str, make: bool) -> Iterator[None]:
    """Lock the lock file beside a file; only with `make` (replace_if) is a missing one created.

    The lock file is never deleted, since that would let two holders in. flock works over NFS too.
    """
    folder, _, name = path.rpartition("/")
    lock = None
    with suppress(FileNotFoundError, NotADirectoryError):
        file = f"{folder}/{HIDDEN}{name}.lock"
        made = make and not os.path.exists(file)
        lock = os.open(file, os.O_RDWR | (os.O_CREAT if make else 0), 0o666)
        if made:
            _share(file)
    try:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        if lock is not None:
            os.close(lock)


LOCAL_REASONS = {  # errno -> (why, what to do)
    errno.ENOSPC: ("the disk is full", "Free some space or choose a folder on another disk"),
    errno.EDQUOT: ("your disk quota is used up", "Free some space or choose another folder"),
    errno.EACCES: ("permission denied", "Choose a folder you may write to or fix its mode"),
    errno.EPERM: ("the system does not permit it", "Choose a folder you may write to"),
    errno.EROFS: ("the file system is read-only", "Choose a folder on a writable disk"),
    errno.ENOENT: ("its parent folder does not exist and cannot be created", "Correct the path"),
    errno.ENOTDIR: ("a parent of it is a file, not a folder", "Correct the path"),
    errno.EEXIST: ("a file stands where a folder is needed", "Correct the path"),
    errno.EISDIR: ("it is a folder, not a file", "Correct the path"),
}

FULL = (errno.ENOSPC, errno.EDQUOT)


def _local_error(what: str, path: str, error: OSError) -> StorageError:
    default = (str(error.strerror or error), "Check the disk or choose another folder")
    explained = StorageError(what, path, *LOCAL_REASONS.get(error.errno or 0, default))
    explained.errno = error.errno
    return explained


@contextmanager
def explained(what: str, path: str) -> Iterator[None]:
    """Raise errors of the system as StorageError, with what was done, the reason and a remedy."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _local_error(what, path, error) from error
