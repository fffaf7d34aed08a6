"""Check that metrics.jsonl is whole while it is in parts, whenever its writer is killed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_observe_metrics import record, steps

from rayapp.observe import metrics, metrics_log
from rayapp.observe.columns import Columns, Follower
from rayapp.observe.metrics import backwards, blocks, last, parts
from rayapp.observe.metrics_log import MetricsLog, cut, part_name, seal
from rayapp.observe.run_folder import METRICS, METRICS_PARTS
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.storage.local import LocalStorage


class Killed(BaseException):
    """The writer is gone."""


class Mortal(LocalStorage):
    """A folder whose process is killed before one of its writes or deletions."""

    left = 0

    def _live(self) -> None:
        if Mortal.left == 0:
            raise Killed
        Mortal.left -= 1

    @contextmanager
    def open_write(self, name: str) -> Iterator[Any]:
        self._live()
        with super().open_write(name) as out:
            yield out

    def delete(self, name: str) -> None:
        self._live()
        super().delete(name)

    def delete_tree(self, prefix: str) -> None:
        for entry in self.list(prefix):
            self.delete(entry.name)
        super().delete_tree(prefix)

    def local_path(self, name: str = "") -> None:  # type: ignore[override]
        return None


def line(number: int) -> bytes:
    return b'{"step": %6d, "attempt": 1, "time": 2}\n' % number


def content(storage: Storage) -> bytes:
    return b"".join(data for _, data in blocks(storage))


def append(storage: Storage, first: int, count: int) -> Iterator[bytes]:
    """Write lines as MetricsLog does, in parts of 3; yield each after it is stored."""
    listed = parts(storage)
    start, data = listed[-1].end if listed else 0, b""
    for number in range(first, first + count):
        data += line(number)
        storage.write(part_name(start), data)
        if len(data) >= 3 * len(line(number)):
            start, data = start + len(data), b""
        yield line(number)


def test_parts_are_sealed(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    whole = b"".join(map(line, range(1, 101)))
    assert b"".join(append(storage, 1, 100)) == content(storage) == whole
    assert len(parts(storage)) == 34
    seal(storage)
    assert [part.name for part in parts(storage)] == [METRICS]
    assert storage.read(METRICS) == whole and storage.list(METRICS_PARTS) == []


def test_a_killed_writer_leaves_all_that_it_has_stored(tmp_path: Path) -> None:
    """Kill it at its 1st, 2nd ... write or deletion; the next attempt cuts, goes on and seals."""
    draw = random.Random(0)
    for case in range(40):
        storage = Mortal(str(tmp_path / str(case)))
        Mortal.left, stored, resumed = 1 + case % 20, b"", False
        try:
            for written in append(storage, 1, 12):
                stored += written
            seal(storage)
        except Killed:
            pass
        assert content(storage) in (stored, stored + line(len(stored) // len(line(1)) + 1))
        end = len(line(1)) * draw.randint(0, len(stored) // len(line(1)))
        Mortal.left = draw.randint(0, 4)
        try:  # the next attempt may be killed as it begins
            cut(storage, end)
            resumed = True
        except Killed:
            now = content(storage)
            assert stored[:end] == now[:end] and (stored + line(99)).startswith(now[: len(stored)])
        Mortal.left = 10**6
        if not resumed:
            cut(storage, end)
        assert content(storage) == stored[:end]
        appended = b"".join(append(storage, 100, 5))
        seal(storage)
        assert storage.read(METRICS) == stored[:end] + appended
        assert storage.list(METRICS_PARTS) == []


def test_lines_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FIRST_BYTES", 20)
    monkeypatch.setattr(metrics, "BLOCK_BYTES", 50)
    storage = open_storage(str(tmp_path))
    lines = [line(number) for number in range(1, 40)]
    storage.write(METRICS, b"".join(lines) + b'{"torn')
    found = list(backwards(storage))
    assert [text for _, text in found] == [b'{"torn', *reversed(lines)]
    assert [stop for stop, _ in found[1:]] == [len(line(1)) * n for n in range(39, 0, -1)]


def test_a_run_on_s3_writes_few_bytes_and_is_read_at_any_time(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_log, "PART_BYTES", 3_000)  # some 5 lines
    monkeypatch.setattr(metrics_log, "FLUSH_S", 0.0)
    storage = open_storage(f"s3://{s3_bucket}/run")
    written = 0
    put = type(storage).write

    def counted(self: Storage, name: str, data: bytes) -> None:
        nonlocal written
        written += len(data)
        put(self, name, data)

    monkeypatch.setattr(type(storage), "write", counted)
    storage.write(
        METRICS, b"".join(b'{"step": %d, "attempt": 3, "time": 1}\n' % n for n in range(1, 9))
    )
    followed = Follower(storage)
    log = MetricsLog(storage, 6)  # of a run that has left no parts
    assert log.attempt == 4 and steps(storage) == [1, 2, 3, 4, 5, 6]
    for step in range(7, 127):
        log.write(record(step, attempt=4))
        log.wait_stored(step)
        if step % 20 == 0:
            assert followed.poll() == (0 if step == 20 else step - 20)
            assert followed.steps["step"].tolist() == list(range(1, step + 1))
            newest = last(storage)
            assert newest is not None and newest["step"] == step
    assert len(parts(storage)) > 3
    size = parts(storage)[-1].end
    assert written < 10 * size, "it rewrites what it has written"
    # Killed here: no `close`. The next attempt begins in the midst of a part.
    again = MetricsLog(storage, 41)
    assert followed.poll() == 41 and steps(storage) == list(range(1, 42))
    again.write(record(42, attempt=5))
    again.close()
    assert followed.poll() == 41 and followed.steps["attempt"].tolist()[-2:] == [4, 5]
    assert [part.name for part in parts(storage)] == [METRICS]
    assert steps(storage) == list(range(1, 43))
    assert [entry["step"] for entry in followed.lines(39, 42)] == [40, 41, 42]
    log.close()


def test_a_folder_copied_in_the_midst_goes_on_locally(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write(METRICS, line(1))
    list(append(storage, 2, 20))
    assert steps(storage) == list(range(1, 22))
    end = metrics.parts(storage)[-1].end
    cut(storage, end - len(line(1)))
    assert storage.list(METRICS_PARTS) == [] and steps(storage) == list(range(1, 21))


def test_columns_are_what_the_lines_say(tmp_path: Path) -> None:
    """Also where lines lack fields."""
    storage = open_storage(str(tmp_path))
    log = MetricsLog(storage, 0)
    for step in range(1, 40):
        log.write(record(step, loss=float(step), mfu=None, skipped=step % 2 == 0))
    log.close()
    names = ("step", "loss", "mfu", "skipped", "images")
    found = Columns.read(storage, names)
    assert found["step"].tolist() == found["loss"].tolist() == list(range(1, 40))
    assert found["skipped"].tolist() == [float(step % 2 == 0) for step in range(1, 40)]
    assert all(value != value for name in ("mfu", "images") for value in found[name])
    assert found.ends[-1] == storage.size(METRICS) and found.last == last(storage)


def followed(storage: Storage) -> Columns:
    follower = Follower(storage)
    follower.poll()
    return follower.steps


@pytest.mark.parametrize("reading", [metrics.read, metrics.last, Columns.read, followed])
def test_a_file_that_is_cut_while_it_is_read_is_read_again(
    reading: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an attempt begins after a failure: a status, a list or a report is read then."""
    storage = open_storage(str(tmp_path))
    line = {"step": 1, "attempt": 1, "time": 1.0}
    lines = [json.dumps({**line, "step": step}) + "\n" for step in (1, 2, 3)]
    storage.write(METRICS, "".join(lines).encode())
    listing, cuts = metrics.parts, [2]

    def listed_before_the_cut(storage: Storage) -> list[metrics.Part]:
        found = listing(storage)
        if cuts:
            cut(storage, sum(map(len, lines[: cuts.pop()])))
        return found

    monkeypatch.setattr(metrics, "parts", listed_before_the_cut)
    found = reading(storage)
    if reading is metrics.last:
        assert found["step"] == 2
    else:
        assert len(found) == 2
    assert cuts == []


def test_a_file_that_is_always_shorter_than_listed_is_not_read_without_end() -> None:
    def reading() -> None:
        tries.append(1)
        raise metrics.CutBackError("read", METRICS, "it has been cut back meanwhile")

    tries = list[int]()
    with pytest.raises(StorageError, match="cut back"):
        metrics.read_again(reading)()
    assert len(tries) == metrics.READINGS
