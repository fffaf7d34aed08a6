"""What a drill is made of: a real command with a Ray of its own, and the run that it must equal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import groupby, islice
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
import yaml
from patience import PATIENCE_S
from processes import spawn

from rayapp.config import from_dict
from rayapp.data import prepared as prepared_data
from rayapp.data.token_rows import local_steps
from rayapp.finetune.prepared_run import order_of
from rayapp.observe import metrics
from rayapp.observe.run_folder import PREPARED
from rayapp.storage import open_storage
from rayapp.train.checkpoint.marker import latest
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec

TEXT = "".join(
    f"Line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} says {i * i % 97}.\n" for i in range(3500)
)
SETTINGS = {
    "data.seq_len": 128,
    "model.tokenizer": "bytes",
    "model.overrides": "{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128}",
    "train.tokens_per_step": 4096,
    "train.micro_batch": 8,
    "train.epochs": 3,
    "train.lr": 3e-3,
    "train.precision": "fp32",
    "checkpoint.every_steps": 10,
    "checkpoint.every_s": "none",
    "checkpoint.export": "false",
    "cluster.workers": 2,
    "cluster.max_failures": 3,
}
Lines = list[dict[str, Any]]


class Drill:
    """One command in a process of its own; `more` overrides SETTINGS."""

    PROGRAM = "-m"
    MODULE = "rayapp.finetune"
    GROUP: ClassVar[int | None] = None
    """0: a process group of its own; None: that of the tests."""
    SETTINGS: ClassVar[dict[str, Any]] = SETTINGS

    def __init__(
        self,
        folder: Path,
        name: str,
        more: dict[str, Any] | None = None,
        storage: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.storage = storage or str(folder / "runs")
        self.run = open_storage(f"{self.storage}/{name}")
        self.attempts_before = max((line["attempt"] for line in self.lines()), default=0)
        self.temporary = tempfile.mkdtemp()
        arguments = {"run.storage": self.storage, "run.name": name, **self.inputs(folder)}
        command = [sys.executable, self.PROGRAM, self.MODULE]
        for field, value in {**arguments, **self.SETTINGS, **(more or {})}.items():
            command.append(f"--{field}={value}")
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": self.temporary}
        variables = {**os.environ, **own, **(environment or {})}
        variables.pop("RAY_ADDRESS", None)
        self.log = folder / f"{name}.log"
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=self.GROUP,
            )

    def inputs(self, folder: Path) -> dict[str, Any]:
        """Return the fields that name what is trained on."""
        return {"data.path": self.data(folder)}

    def data(self, folder: Path) -> Path:
        """Write what is trained on; return where it is."""
        text = folder / "text.txt"
        text.write_text(TEXT)
        return text

    def lines(self) -> Lines:
        return metrics.read(self.run)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run.read("result.json"))
        return found

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        """Wait until an attempt of this command (its first is 1) has done the step."""
        number = self.attempts_before + attempt
        self.wait_for(lambda line: line["step"] >= step and line["attempt"] >= number)

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait for a step, and for a checkpoint to which what dies then goes back."""
        self.wait_for_step(step)
        self.wait_until(lambda: latest(self.run)[0] is not None)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a line of metrics."""
        self.wait_until(lambda: any(map(wanted, self.lines())))

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait while the command runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02 if self.run.local_path() else 0.2)  # the S3 server is in this process

    def stop_after_change(self, workers: int) -> None:
        """Let it do some steps with so many workers, which it has not had last, and stop it."""
        attempt = max(line["attempt"] for line in self.lines())
        self.wait_for(lambda line: line["attempt"] > attempt and line["workers"] == workers)
        self.wait_for_step(self.lines()[-1]["step"] + 10)
        self.stop()

    def stop(self) -> None:
        """Do what Ctrl-C does: it saves after its current step and leaves."""
        self.process.send_signal(signal.SIGINT)
        self.end(3)

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
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended while being looked at
                if "TrainWorker" in (title := " ".join(process.cmdline())) and "ray::" in title:
                    found.append(process.pid)
        return sorted(found)

    def end(self, code: int) -> None:
        assert self.process.wait(timeout=PATIENCE_S) == code, self.log.read_text()
        shutil.rmtree(self.temporary, ignore_errors=True)


class DrillElsewhere(Drill):
    """A command that takes itself for one on another machine."""

    PROGRAM = str(Path(__file__).with_name("elsewhere.py"))


class Undisturbed:
    """The runs that nothing happens to, each made once: expected(drill, workers)."""

    def __init__(self, folder: Path, train: Callable[..., None] | None = None) -> None:
        self.folder, self.made = folder, dict[int, Lines]()
        self.train = train

    def __call__(self, drill: Drill, workers: int) -> Lines:
        """Return the lines of a run with a command's rows, as far as the command has come."""
        result = drill.result()
        done = result["status"] == "done"
        steps = json.loads(drill.run.read("plan.json"))["steps"] if done else result["steps"]
        if len(self.made.get(workers, [])) < steps:
            folder = self.folder / f"undisturbed-{workers}-{steps}"
            where = (drill.storage, drill.run.url, workers, folder, steps)
            self.made[workers] = without_ray(*where, self.train)
        lines = self.made[workers][:steps]
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        return lines


def without_ray(
    storage: str,
    run: str,
    workers: int,
    folder: Path,
    steps: int,
    train: Callable[..., None] | None = None,
) -> Lines:
    """Train again what a run has trained, by its config, on its rows, in plain processes.

    `train` is what each does, as `train_again`, which is for language models.
    """
    folder.mkdir()
    where = (storage, run, str(folder), steps)
    spawn(train or train_again, workers, str(folder / "rendezvous"), *where)
    return metrics.read(open_storage(str(folder)))


def train_again(rank: int, world: int, storage: str, run: str, folder: str, steps: int) -> None:
    asked, prepared_root = open_storage(run), open_storage(f"{storage}/{PREPARED}")
    config = from_dict(yaml.safe_load(asked.read("config.yaml")))
    off = config.checkpoint.model_copy(update={"every_steps": None})
    config = config.model_copy(update={"checkpoint": off})
    fingerprint = json.loads(asked.read("plan.json"))["fingerprint"]
    prepared = prepared_data.load(prepared_root / fingerprint)
    assert prepared is not None
    (tokenizer,) = [name for name in prepared_root.dirs() if name.startswith("tokenizer-")]
    order, rows = order_of(config, prepared), prepared.rows("train")
    spec = LanguageSpec(
        "rayapp.finetune", config, prepared, order, folder, f"{prepared_root.url}/{tokenizer}"
    )
    ahead = local_steps(rows, order, rank, world, 0)
    train_rank(spec, RankContext(torch.device("cpu"), lambda first: islice(ahead, first, steps)))


def worker_counts(lines: Lines) -> list[int]:
    """Return how many workers there were, one after another."""
    return [workers for workers, _ in groupby(line["workers"] for line in lines)]


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
