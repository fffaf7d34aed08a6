"""The file system through which torch.distributed.checkpoint reads and writes our storage."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase

from rayapp.storage import Storage, StorageError
from rayapp.train.checkpoint.marker import MARKER, Damaged, Digest, SavedFile, open_checked

# torch raises CheckpointException for a failure on any rank; it is a BaseException, no Exception.
FAILURES = (Exception, CheckpointException)


def reason_of(error: BaseException) -> str:
    """Return an error's message; of torch's CheckpointException, each cause with its ranks."""
    if not isinstance(error, CheckpointException):
        return str(error) or repr(error)
    whys: dict[str, list[str]] = {}
    for rank, (cause, _) in error.failures.items():
        whys.setdefault(str(cause) or repr(cause), []).append(str(rank))
    return "; ".join(f"{why} (rank {', '.join(ranks)})" for why, ranks in whys.items())


class Files(FileSystemBase):
    """torch.distributed.checkpoint's file system interface over Storage; paths are names in it."""

    def __init__(self, storage: Storage, files: dict[str, SavedFile]) -> None:
        self.storage = storage
        self.files = files
        """Size and checksums by path: recorded for files written, checked for files read."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        name = str(path)
        if mode == "rb":
            if name not in self.files:
                raise Damaged(f"{name.rpartition('/')[2]} is not named in {MARKER}")
            with open_checked(self.storage, name, self.files[name]) as stream:
                yield stream
            return
        assert mode == "wb", mode
        with self.storage.open_write(name) as raw:
            digesting = Digesting(raw)
            yield digesting
            self.files[name] = digesting.digest.file()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: writing a file creates its folder."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self.storage.exists(str(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.storage.delete(str(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise StorageError("rename", str(path), "a committed name is never moved", "")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Digesting(io.RawIOBase):
    """Pass bytes on to `raw` and compute their checksums."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.digest = raw, Digest()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.raw.write(data)
        self.digest.update(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.digest.size

    def close(self) -> None:
        """Leave closing to the owner of `raw`, which publishes the file."""
