"""A cluster of containers from rendered files, and runs on it as a user submits them.

with ContainerCluster("ecs", image, network, S3 variables) as cluster:
    cluster.start("head")
    worker = cluster.start("worker")
    run = Job(cluster, folder, "name", {"cluster.workers": "1:2"})
    worker.kill()
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from containers import Container, Network
from drill import TEXT, Drill
from image import ROOT
from patience import PATIENCE_S
from rendered import head_name, specs

from rayapp.cluster import Options, render
from rayapp.config import load
from rayapp.observe.run_folder import STOP
from rayapp.storage import open_storage

RAY = Path(sys.executable).with_name("ray")
CONFIG = {
    "cluster.instance": "m5.xlarge",  # 3 CPUs for Ray: room for one worker and Ray Data
    "cluster.workers": "1:2",
    "cluster.resources": "{CPU: 2}",
}
PORT = 8265
STARTS = 3
LOOPBACK = "127.0.0.1 localhost\n"


class ContainerCluster:
    """Head and workers; what is started is ended with it."""

    def __init__(
        self,
        platform: str,
        image: Path,
        network: Network,
        s3: Mapping[str, str],
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`s3` is what the platform's role gives: keys, and where S3 is; `more` goes to Ray."""
        files = render(platform, load(None, CONFIG), Options(account="123456789012"))
        self.token = secrets.token_hex(32)
        self.specs = specs(platform, files, self.token)
        self._head_name = head_name(platform, files)
        self._image, self._network, self._more = image, network, {**s3, **(more or {})}
        self.containers, self.runs = list[Container](), list[Job]()
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._hosts = self.folder / "hosts"
        self._hosts.write_text(LOOPBACK)

    def __enter__(self) -> ContainerCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
        for container in reversed(self.containers):
            container.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, role: str, **limits: Any) -> Container:
        """Start a head or a worker; `limits` are those of the container where not as rendered.

        Ray gives up a node that has not started within 30 s; then another takes its place, as a
        service of ECS and KubeRay's operator have it.
        """
        disk_mib = limits.pop("disk_mib", None)
        spec = self.specs[role]
        spec = replace(spec, environment={**spec.environment, **self._more}, **limits)
        for _ in range(STARTS):
            container = Container(spec, self._image, self._network, self._hosts, disk_mib)
            if role == "head":
                lines = self._hosts.read_text().splitlines()
                kept = [line for line in lines if not line.endswith(f" {self._head_name}")]
                kept.append(f"{container.address} {self._head_name}\n")
                self._hosts.write_text("\n".join(kept))
            if container.becomes_healthy():
                self.containers.append(container)
                return container
            said = container.said()
            container.end()
        raise AssertionError(said)

    @property
    def head(self) -> Container:
        return self.containers[0]


class Job(Drill):
    """A run submitted from outside, with this checkout's sources."""

    def __init__(
        self,
        cluster: ContainerCluster,
        folder: Path,
        name: str,
        storage: str,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        bucket = storage.rpartition("/")[0]
        self.storage, self.run = storage, open_storage(f"{storage}/{name}")
        self.attempts_before = max((line["attempt"] for line in self.lines()), default=0)
        self.temporary = tempfile.mkdtemp()
        open_storage(bucket).write("data/text.txt", TEXT.encode())
        arguments = {"run.storage": storage, "run.name": name, "data.path": f"{bucket}/data"}
        arguments |= {**self.SETTINGS, **CONFIG, **(more or {})}
        arguments.pop("cluster.instance")
        package = folder / "package"
        if not package.exists():
            shutil.copytree(
                ROOT / "rayapp", package / "rayapp", ignore=shutil.ignore_patterns("__pycache__")
            )
        command = [str(RAY), "job", "submit", "--working-dir", str(package), "--"]
        command += ["python", "-m", self.MODULE]
        command += [f"--{field}={value}" for field, value in arguments.items()]
        variables = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token}
        variables.pop("RAY_ADDRESS", None)
        self.log = folder / f"{name}.log"
        cluster.runs.append(self)
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                cluster.head.outside(*command),
                env={**variables, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{PORT}"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> None:
        """Ask it to save after its current step and to leave, by a file in its folder."""
        self.run.write(STOP, b"")
        self.process.wait(timeout=PATIENCE_S)
        result = json.loads(self.run.read("result.json"))
        assert result["status"] == "stopped", self.log.read_text()
        shutil.rmtree(self.temporary, ignore_errors=True)


class Watch:
    """How many nodes Ray takes for alive, as it changes, with Unix times."""

    CODE = """
import time, ray
ray.init(address="auto", log_to_driver=False, logging_level=50)
last = None
while True:
    count = sum(node["Alive"] for node in ray.nodes())
    if count != last:
        print("alive", time.time(), count, flush=True)
    last = count
    time.sleep(0.2)
"""

    def __init__(self, head: Container) -> None:
        self._log = head.folder / "watch"
        with self._log.open("w") as output:
            self._process = head.popen(output, "python", "-c", self.CODE)

    def changes(self) -> list[tuple[float, int]]:
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [(float(line[1]), int(line[2])) for line in lines if line[:1] == ["alive"]]

    def fell_at(self, since: float) -> float:
        """Return when, after `since`, Ray first had fewer nodes than just before."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            changes = self.changes()
            for (_, before), (at, now) in itertools.pairwise(changes):
                if at > since and now < before:
                    return at
            assert time.monotonic() < deadline, changes
            time.sleep(0.5)
