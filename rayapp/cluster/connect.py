"""Reach the head of a private cluster: the command that forwards its port, and its token.

ECS: an SSM session into the head's container, which needs the AWS CLI with its session manager
plug-in. EKS: `kubectl port-forward`. Either way the dashboard and the Jobs API are then on this
machine's loopback, and every request to them needs the token. The token is kept only while the
command that this process has started listens on the port: another listener would get it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

DASHBOARD_PORT = 8265
FORWARD_POLL_S = 0.5
FORWARDED_S = 60.0  # until the forwarding command has opened its port
SECRET_KEY = "auth_token"  # in the Secret that KubeRay creates under the cluster's name
ERROR_LETTERS = 500


class NotReachable(RuntimeError):
    """No head can be found to connect to; the message says what to do."""


@dataclass(frozen=True)
class Way:
    """How to reach a head: the command that forwards its port, and the token it requires."""

    command: list[str]
    token: str


def to_ecs(name: str, region: str, port: int, client: Callable[[str], Any]) -> Way:
    """Return how to reach the head of infra/ecs; `client(service)` returns a boto3 client.

    Raises:
        NotReachable: no head is running.
    """
    stack, ecs = f"{name}-ecs", client("ecs")
    running = ecs.list_tasks(cluster=stack, serviceName="head", desiredStatus="RUNNING")["taskArns"]
    tasks = ecs.describe_tasks(cluster=stack, tasks=running)["tasks"] if running else []
    tasks = [task for task in tasks if task.get("lastStatus") == "RUNNING"]
    if not tasks:
        raise NotReachable(
            f"{stack} has no running head: its host takes some minutes to start. Look with "
            f"`aws ecs describe-services --region {region} --cluster {stack} --services head`"
        )
    (container,) = [container for container in tasks[0]["containers"] if container["name"] == "ray"]
    task = tasks[0]["taskArn"].rpartition("/")[2]
    ports = {"portNumber": [str(DASHBOARD_PORT)], "localPortNumber": [str(port)]}
    command = ["aws", "ssm", "start-session", "--region", region]
    command += ["--target", f"ecs:{stack}_{task}_{container['runtimeId']}"]
    command += ["--document-name", "AWS-StartPortForwardingSession"]
    command += ["--parameters", json.dumps(ports)]
    parameter = client("ssm").get_parameter(Name=f"/{stack}/ray-token", WithDecryption=True)
    return Way(command, str(parameter["Parameter"]["Value"]))


def to_eks(port: int, job: str | None = None) -> Way:
    """Return how to reach the head of cluster/kuberay, or of a RayJob's own cluster.

    Either is that of kubectl's current context.

    Raises:
        NotReachable: kubectl finds no such cluster.
    """
    cluster = "rayapp"
    if job is not None:
        cluster = kubectl("get", f"rayjob/{job}", "--output=jsonpath={.status.rayClusterName}")
        if not cluster:
            raise NotReachable(
                f"RayJob {job} has no cluster: it waits for room, or is between two tries. Look "
                "with `kubectl --namespace=rayapp get rayjob`"
            )
    secret = kubectl("get", f"secret/{cluster}", f"--output=jsonpath={{.data.{SECRET_KEY}}}")
    command = ["kubectl", "--namespace=rayapp", "port-forward", f"service/{cluster}-head-svc"]
    command += [f"{port}:{DASHBOARD_PORT}"]
    return Way(command, base64.b64decode(secret).decode())


def kubectl(*words: str) -> str:
    """Return what kubectl prints of the namespace of Ray clusters, in its current context."""
    try:
        command = ["kubectl", "--namespace=rayapp", *words]
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotReachable("kubectl is not installed. Install it") from None
    if done.returncode != 0:
        raise NotReachable(
            f"kubectl {words[0]} fails: {done.stderr.strip()[-ERROR_LETTERS:]}. Set its context "
            "with `aws eks update-kubeconfig`, and apply the rendered cluster"
        )
    return done.stdout


def free_port() -> int:
    """Return a local port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Forwarding:
    """A command that forwards a port, and a file with the token for this user's other commands.

    The file is there from when the command listens on the port until `end`.
    """

    def __init__(self, way: Way, port: int, token: Path) -> None:
        self._way, self._port, self._token = way, port, token
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that Ray's clients, and so `rayapp submit`, connect with."""
        return {
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self._port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
        }

    def closed(self) -> bool:
        """Say whether the command has not been started, or has ended."""
        return self._process is None or self._process.poll() is not None

    def open(self, wanted: Callable[[], bool]) -> bool:
        """Start the command, again while it ends, until it listens; False: it is not wanted longer.

        Raises:
            NotReachable: another process listens on the port.
        """
        while self._process is None or not _listens(self._process.pid, self._port):
            if self.closed():
                self.end()
                if _taken(self._port):
                    raise NotReachable(
                        f"port {self._port} is taken: another process listens on it, and would get "
                        "the cluster's token. Leave --port out, or set a free one"
                    )
                self._process = subprocess.Popen(
                    self._way.command, stdin=subprocess.DEVNULL, start_new_session=True
                )
            if not wanted():
                return False
            time.sleep(FORWARD_POLL_S)
        self._token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._token.unlink(missing_ok=True)
        self._token.touch(mode=0o600)
        self._token.write_text(self._way.token, encoding="utf-8")
        return True

    def open_in_time(self) -> None:
        """Open the port; raise NotReachable if it is not open after FORWARDED_S seconds."""
        until = time.monotonic() + FORWARDED_S
        if not self.open(lambda: time.monotonic() < until):
            raise NotReachable(
                f"port {self._port} is closed: `{self._way.command[0]}` has not forwarded it "
                f"within {FORWARDED_S:.0f} s. See what it says above"
            )

    def end(self) -> None:
        """End the command with what it has started, and delete the token's file."""
        self._token.unlink(missing_ok=True)
        if self._process is not None:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()


def through(forwarding: Forwarding, command: list[str]) -> int:
    """Run a command while a port is forwarded, again where that ends; return its exit code.

    Raises:
        NotReachable: the port is not open in time, or another process has taken it.
    """
    forwarding.open_in_time()
    running = subprocess.Popen(command, env={**os.environ, **forwarding.variables})
    try:
        while running.poll() is None:
            if forwarding.closed():
                forwarding.open(lambda: running.poll() is None)
            time.sleep(FORWARD_POLL_S)
    finally:
        running.terminate()
    return running.wait()


def _taken(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0


def _listens(session: int, port: int) -> bool:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended meanwhile, or is another user's
            if os.getsid(process.pid) == session and any(
                one.status == psutil.CONN_LISTEN and one.laddr.port == port
                for one in process.net_connections("tcp")
            ):
                return True
    return False
