"""Check metrics.jsonl through resumes, kills and a failing S3."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from rayapp.config.fields import TOKENS
from rayapp.observe import metrics, metrics_log
from rayapp.observe.columns import Columns, Follower
from rayapp.observe.metrics import FIRST_BYTES, MetricsLine, columns_of, last, line_of, read
from rayapp.observe.metrics_log import MetricsLog
from rayapp.observe.run_folder import METRICS
from rayapp.storage import Storage, StorageError, open_storage


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "run"))
    return open_storage(f"s3://{request.getfixturevalue('s3_bucket')}/run")


def record(step: int, **values: Any) -> MetricsLine:
    numbers: dict[str, Any] = dict.fromkeys(columns_of(TOKENS), 0.5)
    numbers |= {"step": step, "tokens": 64, "workers": 2, "attempt": 1, "batch_digest": "00ff"}
    return line_of(TOKENS, numbers, values)


def steps(storage: Storage) -> list[int]:
    return [line["step"] for line in read(storage)]


def test_no_file_is_no_lines(storage: Storage) -> None:
    assert read(storage) == []


def test_the_last_line_is_read_from_the_end(storage: Storage) -> None:
    assert last(storage) is None
    log = MetricsLog(storage, 0)
    for step in range(1, 201):  # several times what is read at once
        log.write(record(step))
    log.close()
    data = storage.read(METRICS)
    assert len(data) > 4 * FIRST_BYTES
    assert last(storage) == read(storage)[-1] and last(storage)["step"] == 200
    storage.write(METRICS, data + b'{"step": 201, "lo')  # torn
    assert last(storage)["step"] == 200
    storage.write(METRICS, data.split(b"\n")[0] + b"\n")
    assert last(storage)["step"] == 1


def test_each_step_is_there_once_after_resumes(storage: Storage) -> None:
    log = MetricsLog(storage, 0)
    assert log.attempt == 1
    for step in (1, 2, 3, 4, 5):
        log.write(record(step, step_s=step, attempt=log.attempt, time=10.0 * step))
    log.close()
    assert steps(storage) == [1, 2, 3, 4, 5]

    log = MetricsLog(storage, 3)
    assert log.attempt == 2
    assert steps(storage) == [1, 2, 3]  # already before the first step
    for step in (4, 5, 6):
        log.write(record(step, attempt=log.attempt))
    log.close()

    log = MetricsLog(storage, 6)
    assert log.attempt == 3
    log.close()
    lines = read(storage)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["attempt"] for line in lines] == [1, 1, 1, 2, 2, 2]
    assert list(lines[0]) == columns_of(TOKENS)

    log = MetricsLog(storage, 3)
    assert log.attempt == 3  # though no line of the second is kept
    log.close()
    assert steps(storage) == [1, 2, 3]

    MetricsLog(storage, 0).close()
    assert steps(storage) == []


def test_each_field_is_documented() -> None:
    page = Path(__file__).parent.parent.joinpath("docs", "run_folder.md").read_text()
    for name, shown in metrics.FIELDS.items():
        of = f" ({shown.unit.many})" if shown.unit else ""
        assert f"| `{name}` | {shown.text}{of} |\n" in page


def test_a_torn_last_line_is_dropped(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    whole = b'{"step": 1, "time": 0.5, "attempt": 1}\n'
    line = b'{"step": 2, "time": 0.5, "attempt": 1}'
    for end in range(len(line) + 1):
        storage.write(METRICS, whole + line[:end])
        # Only the newline is missing at the end: all of the step is there.
        assert steps(storage) == ([1, 2] if end == len(line) else [1])
    storage.write(METRICS, whole + line[:17])
    log = MetricsLog(storage, 9)
    log.write(record(3))
    log.close()
    assert steps(storage) == [1, 3]
    assert storage.read(METRICS).count(b"\n") == 2
    assert not caplog.records  # a torn end is no news: whoever follows a run sees it often


def test_broken_lines_in_the_midst_are_named(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    one, four = text_of([(1, 1, 2.0)]), text_of([(1, 4, 5.0)])
    storage.write(METRICS, one + b"\0\0\0\xff\n[3]\n" + four)
    assert steps(storage) == [1, 4]
    assert [r.getMessage() for r in caplog.records] == [
        f"{storage.url}/{METRICS}: line {number} is not readable" for number in (2, 3)
    ]


def test_what_is_not_finite_becomes_null(storage: Storage) -> None:
    log = MetricsLog(storage, 0)
    log.write(record(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, mfu=None))
    log.close()
    assert b"NaN" not in storage.read(METRICS) and b"Infinity" not in storage.read(METRICS)
    (line,) = read(storage)
    assert [line[name] for name in ("loss", "grad_norm", "lr", "mfu")] == [None] * 4


def test_close_makes_all_durable_at_once(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "FLUSH_S", PATIENCE_S)
    log = MetricsLog(storage, 0)
    for step in range(1, 301):
        log.write(record(step))
    start = time.monotonic()
    log.close()
    assert time.monotonic() - start < metrics_log.FLUSH_S  # it does not wait for its turn
    assert steps(storage) == list(range(1, 301))
    log.close()


def test_local_lines_can_be_read_while_they_are_written(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    log = MetricsLog(storage, 0)
    for step in (1, 2, 3):
        log.write(record(step))
        assert steps(storage) == list(range(1, step + 1))
    log.close()


def test_a_killed_process_loses_no_local_line(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/support']\n"
        "from test_observe_metrics import MetricsLog, open_storage, record\n"
        f"log = MetricsLog(open_storage({str(tmp_path)!r}), 0)\n"
        "for step in range(1, 10**9):\n"
        "    log.write(record(step)); print(step, flush=True)\n"
    )
    root = Path(__file__).parent.parent
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE)
    assert child.stdout is not None
    seen = [int(child.stdout.readline()) for _ in range(50)]
    os.kill(child.pid, signal.SIGKILL)
    seen += [int(line) for line in child.stdout.read().split(b"\n")[:-1]]
    child.wait()
    child.stdout.close()
    kept = steps(open_storage(str(tmp_path)))
    assert kept[: len(seen)] == seen and len(kept) - len(seen) in (0, 1)


def test_s3_is_rewritten_without_close(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "FLUSH_S", 0.01)
    storage = open_storage(f"s3://{s3_bucket}/run")
    log = MetricsLog(storage, 0)
    for step in range(1, 6):
        log.write(record(step))
        deadline = time.monotonic() + PATIENCE_S
        while steps(storage)[-1:] != [step]:
            assert time.monotonic() < deadline
    log.close()


def test_what_waits_for_a_step_goes_on_once_it_is_stored(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it waits before the step has its record; at once, not when the next flush is due."""
    monkeypatch.setattr(metrics_log, "FLUSH_S", 2 * PATIENCE_S)
    log = MetricsLog(storage, 0)
    with ThreadPoolExecutor(1) as pool:
        for step in range(1, 6):
            waiting = pool.submit(lambda step=step: (log.wait_stored(step), steps(storage))[1])
            if step % 2:
                time.sleep(0.05)
            assert not waiting.done()
            log.write(record(step))
            assert waiting.result(timeout=PATIENCE_S) == list(range(1, step + 1))
        never = pool.submit(log.wait_stored, 7)
        log.write(record(6))
        log.close()
        with pytest.raises(StorageError, match="step 7 is not stored"):
            never.result(timeout=PATIENCE_S)
    assert steps(storage) == [1, 2, 3, 4, 5, 6]


