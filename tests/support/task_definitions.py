"""Check task definitions before ECS does, and for mistakes that ECS accepts.

They are checked against botocore's shape of ECS's API. Further rules are those that ECS enforces in
code, which no schema has, and our own: token authentication, no secret as plain text, enough time
to drain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY$")
STOP_TIMEOUT_MAX_S = 120  # ECS's limit


def check_task_definition(definition: Mapping[str, Any]) -> list[str]:
    """Return the problems in the arguments of ECS's RegisterTaskDefinition, one string each."""
    from botocore.loaders import Loader
    from botocore.model import ServiceModel
    from botocore.validate import ParamValidator

    model = ServiceModel(Loader().load_service_model("ecs", "service-2"))
    shape = model.operation_model("RegisterTaskDefinition").input_shape
    report = ParamValidator().validate(dict(definition), shape)
    problems = [report.generate_report()] if report.has_errors() else []
    return problems + list(_task_rules(definition))


def _task_rules(definition: Mapping[str, Any]) -> Iterator[str]:
    family, containers = definition.get("family"), definition.get("containerDefinitions", [])
    volumes = {volume.get("name") for volume in definition.get("volumes", [])}
    fargate = "FARGATE" in definition.get("requiresCompatibilities", [])
    for container in containers:
        where = f"{family}.{container.get('name')}"
        linux = container.get("linuxParameters", {})
        gpus = [r for r in container.get("resourceRequirements", []) if r.get("type") == "GPU"]
        if fargate and (gpus or linux.get("devices") or linux.get("sharedMemorySize")):
            yield f"{where}: Fargate has no GPUs, devices or shared memory"
        for mount in container.get("mountPoints", []):
            if mount.get("sourceVolume") not in volumes:
                yield f"{where}: no volume {mount.get('sourceVolume')}"
        for variable in container.get("environment", []):
            if SECRET.search(variable.get("name", "")):
                yield f"{where}: {variable['name']} is a secret in plain sight; use `secrets`"
        if container.get("command", [])[:2] == ["ray", "start"]:
            yield from _ray_container_rules(where, container)


def _ray_container_rules(where: str, container: Mapping[str, Any]) -> Iterator[str]:
    variables = {v.get("name"): v.get("value") for v in container.get("environment", [])}
    secrets = {secret.get("name") for secret in container.get("secrets", [])}
    if variables.get("RAY_AUTH_MODE") != "token" or "RAY_AUTH_TOKEN" not in secrets:
        yield f"{where}: without token authentication, anyone who reaches it can run code"
    if "--block" not in container["command"]:
        yield f"{where}: `ray start` without --block ends at once, and the task with it"
    stop_s = container.get("stopTimeout", 30)
    if stop_s > STOP_TIMEOUT_MAX_S:
        yield f"{where}: stopTimeout={stop_s} is more than ECS allows ({STOP_TIMEOUT_MAX_S})"
    if float(variables.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 0)) >= stop_s:
        yield f"{where}: killed after {stop_s} s, before Ray has drained"
