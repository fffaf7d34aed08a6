"""Stream rows to the training workers through Ray Data, in the run's exact order.

    TorchTrainer(loop, datasets={"train": first_step}, dataset_config=ExactOrder(open_stream))
    for batch in steps(ray.train.get_dataset_shard("train"), order.micro_batch): ...

When a group of workers starts, Ray calls `first_step`, then `ExactOrder.configure` with the size of
the group. The stream has one block per (chunk of steps, rank), in that order. With `preserve_order`
and blocks of equal size, `streaming_split(equal=True)` deals them out in turn, so rank r gets
exactly its part of every step. A resume starts reading at the step where it resumes.

Ray Data plans a data set as a whole, so a long run is cut into executions. Two data sets take
turns: while the last chunks of an execution of one are used, the other starts the next execution.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
import ray.train
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data.block import BlockMetadata

from rayapp.data.prepared import Prepared
from rayapp.data.prepared_windows import GrowingRows
from rayapp.data.ray_tasks import on_workers_nodes
from rayapp.data.token_rows import StepRows, step_rows
from rayapp.order import EMPTY, Order

CHUNK_BYTES = 4 * 2**20
EXECUTION_BLOCKS = 2_048  # a planned block costs Ray Data 0.8 ms at the start, and 5 KiB
LEAST_CHUNKS = 8  # of an execution
MAX_STEPS_PER_CHUNK = 32
LEAST_TASKS = 2
PAUSE_S = 0.01
# Ray Data fails by itself after 30 minutes without a block: a long evaluation, or a window of rows
# that is still prepared, is no failure.
NO_LIMIT = -1
Arrays = dict[str, np.ndarray[Any, Any]]
Fields = Mapping[str, tuple[tuple[int, ...], Any]]  # of a row: shape and dtype
FIELDS = ("input_ids", "labels", "segments", "target_bytes", "positions", "rows")


@dataclass
class Shard:
    """One rank's part of a stream."""

    lanes: list[ray.data.DataIterator]
    """Execution e of the stream is execution e // n of lane e % n, for n lanes."""
    executions: int
    chunks: int
    """Of an execution; the last one may have fewer."""

    def blocks(self) -> Iterator[Arrays]:
        """Yield the blocks; open the next execution when three quarters of one are taken.

        All ranks must iterate together: Ray Data starts an execution when all have opened it.
        """
        blocks = self._open(0)
        for execution in range(self.executions):
            following: Future[Iterator[Arrays]] | None = None
            for number, block in enumerate(blocks):
                if execution + 1 < self.executions and number == self.chunks * 3 // 4:
                    following = _beside(partial(self._open, execution + 1))
                yield block
            if following is not None:
                blocks = following.result()

    def _open(self, execution: int) -> Iterator[Arrays]:
        """Start an execution and wait for its first block, after which Ray Data reads ahead."""
        lane: Any = self.lanes[execution % len(self.lanes)]  # the stubs want a batch size
        blocks = iter(lane.iter_batches(batch_size=None, prefetch_batches=2))
        return itertools.chain([next(blocks)], blocks)


def _beside(work: Callable[[], Iterator[Arrays]]) -> Future[Iterator[Arrays]]:
    """Do `work` in a thread of its own, which keeps no process from ending."""
    done: Future[Iterator[Arrays]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="next-execution", daemon=True).start()
    return done


@dataclass(frozen=True)
class Stream:
    """The rest of a run for a number of workers."""

    world: int
    lanes: list[ray.data.Dataset]
    """One if a single execution holds the run, else two."""
    executions: int
    chunks: int
    """Of an execution; the last one may have fewer."""

    def split(self) -> list[Shard]:
        lanes = [lane.streaming_split(self.world, equal=True) for lane in self.lanes]
        of_ranks = map(list, zip(*lanes, strict=True))
        return [Shard(each, self.executions, self.chunks) for each in of_ranks]


