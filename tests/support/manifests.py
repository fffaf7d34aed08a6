"""Check rendered Kubernetes objects, by the schemas of CRDs and by rules that no schema has.

The rules are those that KubeRay and Kueue enforce in code, and ours: token authentication, no
secret as plain text, enough time to drain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from task_definitions import SECRET

RULED_RESOURCES = ("nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi")  # limit == request
RAYJOB = re.compile(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?")  # utils/validation.go of KubeRay 1.7.0


def check_manifests(documents: Iterable[Mapping[str, Any]], crds: Path | None = None) -> list[str]:
    """Return the problems in Kubernetes objects; with a folder of CRDs, by their schemas too."""
    documents = list(documents)
    problems = [] if crds is None else _schema_problems(documents, crds)
    for document in documents:
        kind, spec = document.get("kind"), document.get("spec", {})
        where = f"{kind} {document.get('metadata', {}).get('name')}"
        if kind == "RayJob":
            if spec.get("clusterSelector") and spec.get("rayClusterSpec"):
                problems.append(f"{where}: clusterSelector and rayClusterSpec exclude each other")
            name = document["metadata"]["name"]
            if not isinstance(name, str) or not RAYJOB.fullmatch(name):
                problems.append(f"{where}: KubeRay takes DNS-1035 labels of at most 47 letters")
            spec = spec.get("rayClusterSpec", {})
        if kind == "PodDisruptionBudget" and not isinstance(spec.get("minAvailable"), int):
            problems.append(f"{where}: KubeRay's pods have no scale: only minAvailable=N works")
        if kind == "ClusterQueue":
            problems += [f"{where}: {problem}" for problem in _queue_rules(spec, documents)]
        if kind in ("RayCluster", "RayJob"):
            problems += [f"{where}: {problem}" for problem in _cluster_rules(spec)]
    return problems


def _queue_rules(spec: Mapping[str, Any], documents: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why Kueue would never admit a pod: no flavor for its nodes, or a resource that the
    queue does not cover."""
    flavors = [document for document in documents if document.get("kind") == "ResourceFlavor"]
    groups = {flavor["spec"].get("nodeLabels", {}).get("rayapp/group") for flavor in flavors}
    covered = {name for group in spec["resourceGroups"] for name in group["coveredResources"]}
    for document in documents:
        cluster = document.get("spec", {})
        for part in [cluster.get("headGroupSpec"), *cluster.get("workerGroupSpecs", [])]:
            pod = part["template"]["spec"] if part else {}
            selected = pod.get("nodeSelector", {}).get("rayapp/group")
            if part and selected not in groups:
                yield f"no flavor has the nodes of the group {selected}"
            for container in pod.get("containers", []):
                asked = set(container.get("resources", {}).get("requests", {}))
                for name in sorted(asked - covered):
                    yield f"{container.get('name')}: the queue does not cover {name}"


def _cluster_rules(spec: Mapping[str, Any]) -> Iterator[str]:
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "without authOptions.mode=token, anyone who reaches it can run code"
    groups = [("head", spec.get("headGroupSpec", {}))]
    groups += [(group.get("groupName"), group) for group in spec.get("workerGroupSpecs", [])]
    for name, group in groups:
        counts = [group.get(key) for key in ("minReplicas", "replicas", "maxReplicas")]
        known = [count for count in counts if isinstance(count, int)]
        if known != sorted(known):
            yield f"{name}: replicas is not between minReplicas and maxReplicas"
        if "labels" in group.get("rayStartParams", {}):
            yield f"{name}: KubeRay refuses labels in rayStartParams; use `labels` of the group"
        template = group.get("template", {})
        overwritten = template.get("metadata", {}).get("annotations", {})
        if overwritten.get("ray.io/overwrite-container-cmd") != "true":
            yield f"{name}: KubeRay's own shell would keep SIGTERM from `ray start`"
        yield from (f"{name}: {problem}" for problem in _pod_rules(template.get("spec", {})))


def _pod_rules(pod: Mapping[str, Any]) -> Iterator[str]:
    volumes = {volume.get("name") for volume in pod.get("volumes", [])}
    grace_s = pod.get("terminationGracePeriodSeconds", 30)
    for container in pod.get("containers", []):
        where = container.get("name")
        for mount in container.get("volumeMounts", []):
            if mount.get("name") not in volumes:
                yield f"{where}: no volume {mount.get('name')}"
        for port in container.get("ports", []):
            if len(port.get("name", "")) > 15:
                yield f"{where}: port name {port['name']} is longer than 15 letters"
        limits = container.get("resources", {}).get("limits", {})
        requests = container.get("resources", {}).get("requests", {})
        for name in RULED_RESOURCES:
            if limits.get(name) != requests.get(name):
                yield f"{where}: limit and request of {name} differ"
        for variable in container.get("env", []):
            if SECRET.search(variable.get("name", "")) and "value" in variable:
                yield f"{where}: {variable['name']} is a secret in plain sight; use valueFrom"
            drains = variable.get("name") == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
            if drains and float(variable["value"]) >= grace_s:
                yield f"{where}: killed after {grace_s} s, before Ray has drained"


@lru_cache(maxsize=1)
def _validators(crds: Path) -> dict[tuple[str, str], Any]:
    """Return {(group/version, kind): validator} of a folder of CRDs; reading it takes seconds."""
    from jsonschema import Draft202012Validator

    schemas = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted(crds.glob("*.yaml")):
        crd = yaml.load(path.read_text(encoding="utf-8"), loader)
        for version in crd["spec"]["versions"]:
            key = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
            schemas[key] = Draft202012Validator(schema)
    return schemas


def _schema_problems(documents: list[Mapping[str, Any]], crds: Path) -> list[str]:
    schemas = _validators(crds)
    group = {key[0].split("/")[0] for key in schemas}
    problems = []
    for document in documents:
        key = (str(document.get("apiVersion")), str(document.get("kind")))
        if key in schemas:
            where = f"{key[1]} {document.get('metadata', {}).get('name')}"
            for error in schemas[key].iter_errors(document):
                place = ".".join(str(part) for part in error.absolute_path)
                problems.append(f"{where}: {place}: {error.message[:200]}")
        elif key[0].split("/")[0] in group:
            problems.append(f"{key[1]}: there is no {key[0]} {key[1]}")
    return problems


def _strict(schema: Any) -> Any:
    """Return a CRD's structural schema as a JSON schema in which an unknown field is an error."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    if "properties" in out:
        out["properties"] = {name: _strict(schema) for name, schema in out["properties"].items()}
        if "additionalProperties" not in out and not out.get(
            "x-kubernetes-preserve-unknown-fields"
        ):
            out["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(out.get(name), dict):
            out[name] = _strict(out[name])
    if out.get("nullable"):
        out["type"] = [out["type"], "null"]
    if out.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return out
