"""What a platform starts of rendered files: the Ray containers of head and worker, as `Spec`s.

ECS's agent takes a task definition as it is. KubeRay 1.7 makes pods of a RayCluster; what it adds
is its documented behaviour: https://docs.ray.io/en/latest/cluster/kubernetes (`ray start` from
rayStartParams in KUBERAY_GEN_RAY_START_CMD, variables, the init container wait-gcs-ready, one HTTP
probe from Ray 2.53 on, and the token of authOptions).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml
from containers import Spec

HEAD_SERVICE = "rayapp-head-svc.rayapp.svc.cluster.local"
PROBE = ["curl", "-fsS", "--max-time", "5", "http://{address}:52365/api/healthz"]
ROLES = ("head", "worker")


def head_name(platform: str, files: Mapping[str, str]) -> str:
    """Return the name by which workers find the head."""
    if platform == "kuberay":
        return HEAD_SERVICE
    (address,) = [
        word.removeprefix("--address=").partition(":")[0]
        for word in _task(files, "worker")["command"]
        if word.startswith("--address=")
    ]
    return address


def specs(platform: str, files: Mapping[str, str], token: str) -> dict[str, Spec]:
    """Return {role: Spec}."""
    made = {
        role: (of_ecs if platform == "ecs" else of_kuberay)(files, role, token) for role in ROLES
    }
    return made


def of_ecs(files: Mapping[str, str], role: str, token: str) -> Spec:
    """Return the container `ray` of a task definition. ECS's agent reads the token from SSM."""
    task, ray = json.loads(files[f"{role}.json"]), _task(files, role)
    variables = {one["name"]: one["value"] for one in ray["environment"]}
    for secret in ray["secrets"]:
        assert secret["valueFrom"].endswith("/ray-token"), secret
        variables[secret["name"]] = token
    kind, *check = ray["healthCheck"]["command"]
    assert kind == "CMD-SHELL"
    named = {volume["name"] for volume in task["volumes"]}
    assert {mount["sourceVolume"] for mount in ray.get("mountPoints", [])} <= named
    return Spec(
        name=role,
        command=ray["command"],
        environment=variables,
        memory_mib=int(task["memory"]),
        shared_memory_mib=ray["linuxParameters"]["sharedMemorySize"],
        stop_s=ray["stopTimeout"],
        health=[["sh", "-c", *check]],
        volumes=tuple(mount["containerPath"] for mount in ray.get("mountPoints", [])),
        ulimits={one["name"]: (one["softLimit"], one["hardLimit"]) for one in ray["ulimits"]},
        init=ray["linuxParameters"]["initProcessEnabled"],
    )


def _task(files: Mapping[str, str], role: str) -> dict[str, Any]:
    (ray,) = [
        container
        for container in json.loads(files[f"{role}.json"])["containerDefinitions"]
        if container["name"] == "ray"
    ]
    return dict(ray)


def of_kuberay(files: Mapping[str, str], role: str, token: str) -> Spec:
    """Return the Ray container, the first one, of the pod that KubeRay makes."""
    cluster = yaml.safe_load(files["base/raycluster.yaml"])
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    group = spec["headGroupSpec"] if role == "head" else spec["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    ray = pod["containers"][0]
    variables = {one["name"]: one["value"] for one in ray["env"]}
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    ip = "127.0.0.1" if role == "head" else HEAD_SERVICE
    made = {
        "RAY_CLUSTER_NAME": cluster["metadata"]["name"],
        "RAY_CLOUD_INSTANCE_ID": f"rayapp-{role}-x1y2z",
        "RAY_NODE_TYPE_NAME": group.get("groupName", "headgroup"),
        "KUBERAY_GEN_RAY_START_CMD": _start(role, group["rayStartParams"], ray),
        "RAY_PORT": "6379",
        "RAY_ADDRESS": f"{ip}:6379",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
    }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    paths = {mount["mountPath"]: volumes[mount["name"]] for mount in ray["volumeMounts"]}
    found = Spec(
        name=role,
        command=[*ray["command"], *ray["args"]],
        environment={**made, **variables, **auth},
        memory_mib=_mib(ray["resources"]["limits"]["memory"]),
        shared_memory_mib=_mib(paths["/dev/shm"]["emptyDir"]["sizeLimit"]),
        stop_s=pod["terminationGracePeriodSeconds"],
        health=[PROBE],
        volumes=tuple(path for path in paths if paths[path].get("emptyDir") == {}),
    )
    if role == "head":
        return found
    address = {"FQ_RAY_IP": HEAD_SERVICE, "RAY_IP": "rayapp-head-svc"}
    wait = f"until ray health-check --address {HEAD_SERVICE}:6379; do sleep 5; done"
    environment = {**address, **found.environment}
    return replace(found, environment=environment, before=["/bin/bash", "-c", "--", wait])


def _start(role: str, parameters: Mapping[str, str], ray: Mapping[str, Any]) -> str:
    """Return the command that KubeRay makes of rayStartParams."""
    made = dict(parameters)
    made.setdefault("num-cpus", str(ray["resources"]["limits"]["cpu"]))
    made.setdefault("memory", str(_mib(ray["resources"]["limits"]["memory"]) * 2**20))
    made.setdefault("metrics-export-port", "8080")
    made.setdefault("dashboard-agent-listen-port", "52365")
    if role == "head":
        made.setdefault("dashboard-host", "0.0.0.0")
    else:
        made.setdefault("address", f"{HEAD_SERVICE}:6379")
    made["block"] = "true"
    flags = [
        f"--{name}" if value.lower() == "true" else f"--{name}={value}"
        for name, value in made.items()
    ]
    return " ".join(["ray", "start", *(["--head"] if role == "head" else []), *flags])


def _mib(quantity: str) -> int:
    assert quantity.endswith("Mi"), quantity
    return int(quantity.removesuffix("Mi"))
