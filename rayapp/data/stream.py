"""Stream rows to the training workers through Ray Data, in the run's exact order.

    TorchTrainer(loop, datasets={"train": first_step}, dataset_config=ExactOrder(open_stream))
    for batch in steps(ray.train.get_dataset_shard("train"), order.micro_batch): ...

Ray calls `first_step` when a group of workers starts, and `ExactOrder.configure` with the size of
that group. The pipeline that follows has one block per (chunk of steps, rank), in that order; with
`preserve_order` and equal blocks, `streaming_split(equal=True)` deals them out in turn, so rank r
gets exactly its part of every step, and a resume starts reading at the step where it resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray.data
import ray.train

from rayapp.data.prepared import Prepared
from rayapp.data.rows import StepRows, step_rows
from rayapp.order import EMPTY, Order

CHUNK_BYTES = 4 * 2**20
MAX_CHUNKS = 10_000
MAX_STEPS_PER_CHUNK = 32
FIELDS = ("input_ids", "labels", "segments", "target_bytes", "positions", "rows")


class ExactOrder(ray.train.DataConfig):
    """Give each rank its rows of every step from `datasets["train"]`, the first step, onwards."""

    def __init__(self, open_stream: Callable[[int, int], ray.data.Dataset]) -> None:
        """Take what opens the stream at a step, for a number of workers."""
        super().__init__(enable_shard_locality=False)
        self.open_stream = open_stream

    def configure(
        self, datasets: Any, world_size: int, *args: Any, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Build the pipeline for this group of workers; Ray calls it."""
        ((name, first_step),) = datasets.items()
        splits = self.open_stream(first_step, world_size).streaming_split(world_size, equal=True)
        return [{name: split} for split in splits]


def stream(prepared: Prepared, order: Order, first_step: int, world: int) -> ray.data.Dataset:
    """Return the rest of the run as a Dataset of equal blocks, one per (chunk of steps, rank)."""
    per_chunk = steps_per_chunk(prepared, order, first_step, world)
    chunks = max(1, math.ceil((order.num_steps - first_step) / per_chunk))
    rows = prepared.rows("train")

    def read(block: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        chunk, rank = divmod(int(block["id"][0]), world)
        first = first_step + chunk * per_chunk
        batches = [
            step_rows(rows, order, step, rank, world)
            for step in range(first, min(first + per_chunk, order.num_steps))
        ]
        return _to_block(
            batches, per_chunk * order.num_micro_batches(world) * order.micro_batch, rows.dtype
        )

    dataset = ray.data.range(chunks * world, override_num_blocks=chunks * world).map_batches(
        read, batch_size=None
    )
    dataset.context.execution_options.preserve_order = True
    dataset.context.target_max_block_size = None  # a block that is cut is dealt to two ranks
    dataset.context.enable_progress_bars = False
    return dataset


def steps(shard: Any, micro_batch: int, num_micro_batches: int) -> Iterator[StepRows]:
    """Yield this rank's steps from its shard of the stream."""
    size = micro_batch * num_micro_batches
    for block in shard.iter_batches(batch_size=None, prefetch_batches=2):
        for start in range(0, len(block["step"]), size):
            part = slice(start, start + size)
            step = int(block["step"][start])
            if step == EMPTY:  # the last chunk is filled up to the size of the others
                return
            shape = (num_micro_batches, micro_batch)
            arrays = {
                name: block[name][part].reshape(*shape, *block[name].shape[1:]) for name in FIELDS
            }
            yield StepRows(step, **arrays)


def steps_per_chunk(prepared: Prepared, order: Order, first_step: int, world: int) -> int:
    """Choose steps per block: a few MiB each, and never more blocks than Ray Data plans quickly."""
    row_bytes = prepared.rows("train").dtype.itemsize
    step_bytes = row_bytes * order.micro_batch * order.num_micro_batches(world)
    least = math.ceil((order.num_steps - first_step) * world / MAX_CHUNKS)
    return max(1, least, min(MAX_STEPS_PER_CHUNK, CHUNK_BYTES // step_bytes))


def _to_block(batches: list[StepRows], size: int, dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Lay steps out as columns of `size` rows; what is missing at the end has step EMPTY."""
    seq_len = dtype["input_ids"].shape[0]
    block: dict[str, np.ndarray[Any, Any]] = {"step": np.full(size, EMPTY, np.int64)}
    for name in FIELDS:
        shape = (size, seq_len) if name in ("input_ids", "labels", "segments") else (size,)
        kind = dtype[name].base if name in ("input_ids", "labels", "segments") else np.int64
        block[name] = np.zeros(shape, kind)
    place = 0
    for batch in batches:
        count = batch.positions.size
        part = slice(place, place + count)
        block["step"][part] = batch.step
        for name in FIELDS:
            values = getattr(batch, name)
            block[name][part] = values.reshape(count, *values.shape[2:])
        place += count
    return block
