"""Check that Ray Data deals every rank exactly the rows that reading in one process gives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
from patience import PATIENCE_S

from rayapp.data import stream
from rayapp.data.packing import IGNORE, row_dtype
from rayapp.data.prepared import Prepared
from rayapp.data.token_rows import (
    PLACED,
    StepRows,
    TokenRows,
    local_steps,
    sequential_batches,
    step_rows,
    stored_bytes,
    with_checksums,
)
from rayapp.order import EMPTY, Order
from rayapp.storage import StorageError, open_storage

SHARDS = (5, 1, 8, 3)  # rows
SEQ_LEN = 6


@pytest.fixture(scope="module")
def ray_cluster(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a Ray of 3 CPUs for this module, apart from any other on the machine."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        ray.init(
            address="local",
            num_cpus=3,
            include_dashboard=False,
            object_store_memory=150 * 2**20,
            log_to_driver=False,
            _temp_dir=str(tmp_path_factory.mktemp("ray")),
        )
        yield
        ray.shutdown()


def random_rows(url: str, columns: int = 0) -> Prepared:
    """Write shards of random rows, each row known by its first token."""
    rng = np.random.default_rng(0)
    rows = np.zeros(sum(SHARDS), row_dtype(SEQ_LEN, columns))
    if columns:
        rows["values"] = rng.standard_normal(rows["values"].shape)
    for name in ("input_ids", "labels", "segments"):
        rows[name] = rng.integers(0, 50_000, rows[name].shape)
    rows["input_ids"][:, 0] = np.arange(len(rows))
    rows["target_bytes"] = rng.integers(0, 2**32, len(rows))
    shards, first = [], 0
    for number, count in enumerate(SHARDS):
        some, ours = rows[first : first + count], number % 2 == 0
        name = f"train-{number:05d}{PLACED if ours else '.rows'}"
        stored = with_checksums(some, f"{url}/{name}", 0).tobytes()
        before = corpora.as_before([row.tobytes() for row in some])
        open_storage(url).write(name, stored if ours else before)
        shards.append((name, count))
        first += count
    counts = {"train": {"rows": len(rows)}}
    return Prepared(
        url=url,
        fingerprint="f" * 16,
        parts={"a source values": [*map(str, range(columns))]} if columns else {},
        seq_len=SEQ_LEN,
        shards={"train": shards},
        counts=counts,
        bad={},
        examples=[],
        records=len(rows),
        duplicates=0.0,
    )


def deal(prepared: Prepared, order: Order, first_step: int, world: int) -> list[list[StepRows]]:
    """Take the steps of all ranks from the stream, each rank in a thread, as training does."""
    config = stream.ExactOrder(partial(stream.stream, prepared, order))
    shards = config.configure({"train": first_step}, world)
    taken: list[list[StepRows]] = [[] for _ in range(world)]

    def consume(rank: int) -> None:
        shard, micro_batches = shards[rank]["train"], order.num_micro_batches(world)
        taken[rank] += stream.steps(shard, order.micro_batch, micro_batches)

    threads = [threading.Thread(target=consume, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


@pytest.fixture
def short_executions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make executions of two chunks of two steps."""
    monkeypatch.setattr(stream, "MAX_STEPS_PER_CHUNK", 2)
    monkeypatch.setattr(stream, "EXECUTION_BLOCKS", 1)
    monkeypatch.setattr(stream, "LEAST_CHUNKS", 2)


def same(one: StepRows, other: StepRows) -> bool:
    return one.step == other.step and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in (*stream.FIELDS, *(["values"] if other.values is not None else []))
    )


def check(prepared: Prepared, order: Order, first_step: int, world: int) -> None:
    taken = deal(prepared, order, first_step, world)
    rows = prepared.rows("train")
    for rank in range(world):
        expected = list(local_steps(rows, order, rank, world, first_step))
        assert [batch.step for batch in taken[rank]] == list(range(first_step, order.num_steps))
        assert all(same(a, b) for a, b in zip(taken[rank], expected, strict=True))