def test_training_goes_on_while_s3_fails(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_log, "FLUSH_S", 0.01)
    storage = open_storage(f"s3://{s3_bucket}/run")
    log = MetricsLog(storage, 0)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):

        def refuse(self: Storage, name: str, data: bytes) -> None:
            raise StorageError("write", f"{self.url}/{name}", "access denied")

        broken.setattr(type(storage), "write", refuse)
        for step in (1, 2, 3):
            log.write(record(step))
            deadline = time.monotonic() + PATIENCE_S
            while len(caplog.records) < step:
                assert time.monotonic() < deadline
    log.write(record(4))
    log.close()
    assert steps(storage) == [1, 2, 3, 4]
    assert "metrics are not stored yet: cannot write" in caplog.text

    log = MetricsLog(storage, 4)
    log.write(record(5))
    with monkeypatch.context() as broken:
        broken.setattr(type(storage), "write", refuse)
        with pytest.raises(StorageError, match="access denied"):
            log.close()


def test_a_full_disk_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_storage(str(tmp_path))
    log = MetricsLog(storage, 0)
    log.write(record(1))
    file = log._file
    with open("/dev/full", "ab", buffering=0) as log._file:
        log.write(record(2))
        log.write(record(3))
    assert steps(storage) == [1]
    (warning,) = [entry.getMessage() for entry in caplog.records]
    assert re.search(r"not stored yet: cannot write .*metrics\.jsonl: No space left", warning)
    log._file = file
    log.write(record(4))
    assert steps(storage) == [1, 2, 3, 4]
    with open("/dev/full", "ab", buffering=0) as log._file:
        log.write(record(5))
        with pytest.raises(StorageError, match="No space left"):
            log.close()
    file.close()


