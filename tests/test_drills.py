"""Drills: what is done to a running run, and the proof that nothing of it was lost.

Each drill is a real command with a Ray of its own; what it leaves is compared, step by step and in
order, with a run that nothing happened to, made by plain processes without Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from calls import Recorder, calls, golden, same_as_golden
from ceph import Ceph
from disks import fill, small_disk
from drill import TEXT, Drill, DrillElsewhere, Undisturbed, assert_alike, assert_same
from faults import Cut, Storm
from patience import PATIENCE_S
from takeover import wait_for_renewal, watch

import rayapp.report.folder as reports
from rayapp.observe import status
from rayapp.observe.attempts import log_name, logged, read_log
from rayapp.observe.run_folder import CHECKPOINTS, EVENTS, LEASE, METRICS, REPORT
from rayapp.storage import MIN_PART_BYTES, Storage, open_storage
from rayapp.train.checkpoint.marker import MARKER, latest

# Every ordered pair of two worker counts stands side by side in exactly one of these lines.
CHANGES = [(1, 2, 4, 3), (2, 3, 1, 4), (3, 4, 2, 1), (4, 1, 3, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs and runs of all drills."""
    return tmp_path_factory.mktemp("drills")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Undisturbed:
    return Undisturbed(folder)


@pytest.mark.timeout(900)  # with the undisturbed run
def test_a_killed_worker_changes_nothing(folder: Path, expected: Undisturbed) -> None:
    drill = Drill(folder, "killed")
    drill.wait_for_checkpoint(13)
    os.kill(drill.workers()[-1], signal.SIGKILL)
    drill.end(0)
    lines, result = drill.lines(), drill.result()
    assert_same(lines, expected(drill, 2))
    assert result["status"] == "done"
    assert [event["kind"] for event in result["interruptions"]] == ["failure"]
    attempts = [line["attempt"] for line in lines]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}
    assert attempts.index(2) % 10 == 0  # up to a checkpoint


@pytest.mark.drill
def test_a_stop_and_other_workers_change_nothing(folder: Path, expected: Undisturbed) -> None:
    first = Drill(folder, "stopped")
    first.wait_for_step(22)
    first.stop()
    stopped = first.result()
    assert stopped["status"] == "stopped" and stopped["steps"] == first.lines()[-1]["step"] >= 22
    last = Drill(folder, "stopped", {"cluster.workers": 3})
    last.end(0)

    lines = last.lines()
    at_two = [line for line in lines if line["workers"] == 2]
    assert_same(at_two, expected(last, 2)[: len(at_two)])
    assert_alike(lines, expected(last, 2))
    assert last.result()["status"] == "done"
    attempts = [line["attempt"] for line in lines]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}
    assert attempts.index(2) == stopped["steps"] == len(at_two)  # a stop loses no step


@pytest.mark.drill
def test_a_hung_worker_and_a_dead_driver_change_nothing(
    folder: Path, expected: Undisturbed
) -> None:
    first = Drill(folder, "hung", {"cluster.collective_timeout_s": 15})
    first.wait_for_checkpoint(13)
    hung = first.workers()[0]
    os.kill(hung, signal.SIGSTOP)
    first.wait_for_step(22, attempt=2)
    assert not psutil.pid_exists(hung)
    first.kill("driver")
    last = Drill(folder, "hung")
    last.end(0)

    lines = last.lines()
    assert_same(lines, expected(last, 2))
    assert last.result()["status"] == "done"
    attempts = [line["attempt"] for line in lines]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2, 3}
    assert attempts.index(2) % 10 == attempts.index(3) % 10 == 0  # up to a checkpoint


# ---- Windows that are prepared meanwhile -------------------------------------------------------

WINDOWS = {  # 6 windows of one part each, of which the steps need 4
    "data.window_bytes": 2**20,
    "train.tokens_per_step": 65_536,
    "train.micro_batch": 64,
    "train.epochs": "none",
    "train.max_steps": 60,
    "checkpoint.every_steps": 5,
}


class WindowsDrill(Drill):
    """A run of 6 MB of records, whose first window is prepared before it starts."""

    SETTINGS: ClassVar[dict[str, Any]] = {**Drill.SETTINGS, **WINDOWS}

    def data(self, folder: Path) -> Path:
        records = folder / "records.jsonl"
        if not records.exists():
            rng = random.Random(0)
            texts = (
                "".join(rng.choices("abcdef gh", k=rng.randint(100, 900))) for _ in range(12_000)
            )
            records.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return records

    def blocks(self) -> dict[Path, int]:
        """Return when each block of tokens was written."""
        found = Path(self.storage, ".prepared", "tokens").rglob("*")
        return {path: path.stat().st_mtime_ns for path in found if len(path.name) == 32}


