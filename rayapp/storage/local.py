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

from rayapp.storage import base
from rayapp.storage.folders import below, opened


class LocalStorage(base.Storage):
    """A folder of a file system that supports rename, hard links and flock.

    It may be a link, but links below it are neither listed nor followed to what is deleted: other
    users of a shared folder can make links that lead out of it.
    """

    links = False
    """Whether links to files are listed as files, as the cache of a hub has them."""

    def local_path(self, name: str = "") -> str:
        return self._folder_url(name)

    def read(
        self, name: str, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> bytes:
        base.check_range(offset, length)
        path, absent = self._url(name), (FileNotFoundError, IsADirectoryError, NotADirectoryError)
        try:
            with base.explained("read", path, *absent), open(path, "rb", opener=_open_now) as file:
                info = os.fstat(file.fileno())
                if not stat.S_ISREG(info.st_mode):
                    why = "it is a pipe or a device, not a file"
                    raise base.StorageError("read", path, why, "Remove it")
                if etag not in (None, _entry(name, info).etag):
                    raise base.changed(path)
                file.seek(offset)
                return base.cut(path, file.read(-1 if length is None else length), length)
        except absent:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None

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
            if etag is None and os.path.exists(path) and self.stat(name) is None:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))

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
        temporary = f"{folder}/{base.HIDDEN}{uuid.uuid4().hex}.tmp"
        with base.explained("write", path):
            _make_folder(folder)
            out = _LocalWriter(temporary, path)
        try:
            with out:
                yield out
                with base.explained("write", path):
                    os.fsync(out.fileno())
            with base.explained("write", path):
                publish(temporary, path)
                _sync_folder(folder)
        finally:
            with base.explained("write", path), suppress(FileNotFoundError):  # renamed: published
                os.unlink(temporary)

    def stat(self, name: str) -> base.Entry | None:
        path = self._url(name)
        with base.explained("read", path):
            try:
                info = os.stat(path)
                return _entry(name, info) if stat.S_ISREG(info.st_mode) else None
            except OSError as error:  # ELOOP: a link that leads to itself leads to no file
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    return None
                raise

    def dirs(self, prefix: str = "") -> base.Names:
        with base.explained("list", self._folder_url(prefix)), opened(self.url, prefix) as folder:
            names = [] if folder is None else sorted(filter(base.valid, os.listdir(folder)))
            return [name for name in names if self._holds(f"{prefix}/{name}")]

    def _holds(self, prefix: str) -> bool:
        try:
            return any(self._files(prefix))
        except PermissionError:  # another user's: whoever reads it is told
            return True

    def delete(self, name: str) -> None:
        path, (above, _, last) = self._url(name), name.rpartition("/")
        with base.explained("delete", path), opened(self.url, above, refuse=True) as folder:
            if folder is not None:
                with _locked(path, make=False), suppress(FileNotFoundError):
                    os.unlink(last, dir_fd=folder)

    def delete_if(self, name: str, etag: str) -> bool:
        path = self._url(name)
        with base.explained("delete", path), _locked(path, make=True):
            entry = self.stat(name)
            if entry is None or entry.etag != etag:
                return False
            os.unlink(path)
            return True

    def delete_tree(self, prefix: str) -> None:
        def failed(_: object, path: str, info: Any) -> None:
            if not isinstance(info[1], FileNotFoundError | NotADirectoryError):  # it is gone: fine
                raise info[1]

        path = self._folder_url(prefix)
        if path == "/":
            raise base.StorageError("delete", path, "that is the whole disk", "Name a folder")
        above = os.path.dirname(prefix.rstrip("/"))
        top, inside = (self.url, above) if prefix else (os.path.dirname(path), "")
        with base.explained("delete", path), opened(top, inside, refuse=True) as folder:
            if folder is not None:
                shutil.rmtree(os.path.basename(path), dir_fd=folder, onerror=failed)

    def check_writable(self) -> None:
        data = os.urandom(64)
        with base.explained("write", self.url):
            _make_folder(self.url)
            probe = f"{self.url}/{base.HIDDEN}{uuid.uuid4().hex}.probe"
            out = _LocalWriter(probe, self.url)
            try:
                with out:
                    out.write(data)
                    os.fsync(out.fileno())
                with open(probe, "rb") as file:
                    base.cut(probe, file.read(), len(data))
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
        except base.StorageError:
            raise
        except OSError as error:
            if refusal is not None and isinstance(error, refusal):
                return
            why += f" ({error.strerror})"
            raise base.StorageError("write", self.url, why, fix) from error
        if refusal is not None:
            why = f"its file system does not hold to {what}, so two drivers could own one run"
            raise base.StorageError("write", self.url, why, fix)

    def list(self, prefix: str = "") -> base.Entries:
        above = f"{prefix.rstrip('/')}/".lstrip("/")
        with base.explained("list", self._folder_url(prefix)):
            entries = [_entry(above + name, info) for name, info in self._files(prefix)]
        return sorted(entries, key=lambda entry: entry.name)

    def strays(self) -> base.Names:
        with base.explained("list", self.url), opened(self.url) as folder:
            every = below(folder)
            return sorted(name for name, info in every if not stat.S_ISREG(info.st_mode))

    def _files(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        with opened(self.url, prefix) as folder:
            for name, info in below(folder):
                if self.links and stat.S_ISLNK(info.st_mode):
                    with suppress(FileNotFoundError):
                        info = os.stat(os.path.join(self.url, prefix, name))
                if stat.S_ISREG(info.st_mode):
                    yield name, info


class _LocalWriter(io.FileIO):
    """Writes all of its data; unbuffered, so that closing after an error cannot fail again."""

    def __init__(self, temporary: str, path: str) -> None:
        super().__init__(temporary, "xb")
        self._path = path

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        with base.explained("write", self._path):
            while done < len(view):
                done += super().write(view[done:]) or 0
        return done


def _entry(name: str, info: os.stat_result) -> base.Entry:
    etag = f"{info.st_mtime_ns:x}-{info.st_ino:x}-{info.st_size:x}"  # each write is a new inode
    return base.Entry(name, info.st_size, etag, info.st_mtime)


def _open_now(path: str, flags: int) -> int:
    """Open a file without waiting: a pipe would be opened when somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


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
        file = f"{folder}/{base.HIDDEN}{name}.lock"
        made = make and not os.path.exists(file)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(file, flags | (os.O_CREAT if make else 0), 0o666)
        if made:
            _share(file)
    try:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        if lock is not None:
            os.close(lock)
