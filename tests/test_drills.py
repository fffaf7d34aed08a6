"""Drills: what is done to a running run, and the proof that nothing of it was lost.

Each drill is a real command with a Ray of its own; what it leaves is compared, step by step and in
order, with a run that nothing happened to.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Storm
from nodes import descendants

from rayapp import metrics
from rayapp.checkpoint.marker import latest
from rayapp.storage import open_storage

EPOCHS = 3
TEXT = "".join(
    f"Line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} says {i * i % 97}.\n" for i in range(3500)
)
# Every ordered pair of two worker counts stands side by side in exactly one of these lines.
CHANGES = [(1, 2, 4, 3), (2, 3, 1, 4), (3, 4, 2, 1), (4, 1, 3, 2)]
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Inputs and runs of all drills; short paths for Ray's sockets."""
    folder = tmp_path_factory.mktemp("drills")
    (folder / "text.txt").write_text(TEXT)
    yield folder


class Drill:
    """One command in a process group of its own."""

    def __init__(
        self,
        folder: Path,
        name: str,
        workers: int | str = 2,
        max_failures: int = 3,
        storage: str = "",
        environment: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        storage = storage or str(folder / "runs")
        self.run = open_storage(f"{storage}/{name}")
        self.attempts_before = max((line["attempt"] for line in self.lines()), default=0)
        self.temporary = tempfile.mkdtemp()
        arguments = {
            "run.storage": storage,
            "run.name": name,
            "data.path": folder / "text.txt",
            "data.seq_len": 128,
            "model.tokenizer": "bytes",
            "model.overrides": "{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128}",
            "train.tokens_per_step": 4096,
            "train.micro_batch": 8,
            "train.epochs": EPOCHS,
            "train.lr": 3e-3,
            "train.precision": "fp32",
            "checkpoint.every_steps": 10,
            "checkpoint.every_s": "none",
            "checkpoint.export": "false",
            "cluster.workers": workers,
            "cluster.max_failures": max_failures,
            **more,
        }
        command = [sys.executable, "-m", "rayapp.finetune"]
        command += [f"--{field}={value}" for field, value in arguments.items()]
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": self.temporary}
        variables = {**os.environ, **own, **(environment or {})}
        variables.pop("RAY_ADDRESS", None)
        self.log = folder / f"{name}.log"
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command, env=variables, stdout=output, stderr=subprocess.STDOUT
            )

    def lines(self) -> Lines:
        return metrics.read(self.run)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run.read("result.json"))
        return found

    def wait_for_step(self, step: int) -> None:
        """Wait until this command itself has done the step, or is past it from its start."""
        self.wait_for(lambda line: line["step"] >= step and line["attempt"] > self.attempts_before)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a line of metrics."""
        deadline = time.monotonic() + 300
        while not any(map(wanted, self.lines())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def kill(self, victim: str) -> None:
        """SIGKILL the driver, or one of its workers where none is to be restarted."""
        if victim == "driver":
            self.process.kill()
            self.end(-signal.SIGKILL)
        else:
            os.kill(self.workers()[-1], signal.SIGKILL)
            self.end(1)

    def workers(self) -> list[int]:
        """PIDs of this command's training workers, lowest first."""
        found = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):  # it ended while being looked at
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if title.startswith(b"ray::") and b"TrainWorker" in title else []
        return sorted(found)

    def end(self, code: int) -> None:
        assert self.process.wait(timeout=600) == code, self.log.read_text()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Lines:
    """The run of 2 workers that nothing happens to."""
    drill = Drill(folder, "undisturbed")
    drill.end(0)
    lines = drill.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    plan = json.loads(drill.run.read("plan.json"))
    assert len(lines) == plan["steps"] in range(45, 61)
    rows = plan["data"]["train"]["rows"]
    assert all(epoch * rows % plan["rows_per_step"] for epoch in range(1, EPOCHS + 1))
    return lines


def assert_same(lines: Lines, expected: Lines) -> None:
    """Bitwise: as at the same number of workers."""
    for name in ("step", "batch_digest", "loss", "grad_norm"):
        assert [line[name] for line in lines] == [line[name] for line in expected], name