def test_a_disk_that_takes_a_part_gets_the_rest_later(tmp_path: Path) -> None:
    """A file that may grow to a size within the second line, as the last bytes of a disk."""
    script = f"""
import resource
from rayapp.observe.metrics_log import MetricsLog
from rayapp.storage import open_storage
from test_observe_metrics import record, steps
storage = open_storage({str(tmp_path)!r})
log = MetricsLog(storage, 0)
log.write(record(1))
size = storage.size("metrics.jsonl")
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, hard))
log.write(record(2))
assert storage.size("metrics.jsonl") == size + 40 and steps(storage) == [1]
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.write(record(3))
log.close()
assert steps(storage) == [1, 2, 3]
"""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), str(here / "support")])
    environment = os.environ | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", script], cwd=here, env=environment, check=True)


seconds = st.floats(0, 1e5)


def test_lines_are_json_objects_of_one_line(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    log = MetricsLog(storage, 0)
    log.write(record(1, batch_digest="a\nb\u2028}"))
    log.close()
    (text,) = storage.read(METRICS).splitlines()
    assert json.loads(text)["batch_digest"] == "a\nb\u2028}"


def pairs(lines: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(line["attempt"], line["step"]) for line in lines]


Line: TypeAlias = tuple[int, int, float]  # attempt, step, time


def lines_in(lines: Follower) -> list[Line]:
    columns = (lines.steps[name].tolist() for name in ("attempt", "step", "time"))
    return list(zip(*columns, strict=True))


def text_of(steps: Sequence[Line]) -> bytes:
    lines = ({"attempt": attempt, "step": step, "time": at} for attempt, step, at in steps)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def text_from(lines: Sequence[MetricsLine]) -> bytes:
    return text_of([(line["attempt"], line["step"], line["time"]) for line in lines])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.booleans()), max_size=8),
    st.integers(0, 30),
)
@example([(0, 1, True), (0, 0, False), (0, 1, True)], 0)
def test_lines_follow_every_cut_back(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int, bool]], torn: int
) -> None:
    """Each attempt keeps some lines and adds some; looks are taken, or not, in between.

    It is numbered after the last line that is there when it begins, as MetricsLog does it: the
    number of one that has cut lines and added none is used again.
    """
    run = open_storage(str(tmp_path_factory.mktemp("lines")))
    lines, held = Follower(run), list[Line]()
    assert lines.poll() == 0 and len(lines.steps) == 0
    for now, (kept, added, looked) in enumerate(attempts):
        attempt, held = held[-1][0] + 1 if held else 1, held[:kept]
        held += [(attempt, len(held) + 1, now + number / 10) for number in range(added)]
        run.write(METRICS, text_of(held) + b'{"attempt": 9, "step": 1234567890}'[:torn])
        if looked:
            known = lines_in(lines)
            valid = lines.poll()
            assert lines_in(lines) == held
            assert not held or text_from(lines.lines(0, len(held))) == text_of(held)
            assert known[:valid] == held[:valid]
            assert valid == len(known) or known[valid : valid + 1] != held[valid : valid + 1]
    lines.poll()
    assert lines_in(lines) == held


@pytest.mark.parametrize(
    "odd",
    [
        b"not JSON",
        b"[1]",
        b"{}",
        b'{"step": "x", "attempt": 1, "time": 2.0}',
        b'{"step": 3, "attempt": 1}',
        b'{"step": 3, "attempt": 1, "time": NaN}',
    ],
)
def test_a_line_that_is_none_is_named_and_left_out(
    tmp_path: Path, odd: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_storage(str(tmp_path))
    lines = [text_of([(1, step, float(step))]) for step in (1, 2, 3)]
    run.write(METRICS, b"".join([lines[0], odd + b"\n", *lines[1:]]))
    assert Columns.read(run)["step"].tolist() == [1, 2, 3]
    assert caplog.messages == [f"{run.url}/{METRICS}: line 2 is not readable"]
    run.write(METRICS, b"".join([*lines, odd + b"\n"]))
    assert metrics.last(run) == json.loads(lines[-1])
