"""A machine on which `make prove-*` runs: stand-ins for tools, an emulated account, hosts in it.

The stand-ins write down every call and refuse those that the real tool would not understand. With
Terraform itself, `Hosts` plays what AWS does then: hosts come for a service or node group, each a
node of Ray on this machine; a spot notice and a termination reach them; they go with their group.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from nodes import RAY
from patience import PATIENCE_S
from ports import free_port
from terraform import ROOT, Cloud, mirror

BIN = Path(sys.executable).parent
NAME = "rayapp-prove"
WORKERS = 3
TASK = f"arn:aws:ecs:us-west-2:123456789012:task/{NAME}-ecs/0123456789abcdef"
TOOLS = ("aws", "docker", "helm", "kubectl")


class Site:
    """A folder with the Makefile and stand-ins; `failing` are parts of calls that fail."""

    def __init__(self, cloud: Cloud, folder: Path, *failing: str, terraform: bool = False) -> None:
        self.cloud, self.folder, self.log = cloud, folder, folder / "calls"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        shutil.copytree(ROOT / "cluster" / "helm", folder / "cluster" / "helm")
        (folder / "infra").symlink_to(cloud.folder / "infra")
        (folder / ".venv").mkdir()
        (folder / ".venv" / ".ready").touch()
        self.settings = folder / "stand-ins.json"
        self.say(failing=failing)
        program = Path(__file__).with_name("stand_in.py")
        (folder / "bin").mkdir()
        for name in TOOLS if terraform else (*TOOLS, "terraform"):
            text = f'#!/bin/sh\nexec {sys.executable} {program} {name} "$@"\n'
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def say(self, **more: Any) -> None:
        """Tell the stand-ins what they need to know."""
        known = json.loads(self.settings.read_text()) if self.settings.exists() else {}
        self.settings.write_text(json.dumps({"log": str(self.log), **known, **more}))

    @property
    def environment(self) -> dict[str, str]:
        found = mirror()
        path = f"{self.folder / 'bin'}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
        return {
            **self.cloud.environment,
            "AWS_ENDPOINT_URL_S3": self.cloud.url,
            "AWS_DEFAULT_REGION": "us-west-2",
            "HOME": str(self.folder),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "STAND_INS": str(self.settings),
            "TF_CLI_ARGS_init": f"-plugin-dir={found}" if found else "",
            "TF_CLI_ARGS_apply": "-parallelism=30",
            "TF_CLI_ARGS_destroy": "-parallelism=30",
        }

    def prove(
        self, home: str, *variables: str, answer: str = "yes"
    ) -> subprocess.CompletedProcess[str]:
        """Run `make prove-HOME` as a user does, who answers its question."""
        return subprocess.run(
            ["make", f"BIN={BIN}", "-o", ".venv/.ready", f"prove-{home}", *variables],
            cwd=self.folder,
            env=self.environment,
            input=f"{answer}\n",
            capture_output=True,
            text=True,
            timeout=6 * PATIENCE_S,
        )

    def page(self, home: str) -> str:
        return (self.folder / "build" / f"{NAME}-us-west-2" / f"prove-{home}.md").read_text()

    def calls(self) -> list[str]:
        """Return the calls of the stand-ins, a line each."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [" ".join(json.loads(line)) for line in lines]