class MixtureDrill(WindowsDrill):
    """A run of these records and 3 MB of text, of which few windows are needed."""

    def inputs(self, folder: Path) -> dict[str, Any]:
        text = folder / "long.txt"
        text.write_text(TEXT * 25)
        return {"data.mixture": json.dumps({str(self.data(folder)): 5, str(text): 1})}


def tokens_by_source(drill: Drill) -> list[dict[str, int]]:
    """Return what each step tells of the sources, by the names of their files."""
    told = (line.get("tokens_by_source") or {} for line in drill.lines())
    return [{Path(path).name: count for path, count in each.items()} for each in told]


@pytest.mark.drill
@pytest.mark.parametrize("kind", [WindowsDrill, MixtureDrill])
def test_windows_prepared_meanwhile_and_kills_change_nothing(
    tmp_path: Path, kind: type[WindowsDrill]
) -> None:
    """A driver killed while it prepares, after the first steps, and later; a worker too."""

    class Beforehand(kind):  # type: ignore[misc, valid-type]
        PROGRAM = "-mrayapp"
        MODULE = "prepare"

    folder, beforehand = tmp_path, tmp_path / "beforehand"
    beforehand.mkdir()
    Beforehand(beforehand, "whole").end(0)
    whole = kind(beforehand, "whole")
    written = whole.blocks()
    whole.end(0)
    assert whole.blocks() == written, "all was prepared"

    blocks: dict[Path, int] = {}
    drill = kind(folder, "meanwhile")
    drill.wait_until(lambda: bool(drill.blocks()))
    drill.kill("driver")
    assert not drill.lines()
    for step in (6, 25):
        blocks |= drill.blocks()
        drill = kind(folder, "meanwhile")
        drill.wait_for_checkpoint(step)
        drill.kill("driver")
    blocks |= drill.blocks()
    drill = kind(folder, "meanwhile")
    drill.wait_for_step(40)
    os.kill(drill.workers()[-1], signal.SIGKILL)
    drill.end(0)
    assert_same(drill.lines(), whole.lines())
    assert tokens_by_source(drill) == tokens_by_source(whole)
    assert all(map(len, tokens_by_source(whole))) == (kind is MixtureDrill)
    after = drill.blocks()
    assert {path: after[path] for path in blocks} == blocks, "a block was made twice"


# ---- S3 --------------------------------------------------------------------------------------

STORM = {"slow": 0.02, "reset": 0.01, "lose": 0.005, "cut": 0.005, "stall": 0.001}
GALE = {"slow": 0.2, "reset": 0.1, "lose": 0.05, "cut": 0.05, "stall": 0.002}


@pytest.mark.drill
@pytest.mark.parametrize(
    ("at_first", "later"),
    [
        pytest.param({}, GALE, id="after the start"),
        pytest.param(STORM, STORM, id="from the start"),
    ],
)
def test_training_goes_on_while_s3_fails(
    at_first: dict[str, float],
    later: dict[str, float],
    folder: Path,
    expected: Undisturbed,
    s3_server: str,
    s3_bucket: str,
) -> None:
    """Throttled, reset, cut and lost answers, stalls of 30 s, and an outage of 15 s."""
    with Storm(s3_server, 1, at_first).serving() as storm:
        endpoint = {"AWS_ENDPOINT_URL_S3": storm.url}
        drill = Drill(folder, s3_bucket, None, f"s3://{s3_bucket}/runs", endpoint)
        drill.wait_for_step(5)
        begun, storm.rates = time.time(), later
        storm.outage_until = time.monotonic() + 15.0
        drill.end(0)
    assert_same(drill.lines(), expected(drill, 2))
    assert {line["attempt"] for line in drill.lines()} == {1}
    during = [line for line in drill.lines() if begun < line["time"] < begun + 15.0]
    assert len(during) >= 5, "training goes on during the outage"
    assert len(storm.spoilt) >= 4 and storm.spoilt.total() > 30, storm.spoilt
    found, skipped = latest(drill.run)
    assert found is not None and found.step == drill.lines()[-1]["step"] and not skipped


