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
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
import ray.train
from ray.data.block import BlockMetadata

from rayapp.data.prepared import Prepared
from rayapp.data.rows import StepRows, step_rows
from rayapp.order import EMPTY, Order

CHUNK_BYTES = 4 * 2**20
MAX_CHUNKS = 10_000
MAX_STEPS_PER_CHUNK = 32
LEAST_TASKS = 2
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


class Numbers(ray.data.Datasource):
    """The numbers of the blocks, one block each.

    `ray.data.range` is that too, but its tasks always take a CPU.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def estimate_inmemory_data_size(self) -> int:
        """Return bytes; Ray Data asks."""
        return 8 * self.count

    def get_read_tasks(self, *args: Any, **kwargs: Any) -> list[ray.data.ReadTask]:
        """Return what makes each block; Ray Data asks."""
        one = BlockMetadata(num_rows=1, size_bytes=8, input_files=None, exec_stats=None)
        return [ray.data.ReadTask(partial(_numbered, i), one) for i in range(self.count)]


def _numbered(number: int) -> list[pa.Table]:
    return [pa.table({"id": [number]})]


def spare_cpus(world: int) -> int:
    """Return how many tasks may read at once beside so many workers: the cluster's other CPUs."""
    return max(LEAST_TASKS, int(ray.cluster_resources().get("CPU", 0)) - world)


Arrays = dict[str, np.ndarray[Any, Any]]
Fields = Mapping[str, tuple[tuple[int, ...], Any]]  # of a row: shape and dtype


def blocks(
    order: Order,
    first_step: int,
    world: int,
    row_bytes: int,
    fields: Fields,
    fill: Callable[[int, int, Arrays], None],
    concurrency: int | None = None,
    block_bytes: int = CHUNK_BYTES,
) -> ray.data.Dataset:
    """Return the rest of a run as a Dataset of equal blocks, one per (chunk of steps, rank).

    `fill(step, rank, columns)` writes what a rank takes of a step where the block has it, into
    columns of zeros: [m * b, ...]. Blocks have at most `block_bytes`, and at least one step.

    At most `concurrency` tasks run at once, by default one for each CPU without a worker. They ask
    Ray for no CPU: where runs share a cluster, their workers may hold every CPU, and would wait for
    tasks that wait for a CPU.
    """
    rank_rows = order.num_micro_batches(world) * order.micro_batch
    per_chunk = steps_per_chunk(order, first_step, world, row_bytes, block_bytes)
    chunks = max(1, math.ceil((order.num_steps - first_step) / per_chunk))

    def read(block: Arrays) -> Arrays:
        chunk, rank = divmod(int(block["id"][0]), world)
        first = first_step + chunk * per_chunk
        steps = range(first, min(first + per_chunk, order.num_steps))
        # What is missing at the end has step EMPTY.
        made: Arrays = {"step": np.full(per_chunk * rank_rows, EMPTY, np.int64)}
        for name, (shape, dtype) in fields.items():
            made[name] = np.zeros((per_chunk * rank_rows, *shape), dtype)
        for number, step in enumerate(steps):
            part = slice(number * rank_rows, (number + 1) * rank_rows)
            made["step"][part] = step
            fill(step, rank, {name: made[name][part] for name in fields})
        return made

    count = chunks * world
    # Alike in both, so that Ray Data makes one task of the two.
    tasks: dict[str, object] = {
        "num_cpus": 0,
        "compute": ray.data.TaskPoolStrategy(size=concurrency or spare_cpus(world)),
    }
    numbers = ray.data.read_datasource(Numbers(count), override_num_blocks=count, **tasks)
    dataset = numbers.map_batches(read, batch_size=None, **tasks)
    dataset.context.execution_options.preserve_order = True
    dataset.context.target_max_block_size = None  # a block that is cut is dealt to two ranks
    dataset.context.enable_progress_bars = False
    return dataset


def parts(
    shard: Any, names: Iterable[str], micro_batch: int, num_micro_batches: int
) -> Iterator[tuple[int, Arrays]]:
    """Yield (step, columns as [m, b, ...]) of a rank's steps from its shard of the blocks."""
    size = micro_batch * num_micro_batches
    for block in shard.iter_batches(batch_size=None, prefetch_batches=2):
        for start in range(0, len(block["step"]), size):
            part = slice(start, start + size)
            step = int(block["step"][start])
            if step == EMPTY:  # the last chunk is filled up to the size of the others
                return
            shape = (num_micro_batches, micro_batch)
            yield (
                step,
                {name: block[name][part].reshape(*shape, *block[name].shape[1:]) for name in names},
            )


def steps_per_chunk(
    order: Order, first_step: int, world: int, row_bytes: int, block_bytes: int = CHUNK_BYTES
) -> int:
    """Choose steps per block: by bytes, and never more blocks than Ray Data plans quickly."""
    step_bytes = row_bytes * order.micro_batch * order.num_micro_batches(world)
    least = math.ceil((order.num_steps - first_step) * world / MAX_CHUNKS)
    return max(1, least, min(MAX_STEPS_PER_CHUNK, block_bytes // step_bytes))


# ---- Rows of tokens ----------------------------------------------------------------------------


def stream(
    prepared: Prepared,
    order: Order,
    first_step: int,
    world: int,
    concurrency: int | None = None,
) -> ray.data.Dataset:
    """Return the rest of the run for so many workers."""
    rows = prepared.rows("train")

    def fill(step: int, rank: int, columns: Arrays) -> None:
        batch = step_rows(rows, order, step, rank, world)
        for name, column in columns.items():
            column[:] = getattr(batch, name).reshape(column.shape)

    row_bytes, fields = rows.dtype.itemsize, _fields(rows.dtype)
    return blocks(order, first_step, world, row_bytes, fields, fill, concurrency)


def steps(shard: Any, micro_batch: int, num_micro_batches: int) -> Iterator[StepRows]:
    """Yield this rank's steps from its shard of the stream."""
    for step, arrays in parts(shard, FIELDS, micro_batch, num_micro_batches):
        yield StepRows(step, **arrays)


def _fields(dtype: np.dtype[Any]) -> Fields:
    shape = dtype["input_ids"].shape
    tokens = ("input_ids", "labels", "segments")
    return {
        name: (shape, dtype[name].base) if name in tokens else ((), np.int64) for name in FIELDS
    }
