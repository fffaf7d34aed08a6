"""Stand-ins for the AWS CLI, docker, helm, kubectl and Terraform: python stand_in.py TOOL ARGUMENTS

Each writes down how it was called. A call that the real tool would not understand, or a file that
is not there, ends with code 64.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import yaml

HELM = {
    *("--repo", "--version", "--namespace", "--timeout", "-f"),
    *("--create-namespace", "--wait", "--install"),
}


def check(true: Any, what: str) -> None:
    if not true:
        print(f"stand-in: {what}: {' '.join(sys.argv[1:])}", file=sys.stderr)
        sys.exit(64)


def value(words: list[str], option: str) -> str:
    check(option in words, f"{option} is missing")
    return words[words.index(option) + 1]


def aws(words: list[str], known: dict[str, Any]) -> None:
    if words[:2] == ["ecr", "describe-images"]:
        check(value(words, "--image-ids").startswith("imageTag="), "no tag")
    elif words[:2] == ["eks", "update-kubeconfig"]:
        check(value(words, "--name").endswith("-eks") and value(words, "--region"), "no cluster")
    elif words[:2] == ["ssm", "start-session"]:
        target, ports = value(words, "--target"), json.loads(value(words, "--parameters"))
        check(re.fullmatch(r"ecs:[\w-]+-ecs_[0-9a-f]+_[0-9a-f-]+", target), "no container")
        check(value(words, "--document-name") == "AWS-StartPortForwardingSession", "no forwarding")
        check(ports["portNumber"] == ["8265"], "another port")
        forward(int(ports["localPortNumber"][0]), known["dashboard"])
    else:
        check(False, "unknown call")


def docker(words: list[str], known: dict[str, Any]) -> None:
    check(words[0] in ("build", "login", "push"), "unknown call")


def helm(words: list[str], known: dict[str, Any]) -> None:
    check(words[:2] == ["upgrade", "--install"] and len(words) > 4, "unknown call")
    check(all(word in HELM for word in words if word.startswith("-")), "unknown option")
    check(value(words, "--repo").startswith("https://"), "no repository")
    check(re.fullmatch(r"v?\d+\.\d+\.\d+", value(words, "--version")), "no version")
    check(isinstance(yaml.safe_load(Path(value(words, "-f")).read_text()), dict), "no values")


def kubectl(words: list[str], known: dict[str, Any]) -> None:
    plain = [word for word in words if not word.startswith("--request-timeout")]
    if plain[:2] == ["--namespace", "rayapp"]:
        plain = plain[2:]
    elif plain[0] == "--namespace=rayapp":
        plain = plain[1:]
    state = Path(f"{known['log']}.raycluster")
    if plain[0] in ("apply", "delete"):
        folder = Path(value(plain, "-k"))
        objects(folder)
        if plain[0] == "apply" and folder.name == "cluster":
            state.write_text((folder.parent / "base" / "raycluster.yaml").read_text())
    elif plain[:3] == ["get", "raycluster", "rayapp"]:
        check("--output=json" in plain, "no output")
        check(state.exists(), "no such RayCluster")
        print(json.dumps(yaml.safe_load(state.read_text())))
    elif plain[:3] == ["patch", "raycluster", "rayapp"]:
        check("--type=json" in plain, "another patch")
        cluster = yaml.safe_load(state.read_text())
        (patch,) = [word for word in plain if word.startswith("--patch=")]
        for change in json.loads(patch.removeprefix("--patch=")):
            apply(cluster, change)
        state.write_text(yaml.safe_dump(cluster))
    elif plain[:2] == ["get", "pods"]:
        check("--output=json" in plain, "no output")
        (selector,) = [word for word in plain if word.startswith("--selector=")]
        wanted = dict(pair.split("=") for pair in selector.partition("=")[2].split(","))
        print(json.dumps({"items": pods(yaml.safe_load(state.read_text()), wanted, known)}))
    elif plain[0] == "wait":
        condition = next((word for word in plain if word.startswith("--for=condition=")), "")
        check(condition.endswith(("HeadPodReady", "RayClusterProvisioned")), "no condition")
        check("raycluster/rayapp" in plain and any("--timeout=" in word for word in plain), "what")
    elif plain[:2] == ["get", "secret/rayapp"]:
        check("--output=jsonpath={.data.auth_token}" in plain, "no key")
        print(base64.b64encode(known["token"].encode()).decode(), end="")
    elif plain[:2] == ["port-forward", "service/rayapp-head-svc"]:
        local, remote = plain[2].split(":")
        check(remote == "8265", "another port")
        forward(int(local), known["dashboard"])
    else:
        check(plain == ["version"], "unknown call")


def apply(cluster: dict[str, Any], change: dict[str, Any]) -> None:
    """Apply an operation of a JSON patch, as the API server does with a RayCluster."""
    *way, last = change["path"].strip("/").split("/")
    place: Any = cluster
    for word in way:
        place = place[int(word)] if isinstance(place, list) else place[word]
    if change["op"] == "test":
        check(place.get(last) == change["value"], "the test of the patch fails")
        return
    check(change["op"] in ("add", "replace") and last == "replicas", "another operation")
    check(place["minReplicas"] <= change["value"] <= place["maxReplicas"], "not so many")
    place[last] = change["value"]


def pods(
    cluster: dict[str, Any], wanted: dict[str, str], known: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the pods that KubeRay makes of the groups, ready unless the settings say otherwise."""
    found = []
    for group in cluster["spec"]["workerGroupSpecs"]:
        labels = {"ray.io/cluster": "rayapp", "ray.io/node-type": "worker"}
        labels["ray.io/group"] = group["groupName"]
        status = "False" if group["groupName"] in known.get("unready", []) else "True"
        pod = {
            "metadata": {"labels": labels},
            "status": {"conditions": [{"type": "Ready", "status": status}]},
        }
        if wanted.items() <= labels.items():
            found += [pod] * group.get("replicas", 0)
    return found


