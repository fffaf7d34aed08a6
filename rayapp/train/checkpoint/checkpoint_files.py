"""How torch.distributed.checkpoint reads and writes our storage, without running what it reads.

torch pickles the metadata and every value that is no tensor. Whoever can write to a run's folder
can also write the marker, so checksums do not make a pickle safe: only the classes of PICKLED and
those of `torch.load(weights_only=True)` are ever made.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from rayapp.storage import Storage, StorageError
from rayapp.train.checkpoint import marker

PICKLED = {  # what the metadata of a checkpoint may name
    "torch": "Size bool bfloat16 float16 float32 float64 float8_e4m3fn float8_e5m2 "
    "int8 int16 int32 int64 uint8",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata "
    "MetadataIndex StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.serialization": "_get_layout",
}

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

    def __init__(self, storage: Storage, files: dict[str, marker.SavedFile]) -> None:
        self.storage = storage
        self.files = files
        """Size and checksums by path: recorded for files written, checked for files read."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        name = str(path)
        if mode == "rb":
            if name not in self.files:
                raise marker.Damaged(f"{name.rpartition('/')[2]} is not named in {marker.MARKER}")
            with marker.open_checked(self.storage, name, self.files[name]) as stream:
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
        self.raw, self.digest = raw, marker.Digest()

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


class CheckedReader(FileSystemReader):
    """Read shards from `<storage>/<name>` and check them against its marker."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(name)
        files = marker.read_marker(storage / name, name).files
        checked = {f"{name}/{file}": facts for file, facts in files.items()}
        self.fs = Files(storage, checked)  # type: ignore[assignment]
        self.path = name
        with self.fs.create_stream(f"{name}/{marker.METADATA}", "rb") as stream:
            data = stream.read()  # an error of the storage is no damage
        try:
            self.metadata: Metadata = _Unpickler(io.BytesIO(data)).load()
            whole = isinstance(self.metadata, Metadata) and all(
                isinstance(item, BytesStorageMetadata) or isinstance(item.size, torch.Size)
                for item in self.metadata.state_dict_metadata.values()
            )
        except Exception as error:  # any cause: a pickle may raise anything
            raise marker.Damaged(f"{marker.METADATA} is damaged: {error}") from error
        if not whole:
            raise marker.Damaged(f"{marker.METADATA} is damaged: it is of another form")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return it; torch would hide the type of an error that is raised here."""
        return self.metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in PICKLED.get(module, "").split():
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class CheckedPlanner(DefaultLoadPlanner):
    """Read values that are no tensors without running them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise marker.Damaged(f"{name} is damaged: {error}") from error
        set_element(self.original_state_dict, self.mappings[name], loaded)
