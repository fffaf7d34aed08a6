"""checkov and hadolint on what is rendered and applied; `make security` installs and runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).with_name("golden")
PLACE = f"{ROOT / '.venv-security' / 'bin'}{os.pathsep}{os.environ['PATH']}"
CHECKOV, HADOLINT = shutil.which("checkov", path=PLACE), shutil.which("hadolint", path=PLACE)
needs_checkov = pytest.mark.skipif(
    CHECKOV is None, reason="checkov is not installed; `make security` does that"
)
needs_hadolint = pytest.mark.skipif(
    HADOLINT is None, reason="hadolint is not installed; `make security` does that"
)


def failures(framework: str, *arguments: str) -> tuple[int, list[str]]:
    """Return how many checks passed, and which failed where."""
    command = [str(CHECKOV), "--framework", framework, "--output", "json", "--skip-download"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    found = json.loads(done.stdout)
    reports = found if isinstance(found, list) else [found]
    failed = [check for report in reports for check in report["results"]["failed_checks"]]
    passed = sum(report["summary"]["passed"] for report in reports)
    return passed, [f"{one['check_id']} {one['resource']} {one['file_path']}" for one in failed]


@needs_checkov
def test_the_stacks_pass() -> None:
    passed, failed = failures("terraform", "--directory", str(ROOT / "infra"))
    assert passed > 250 and not failed, failed


def pods(case: str) -> list[dict[str, Any]]:
    """Return a built cluster with Ray's pod templates as pods, which checkov can read."""
    documents = list(yaml.safe_load_all((GOLDEN / f"kuberay-{case}" / "cluster.yaml").read_text()))
    (cluster,) = [one for one in documents if one["kind"] == "RayCluster"]
    spec = cluster["spec"]
    templates = {"head": spec["headGroupSpec"]["template"]}
    templates["worker"] = spec["workerGroupSpecs"][0]["template"]
    for name, template in templates.items():
        metadata = {"name": name, "namespace": "rayapp", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        documents.append(pod)
    return documents


@needs_checkov
@pytest.mark.parametrize("case", ["p5", "spot"])
def test_the_manifests_pass(case: str, tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(pods(case)))
    passed, failed = failures("kubernetes", "--file", str(path))
    assert passed > 100 and not failed, failed


@needs_checkov
def test_the_dockerfile_passes() -> None:
    passed, failed = failures("dockerfile", "--file", str(ROOT / "cluster" / "Dockerfile"))
    assert passed > 10 and not failed, failed


@needs_hadolint
def test_the_dockerfile_is_clean() -> None:
    command = [str(HADOLINT), str(ROOT / "cluster" / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_exception_is_argued() -> None:
    """A skipped check has its reason where it stands."""
    seen = 0
    for path in [*(ROOT / "infra").rglob("*.tf"), *(ROOT / "cluster").rglob("*.yaml")]:
        for line in path.read_text().splitlines():
            if "checkov:skip=" in line or "checkov.io/skip" in line:
                reason = line.partition("checkov")[2].partition("CKV")[2]
                assert len(reason.replace("=", ":", 1).partition(":")[2].split()) >= 3, line
                seen += 1
    assert seen > 15