def objects(folder: Path) -> None:
    """Check that a kustomization and all that it names is there, and that it is YAML."""
    check((folder / "kustomization.yaml").is_file(), f"no kustomization in {folder}")
    whole = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in [*whole.get("resources", []), *whole.get("components", [])]:
        path = folder / name
        if path.is_dir():
            objects(path)
        else:
            check(path.is_file(), f"no {path}")
            check(all(isinstance(one, dict) for one in yaml.safe_load_all(path.read_text())), name)


def terraform(words: list[str], known: dict[str, Any]) -> None:
    """Answer as a Terraform with a state that `apply` fills and `destroy` empties."""
    stack = next(word for word in words if word.startswith("-chdir=")).rpartition("/")[2]
    state = Path(f"{known['log']}.{os.environ['TF_WORKSPACE']}.{stack}")
    if "apply" in words:
        check("-auto-approve" in words, "it would ask")
        state.touch()
    if "destroy" in words:
        check("-auto-approve" in words, "it would ask")
        state.unlink(missing_ok=True)
    if "show" in words and state.exists():
        print('{"resources": []}')
    if "repository_url" in words:
        print("123456789012.dkr.ecr.us-west-2.amazonaws.com/rayapp-prove")


def forward(local: int, remote: int) -> None:
    """Pass on every connection to a local port, until the process is ended."""
    with socket.create_server(("127.0.0.1", local)) as listener:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", remote))
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=pump, args=(one, other), daemon=True).start()


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the other side has closed
        source.close()


if __name__ == "__main__":
    tool, *given = sys.argv[1:]
    settings = json.loads(Path(os.environ["STAND_INS"]).read_text())
    with open(settings["log"], "a") as log:
        log.write(json.dumps([tool, *given]) + "\n")
    said = " ".join([tool, *given])
    if any(part in said for part in settings["failing"]):
        print(f"stand-in: {tool} fails here", file=sys.stderr)
        sys.exit(1)
    {"aws": aws, "docker": docker, "helm": helm, "kubectl": kubectl, "terraform": terraform}[tool](
        given, settings
    )
