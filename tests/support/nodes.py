"""Ray nodes on this machine: each is a `ray start --block`, as on a cluster's hosts."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from patience import PATIENCE_S
from ports import free_port

RAY = Path(sys.executable).with_name("ray")


class Node:
    """One node; the first of a cluster is its head."""

    def __init__(
        self,
        log: Path,
        cpus: int,
        seats: int,
        head: Node | None = None,
        ip: str = "127.0.0.1",
        inside: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Start it; `inside` is a command that runs another in a namespace of its own, `more` are
        words for `ray start`."""
        self.temporary = head.temporary if head else tempfile.mkdtemp()
        self.address = head.address if head else f"{ip}:{free_port()}"
        command = [*inside, str(RAY), "start", "--block", "--disable-usage-stats"]
        command += [f"--num-cpus={cpus}", *more]
        command += [f"--resources={json.dumps({'seat': seats})}"]
        command += ["--object-store-memory=150000000", f"--node-ip-address={ip}"]
        command += [f"--dashboard-agent-listen-port={free_port()}"]
        command += [f"--metrics-export-port={free_port()}"]
        command += [f"--runtime-env-agent-port={free_port()}"]
        if head:
            command += [f"--address={self.address}"]
        else:
            command += ["--head", f"--port={self.address.rpartition(':')[2]}"]
            command += [f"--temp-dir={self.temporary}", "--include-dashboard=false"]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **(variables or {})}
        environment.pop("RAY_ADDRESS", None)
        self.process = started(command, environment, log)

    def preempt(self) -> None:
        """Do what a spot interruption or the end of a pod does: SIGTERM, then wait for the end."""
        self.process.send_signal(signal.SIGTERM)

    def lose(self) -> None:
        """Kill all of its processes at once, as when a machine loses power."""
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=PATIENCE_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.lose()


def started(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Return a `ray start --block` when its node has started; Ray gives one up after 30 s."""
    for _ in range(3):
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group that can be killed like a machine
            )
        while process.poll() is None:
            if "Ray runtime started" in log.read_text():
                return process
            time.sleep(0.1)
    raise AssertionError(log.read_text())


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[list[Node]]:
    """Start a head with room for a worker, the driver and Ray Data; end every node of the list."""
    nodes = [Node(folder / "head.log", cpus=3, seats=1)]
    try:
        yield nodes
    finally:
        for node in reversed(nodes):
            node.end()


@contextlib.contextmanager
def seats(folder: Path, count: int) -> Iterator[list[Node]]:
    """Start a cluster with as many nodes, each with room for one worker."""
    with cluster(folder) as nodes:
        for _ in range(count - 1):
            join(nodes, folder)
        yield nodes


def join(nodes: list[Node], folder: Path) -> None:
    """Let another node come."""
    log = folder / f"node-{nodes[0].address.rpartition(':')[2]}-{len(nodes)}.log"
    nodes.append(Node(log, cpus=1, seats=1, head=nodes[0]))


@contextlib.contextmanager
def with_jobs(folder: Path, cpus: int, workers: int = 0) -> Iterator[dict[str, str]]:
    """Start a cluster with a dashboard and a token of its own; yield the environment of a client.

    `workers` more nodes of 2 CPUs each join it.
    """
    temporary = tempfile.mkdtemp()  # short: Ray makes sockets below it
    dashboard, gcs = free_port(), free_port()
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, options: dict[str, object]) -> None:
        options |= {"object-store-memory": 150_000_000, "node-ip-address": "127.0.0.1"}
        options |= {"dashboard-agent-listen-port": free_port(), "metrics-export-port": free_port()}
        options |= {"runtime-env-agent-port": free_port()}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        arguments += ["--head"] if name == "head" else []
        command = [str(RAY), "start", "--block", "--disable-usage-stats", *arguments]
        processes.append(started(command, environment, folder / f"{name}.log"))

    try:
        options = {"port": gcs, "dashboard-port": dashboard, "temp-dir": temporary}
        start("head", options | {"num-cpus": cpus, "ray-client-server-port": free_port()})
        address = f"http://127.0.0.1:{dashboard}"
        _wait_for_dashboard(address, processes[0], folder / "head.log")
        for number in range(workers):
            start(f"worker-{number}", {"address": f"127.0.0.1:{gcs}", "num-cpus": 2})
        yield {**environment, "RAY_API_SERVER_ADDRESS": address}
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=PATIENCE_S)
        shutil.rmtree(temporary, ignore_errors=True)


def _wait_for_dashboard(address: str, head: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(f"{address}/api/version", timeout=5)
        except urllib.error.HTTPError as error:
            assert error.code in (401, 403), error  # it asks for the token, so it is up
            return
        except OSError:
            assert head.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        else:
            raise AssertionError("the dashboard answers without a token")
