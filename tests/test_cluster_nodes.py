"""What the rendered files start, started: head and workers, a job, a node taken away."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import PATIENCE_S
from ports import free_port
from rendered import head_name, specs

from rayapp.cluster import Options, render
from rayapp.cluster.cluster_files import GRACE_S, JOB_STOP_S
from rayapp.config import load
from rayapp.observe import metrics
from rayapp.storage import open_storage

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
CONFIG = {
    "cluster.instance": "m5.xlarge",  # 3 CPUs for Ray: room for one worker and Ray Data
    "cluster.workers": "1:2",
    "cluster.resources": "{CPU: 2}",
    "cluster.max_failures": "0",
}


@pytest.mark.parametrize("platform", ["ecs", "kuberay"])
def test_what_a_platform_starts(platform: str) -> None:
    """The same on both: limits, time to stop, and what each is started with."""
    files = render(platform, load(None, CONFIG), Options(account="123456789012"))
    found = specs(platform, files, "token")
    for role, spec in found.items():
        assert spec.stop_s == GRACE_S and spec.environment["RAY_AUTH_TOKEN"] == "token"
        assert spec.memory_mib > spec.shared_memory_mib > 1024
        shell = spec.environment.get("KUBERAY_GEN_RAY_START_CMD")
        words = shell.split() if shell else spec.command
        assert (
            words[:2] == ["ray", "start"]
            and "--block" in words
            and "--disable-usage-stats" in words
        )
        assert ("--head" in words) == (role == "head")
        reached = f"--address={head_name(platform, files)}:6379" in words
        assert reached == (role == "worker")
    head, worker = found["head"].environment, found["worker"].environment
    assert head["RAY_JOB_STOP_WAIT_TIME_S"] == str(JOB_STOP_S)
    assert int(worker["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < GRACE_S
    period, timeout = head["RAY_health_check_period_ms"], head["RAY_health_check_timeout_ms"]
    failures = int(head["RAY_health_check_failure_threshold"])
    assert failures * (int(period) + int(timeout)) <= 20_000  # until a silent node is dead
    start = head.get("KUBERAY_GEN_RAY_START_CMD", " ".join(found["head"].command))
    assert "--runtime-env-agent-port=" in start  # else a raylet that is slow ends the head
    assert bool(found["worker"].before) == (platform == "kuberay")  # the init container


class Machine:
    """A container's command on this machine: ports of its own instead of an address."""

    def __init__(
        self, command: list[str], variables: dict[str, str], log: Path, own: dict[str, str]
    ) -> None:
        shell = "KUBERAY_GEN_RAY_START_CMD" in variables
        words = variables["KUBERAY_GEN_RAY_START_CMD"].split() if shell else command
        assert words[:2] == ["ray", "start"] and "--block" in words
        flags = dict(word.partition("=")[::2] for word in words[2:])
        flags |= {f"--{name}": value for name, value in own.items()}
        words = ["ray", "start", *(f"{k}={v}" if v else k for k, v in flags.items())]
        if shell:
            variables = {**variables, "KUBERAY_GEN_RAY_START_CMD": " ".join(words)}
            words = command
        self.log = log
        kept = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(log.parent)}
        kept |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                words,
                env={**kept, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while "Ray runtime started" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself
            whole = psutil.Process(self.process.pid)
            for process in [*whole.children(recursive=True), whole]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(timeout=PATIENCE_S)


class Cluster:
    def __init__(self, platform: str, folder: Path) -> None:
        files = render(platform, load(None, CONFIG), Options(account="123456789012"))
        self.token, self.port, self.dashboard = secrets.token_hex(32), free_port(), free_port()
        self.specs = specs(platform, files, self.token)
        self.folder, self.machines = folder, list[Machine]()
        self.temporary = tempfile.mkdtemp()  # short: Ray makes sockets below it

    def start(self, role: str) -> Machine:
        own = {
            "node-ip-address": "127.0.0.1",
            "object-store-memory": "150000000",
            "metrics-export-port": str(free_port()),
            "dashboard-agent-listen-port": str(free_port()),
            "runtime-env-agent-port": str(free_port()),
        }
        if role == "head":
            own |= {"port": str(self.port), "dashboard-port": str(self.dashboard)}
            own |= {"temp-dir": self.temporary, "ray-client-server-port": str(free_port())}
        else:
            own |= {"address": f"127.0.0.1:{self.port}"}
        spec = self.specs[role]
        log = self.folder / f"{role}-{len(self.machines)}.log"
        variables = dict(spec.environment)
        if "RAY_ADDRESS" in variables:
            variables["RAY_ADDRESS"] = f"127.0.0.1:{self.port}"
        machine = Machine(spec.command, variables, log, own)
        self.machines.append(machine)
        machine.wait()
        return machine

    def client(self) -> dict[str, str]:
        variables = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        variables.pop("RAY_ADDRESS", None)
        variables["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return {**variables, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard}"}


@pytest.fixture
def cluster(request: pytest.FixtureRequest, s3_server: str, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(request.param, tmp_path)
    try:
        cluster.start("head")
        yield cluster
    finally:
        for machine in reversed(cluster.machines):
            machine.end()
        shutil.rmtree(cluster.temporary, ignore_errors=True)


def answer(url: str) -> int:
    try:
        return int(urllib.request.urlopen(url, timeout=10).status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("cluster", ["ecs", "kuberay"], indirect=True)
def test_a_job_runs_and_a_worker_leaves(cluster: Cluster) -> None:
    """Submitted with the token, run on the worker, which ends by itself after SIGTERM."""
    worker = cluster.start("worker")
    code = "import os, ray; ray.init(); print(ray.get(ray.remote(lambda: 6 * 7).remote()), 'it is')"
    # The driver has the environment of its supervisor, which waits that long after `ray job stop`.
    code += "; print('to save:', os.environ['RAY_JOB_STOP_WAIT_TIME_S'], 's')"
    command = [str(BIN / "ray"), "job", "submit", "--", "python", "-c", code]
    done = subprocess.run(
        command, env=cluster.client(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0 and "42 it is" in done.stdout, done.stdout[-3000:] + done.stderr
    assert f"to save: {JOB_STOP_S} s" in done.stdout
    worker.process.send_signal(signal.SIGTERM)
    worker.process.wait(timeout=GRACE_S)
    assert "Node" in worker.log.read_text() and "draining" in worker.log.read_text().lower()


@pytest.mark.drill
@pytest.mark.parametrize("cluster", ["ecs", "kuberay"], indirect=True)
def test_a_job_outlives_its_node(cluster: Cluster, s3_bucket: str, tmp_path: Path) -> None:
    """Submitted over HTTP with the token; SIGTERM to a worker's process; nothing is lost."""
    workers = [cluster.start("worker"), cluster.start("worker")]
    address = f"http://127.0.0.1:{cluster.dashboard}"
    assert answer(f"{address}/api/gcs_healthz") == 200  # the health check needs no token
    assert answer(f"{address}/api/jobs/") == 401  # all else does
    found = json.loads(Path(cluster.temporary, "prom_metrics_service_discovery.json").read_text())
    assert sum(len(one["targets"]) for one in found) >= 3  # what the side-car reads: every node
    storage = f"s3://{s3_bucket}/runs"
    open_storage(f"s3://{s3_bucket}").write("data/text.txt", text())
    package = tmp_path / "package"
    shutil.copytree(ROOT / "rayapp", package / "rayapp")
    arguments = {
        "run.storage": storage,
        "run.name": "job",
        "data.path": f"s3://{s3_bucket}/data",
        "data.seq_len": "128",
        "model.tokenizer": "bytes",
        "model.overrides": "{num_hidden_layers: 1, hidden_size: 64, intermediate_size: 128}",
        "train.tokens_per_step": "4096",
        "train.micro_batch": "8",
        "train.max_steps": "400",  # more than the 7 s in which a notice is seen
        "train.precision": "fp32",
        "checkpoint.every_steps": "1000",
        "checkpoint.every_s": "none",
        "checkpoint.export": "false",
        **{name: value for name, value in CONFIG.items() if name != "cluster.instance"},
    }
    command = [str(BIN / "ray"), "job", "submit", "--working-dir", str(package), "--"]
    command += ["python", "-m", "rayapp.finetune"]
    command += [f"--{name}={value}" for name, value in arguments.items()]
    log = tmp_path / "job.log"
    with log.open("w") as output:
        job = subprocess.Popen(
            command, env=cluster.client(), stdout=output, stderr=subprocess.STDOUT
        )
    run = open_storage(f"{storage}/job")
    wait_for_two_workers(run, job, log)
    stopped = time.monotonic()
    workers[1].process.send_signal(signal.SIGTERM)
    workers[1].process.wait(timeout=GRACE_S)  # later ECS or the kubelet would kill it
    left_s = time.monotonic() - stopped
    assert job.wait(timeout=PATIENCE_S) == 0, log.read_text()[-5000:]
    result = json.loads(run.read("result.json"))
    (taken,) = result["interruptions"]
    assert (taken["kind"], taken["lost_steps"]) == ("preemption", 0), taken
    lines = metrics.read(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert {line["workers"] for line in lines} == {1, 2}
    print(f"the worker left {left_s:.1f} s after SIGTERM")


def wait_for_two_workers(run: Any, job: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(line["workers"] == 2 and line["step"] >= 3 for line in metrics.read(run)):
        assert job.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.5)


def text() -> bytes:
    lines = (
        f"Line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} says {i * i % 97}.\n" for i in range(3000)
    )
    return "".join(lines).encode()