@pytest.mark.full
def test_a_killed_driver_changes_nothing_on_ceph(
    folder: Path,
    expected: Undisturbed,
    ceph: Ceph,
    ceph_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a real S3 server, its data there too; every call that is made of it is a known one."""
    open_storage(f"s3://{ceph_bucket}").write("data/text.txt", TEXT.encode())
    more = {"data.path": f"s3://{ceph_bucket}/data", "checkpoint.export": "true"}
    with Recorder(ceph.url).serving() as recorder:
        where = (f"s3://{ceph_bucket}/runs", {"AWS_ENDPOINT_URL_S3": recorder.url})
        first = Drill(folder, "ceph", more, *where)
        first.wait_for_checkpoint(13)
        first.kill("driver")
        # What it leaves, if it gets as far; the next command deletes it.
        first.run.write("tensorboard/events.out.tfevents.1.host", b"")
        last = Drill(folder, "ceph", more, *where)
        last.end(0)
        with monkeypatch.context() as through_it:
            through_it.setenv("AWS_ENDPOINT_URL_S3", recorder.url)
            send_in_parts(last.run)
    assert_same(last.lines(), expected(last, 2))
    assert last.result()["status"] == "done"
    attempts = [line["attempt"] for line in last.lines()]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}
    assert attempts.index(2) % 10 == 0  # up to a checkpoint
    by = golden()
    same_as_golden({call: by.get(call) for call in calls(recorder.seen, ceph_bucket, "ceph")})


def send_in_parts(run: Storage) -> None:
    """Write as shards of a larger model are written, and give one such upload up."""
    shard = f"{CHECKPOINTS}/step-00000001/__0_0.distcp"
    data = b"x" * (MIN_PART_BYTES + 1)
    run.write(shard, data)
    with pytest.raises(InterruptedError), run.open_write(shard) as out:
        out.write(data)
        raise InterruptedError


@pytest.mark.drill
def test_a_driver_that_is_cut_off_stops_before_another_takes_over(
    folder: Path, tmp_path: Path, ceph: Ceph, ceph_bucket: str
) -> None:
    """All requests of the first command hang. Another machine's comes, then the first's go on."""
    name, storage = "cut", f"s3://{ceph_bucket}/runs"
    # Rows come from S3 too, so the steps are long, that those read ahead last for a while.
    model = "{num_hidden_layers: 6, hidden_size: 256, intermediate_size: 768}"
    long = {"train.epochs": 2000, "train.lr": 1e-4, "model.overrides": model}
    saved = Drill(folder, name, long, storage)
    saved.wait_for_step(2)
    saved.stop()
    long["checkpoint.every_steps"] = "none"  # a save that hangs would hold up training
    with Cut(ceph.url).serving() as network:
        first = Drill(folder, name, long, storage, {"AWS_ENDPOINT_URL_S3": network.url})
        first.wait_for_step(saved.lines()[-1]["step"] + 1)
        wait_for_renewal(first.run)
        network.cut()
        cut_at = time.time()
        second = DrillElsewhere(folder, name, long, storage)
        seen = watch(first, cut_at)
        assert seen.ended_at is not None and seen.ended_at < seen.taken_at, seen
        assert seen.trained_until - cut_at > 30.0, "the first trains on while it is cut off"
        assert seen.changed == set() and network.hung.total() > 3, (seen, network.hung)
        second.wait_for_step(1)
        network.heal()
        first.end(1)
        written = [asked for asked in network.seen if asked.method not in ("GET", "HEAD")]
    assert "another driver has taken over" in first.log.read_text()
    assert all(f"/{LEASE}" in asked.path and asked.status in (404, 412) for asked in written)
    second.wait_for_step(second.lines()[-1]["step"] + 2)
    second.stop()
    lines = second.lines()
    assert_same(lines, Undisturbed(tmp_path)(second, 2))
    steps_from = next(line["time"] for line in lines if line["attempt"] == 3)
    assert steps_from > seen.taken_at
    print(
        f"seconds from the cut: last training {seen.trained_until - cut_at:.0f}, last worker "
        f"{seen.ended_at - cut_at:.0f}, lease taken {seen.taken_at - cut_at:.0f}, first step "
        f"{steps_from - cut_at:.0f}"
    )


# The file of the second checkpoint whose upload is held up; whom SIGKILL hits meanwhile; what then
# becomes of the upload; the steps of which a checkpoint may be left.
HELD = {
    "a shard's sender": ("__1_0.distcp", "sender", "reset", {10}),
    "the other of a shard's sender": ("__1_0.distcp", "other", "reset", {10}),
    "the marker's sender": (MARKER, "sender", "reset", {10}),
    "the marker's sender, and the marker arrives": (MARKER, "sender", "lose", {20}),
    "the other of the marker's sender, who may send again": (MARKER, "other", "reset", {10, 20}),
}


@pytest.mark.drill
@pytest.mark.parametrize("killed", HELD)
def test_a_worker_dies_while_a_checkpoint_is_uploaded(
    killed: str, folder: Path, expected: Undisturbed, s3_server: str, s3_bucket: str
) -> None:
    """SIGKILL during the upload of a shard, and between the shards and the marker."""
    file, victim, end, kept = HELD[killed]
    name, checkpoint = f"held-{list(HELD).index(killed)}", f"{CHECKPOINTS}/step-00000020"
    with Storm(s3_server, 1, {}).serving() as storm:
        endpoint = {"AWS_ENDPOINT_URL_S3": storm.url}
        storm.hold(f"{checkpoint}/{file}")
        drill = Drill(folder, name, storage=f"s3://{s3_bucket}/runs", environment=endpoint)
        drill.wait_until(lambda: bool(storm.held_ports))
        if file == MARKER:
            there = {entry.name for entry in (drill.run / checkpoint).list()}
            assert there == {"__0_0.distcp", "__1_0.distcp", ".metadata", "state.json"}
        ports = {
            pid: {connection.laddr.port for connection in psutil.Process(pid).net_connections()}
            for pid in drill.workers()
        }
        (sender,) = [pid for pid in ports if storm.held_ports[0] in ports[pid]]
        (other,) = set(ports) - {sender}
        os.kill(sender if victim == "sender" else other, signal.SIGKILL)
        storm.release(end)
        drill.end(0)
    assert_same(drill.lines(), expected(drill, 2))
    attempts = [line["attempt"] for line in drill.lines()]
    assert attempts.count(1) in kept and set(attempts) == {1, 2}, attempts
    (event,) = drill.result()["interruptions"]
    assert event["kind"] == "failure"
    found, skipped = latest(drill.run)
    assert found is not None and found.step == len(attempts) and not skipped


# ---- The grid --------------------------------------------------------------------------------


@pytest.mark.drill
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_number_of_workers_takes_the_same_rows(
    workers: int, folder: Path, expected: Undisturbed
) -> None:
    """By the real command: through Ray Train and Ray Data nothing differs from plain processes."""
    drill = Drill(folder, f"workers-{workers}", {"cluster.workers": workers})
    drill.end(0)
    assert {line["workers"] for line in drill.lines()} == {workers}
    assert_same(drill.lines(), expected(drill, workers))
    assert_alike(drill.lines(), expected(drill, 1))


@pytest.mark.drill
@pytest.mark.parametrize("worlds", CHANGES)
def test_the_order_outlives_every_change_of_workers(
    worlds: tuple[int, ...], folder: Path, expected: Undisturbed
) -> None:
    """Three commands are killed at drawn steps, the next one has another number of workers."""
    name = "changes-" + "-".join(map(str, worlds))
    draw = random.Random(name)
    for workers, earliest in zip(worlds[:-1], (1, 17, 33), strict=True):
        drill = Drill(folder, name, {"cluster.workers": workers, "cluster.max_failures": 0})
        drill.wait_for_step(draw.randrange(earliest, earliest + 12))
        drill.kill(draw.choice(("driver", "worker")))
    drill = Drill(folder, name, {"cluster.workers": worlds[-1]})
    drill.end(0)
    lines = drill.lines()
    for workers in range(1, 5):
        assert_alike(lines, expected(drill, workers))
    begun = [line for line in lines if line["attempt"] == 1]
    assert_same(begun, expected(drill, worlds[0])[: len(begun)])
    used = [line["workers"] for line in lines]
    assert len(set(used)) > 1 and used[-1] == worlds[-1], used


@pytest.mark.drill
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_resumes_with_as_many_workers_are_bitwise(
    workers: int, folder: Path, expected: Undisturbed
) -> None:
    """A worker dies and is restarted, then the driver dies and the same command goes on."""
    name = f"bitwise-{workers}"
    draw = random.Random(name)
    drill = Drill(folder, name, {"cluster.workers": workers})
    drill.wait_for_step(draw.randrange(2, 18))
    os.kill(draw.choice(drill.workers()), signal.SIGKILL)
    drill.wait_for_step(draw.randrange(30, 42))
    drill.kill("driver")
    drill = Drill(folder, name, {"cluster.workers": workers})
    drill.end(0)
    assert_same(drill.lines(), expected(drill, workers))
    assert drill.lines()[-1]["attempt"] == 3


@pytest.mark.drill
def test_a_crash_loop_ends_with_the_reason_and_blames_no_rows(folder: Path) -> None:
    """Every group of workers loses one as soon as it starts: three are enough."""
    drill = Drill(folder, "loop", {"cluster.max_failures": 99})
    killed: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while drill.process.poll() is None:
        assert time.monotonic() < deadline
        for pid in set(drill.workers()) - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.1)
    drill.end(1)
    result = drill.result()
    assert result["status"] == "failed" and 3 <= len(killed) <= 8, killed
    why = "3 attempts have failed alike before they had done a step: "
    assert result["reason"].startswith(why)
    *_, log, last = drill.log.read_text().splitlines()
    assert last == f"failed: {result['reason']}"
    assert log == f"the log is {drill.run.url}/{log_name(logged(drill.run)[-1])}"
    kept = read_log(drill.run)
    assert "\n==== rank " in kept or "\n==== workers\n" in kept, "some die before they have a rank"
    assert kept.endswith(f"\n==== end\n{last}\n")


@pytest.mark.drill
def test_a_disk_that_becomes_full_leaves_the_reason(folder: Path) -> None:
    """Once there is room again, the same command goes on."""
    with small_disk(64) as disk:
        drill = Drill(folder, "full", storage=str(disk))
        drill.wait_for_checkpoint(13)
        filler = fill(disk)
        drill.end(1)
        result = drill.result()
        assert result["status"] == "failed"
        assert "the disk is full" in result["reason"] or "No space left" in result["reason"]
        assert drill.log.read_text().splitlines()[-1] == f"failed: {result['reason']}"
        assert read_log(drill.run).endswith(f"==== end\nfailed: {result['reason']}\n")
        assert status.read(drill.run).reason == result["reason"]
        filler.unlink()
        Drill(folder, "full", storage=str(disk)).end(0)


@pytest.mark.drill
@pytest.mark.parametrize("damage", ["flipped", "cut short", "deleted"])
def test_a_damaged_checkpoint_is_refused_and_named(
    damage: str, folder: Path, expected: Undisturbed
) -> None:
    """One file of the newest checkpoint is damaged between a stop and the same command again."""
    name = f"damaged-{damage.split()[0]}"
    draw = random.Random(name)
    drill = Drill(folder, name)
    drill.wait_for_step(25)
    drill.stop()
    before, newest = sorted(Path(drill.run.url, CHECKPOINTS).iterdir())
    victim = draw.choice([path for path in newest.iterdir() if path.name != MARKER])
    data = bytearray(victim.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    if damage == "flipped":
        victim.write_bytes(data)
    elif damage == "cut short":
        os.truncate(victim, len(data) // 2)
    else:
        victim.unlink()
    drill = Drill(folder, name)
    drill.end(0)
    assert_same(drill.lines(), expected(drill, 2))
    kept = [line["attempt"] for line in drill.lines()].count(1)
    assert before.name == f"step-{kept:08d}"
    assert victim.name in drill.log.read_text().replace("\n", "")


@pytest.mark.drill
def test_a_run_whose_checkpoints_are_all_damaged_says_so_and_changes_nothing(
    folder: Path,
) -> None:
    """One is cut short, one has a bit flipped: the same command fails, however often it is sent."""
    name = "damaged-all"
    first = Drill(folder, name)
    first.wait_for_step(25)
    first.stop()
    run = Path(first.run.url)
    older, newest = sorted((run / CHECKPOINTS).iterdir())
    os.truncate(older / "__0_0.distcp", 10)
    data = bytearray((newest / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "__1_0.distcp").write_bytes(data)
    reasons = (
        f"{older.name}: __0_0.distcp has 10 bytes instead of",
        f"{newest.name}: __1_0.distcp has another checksum than when",
    )
    metrics, events = (run / METRICS).read_bytes(), (run / EVENTS).read_text()
    steps = metrics.count(b"\n")
    for _ in range(2):
        again = Drill(folder, name)
        told = len(again.log.read_text())
        again.end(1)
        lines = again.log.read_text()[told:].splitlines()
        # A slow machine makes Ray's own processes print tracebacks, each line with their name.
        said = " ".join(" ".join(line for line in lines if " pid=" not in line[:80]).split())
        assert all(reason in said for reason in reasons), said
        assert "Traceback" not in said, said
        assert (run / METRICS).read_bytes() == metrics
        assert (run / EVENTS).read_text().startswith(events)
        events = (run / EVENTS).read_text()
        reported = reports.read(again.run)
        assert (reported.status, reported.step, reported.num_lines) == ("failed", steps, steps)
        assert all(reason in str(reported.reason) for reason in reasons), reported.reason
        result = again.result()
        assert (result["status"], result["steps"]) == ("failed", steps)
        assert all(reason in result["reason"] for reason in reasons), result
        page = (run / REPORT).read_text()
        assert "another checksum than when it was saved" in page
    endings = [json.loads(line).get("status") for line in events.splitlines()]
    assert [status for status in endings if status] == ["stopped", "failed"]