class ExactOrder(ray.train.DataConfig):
    """Gives each rank its rows of every step, from the first step (`datasets["train"]`) onwards."""

    def __init__(self, open_stream: Callable[[int, int], Stream]) -> None:
        """`open_stream(first_step, world)` returns the stream for a number of workers."""
        super().__init__(enable_shard_locality=False)
        self.open_stream = open_stream

    def configure(self, datasets: Any, world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Return {name: Shard} of each rank; Ray calls it."""
        ((name, first_step),) = datasets.items()
        return [{name: shard} for shard in self.open_stream(first_step, world_size).split()]


class Numbers(ray.data.Datasource):
    """The numbers of a lane's blocks, each in a block of its own.

    `ray.data.range` would reserve a CPU for each of its tasks.
    """

    def __init__(self, count: int, size: int, lane: int, lanes: int) -> None:
        """Of `count` numbers, executions of `size` go to the lanes in turn."""
        super().__init__()
        self.count, self.size, self.lane, self.lanes = count, size, lane, lanes

    def estimate_inmemory_data_size(self) -> int:
        """Return the bytes of all blocks; Ray Data calls it."""
        return 8 * self.size

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: ray.data.DataContext | None = None,
    ) -> list[ray.data.ReadTask]:
        """Return one read task per block; Ray Data calls it.

        It calls it once more without a context, for the number of tasks that it was told.
        """
        one = BlockMetadata(num_rows=1, size_bytes=8, input_files=None, exec_stats=None)
        # How often the data set has been executed; by it Ray's own sources shuffle anew.
        done = 0 if data_context is None else data_context._execution_idx
        first = (done * self.lanes + self.lane) * self.size
        numbers = range(first, min(first + self.size, self.count))
        if data_context is None:
            numbers = range(parallelism)
        return [ray.data.ReadTask(partial(_numbered, number), one) for number in numbers]


class Paced(ExecutionCallback):
    """Lets Ray Data look for finished tasks 100 times a second, at most.

    While enough blocks are ready, which is most of a run, its executor would look all the time.
    """

    def on_execution_step(self, executor: Any) -> None:
        """Wait; Ray Data calls it after each look."""
        time.sleep(PAUSE_S)


def _numbered(number: int) -> list[pa.Table]:
    return [pa.table({"id": [number]})]


def spare_cpus(world: int) -> int:
    """Return how many tasks may read at once: the CPUs beside `world` workers, at least 2."""
    return max(LEAST_TASKS, int(ray.cluster_resources().get("CPU", 0)) - world)


def blocks(
    order: Order,
    first_step: int,
    world: int,
    row_bytes: int,
    fields: Fields,
    fill: Callable[[int, int, Arrays], None],
    concurrency: int | None = None,
    block_bytes: int = CHUNK_BYTES,
) -> Stream:
    """Return the rest of a run as equal blocks, one per (chunk of steps, rank).

    `fill(step, rank, columns)` writes a rank's rows of a step into `columns`, slices [m * b, ...]
    of the block that are zero. A block has as many steps as fit `block_bytes`, at least one.

    At most `concurrency` tasks run at once, by default one per CPU without a worker. They reserve
    no CPU in Ray: the workers of runs that share a cluster may hold every CPU, and would then wait
    for tasks that wait for a CPU.
    """
    rank_rows = order.num_micro_batches(world) * order.micro_batch
    per_chunk = steps_per_chunk(order, world, row_bytes, block_bytes)
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

    size = min(chunks, max(LEAST_CHUNKS, EXECUTION_BLOCKS // world))
    executions = math.ceil(chunks / size)
    at_once = min(concurrency or spare_cpus(world), size * world)  # Ray warns about more
    lanes = []
    for lane in range(min(2, executions)):
        numbers = Numbers(chunks * world, size * world, lane, min(2, executions))
        lanes.append(_lane(numbers, read, at_once))
    return Stream(world, lanes, executions, size)


def _lane(numbers: Numbers, read: Callable[[Arrays], Arrays], concurrency: int) -> ray.data.Dataset:
    # The same for both operators, so that Ray Data fuses them into one task.
    compute = ray.data.TaskPoolStrategy(size=concurrency)
    tasks: dict[str, Any] = {"num_cpus": 0, "compute": compute, **on_workers_nodes()}
    # Fewer tasks than that, in the last execution, are no reason to split their blocks.
    dataset = ray.data.read_datasource(numbers, override_num_blocks=numbers.size, **tasks)
    dataset = dataset.map_batches(read, batch_size=None, **tasks)
    dataset.context.execution_options.preserve_order = True
    dataset.context.target_max_block_size = None  # a split block would go to two ranks
    dataset.context.enable_progress_bars = False
    dataset.context.execution_no_progress_timeout_s = NO_LIMIT
    dataset.context.custom_execution_callback_classes = [Paced]
    return dataset


def parts(
    shard: Shard, micro_batch: int, num_micro_batches: int
) -> Iterator[tuple[int, Arrays, bool]]:
    """Yield (step, columns as [m, b, ...], whether the block ends) of a rank's steps."""
    size, shape = micro_batch * num_micro_batches, (num_micro_batches, micro_batch)
    for block in shard.blocks():
        taken = block.pop("step")[::size]
        taken = taken[taken != EMPTY]  # padding of the last chunk
        for number, step in enumerate(taken.tolist()):
            part = slice(number * size, (number + 1) * size)
            columns = {n: c[part].reshape(*shape, *c.shape[1:]) for n, c in block.items()}
            yield step, columns, number + 1 == len(taken)


def steps_per_chunk(
    order: Order, world: int, row_bytes: int, block_bytes: int = CHUNK_BYTES
) -> int:
    """Return the steps of a block: as many as fit `block_bytes`, from 1 to MAX_STEPS_PER_CHUNK."""
    step_bytes = row_bytes * order.micro_batch * order.num_micro_batches(world)
    return max(1, min(MAX_STEPS_PER_CHUNK, block_bytes // step_bytes))


# ---- Rows of tokens ----------------------------------------------------------------------------


def stream(
    prepared: Prepared, order: Order, first_step: int, world: int, concurrency: int | None = None
) -> Stream:
    """Return the rest of the run from `first_step` on, for `world` workers.

    Its tasks wait for the windows that are not prepared.
    """
    growing = GrowingRows(prepared, order)

    def fill(step: int, rank: int, columns: Arrays) -> None:
        batch = step_rows(*growing.at(step), step, rank, world)
        for name, column in columns.items():
            column[:] = getattr(batch, name).reshape(column.shape)

    dtype = growing.rows.dtype
    row_bytes, fields = dtype.itemsize, _fields(dtype)
    return blocks(order, first_step, world, row_bytes, fields, fill, concurrency)


def steps(
    shard: Shard,
    micro_batch: int,
    num_micro_batches: int,
    source_ends: tuple[int, ...] = (),
    pairs: bool = False,
) -> Iterator[StepRows]:
    """Yield this rank's steps from its part of the stream; `source_ends` is as in StepRows."""
    for step, arrays, ends in parts(shard, micro_batch, num_micro_batches):
        more: dict[str, Any] = {"source_ends": source_ends, "ends_block": ends, "group": 2 * pairs}
        yield StepRows(step, **arrays | more)


def _fields(dtype: np.dtype[Any]) -> Fields:
    stored = ("input_ids", "labels", "segments", "values")
    names = [*FIELDS, *({"values"} & {*(dtype.names or ())})]
    return {
        name: (dtype[name].shape, dtype[name].base) if name in stored else ((), np.int64)
        for name in names
    }
