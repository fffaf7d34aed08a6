"""A storage that a driver may write to only while it holds the run's lease.

`check` is called before each write and deletion: it waits for the lease to be renewed, and raises
if it is lost. A process may still be suspended between that and the write. So a file is written
only if it is as this driver has last seen it; if it is not, `verify` asks whose the lease is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from rayapp.storage import Entry, Storage
from rayapp.storage.base import Entries, Names


@dataclass(frozen=True)
class Fenced(Storage):
    """Pass reads on; refuse writes and deletions without the lease."""

    inner: Storage
    check: Callable[[], None]
    verify: Callable[[], None]
    """Raise unless the lease in the storage is this driver's."""
    _etags: dict[str, str | None] = field(default_factory=dict)
    """Of the files that this driver has written or looked at; None: absent."""

    def child(self, name: str) -> Storage:
        inner = self.inner.child(name)
        return Fenced(inner.url, inner, self.check, self.verify)

    __truediv__ = child

    def write(self, name: str, data: bytes) -> None:
        """Write a file if it is as this driver has last seen it, else after `verify`."""
        self.check()
        if name not in self._etags:
            self._etags[name] = self._look(name)
        while True:
            etag = self._etags[name]
            if etag is None:
                new = self.inner.create(name, data)
            else:
                new = self.inner.replace_if(name, data, etag)
            if new is None:
                self.verify()  # changed by someone else, or by our own request before this one
                self._etags[name] = self._look(name)
                continue
            self._etags[name] = new
            return

    def _look(self, name: str) -> str | None:
        entry = self.inner.stat(name)
        return entry.etag if entry else None

    @contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        self.check()
        with self.inner.open_write(name) as out:
            yield out
            self.check()  # an error here discards what was written

    def create(self, name: str, data: bytes) -> str | None:
        self.check()
        return self.inner.create(name, data)

    def replace_if(self, name: str, data: bytes, etag: str) -> str | None:
        self.check()
        return self.inner.replace_if(name, data, etag)

    def delete(self, name: str) -> None:
        self.check()
        self.inner.delete(name)

    def delete_if(self, name: str, etag: str) -> bool:
        self.check()
        return self.inner.delete_if(name, etag)

    def delete_tree(self, prefix: str) -> None:
        self.check()
        self.inner.delete_tree(prefix)

    def check_writable(self) -> None:
        self.inner.check_writable()

    def read(
        self, name: str, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> bytes:
        return self.inner.read(name, offset, length, etag)

    def stat(self, name: str) -> Entry | None:
        return self.inner.stat(name)

    def dirs(self, prefix: str = "") -> Names:
        return self.inner.dirs(prefix)

    def local_path(self, name: str = "") -> str | None:
        return self.inner.local_path(name)

    def list(self, prefix: str = "") -> Entries:
        return self.inner.list(prefix)
