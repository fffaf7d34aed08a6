"""Read checkpoints into tensors, however these are sharded."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from rayapp.observe.run_folder import CHECKPOINTS
from rayapp.storage import Storage
from rayapp.train.checkpoint.files import FAILURES, Files, reason_of
from rayapp.train.checkpoint.marker import CheckpointError, Damaged, read_marker
from rayapp.train.checkpoint.staging import Tensors


def load(storage: Storage, name: str, tensors: Tensors) -> None:
    """Read a checkpoint into `tensors` in place; each rank reads only what its shards need.

    Raises:
        Damaged: a file is not what was saved; parts of `tensors` may have been filled.
        CheckpointError: a tensor is missing or has another shape, or the storage has failed.
    """
    try:
        reader = _Reader(storage / CHECKPOINTS, name)
        dcp_load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except FAILURES as error:
        causes: list[BaseException] = [error]
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
        damaged = any(isinstance(cause, Damaged) for cause in causes)
        raise (Damaged if damaged else CheckpointError)(
            f"{storage.url}/{CHECKPOINTS}/{name} could not be loaded: {reason_of(error)}"
        ) from error


def saved_shapes(storage: Storage, name: str) -> dict[str, tuple[int, ...] | None]:
    """Return the names in a checkpoint, each with the tensor's shape, or None for an object."""
    metadata = _Reader(storage / CHECKPOINTS, name).read_metadata().state_dict_metadata
    return {
        key: tuple(item.size) if isinstance(item, TensorStorageMetadata) else None
        for key, item in metadata.items()
    }


class _Reader(FileSystemReader):
    """Read shards from `<storage>/<name>` and check them against its marker."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(name)
        files = read_marker(storage / name, name).files
        checked = {f"{name}/{file}": facts for file, facts in files.items()}
        self.fs = Files(storage, checked)  # type: ignore[assignment]
        self.path = name