class Hosts:
    """What AWS does of its own accord in an account: hosts come, are taken away, and go."""

    def __init__(self, site: Site, home: str) -> None:
        self.site, self.home, self.stack = site, home, f"{NAME}-{home}"
        self.nodes = dict[str, subprocess.Popen[bytes]]()  # by instance; the head's is "head"
        self.coming = dict[Path, subprocess.Popen[bytes]]()  # by log: their Ray is not up yet
        self.noticed = set[str]()
        self.problems, self.started = list[str](), 0
        self.token, self.temporary = secrets.token_hex(32), tempfile.mkdtemp()
        self.dashboard, self.gcs = free_port(), free_port()
        site.say(dashboard=self.dashboard, token=self.token)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._play)

    def __enter__(self) -> Hosts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for node in [*self.nodes.values(), *self.coming.values()]:
            _lose(node)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _play(self) -> None:
        while not self._ended.wait(1.0):
            try:
                self._turn()
            except Exception as error:  # the test looks at them when the proof has ended
                self.problems.append(f"{type(error).__name__}: {error}")

    def _turn(self) -> None:
        ec2 = self.site.cloud.client("ec2")
        if not self._wanted():
            for instance in [name for name in self.nodes if name != "head"]:
                ec2.terminate_instances(InstanceIds=[instance])
            for known in (self.nodes, self.coming):
                for name in list(known):
                    _lose(known.pop(name))
            return
        if "head" not in self.nodes:
            if self.home == "ecs":  # its agent hands it over
                asked = {"Name": f"/{self.stack}/ray-token", "WithDecryption": True}
                found = self.site.cloud.client("ssm").get_parameter(**asked)
                self.token = found["Parameter"]["Value"]
            head = {"port": self.gcs, "dashboard-port": self.dashboard, "num-cpus": 0}
            log, self.nodes["head"] = self._start("head", {**head, "temp-dir": self.temporary})
            while "Ray runtime started" not in log.read_text():
                assert self.nodes["head"].poll() is None, log.read_text()
                time.sleep(0.5)
        for host in self._notices() - self.noticed:
            self.noticed.add(host)
            self.nodes[host].terminate()
        for host in [name for name in self.nodes if name != "head"]:
            state = ec2.describe_instances(InstanceIds=[host])["Reservations"][0]["Instances"][0]
            if state["State"]["Name"] != "running":
                _lose(self.nodes.pop(host))
            elif self.nodes[host].poll() is not None:
                ec2.terminate_instances(InstanceIds=[host])
                del self.nodes[host]
        for log, node in list(self.coming.items()):
            if "Ray runtime started" in log.read_text():
                self.nodes[self._launch()] = self.coming.pop(log)
            elif node.poll() is not None:  # Ray gives up a node that does not start within 30 s
                del self.coming[log]
        if len(self.nodes) - 1 + len(self.coming) < WORKERS:
            options = {"address": f"127.0.0.1:{self.gcs}", "num-cpus": 3}
            log, node = self._start("worker", options)
            self.coming[log] = node

    def _wanted(self) -> bool:
        """Whether the stack asks for workers."""
        if self.home == "eks":
            eks = self.site.cloud.client("eks")
            if self.stack not in eks.list_clusters()["clusters"]:
                return False
            groups = eks.list_nodegroups(clusterName=self.stack)["nodegroups"]
            return any("system" not in group for group in groups)
        ecs = self.site.cloud.client("ecs")
        clusters = ecs.describe_clusters(clusters=[self.stack])["clusters"]
        if not [one for one in clusters if one["status"] == "ACTIVE"]:
            return False
        asked = {"cluster": self.stack, "services": ["worker-spot"]}
        services = ecs.describe_services(**asked)["services"]
        return any(one["status"] == "ACTIVE" and one["desiredCount"] for one in services)

    def _launch(self) -> str:
        group = "worker-spot" if self.home == "ecs" else "workers"
        tags = {"Project": self.stack, "Name": f"{self.stack}-{group}"}
        asked = {"ImageId": "ami-12c6146b", "InstanceType": "m5.xlarge", "MinCount": 1}
        asked |= {"MaxCount": 1, "InstanceMarketOptions": {"MarketType": "spot"}}
        listed = [{"Key": name, "Value": value} for name, value in tags.items()]
        specs = [{"ResourceType": "instance", "Tags": listed}]
        made = self.site.cloud.client("ec2").run_instances(**asked, TagSpecifications=specs)
        return str(made["Instances"][0]["InstanceId"])

    def _notices(self) -> set[str]:
        """Return the hosts that an experiment of the Fault Injection Service names."""
        fis = self.site.cloud.client("fis")
        found = set()
        for one in fis.list_experiments()["experiments"]:
            experiment = fis.get_experiment(id=one["id"])["experiment"]
            (action,) = experiment["actions"].values()
            assert action["actionId"] == "aws:ec2:send-spot-instance-interruptions"
            assert action["parameters"] == {"durationBeforeInterruption": "PT2M"}
            target = experiment["targets"][action["targets"]["SpotInstances"]]
            assert target["resourceType"] == "aws:ec2:spot-instance"
            found |= {arn.rpartition("/")[2] for arn in target["resourceArns"]}
        return found & self.nodes.keys()

    def _start(
        self, role: str, options: Mapping[str, object]
    ) -> tuple[Path, subprocess.Popen[bytes]]:
        """Start a node of Ray with the rendered variables of its role; return its log, and it."""
        own = {"dashboard-agent-listen-port": free_port(), "metrics-export-port": free_port()}
        own |= {"runtime-env-agent-port": free_port(), "node-ip-address": "127.0.0.1"}
        arguments = [f"--{key}={value}" for key, value in {**options, **own}.items()]
        arguments += ["--object-store-memory=150000000"]
        arguments += ["--head"] if role == "head" else []
        self.started += 1
        log = self.site.folder / f"{role}-{self.started}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(RAY), "start", "--block", "--disable-usage-stats", *arguments],
                env={**self.site.environment, **self._variables(role)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return log, process

    def _variables(self, role: str) -> dict[str, str]:
        rendered = self.site.folder / "build" / f"{NAME}-us-west-2" / "ecs"
        path = rendered / f"{role}.json"
        found = {"RAY_AUTH_MODE": "token", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "100"}
        if path.exists():
            containers = json.loads(path.read_text())["containerDefinitions"]
            found = {one["name"]: one["value"] for one in containers[0]["environment"]}
        found = {key: value for key, value in found.items() if not key.endswith("_IFNAME")}
        return {**found, "RAY_AUTH_TOKEN": self.token, "AWS_REGION": "us-west-2"}


def _lose(node: subprocess.Popen[bytes]) -> None:
    """Kill all of a node's processes at once, as when a machine loses power."""
    if node.poll() is None:
        root = psutil.Process(node.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    node.wait(timeout=PATIENCE_S)
