"""Drills: what is done to a running run, and the proof that nothing of it was lost.

Each drill is a real command with a Ray of its own; what it leaves is compared, step by step and in
order, with a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
        **more: Any,
    ) -> None:
        self.run = folder / "runs" / name
        self.attempts_before = max((line["attempt"] for line in self.lines()), default=0)
        self.temporary = tempfile.mkdtemp()
        arguments = {
            "run.storage": folder / "runs",
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
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": self.temporary}
        environment.pop("RAY_ADDRESS", None)
        self.log = folder / f"{name}.log"
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def lines(self) -> Lines:
        path = self.run / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

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
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                title = (entry / "cmdline").read_bytes()
                if (
                    title.startswith(b"ray::")
                    and b"TrainWorker" in title
                    and self._owns(entry.name)
                ):
                    found.append(int(entry.name))
            except OSError:  # it ended while being looked at
                continue
        return sorted(found)

    def _owns(self, pid: str) -> bool:
        while pid not in ("0", "1"):
            if pid == str(self.process.pid):
                return True
            pid = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1]
        return False

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
    plan = json.loads((drill.run / "plan.json").read_text())
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
    result = json.loads((first.run / "result.json").read_text())
    assert result["status"] == "stopped" and result["steps"] == stopped_at
    second = Drill(folder, "stopped")
    second.end(0)
    assert_same(second.lines(), undisturbed)
    assert [line["attempt"] for line in second.lines()].count(1) == stopped_at  # none done twice
    assert json.loads((second.run / "result.json").read_text())["status"] == "done"


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
    """SIGKILL the driver twice: the same command goes on, then one with 3 workers instead of 2."""
    for step in (13, 33):
        drill = Drill(folder, "driver")
        drill.wait_for_step(step)
        drill.kill("driver")
    drill = Drill(folder, "driver", workers=3)
    drill.end(0)
    lines = drill.lines()
    at_two = [line for line in lines if line["workers"] == 2]
    assert_same(at_two, undisturbed[: len(at_two)])
    assert_alike(lines, undisturbed)
    assert {line["attempt"] for line in at_two} == {1, 2}
    assert {line["attempt"] for line in lines[len(at_two) :]} == {3}


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
