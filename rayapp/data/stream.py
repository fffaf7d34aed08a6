"""Stream rows to the training workers through Ray Data, in the run's exact order.

    TorchTrainer(loop, datasets={"train": first_step}, dataset_config=ExactOrder(open_stream))
    for batch in steps(ray.train.get_dataset_shard("train"), order.micro_batch): ...

When a group of workers starts, Ray calls `first_step`, then `ExactOrder.configure` with the size of
the group. The pipeline has one block per (chunk of steps, rank), in that order. With
`preserve_order` and blocks of equal size, `streaming_split(equal=True)` deals them out in turn, so
rank r gets exactly its part of every step. A resume starts reading at the step where it resumes.
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
    """Gives each rank its rows of every step, from the first step (`datasets["train"]`) onwards."""

    def __init__(self, open_stream: Callable[[int, int], ray.data.Dataset]) -> None:
        """`open_stream(first_step, world)` returns the stream for a number of workers."""
        super().__init__(enable_shard_locality=False)
        self.open_stream = open_stream

    def configure(
        self, datasets: Any, world_size: int, *args: Any, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Build the pipeline of a group of workers; Ray calls it."""
        ((name, first_step),) = datasets.items()
        splits = self.open_stream(first_step, world_size).streaming_split(world_size, equal=True)
        return [{name: split} for split in splits]


class Numbers(ray.data.Datasource):
    """The numbers 0 to count - 1, each in a block of its own.

    `ray.data.range` does the same, but each of its tasks reserves a CPU.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def estimate_inmemory_data_size(self) -> int:
        """Return the bytes of all blocks; Ray Data calls it."""
        return 8 * self.count

    def get_read_tasks(self, *args: Any, **kwargs: Any) -> list[ray.data.ReadTask]:
        """Return one read task per block; Ray Data calls it."""
        one = BlockMetadata(num_rows=1, size_bytes=8, input_files=None, exec_stats=None)
        return [ray.data.ReadTask(partial(_numbered, i), one) for i in range(self.count)]


def _numbered(number: int) -> list[pa.Table]:
    return [pa.table({"id": [number]})]


def spare_cpus(world: int) -> int:
    """Return how many tasks may read at once: the CPUs beside `world` workers, at least 2."""
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

    `fill(step, rank, columns)` writes a rank's rows of a step into `columns`, slices [m * b, ...]
    of the block that are zero. A block has at least one step, and aims at `block_bytes` at most.

    At most `concurrency` tasks run at once, by default one per CPU without a worker. They reserve
    no CPU in Ray: the workers of runs that share a cluster may hold every CPU, and would then wait
    for tasks that wait for a CPU.
    """
    rank_rows = order.num_micro_batches(world) * order.micro_batch
    per_chunk = steps_per_chunk(order, first_step, world, row_bytes, block_bytes)
    chunks = max(1, math.ceil((order.num_steps - first_step) / per_chunk))

    def read(block: Arrays) -> Arrays:
        chunk, rank = divmod(int(block["id"][0]), world)
        first = first_step + chunk * per_chunk
        steps = range(first, min(first + per_chunk, order.num_steps))
        # Slots after the last step have step EMPTY.
        made: Arrays = {"step": np.full(per_chunk * rank_rows, EMPTY, np.int64)}
        for name, (shape, dtype) in fields.items():
            made[name] = np.zeros((per_chunk * rank_rows, *shape), dtype)
        for number, step in enumerate(steps):
            part = slice(number * rank_rows, (number + 1) * rank_rows)
            made["step"][part] = step
            fill(step, rank, {name: made[name][part] for name in fields})
        return made

    count = chunks * world
    # The same for both operators, so that Ray Data fuses them into one task.
    tasks: dict[str, object] = {
        "num_cpus": 0,
        "compute": ray.data.TaskPoolStrategy(size=concurrency or spare_cpus(world)),
    }
    numbers = ray.data.read_datasource(Numbers(count), override_num_blocks=count, **tasks)
    dataset = numbers.map_batches(read, batch_size=None, **tasks)
    dataset.context.execution_options.preserve_order = True
    dataset.context.target_max_block_size = None  # a split block would go to two ranks
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
            if step == EMPTY:  # padding of the last chunk
                return
            shape = (num_micro_batches, micro_batch)
            yield (
                step,
                {name: block[name][part].reshape(*shape, *block[name].shape[1:]) for name in names},
            )


def steps_per_chunk(
    order: Order, first_step: int, world: int, row_bytes: int, block_bytes: int = CHUNK_BYTES
) -> int:
    """Return steps per block: as many as fit `block_bytes`, more beyond MAX_CHUNKS blocks."""
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
    """Return the rest of the run from `first_step` as a Dataset for `world` workers."""
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