# 17 rows, 3 micro-batches of 2 a step: steps 2 and 5 straddle an epoch's end, the last is short,
# 2 and more ranks do not divide the 3 micro-batches evenly.
EPOCHS = Order.for_epochs(num_rows=17, rows_per_step=6, micro_batch=2, seed=3, epochs=3)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("first_step", [0, 5])
def test_the_stream_is_what_one_process_reads(
    ray_cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    first_step: int,
) -> None:
    assert EPOCHS.num_steps == 9
    monkeypatch.setattr(stream, "MAX_STEPS_PER_CHUNK", 2)  # 9 and 4 steps: a last chunk of 1 and 2
    columns = 2 if first_step else 0
    check(random_rows(str(tmp_path), columns), EPOCHS, first_step, world)


@pytest.mark.parametrize("first_step", [0, 3, 20])
def test_executions_follow_one_another(
    ray_cluster: None, tmp_path: Path, short_executions: None, first_step: int
) -> None:
    order = Order.for_steps(num_rows=17, rows_per_step=6, micro_batch=2, seed=3, num_steps=21)
    check(random_rows(str(tmp_path)), order, first_step, 2)


@pytest.mark.full
def test_the_next_execution_is_read_before_the_last_one_ends(
    ray_cluster: None, short_executions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LEAST_CHUNKS", 8)
    order = Order.for_steps(num_rows=17, rows_per_step=1, micro_batch=1, seed=0, num_steps=32)
    dealt = stream.blocks(order, 0, 1, 8, {}, lambda step, rank, columns: None)
    assert dealt.executions == 2
    (shard,) = dealt.split()
    waits = list[float]()
    blocks = shard.blocks()
    for number in range(dealt.executions * dealt.chunks):
        began = time.monotonic()
        next(blocks)
        waits.append(time.monotonic() - began)
        meanwhile = dealt.chunks * 3 // 4 <= number < dealt.chunks  # the next execution is opened
        time.sleep(1.5 if meanwhile else 0.3)  # the steps of a chunk
    assert max(waits[1:]) < 1.0, [round(wait, 2) for wait in waits]


@pytest.mark.full
def test_a_stream_that_is_ahead_takes_little_cpu(ray_cluster: None) -> None:
    order = Order.for_steps(num_rows=17, rows_per_step=1, micro_batch=1, seed=0, num_steps=32 * 500)
    fields = {"bytes": ((2**16,), np.uint8)}  # blocks of 2 MiB
    dealt = stream.blocks(order, 0, 1, 2**16, fields, lambda step, rank, columns: None)
    bundles = dealt.lanes[0].iter_internal_ref_bundles()  # its executor is in this process
    next(bundles)
    time.sleep(4.0)
    began, cpu_s = time.monotonic(), time.process_time()
    for _ in range(8):
        time.sleep(0.5)
        next(bundles)
    share = (time.process_time() - cpu_s) / (time.monotonic() - began)
    assert share < 0.35, f"{share:.0%} of a core"


def test_a_resume_at_the_end_gives_nothing(ray_cluster: None, tmp_path: Path) -> None:
    assert deal(random_rows(str(tmp_path)), EPOCHS, EPOCHS.num_steps, 2) == [[], []]


def test_more_ranks_than_micro_batches_and_rows_on_s3(ray_cluster: None, s3_bucket: str) -> None:
    order = Order.for_steps(num_rows=17, rows_per_step=2, micro_batch=1, seed=0, num_steps=3)
    check(random_rows(f"s3://{s3_bucket}/rows"), order, 1, 3)


def test_blocks_larger_than_ray_wants_are_not_cut(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.data

    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "target_max_block_size", 256)  # bytes; a chunk has 9 steps of 700
    check(random_rows(str(tmp_path)), EPOCHS, 0, 2)
    assert context.target_max_block_size == 256, "the settings of other data sets changed"
    assert not context.execution_options.preserve_order


def test_rows_come_where_workers_hold_every_cpu(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    order = Order.for_steps(num_rows=17, rows_per_step=6, micro_batch=2, seed=0, num_steps=40)

    def fill(step: int, rank: int, columns: stream.Arrays) -> None:
        mark = tmp_path / f"{step}-{rank}"
        mark.touch()
        columns["at_once"][:] = len(list(tmp_path.iterdir()))
        time.sleep(0.02)
        mark.unlink()

    held = ray.util.placement_group([{"CPU": 3}])
    assert held.wait(60)
    fields = {"at_once": ((), np.int64)}
    dealt = stream.blocks(order, 0, 2, 8, fields, fill, concurrency=2, block_bytes=1)
    (dataset,) = dealt.lanes
    found: list[int] = []
    reader = threading.Thread(
        target=lambda: found.extend(int(row["at_once"]) for row in dataset.iter_rows()), daemon=True
    )
    reader.start()
    reader.join(PATIENCE_S / 10)
    try:
        assert not reader.is_alive(), "the rows wait for a CPU"
        assert max(found) <= 2, "more tasks read at once than were allowed"
    finally:
        ray.util.remove_placement_group(held)


def test_ray_has_nothing_to_say_where_cpus_outnumber_blocks(
    ray_cluster: None, recwarn: pytest.WarningsRecorder
) -> None:
    order = Order.for_steps(num_rows=17, rows_per_step=2, micro_batch=1, seed=0, num_steps=3)
    dealt = stream.blocks(order, 0, 1, 8, {}, lambda step, rank, columns: None, concurrency=15)
    (lane,) = dealt.lanes
    assert sum(1 for _ in lane.iter_batches(batch_size=None)) == 1  # block
    shown = [str(each.message) for each in recwarn if each.category is UserWarning]
    assert shown == []


@pytest.mark.parametrize(
    ("world", "steps", "chunks"), [(1, 12_800, 512), (8, 10_000, 256), (256, 100_000, 8)]
)
def test_the_start_is_the_same_at_any_length(
    ray_cluster: None, world: int, steps: int, chunks: int
) -> None:
    row = row_dtype(4096).itemsize
    order = Order.for_steps(10**6, 4 * world, 4, seed=0, num_steps=steps)
    per_chunk = stream.steps_per_chunk(order, world, row)
    assert per_chunk * 4 * row <= stream.CHUNK_BYTES
    dealt = stream.blocks(order, 0, world, row, {}, lambda step, rank, columns: None)
    assert dealt.chunks == chunks
    assert dealt.executions == -(-steps // (per_chunk * chunks))


def test_a_block_has_at_least_a_step_and_few_of_them() -> None:
    assert stream.steps_per_chunk(EPOCHS, 1, 100) == stream.MAX_STEPS_PER_CHUNK
    large = Order.for_steps(17, 10**6, 10**6, 0, 10)
    assert stream.steps_per_chunk(large, 1, 100) == 1


# ---- Rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["local", "s3"])
def test_rows_by_number(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = str(tmp_path) if where == "local" else f"s3://{request.getfixturevalue('s3_bucket')}/r"
    rows = random_rows(url).rows("train")
    assert len(rows) == 17
    ids = np.array([16, 0, EMPTY, 4, 5, 6, 13, 14, 0])  # the ends of every shard, one twice
    records = rows.read(ids)
    present = ids != EMPTY
    assert records["input_ids"][present, 0].tolist() == ids[present].tolist()
    (empty,) = records[~present]
    assert (empty["labels"] == IGNORE).all() and not empty["segments"].any()
    assert empty["target_bytes"] == 0 and len(rows.read(ids[:0])) == 0
    whole = rows.read(np.arange(17))
    data = b"".join(
        np.frombuffer(open_storage(url).read(name), np.uint8)
        .reshape(-1, stored_bytes(SEQ_LEN))[:, : rows.dtype.itemsize]
        .tobytes()
        for name, _ in rows.shards
    )
    assert whole.tobytes() == data


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_a_row_with_a_changed_bit_is_named(where: str, tmp_path: Path, s3_bucket: str) -> None:
    """In each of its bytes, the checksum's own included; the rows beside it are read."""
    url = str(tmp_path) if where == "folder" else f"s3://{s3_bucket}/rows"
    prepared, storage = random_rows(url), open_storage(url)
    name, size = "train-00002.placed.rows", stored_bytes(SEQ_LEN)
    whole = storage.read(name)
    ids = np.arange(6, 14)  # of this shard
    expected = prepared.rows("train").read(ids)
    for at in range(3 * size, 4 * size) if where == "folder" else (3 * size, 4 * size - 1):
        storage.write(name, whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        rows = prepared.rows("train")
        with pytest.raises(StorageError) as caught:
            rows.read(ids)
        assert f"{name}: row 3 has other bytes than were written" in str(caught.value)
        assert (rows.read(ids[4:]) == expected[4:]).all()


def test_a_row_is_not_read_where_another_one_was(tmp_path: Path) -> None:
    """Two rows, two shards, or the rows of two data sets have changed places."""
    urls = [str(tmp_path / name) for name in ("a", "b")]
    prepared = [random_rows(url) for url in urls]
    name, size = "train-00002.placed.rows", stored_bytes(SEQ_LEN)
    whole = open_storage(urls[0]).read(name)
    rows = [whole[at : at + size] for at in range(0, len(whole), size)]
    moved = {
        "rows": b"".join([rows[1], rows[0], *rows[2:]]),
        "a row twice": b"".join([rows[1], *rows[1:]]),
        "shards": open_storage(urls[0]).read("train-00000.placed.rows") + b"".join(rows[:3]),
    }
    ids = np.arange(6, 14)  # of this shard
    for what, data in moved.items():
        open_storage(urls[0]).write(name, data)
        with pytest.raises(StorageError, match=f"{name}: row 0 has other bytes than were written"):
            prepared[0].rows("train").read(ids)
            pytest.fail(what)
    open_storage(urls[1]).write(name, whole)
    with pytest.raises(StorageError, match=f"b/{name}: row 0 has other bytes"):
        prepared[1].rows("train").read(ids)


def test_bounds_are_given_where_a_row_holds_documents() -> None:
    """Of all rows of the micro-batch then; without any, none are needed."""
    segments = np.array([[[1, 1, 1, 0], [1, 1, 2, 2]]], np.uint16)
    tokens, places = np.zeros(segments.shape, np.int32), np.zeros((1, 2), np.int64)
    batch = StepRows(0, tokens, tokens, segments, places, places, places)
    whole: Any = batch.inputs(0)
    assert whole["boundaries"].tolist() == [0, 3, 4, 6, 8] and whole["longest"] == 3
    assert whole["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert whole["present"].tolist() == [[True, True, True, False], [True] * 4]
    assert set(batch.inputs(0, slice(0, 1))) == {"input_ids", "labels", "present"}
    assert set(batch.inputs(0, slice(1, 2))) == {*whole} - {"present"}
    empty = StepRows(0, tokens, tokens, segments * 0, places, places, places)
    assert set(empty.inputs(0)) == {"input_ids", "labels"}  # a router has no token to balance
    labels = np.array([[[IGNORE, 5, 5, IGNORE], [7, 7, 7, 7]]], np.int32)
    some = StepRows(0, tokens, labels, segments, places, places, places)
    assert some.inputs(0)["trained"].tolist() == [1, 2, 4, 5, 6, 7]  # type: ignore[union-attr]
    assert "trained" not in some.inputs(0, slice(1, 2))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_ranks_together_take_each_position_of_a_step_once(tmp_path: Path, world: int) -> None:
    rows = random_rows(str(tmp_path)).rows("train")
    for step in range(EPOCHS.num_steps):
        taken: list[Any] = []
        for rank in range(world):
            (batch,) = (b for b in local_steps(rows, EPOCHS, rank, world, step) if b.step == step)
            assert batch.input_ids.shape == (EPOCHS.num_micro_batches(world), 2, SEQ_LEN)
            real = batch.positions != EMPTY
            assert np.array_equal(real, batch.rows != EMPTY)
            assert np.array_equal(batch.input_ids[real][:, 0], batch.rows[real])
            taken += zip(batch.positions[real].tolist(), batch.rows[real].tolist(), strict=True)
        expected = [(n, row) for n, row in enumerate(EPOCHS.rows(step).tolist()) if row != EMPTY]
        assert sorted(taken) == expected


def test_the_last_step_of_a_block_says_so(
    ray_cluster: None, tmp_path: Path, short_executions: None
) -> None:
    prepared = random_rows(str(tmp_path))
    order = Order.for_steps(prepared.num_rows("train"), 4, 2, 0, 7)
    for taken in deal(prepared, order, 0, 2):
        assert [batch.ends_block for batch in taken] == [False, True] * 3 + [True]


@pytest.mark.full
def test_a_block_that_takes_long_does_not_end_the_stream(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of itself Ray Data fails after 30 minutes without a block; here, after two seconds."""
    import ray.data

    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "execution_no_progress_timeout_s", 2.0)
    order = Order.for_steps(16, 4, 2, 0, 4)

    def fill(step: int, rank: int, columns: stream.Arrays) -> None:
        time.sleep(6.0)
        columns["rows"][:] = step

    def first_step(step: int, world: int) -> stream.Stream:
        return stream.blocks(order, step, world, 8, {"rows": ((), np.int64)}, fill, 1, 1)

    (given,) = stream.ExactOrder(first_step).configure({"train": 2}, 1)
    taken = stream.parts(given["train"], order.micro_batch, order.num_micro_batches(1))
    assert [step for step, *_ in taken] == [2, 3]


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("micro_batch", [1, 4, 20])
def test_sequential_batches_take_every_row_once(
    tmp_path: Path, world: int, micro_batch: int
) -> None:
    rows = random_rows(str(tmp_path)).rows("train")
    ranks = [list(sequential_batches(rows, micro_batch, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    dealt = [batch for together in zip(*ranks, strict=True) for batch in together]
    ids = np.concatenate([batch.rows.ravel() for batch in dealt])
    assert ids[ids != EMPTY].tolist() == list(range(17))
    first = np.concatenate([batch.input_ids[..., 0].ravel() for batch in dealt])
    assert first[ids != EMPTY].tolist() == list(range(17))
    labels = np.concatenate([batch.labels.reshape(-1, SEQ_LEN) for batch in dealt])
    assert (labels[ids == EMPTY] == IGNORE).all()


@pytest.mark.parametrize("where", ["here", "on s3"])
def test_a_batch_has_the_numbers_of_its_rows(where: str, tmp_path: Path, s3_bucket: str) -> None:
    url = str(tmp_path) if where == "here" else f"s3://{s3_bucket}/columns"
    rows = random_rows(url, 3).rows("train")
    stored = rows.read(np.arange(len(rows)))["values"]  # [rows, 3, S]
    assert len(np.unique(stored)) == stored.size
    batches = [step_rows(rows, EPOCHS, 2, 1, 2), *sequential_batches(rows, 2, 0, 2)]
    for batch in batches:
        for i, numbers in enumerate(batch.rows):
            values: Any = batch.inputs(i)["values"]
            there = numbers != EMPTY
            assert values.shape == (3, 2, SEQ_LEN) and not values[:, ~there].any()
            assert (values[:, there] == stored[numbers[there]].swapaxes(0, 1)).all()
    assert "values" not in step_rows(random_rows(url).rows("train"), EPOCHS, 0, 0, 1).inputs(0)


def test_no_rows_give_no_batches(tmp_path: Path) -> None:
    rows = TokenRows(open_storage(str(tmp_path)), [], SEQ_LEN)
    assert len(rows) == 0 and list(sequential_batches(rows, 2, 0, 1)) == []
