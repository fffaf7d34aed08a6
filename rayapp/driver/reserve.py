"""Keep some bytes of a disk for the reason of a failure.

A disk that becomes full during a run refuses result.json and events.jsonl too, so that the folder
would not tell why the run ended. A file of RESERVE_BYTES is written at the start and deleted before
the end of the command is recorded, whether the disk is full or not. By then the workers, which
would use the room up, have ended. Another user of the disk may still be quicker. In object stores
there is no reserve.

The file holds random bytes and is synced: compression, sparse files and delayed allocation would
save others, and posix_fallocate is not everywhere. After a kill the next command writes it anew.
"""

from __future__ import annotations

import os
from contextlib import suppress

from rayapp.observe.run_folder import RESERVE
from rayapp.storage import Storage
from rayapp.storage.base import explained

RESERVE_BYTES = 2**20  # a log of an attempt takes up to 520 kB, the rest some 10


class Reserve:
    """Room on the run's disk: taken where the block begins, given back where it ends, or before."""

    def __init__(self, run: Storage) -> None:
        folder = run.local_path()
        self._path = None if folder is None else f"{folder}/{RESERVE}"

    def __enter__(self) -> Reserve:
        """Raises: StorageError: there is no such room."""
        if self._path is not None:
            try:
                with explained("write", self._path), open(self._path, "wb") as file:
                    file.write(os.urandom(RESERVE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                self.free()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        """Give the room back."""
        if self._path is not None:
            with explained("delete", self._path), suppress(FileNotFoundError):
                os.unlink(self._path)
