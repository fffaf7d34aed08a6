"""What `make up-*` and `make down-*` run, and in which order, with stand-ins for the tools."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "llama3_1_8b_c4_eks.yaml"
BIN = Path(sys.executable).parent
TOOLS = ("terraform", "aws", "docker", "helm", "kubectl", "capacity")
STAND_IN = """#!{python}
import json, os, sys
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
if words[0] == "terraform":
    words.append("in " + os.environ.get("TF_WORKSPACE", "default"))
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
said = " ".join(words)
if "output -raw repository_url" in said:
    print("123456789012.dkr.ecr.us-west-2.amazonaws.com/rayapp")
if "show -json" in said and {up!r}:
    print('"resources"')
sys.exit(any(each in said for each in {failing!r}))
"""
# No AWS answers there.
NOWHERE = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
NOWHERE |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
NOT_PUSHED = "ecr describe-images"  # fails where the registry has no such tag


class Tools:
    """Stand-ins that write down how they were called, in a folder with the Makefile; some fail."""

    def __init__(self, folder: Path, *failing: str, up: bool = False) -> None:
        self.folder, self.log, self._bin = folder, folder / "log", folder / "bin"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self._bin.mkdir()
        (folder / ".venv").mkdir()
        (folder / ".venv" / ".ready").touch()
        text = STAND_IN.format(python=sys.executable, log=str(self.log), failing=failing, up=up)
        for name in TOOLS:
            (self._bin / name).write_text(text)
            (self._bin / name).chmod(0o755)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run make with this environment's Python."""
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        given = [f"BIN={BIN}", f"CONFIG={CONFIG}", "-o", ".venv/.ready"]
        given += ["CAPACITY=capacity", "RENDER=--account=123456789012", "EMAIL=me@example.com"]
        return subprocess.run(
            ["make", *given, *arguments],
            cwd=self.folder,
            env={**os.environ, **NOWHERE, "PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    def calls(self) -> list[str]:
        """Return the calls so far, a line each."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [" ".join(json.loads(line)) for line in lines]

    def rendered(self, path: str) -> dict[str, Any]:
        """Return a rendered JSON file."""
        folder = self.folder / "build" / "rayapp-us-west-2"
        found: dict[str, Any] = json.loads((folder / path).read_text())
        return found

    def place(self, part: str) -> int:
        """Return which call has this in it."""
        (found, *_) = [n for n, call in enumerate(self.calls()) if part in call]
        return found


def test_eks_comes_up_from_an_address(tmp_path: Path) -> None:
    """As docs/eks.md writes it: the networks reach Terraform, and nodes with GPUs come last, after
    all that can fail: the way in, the image, the operator, the plug-ins and the Ray head."""
    tools = Tools(tmp_path, NOT_PUSHED)
    done = tools.make("up-eks", "API_CIDRS=203.0.113.7/32,198.51.100.0/24")
    assert done.returncode == 0, done.stderr
    variables = tools.rendered("kuberay/terraform.tfvars.json")
    assert variables["api_cidrs"] == ["203.0.113.7/32", "198.51.100.0/24"]
    steps = ("base apply", "-target=aws_eks_cluster.this", "kubectl --request-timeout")
    steps += ("docker push", "-target=aws_eks_addon.system", "kuberay-operator --repo", "nvdp")
    steps += ("kuberay/common", "kubectl apply -k build/rayapp-us-west-2/kuberay/cluster")
    steps += ("kubectl --namespace rayapp wait",)
    assert [tools.place(step) for step in steps] == sorted(tools.place(step) for step in steps)
    (whole,) = [
        number
        for number, call in enumerate(tools.calls())
        if "infra/eks apply" in call and "-target" not in call
    ]
    assert whole == len(tools.calls()) - 2
    assert tools.calls()[-1] == "capacity eks --name=rayapp --region=us-west-2"
    waits = tools.calls()[tools.place("kubectl --namespace rayapp wait")]
    assert "HeadPodReady raycluster/rayapp" in waits
    assert "--wait" in tools.calls()[tools.place("kuberay-operator --repo")]


@pytest.mark.parametrize(
    "failing", ["kuberay-operator", "helm upgrade --install efa", "kubectl apply", "rayapp wait"]
)
def test_no_node_with_gpus_starts_before_what_can_fail(tmp_path: Path, failing: str) -> None:
    tools = Tools(tmp_path, failing)
    assert tools.make("up-eks").returncode != 0
    applied = [call for call in tools.calls() if "infra/eks apply" in call]
    assert applied and all("-target=" in call for call in applied)


@pytest.mark.parametrize("target", ["up-ecs", "up-eks"])
def test_alarms_need_an_address(tmp_path: Path, target: str) -> None:
    tools = Tools(tmp_path, NOT_PUSHED)
    refused = tools.make(target, "EMAIL=")
    assert refused.returncode != 0 and not tools.calls()
    assert "EMAIL is missing: " in refused.stderr and "EMAIL=nobody" in refused.stderr
    assert tools.make(target, "EMAIL=me@example.com").returncode == 0
    stack = f"infra/{target.removeprefix('up-')} apply"
    for call in tools.calls():
        assert stack not in call or "-var=alarm_email=me@example.com" in call


@pytest.mark.full
def test_two_clusters_have_two_states_and_two_folders(tmp_path: Path) -> None:
    """Else the second one's apply would replace the first's bucket, and forget a region's hosts."""
    tools = Tools(tmp_path, NOT_PUSHED)
    for more in ([], ["NAME=other"], ["REGION=eu-west-1"]):
        assert tools.make("up-ecs", *more).returncode == 0
        assert tools.make("down-ecs", *more).returncode == 0
    calls = [call for call in tools.calls() if call.startswith("terraform")]
    for name in ("rayapp-us-west-2", "other-us-west-2", "rayapp-eu-west-1"):
        mine = [call for call in calls if call.endswith(f" in {name}")]
        assert [call for call in mine if "base apply" in call]
        used = [call for call in mine if "infra/ecs apply" in call or "infra/ecs destroy" in call]
        assert len(used) == 2 and all(f"build/{name}/ecs/" in call for call in used)
        rendered = tmp_path / "build" / name / "ecs" / "terraform.tfvars.json"
        variables = json.loads(rendered.read_text())
        assert f"{variables['name']}-{variables['region']}" == name
    assert not [call for call in calls if call.endswith(" in default")]


def test_no_node_starts_where_the_cluster_cannot_be_reached(tmp_path: Path) -> None:
    tools = Tools(tmp_path, NOT_PUSHED, "kubectl --request-timeout")
    done = tools.make("up-eks")
    assert done.returncode != 0
    assert "kubectl does not reach rayapp-eks" in done.stderr and "API_CIDRS" in done.stderr
    applied = [call for call in tools.calls() if "infra/eks apply" in call]
    assert len(applied) == 1 and "-target=aws_eks_cluster.this" in applied[0]
    assert not [call for call in tools.calls() if call.startswith(("helm", "docker push"))]


@pytest.mark.parametrize("failing", ["update-kubeconfig", "kubectl"])
def test_eks_goes_down_also_where_it_cannot_be_reached(tmp_path: Path, failing: str) -> None:
    tools = Tools(tmp_path, failing)
    done = tools.make("down-eks")
    assert done.returncode == 0, done.stderr
    assert tools.place("update-kubeconfig") < tools.place("infra/eks destroy")
    assert "its runs get no time to save" in done.stderr


def test_eks_lets_runs_save_before_it_goes_down(tmp_path: Path) -> None:
    tools = Tools(tmp_path)
    done = tools.make("down-eks")
    assert done.returncode == 0 and "no time to save" not in done.stderr
    deleted = tools.place("kubectl delete")
    assert tools.place("update-kubeconfig") < deleted < tools.place("infra/eks destroy")


def test_ecs_is_up_when_its_workers_run(tmp_path: Path) -> None:
    """Else nobody would be told that EC2 has no room; with a list nothing would start at all."""
    tools = Tools(tmp_path, NOT_PUSHED)
    assert tools.make("up-ecs", "NAME=other").returncode == 0
    assert tools.calls()[-1] == "capacity ecs --name=other --region=us-west-2"
    assert tools.place("infra/ecs apply") == len(tools.calls()) - 2


@pytest.mark.parametrize("home", ["ecs", "eks"])
def test_a_run_without_hosts_is_not_sent(tmp_path: Path, home: str) -> None:
    tools = Tools(tmp_path, NOT_PUSHED, f"capacity {home}")
    assert tools.make(f"run-{home}", "API_CIDRS=203.0.113.7/32").returncode != 0
    assert tools.place(f"capacity {home}") < tools.place(f"infra/{home} destroy")
    assert not [call for call in tools.calls() if "get secret" in call]


@pytest.mark.full
def test_an_image_is_pushed_once(tmp_path: Path) -> None:
    """The registry's tags are immutable: what is there already is not pushed again."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first, second = Tools(tmp_path / "first", NOT_PUSHED), Tools(tmp_path / "second")
    for tools in (first, second):
        done = tools.make("up-ecs")
        assert done.returncode == 0, done.stderr
    (pushed,) = [call for call in first.calls() if call.startswith("docker push")]
    assert not [call for call in second.calls() if call.startswith("docker")]
    rendered = first.rendered("ecs/worker.json")["containerDefinitions"]
    assert pushed == f"docker push {rendered[0]['image']}"
    tag = pushed.rpartition(":")[2]
    assert f"--image-ids imageTag={tag}" in second.calls()[second.place("describe-images")]


@pytest.mark.full
@pytest.mark.parametrize("target", ["run-ecs", "run-eks"])
def test_a_run_that_fails_leaves_no_cluster(tmp_path: Path, target: str) -> None:
    """Up, the run, down without a question: also where the way in fails, as it does here."""
    tools, stack = Tools(tmp_path, NOT_PUSHED, "get secret"), target.removeprefix("run-")
    done = tools.make(target, "API_CIDRS=203.0.113.7/32")
    assert done.returncode != 0
    assert tools.place(f"infra/{stack} apply") < tools.place(f"infra/{stack} destroy")
    (destroyed,) = [call for call in tools.calls() if "destroy" in call]
    assert "-auto-approve" in destroyed
    assert not [call for call in tools.calls() if " apply " in call and "-auto-approve" in call]


def test_a_run_does_not_take_a_cluster_that_is_up(tmp_path: Path) -> None:
    """It would tear down what others use."""
    tools = Tools(tmp_path, up=True)
    done = tools.make("run-ecs")
    assert done.returncode != 0 and "rayapp-ecs is up already" in done.stderr
    assert not [call for call in tools.calls() if "apply" in call or "destroy" in call]


@pytest.mark.parametrize("stack", ["base", "ecs", "eks"])
def test_the_provider_is_locked_for_every_platform(stack: str) -> None:
    """One hash of a zip for each platform of the release, and its manifest: HashiCorp has 14."""
    lock = (ROOT / "infra" / stack / ".terraform.lock.hcl").read_text()
    asked = (ROOT / "infra" / stack / "versions.tf").read_text()
    (version,) = re.findall(r'^  version     = "(.+)"$', lock, re.M)
    assert f'version = "{version}"' in asked and f'constraints = "{version}"' in lock
    assert len(set(re.findall(r'"zh:[0-9a-f]{64}"', lock))) == 15
    assert lock == (ROOT / "infra" / "base" / ".terraform.lock.hcl").read_text()
