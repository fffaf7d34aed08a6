"""What a run has to compute with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
import torch
from drill import Drill
from patience import PATIENCE_S

from rayapp.config import load
from rayapp.driver import ray_session
from rayapp.observe.result import RunFailed
from rayapp.train.checkpoint.marker import steps_done

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("there", "precision"),
    [
        (["accelerator_type:A100"], "bf16"),
        (["accelerator_type:V100"], "fp32"),
        (["accelerator_type:A10G", "accelerator_type:T4"], "fp32"),
        ([], "bf16"),  # a kind that Ray does not know is newer than those it does
    ],
)
def test_auto_is_bf16_where_every_gpu_has_it(
    there: list[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"CPU": 8.0, "GPU": 2.0, **dict.fromkeys(there, 1.0)}
    monkeypatch.setattr(ray, "cluster_resources", lambda: found)
    assert ray_session.fastest_precision(gpus=True) == precision


def slow(times: int, asked: list[str]) -> Callable[..., None]:
    """Return a ray.init that is as slow as on a busy machine, so many times."""

    def init(address: str, **options: object) -> None:
        asked.append(address)
        if len(asked) <= times:
            raise Exception(f"The current node {ray_session.SLOW_START}.")

    return init


def test_a_slow_start_of_ray_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", slow(ray_session.STARTS - 1, asked))
    ray_session._init(load(), "local")
    assert asked == ["local"] * ray_session.STARTS


def test_slow_starts_of_ray_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", slow(ray_session.STARTS, asked))
    with pytest.raises(RunFailed, match="Ray is slow to start on this machine") as failure:
        ray_session._init(load(), "local")
    assert asked == ["local"] * ray_session.STARTS and "\n" not in str(failure.value)


def test_a_cluster_that_does_not_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", slow(1, asked))
    with pytest.raises(Exception, match=ray_session.SLOW_START):
        ray_session._init(load(), "10.0.0.1:6379")
    assert len(asked) == 1


@pytest.mark.parametrize("module", ["rayapp.finetune.__main__", "rayapp.cli.data"])
def test_commands_import_ray_after_they_have_told_it(module: str) -> None:
    """Ray reads some of these variables when it is imported: which lines to skip, for one."""
    code = f"import sys, {module}\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_workers_on_a_cluster_are_told_what_their_job_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray refuses a variable that the job has too (`rayapp submit` sets them, users may)."""
    job = {"runtime_env": {"env_vars": {"RAY_DATA_LOG_LEVEL": "DEBUG"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    told = ray_session._quiet_workers()
    assert set(told) == set(ray_session.QUIET) - {"RAY_DATA_LOG_LEVEL"}
    assert told["PYTHONWARNINGS"] == "error"
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    assert set(ray_session._quiet_workers()) == set(ray_session.QUIET)


def test_what_a_worker_prints_is_printed_once() -> None:
    """By Ray Train's own patch of print, where stdout is wrapped as in a worker."""
    code = (
        "import logging, sys; from rayapp.driver.ray_session import tell_ray; tell_ray()\n"
        "from ray.train.v2._internal.logging.patch_print import patch_print_function\n"
        "from rayapp.observe.plain import PlainStream\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout); patch_print_function()\n"
        "sys.stdout = PlainStream(sys.stdout); print('a line')"
    )
    environment = {n: v for n, v in os.environ.items() if n != "RAY_TRAIN_ENABLE_PRINT_PATCH"}
    out = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert out.count("a line") == 1


class Grouped(Drill):
    """A command in a process group of its own, as a shell, `timeout` or a batch system makes it."""

    GROUP = 0

    def processes(self) -> list[psutil.Process]:
        """Return the processes of its Ray."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def events(self, kind: str) -> list[dict[str, object]]:
        text = self.run.read("events.jsonl") if self.run.exists("events.jsonl") else b""
        return [each for each in map(json.loads, text.splitlines()) if each["event"] == kind]


def leave(processes: list[psutil.Process]) -> None:
    """Wait until the processes are gone; those that stay fail the test."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S / 4)
    assert not alive, [each.as_dict(["pid", "cmdline", "ppid"]) for each in alive]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["ray", "workers", "training"])
def test_a_signal_to_the_process_group_is_for_the_driver_alone(
    tmp_path: Path, number: signal.Signals, phase: str
) -> None:
    """`timeout`, a batch system and Ctrl-C signal all processes of a group: it saves and leaves."""
    drill = Grouped(tmp_path, "grouped", {"train.epochs": 100, "cluster.workers": 1})
    if phase == "ray":
        drill.wait_until(lambda: any("gcs_server" in each.name() for each in drill.processes()))
    else:
        drill.wait_until(lambda: bool(drill.events("workers")))
    if phase == "training":
        drill.wait_for_step(3)
    processes = drill.processes()
    os.killpg(drill.process.pid, number)
    drill.end(3)
    assert [each["status"] for each in drill.events("ended")][-1:] in ([], ["stopped"])
    assert phase == "ray" or drill.events("ended"), drill.log.read_text()
    assert steps_done(drill.run) == len(drill.lines()), "each step is saved"
    assert phase != "training" or steps_done(drill.run) >= 3
    leave(processes)


@pytest.mark.full
def test_the_ray_of_a_killed_driver_ends_with_it(tmp_path: Path) -> None:
    drill = Grouped(tmp_path, "killed", {"train.epochs": 100, "cluster.workers": 1})
    drill.wait_for_step(3)
    processes = drill.processes()
    assert {os.getsid(each.pid) for each in processes}.isdisjoint({os.getsid(drill.process.pid)})
    drill.kill("driver")
    leave(processes)


@pytest.mark.parametrize(
    ("here", "workers", "said"), [(True, 1, "8"), (True, 3, "2"), (False, 1, None)]
)
def test_a_worker_gets_its_share_of_the_cores_of_a_ray_that_is_started_here(
    here: bool, workers: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "started_here", lambda: here)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert ray_session.threads(workers).get("OMP_NUM_THREADS") == said
