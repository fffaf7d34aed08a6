"""Reach the head of a private cluster: the command that forwards its port, and its token.

ECS: an SSM session into the head's container, which needs the AWS CLI with its session manager
plug-in. EKS: `kubectl port-forward`. Either way the dashboard and the Jobs API are then on this
machine's loopback, and every request to them needs the token.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD_PORT = 8265
HOMES = ("ecs", "eks")
POLL_S = 15.0
DESCRIBED = 10  # the most services in one request
FORWARDED_S = 60.0  # until the forwarding command has opened its port
SECRET_KEY = "auth_token"  # in the Secret that KubeRay creates under the cluster's name


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


def to_eks(port: int) -> Way:
    """Return how to reach the head of cluster/kuberay in kubectl's current context.

    Raises:
        NotReachable: kubectl finds no such cluster.
    """
    path = f"jsonpath={{.data.{SECRET_KEY}}}"
    asked = ["kubectl", "--namespace=rayapp", "get", "secret", "rayapp", f"--output={path}"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotReachable("kubectl is not installed. Install it") from None
    if done.returncode != 0 or not done.stdout:
        raise NotReachable(
            f"kubectl finds no Ray cluster: {done.stderr.strip()[-500:] or 'no token'}. "
            "Set its context with `aws eks update-kubeconfig`, then apply the rendered cluster"
        )
    command = ["kubectl", "--namespace=rayapp", "port-forward", "service/rayapp-head-svc"]
    command += [f"{port}:{DASHBOARD_PORT}"]
    return Way(command, base64.b64decode(done.stdout).decode())


def missing_tasks(name: str, client: Callable[[str], Any]) -> list[str]:
    """Return a line for each service of infra/ecs that lacks tasks, with the reason if EC2 has one.

    A group of hosts for which there is no capacity stays empty, and says so in its activities.
    """
    stack, lines = f"{name}-ecs", list[str]()
    for service in services_of(stack, client):
        if service["runningCount"] >= service["desiredCount"]:
            continue
        newest = activities_of(f"{stack}-{service['serviceName']}", client, 1)
        why = refusal(newest) or "its hosts are starting"
        count = f"{service['runningCount']} of {service['desiredCount']} tasks"
        lines.append(f"service {service['serviceName']} is incomplete: {count} run, {why}")
    return lines


def services_of(stack: str, client: Callable[[str], Any]) -> list[Any]:
    """Return the services of a cluster, as ECS describes them."""
    pages = client("ecs").get_paginator("list_services").paginate(cluster=stack)
    return described(stack, [arn for page in pages for arn in page["serviceArns"]], client)


def described(stack: str, services: list[str], client: Callable[[str], Any]) -> list[Any]:
    """Return what ECS says of services, by name or ARN."""
    told = list[Any]()
    for first in range(0, len(services), DESCRIBED):
        some = services[first : first + DESCRIBED]
        told += client("ecs").describe_services(cluster=stack, services=some)["services"]
    return told


def activities_of(hosts: str, client: Callable[[str], Any], most: int) -> list[Any]:
    """Return the newest activities of an Auto Scaling group."""
    asked = {"AutoScalingGroupName": hosts, "MaxRecords": most}
    return list(client("autoscaling").describe_scaling_activities(**asked)["Activities"])


def scaling_group(hosts: str, client: Callable[[str], Any]) -> Any:
    """Return an Auto Scaling group, as Auto Scaling describes it."""
    asked = {"AutoScalingGroupNames": [hosts]}
    (told,) = client("autoscaling").describe_auto_scaling_groups(**asked)["AutoScalingGroups"]
    return told


def refusal(activities: list[Any]) -> str | None:
    """Return EC2's words on the first of some activities that failed; None if none has."""
    failed = [one for one in activities if one["StatusCode"] == "Failed"]
    return str(failed[0]["StatusMessage"]) if failed else None


def wait_for_tasks(
    name: str, client: Callable[[str], Any], seconds: float, say: Callable[[str], None]
) -> None:
    """Wait until all services of infra/ecs have their tasks; say each new reason that they lack.

    Raises:
        NotReachable: they lack some after so many seconds.
    """
    wait_until_complete(lambda: missing_tasks(name, client), seconds, say)


def wait_until_complete(
    missing: Callable[[], list[str]], seconds: float, say: Callable[[str], None]
) -> None:
    """Wait until `missing()` returns no line; say each line once as long as it stays the same.

    Raises:
        NotReachable: it returns some after so many seconds.
    """
    until, before = time.monotonic() + seconds, list[str]()
    while lines := missing():
        for line in lines:
            if line not in before:
                say(line)
        before = lines
        if time.monotonic() > until:
            raise NotReachable(
                f"{lines[0]}. rayapp has waited {seconds:.0f} s. Take another cluster.instance, "
                "zone or market"
            )
        time.sleep(POLL_S)


def through(way: Way, port: int, path: Path, command: list[str]) -> int:
    """Run a command while the port is forwarded, again where that ends; return what it returns.

    Raises:
        NotReachable: the port is not open in time.
    """
    ended, forwarding = threading.Event(), list[subprocess.Popen[bytes]]()

    def forward() -> None:
        while not ended.is_set():
            forwarding[:] = [subprocess.Popen(way.command, stdin=subprocess.DEVNULL)]
            forwarding[0].wait()
            ended.wait(1.0)

    thread = threading.Thread(target=forward, name="forwarding")
    thread.start()
    try:
        until = time.monotonic() + FORWARDED_S
        while not _listens(port):
            if time.monotonic() > until:
                raise NotReachable(
                    f"port {port} is closed: `{way.command[0]}` has not forwarded it within "
                    f"{FORWARDED_S:.0f} s. See what it says above"
                )
            time.sleep(0.2)
        return subprocess.run(command, env={**os.environ, **variables(path, port)}).returncode
    finally:
        ended.set()
        for process in forwarding:
            process.terminate()
        thread.join()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0


def keep(token: str, home: str, folder: Path) -> Path:
    """Write the token to a file that only this user can read; return its path."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{home}.token"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(token, encoding="utf-8")
    return path


def variables(path: Path, port: int) -> dict[str, str]:
    """Return the environment variables that Ray's clients, and so `rayapp submit`, connect with."""
    return {
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(path),
    }
