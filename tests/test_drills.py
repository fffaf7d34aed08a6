"""Drills: what is done to a running run, and the proof that nothing of it was lost.

Each drill is a real command with a Ray of its own; what it leaves is compared, step by step and in
order, with a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STEPS = 60
TEXT = "".join(
    f"Line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} says {i * i % 97}.\n" for i in range(3000)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Inputs and runs of all drills; short paths for Ray's sockets."""
    folder = tmp_path_factory.mktemp("drills")
    (folder / "text.txt").write_text(TEXT)
    yield folder


class Drill:
    """One command in a process group of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.run = folder / "runs" / name
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
            "train.max_steps": STEPS,
            "train.lr": 3e-3,
            "train.precision": "fp32",
            "checkpoint.every_steps": 10,
            "checkpoint.every_s": "none",
            "checkpoint.export": "false",
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

    def lines(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 180
        while not any(line["step"] >= step for line in self.lines()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

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
        assert self.process.wait(timeout=300) == code, self.log.read_text()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[dict[str, Any]]:
    drill = Drill(folder, "undisturbed")
    drill.end(0)
    return drill.lines()


def assert_same(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for name in ("batch_digest", "loss", "grad_norm"):
        assert [line[name] for line in lines] == [line[name] for line in expected], name


def test_a_stop_loses_no_step(folder: Path, undisturbed: list[dict[str, Any]]) -> None:
    """SIGINT to the driver: saved after the current step, exit code 3; the same command goes on."""
    first = Drill(folder, "stopped")
    first.wait_for_step(13)
    first.process.send_signal(signal.SIGINT)
    first.end(3)
    stopped_at = first.lines()[-1]["step"]
    assert 13 <= stopped_at < STEPS
    result = json.loads((first.run / "result.json").read_text())
    assert result["status"] == "stopped" and result["steps"] == stopped_at
    second = Drill(folder, "stopped")
    second.end(0)
    assert_same(second.lines(), undisturbed)
    assert [line["attempt"] for line in second.lines()].count(1) == stopped_at  # none done twice
    assert json.loads((second.run / "result.json").read_text())["status"] == "done"


def test_a_killed_worker_is_restarted_and_nothing_changes(
    folder: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """SIGKILL one rank between two checkpoints: the group resumes from the last whole one."""
    drill = Drill(folder, "killed")
    drill.wait_for_step(15)
    os.kill(drill.workers()[-1], signal.SIGKILL)
    drill.end(0)
    assert_same(drill.lines(), undisturbed)
    attempts = [line["attempt"] for line in drill.lines()]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}
    assert attempts.count(1) % 10 == 0  # up to a checkpoint


def test_a_killed_driver_is_replaced_by_the_same_command(
    folder: Path, undisturbed: list[dict[str, Any]]
) -> None:
    first = Drill(folder, "driver")
    first.wait_for_step(25)
    first.process.kill()
    first.end(-signal.SIGKILL)
    second = Drill(folder, "driver")
    second.end(0)
    assert_same(second.lines(), undisturbed)
    assert second.lines()[-1]["attempt"] == 2