def assert_alike(lines: Lines, expected: Lines) -> None:
    """The same rows in the same order; losses as fp32 sums in another order give them."""
    for name in ("step", "batch_digest"):
        assert [line[name] for line in lines] == [line[name] for line in expected], name
    apart = [abs(a["loss"] - b["loss"]) for a, b in zip(lines, expected, strict=True)]
    assert max(apart) <= 1e-4, apart


def test_a_stop_loses_no_step(folder: Path, undisturbed: Lines) -> None:
    """SIGINT to the driver: saved after the current step, exit code 3; the same command goes on."""
    first = Drill(folder, "stopped")
    first.wait_for_step(13)
    first.process.send_signal(signal.SIGINT)
    first.end(3)
    stopped_at = first.lines()[-1]["step"]
    assert 13 <= stopped_at < len(undisturbed)
    result = first.result()
    assert result["status"] == "stopped" and result["steps"] == stopped_at
    second = Drill(folder, "stopped")
    second.end(0)
    assert_same(second.lines(), undisturbed)
    assert [line["attempt"] for line in second.lines()].count(1) == stopped_at  # none done twice
    assert second.result()["status"] == "done"


def test_a_killed_worker_is_restarted_and_nothing_changes(folder: Path, undisturbed: Lines) -> None:
    """SIGKILL one rank between two checkpoints: the group resumes from the last whole one."""
    drill = Drill(folder, "killed")
    drill.wait_for_step(15)
    os.kill(drill.workers()[-1], signal.SIGKILL)
    drill.end(0)
    assert_same(drill.lines(), undisturbed)
    attempts = [line["attempt"] for line in drill.lines()]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}
    assert attempts.count(1) % 10 == 0  # up to a checkpoint


def test_a_killed_driver_is_replaced_also_with_other_workers(
    folder: Path, undisturbed: Lines
) -> None:
    """SIGKILL the driver: the same command goes on with 3 workers instead of 2."""
    drill = Drill(folder, "driver")
    drill.wait_for_step(33)
    drill.kill("driver")
    drill = Drill(folder, "driver", workers=3)
    drill.end(0)
    lines = drill.lines()
    at_two = [line for line in lines if line["workers"] == 2]
    assert_same(at_two, undisturbed[: len(at_two)])
    assert_alike(lines, undisturbed)
    assert len(at_two) == 30 and {line["attempt"] for line in at_two} == {1}
    assert {line["attempt"] for line in lines[len(at_two) :]} == {2}


STORM = {"slow": 0.02, "reset": 0.01, "lose": 0.005, "cut": 0.005, "stall": 0.001}


def test_training_goes_on_while_s3_fails(
    folder: Path, undisturbed: Lines, s3_server: str, s3_bucket: str
) -> None:
    """Throttled, reset, cut and lost answers, stalls of 30 s, and an outage of 15 s."""
    storm = Storm(s3_server, seed=1, rates=STORM)
    threading.Thread(target=storm.serve_forever, args=[0.01], daemon=True).start()
    try:
        drill = Drill(
            folder,
            "storm",
            storage=f"s3://{s3_bucket}/runs",
            environment={"AWS_ENDPOINT_URL_S3": storm.url},
        )
        drill.wait_for_step(5)
        begun = time.time()
        storm.outage_until = time.monotonic() + 15.0
        drill.end(0)
    finally:
        storm.shutdown()
        storm.server_close()
    assert_same(drill.lines(), undisturbed)
    assert {line["attempt"] for line in drill.lines()} == {1}
    during = [line for line in drill.lines() if begun < line["time"] < begun + 15.0]
    assert len(during) >= 10, "training goes on during the outage"
    assert len(storm.spoilt) >= 4 and storm.spoilt.total() > 50, storm.spoilt
    found, skipped = latest(drill.run)
    assert found is not None and found.step == len(undisturbed) and not skipped


# ---- The grid --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def references(folder: Path, undisturbed: Lines) -> dict[int, Lines]:
    """Runs of 1 to 4 workers that nothing happens to."""
    found = {2: undisturbed}
    for workers in (1, 3, 4):
        drill = Drill(folder, f"undisturbed-{workers}", workers)
        drill.end(0)
        found[workers] = drill.lines()
    return found


@pytest.mark.drill
def test_one_to_four_workers_take_the_same_rows(references: dict[int, Lines]) -> None:
    for workers, lines in references.items():
        assert {line["workers"] for line in lines} == {workers}
        assert_alike(lines, references[1])


@pytest.mark.drill
@pytest.mark.parametrize("worlds", CHANGES)
def test_the_order_outlives_every_change_of_workers(
    worlds: tuple[int, ...], folder: Path, references: dict[int, Lines]
) -> None:
    """Three commands are killed at drawn steps, the next one has another number of workers."""
    name = "changes-" + "-".join(map(str, worlds))
    draw = random.Random(name)
    for workers, earliest in zip(worlds[:-1], (1, 17, 33), strict=True):
        drill = Drill(folder, name, workers, max_failures=0)
        drill.wait_for_step(draw.randrange(earliest, earliest + 12))
        drill.kill(draw.choice(("driver", "worker")))
    drill = Drill(folder, name, worlds[-1])
    drill.end(0)
    lines = drill.lines()
    for workers in range(1, 5):
        assert_alike(lines, references[workers])
    begun = [line for line in lines if line["attempt"] == 1]
    assert_same(begun, references[worlds[0]][: len(begun)])
    used = [line["workers"] for line in lines]
    assert len(set(used)) > 1 and used[-1] == worlds[-1], used


@pytest.mark.drill
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_resumes_with_as_many_workers_are_bitwise(
    workers: int, folder: Path, references: dict[int, Lines]
) -> None:
    """A worker dies and is restarted, then the driver dies and the same command goes on."""
    name = f"bitwise-{workers}"
    draw = random.Random(name)
    drill = Drill(folder, name, workers)
    drill.wait_for_step(draw.randrange(2, 18))
    os.kill(draw.choice(drill.workers()), signal.SIGKILL)
    drill.wait_for_step(draw.randrange(30, 42))
    drill.kill("driver")
    drill = Drill(folder, name, workers)
    drill.end(0)
    assert_same(drill.lines(), references[workers])
    assert drill.lines()[-1]["attempt"] == 3


@pytest.mark.drill
def test_a_worker_that_hangs_is_replaced(folder: Path, undisturbed: Lines) -> None:
    """SIGSTOP one rank: the others wait no longer than they may, and the group starts again."""
    drill = Drill(folder, "hung", **{"cluster.collective_timeout_s": 15})
    drill.wait_for_step(15)
    hung = drill.workers()[-1]
    os.kill(hung, signal.SIGSTOP)
    drill.end(0)
    assert_same(drill.lines(), undisturbed)
    (event,) = drill.result()["interruptions"]
    assert event["kind"] == "failure" and event["to_first_step_s"] < 60.0, event
    assert not Path("/proc", str(hung)).exists()


@pytest.mark.drill
def test_a_crash_loop_ends_with_the_reason_and_the_rows(folder: Path) -> None:
    """Every group of workers loses one as soon as it starts: three are enough."""
    drill = Drill(folder, "loop", max_failures=99)
    killed: set[int] = set()
    deadline = time.monotonic() + 300
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
    assert re.search(
        r"step 1, on rows \d+(, \d+)+ \.\.\. of the prepared data, has failed 3 times in a row: ",
        result["reason"],
    )


@pytest.mark.drill
@pytest.mark.parametrize("damage", ["flipped", "cut short", "deleted"])
def test_a_damaged_checkpoint_is_refused_and_named(
    damage: str, folder: Path, undisturbed: Lines
) -> None:
    """One file of the newest checkpoint is damaged between a stop and the same command again."""
    name = f"damaged-{damage.split()[0]}"
    draw = random.Random(name)
    drill = Drill(folder, name)
    drill.wait_for_step(25)
    drill.process.send_signal(signal.SIGINT)
    drill.end(3)
    before, newest = sorted(Path(drill.run.url, "checkpoints").iterdir())
    victim = draw.choice([path for path in newest.iterdir() if path.name != "COMMITTED"])
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
    assert_same(drill.lines(), undisturbed)
    kept = [line["attempt"] for line in drill.lines()].count(1)
    assert before.name == f"step-{kept:08d}"
    assert victim.name in drill.log.read_text().replace("\n", "")
