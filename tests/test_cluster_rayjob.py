"""RayJobs beside one another, and how KubeRay's rules end or repeat them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import check_manifests
from stub_dashboard import dashboard

from rayapp.cluster import Options, render, write
from rayapp.cluster.cluster_files import ROOT as TEMPLATES
from rayapp.cluster.cluster_files import rayjob_name
from rayapp.config import load
from rayapp.config.fields import NAME_PATTERN

ACCOUNT = "123456789012"
STORAGE = f"s3://rayapp-{ACCOUNT}-us-west-2/runs"
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed"
)


def files_of(name: str, instance: str, workers: str, **options: Any) -> dict[str, str]:
    config = {"run.name": name, "cluster.instance": instance, "cluster.workers": workers}
    return render("kuberay", load(None, config), Options(ACCOUNT, tag="0.1.0", **options))


def build(files: dict[str, str], folder: Path, what: str) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` would send."""
    write(files, folder)
    words = ["kubectl", "kustomize", str(folder / what)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return list(yaml.safe_load_all(done.stdout))


@needs_kubectl
def test_two_runs_share_the_platform_and_nothing_else(tmp_path: Path) -> None:
    """The second person's `kubectl apply -k` changes no object of the first one's."""
    kueue = {"components": ("kueue",)}
    users = {
        "ann": files_of("ann", "p5.48xlarge", "32", **kueue),
        "ben": files_of("ben", "g5.12xlarge", "2:8", market="spot", **kueue),
        "2026-11-28": files_of("2026-11-28", "m6i.4xlarge", "1"),
    }
    common = [build(files, tmp_path / user, "common") for user, files in users.items()]
    assert common == [common[0]] * len(users)
    jobs = [build(files, tmp_path / user, "job") for user, files in users.items()]
    named = [(one["kind"], one["metadata"]["name"]) for one in chain(common[0], *jobs)]
    assert len(set(named)) == len(named)
    for user, (job,) in zip(users, jobs, strict=True):  # nothing but the RayJob is left to delete
        assert job["kind"] == "RayJob" and check_manifests([*common[0], job]) == []
        assert f"--run.name={user}" in job["spec"]["entrypoint"]
        others = set(users) - {user}
        assert not [other for other in others if f"name: {other}\\n" in json.dumps(job)]


def test_the_queue_is_the_platforms() -> None:
    """Its size is what the platform has, by the option, whatever the config of a run asks for."""
    two = [
        files_of("ann", "p5.48xlarge", workers, queue="p5.48xlarge:32", components=("kueue",))
        for workers in ("8", "256")
    ]
    assert two[0]["common/kueue.yaml"] == two[1]["common/kueue.yaml"]
    *_, queue, _ = yaml.safe_load_all(two[0]["common/kueue.yaml"])
    quota = queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    assert {one["name"]: one["nominalQuota"] for one in quota}["nvidia.com/gpu"] == 32 * 8


NAMES = [
    *("demo", "Demo", "DEMO", "a.b", "a-b", "a_b", "a--b", "a-", "a-b-", "rayapp"),
    *("2026-11-28", "12345", "true", "1e3", "null", "~x", "x" * 40, "x" * 41, "x" * 63),
    *("x" * 40 + "y", "x" * 31, "x" * 31 + ".", "é"),
]


@settings(max_examples=200)
@given(st.sets(st.from_regex(NAME_PATTERN, fullmatch=True), max_size=20))
def test_every_run_has_a_name_of_its_own_for_kubernetes(drawn: set[str]) -> None:
    """KubeRay takes DNS-1035 labels, and its names of clusters and secrets add 6 to these 40."""
    names = drawn | {name for name in NAMES if re.fullmatch(NAME_PATTERN, name)}
    names |= {rayjob_name(name, STORAGE, Options(ACCOUNT)) for name in names}  # taken on purpose
    found = [
        rayjob_name(name, storage, Options(ACCOUNT))
        for name in names
        for storage in (STORAGE, f"{STORAGE}/ben")
    ]
    assert len(set(found)) == 2 * len(names)
    for label in found:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", label) and label != "rayapp"
    assert rayjob_name("demo", STORAGE, Options(ACCOUNT)) == "demo"


# ---- Which ends are tried again -------------------------------------------------------------

ENDS = """
import os, signal, sys
from rayapp.config import Config, ConfigError
from rayapp.driver.main import main
from rayapp.observe.result import RunFailed
from rayapp.storage import StorageError

def run(config, console, started):
    assert config.run.name == "Demo" and config.data.columns == {"text": "it's $5"}
    with open(%(log)r, "a") as log:
        log.write("try\\n")
    match os.environ["END"]:
        case "refused":
            raise ConfigError(["data.path=x is missing"])
        case "3 attempts have failed alike":
            raise RunFailed("3 attempts have failed alike")
        case "storage":
            raise StorageError("S3 does not answer")
        case "exception":
            raise KeyError("x")
        case "lost driver":
            os.kill(os.getpid(), signal.SIGKILL)
        case status:
            return {"status": status}

words = [word.replace("/etc/rayapp", %(folder)r) for word in sys.argv[3:]]
sys.exit(main(words, "usage", Config, lambda: run, None))
"""


class KubeRay:
    """What KubeRay 1.7.0 and Ray 2.60 do with a RayJob, by their sources.

    rayjob_controller.go: STOPPED and SUCCEEDED are Complete, FAILED is Failed; what is Failed is
    Retrying, unless its reason is DeadlineExceeded or JobStatusCheckTimeoutExceeded, until it has
    failed backoffLimit + 1 times. common/job.go: the submitter's bash reads the entrypoint, and
    `ray job submit` joins its words again. job_supervisor.py: a shell runs it; a stop is SIGTERM,
    then STOPPED; else exit code 0 is SUCCEEDED and any other is FAILED.
    """

    def __init__(self, job: dict[str, Any], folder: Path, answers: bool) -> None:
        """`answers`: whether Ray's dashboard does."""
        self.spec, self.folder, self.answers = job["spec"], folder, answers
        self.environment = yaml.safe_load(self.spec["runtimeEnvYAML"])["env_vars"]
        template = self.spec["rayClusterSpec"]["headGroupSpec"]["template"]
        (mounted,) = [one for one in template["spec"]["volumes"] if "downwardAPI" in one]
        (item,) = mounted["downwardAPI"]["items"]
        key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", item["fieldRef"]["fieldPath"])
        assert key is not None
        (folder / item["path"]).write_text(template["metadata"]["annotations"][key[1]])
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        assert {"name": mounted["name"], "mountPath": "/etc/rayapp", "readOnly": True} in mounts
        script = ENDS % {"log": str(folder / "tries"), "folder": str(folder)}
        (folder / "ends.py").write_text(script)
        (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/ends.py "$@"\n')
        (folder / "ray").write_text(
            f"#!{sys.executable}\nimport subprocess, sys\n"
            'print(subprocess.list2cmdline(sys.argv[sys.argv.index("--") + 1 :]))\n'
        )
        for name in ("python", "ray"):
            (folder / name).chmod(0o755)

    def ends(self, ends: list[str]) -> list[str]:
        """Return Ray's status of each try, whose drivers end so one after another."""
        statuses = list[str]()
        for end in ends:
            statuses.append(self._one_try(end))
            if statuses[-1] != "FAILED" or len(statuses) > self.spec["backoffLimit"]:
                break
        return statuses

    def _one_try(self, end: str) -> str:
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **self.environment, "PATH": path, "END": end}
        submit = f"ray job submit --no-wait --submission-id demo-x -- {self.spec['entrypoint']} ;"
        words = ["bash", "-c", submit]
        submitted = subprocess.run(words, env=environment, check=True, capture_output=True)
        entrypoint = submitted.stdout.decode().rstrip("\n")
        config = {"metadata": {"job_submission_id": "demo-x"}}
        environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(config)
        with dashboard() as ray:
            ray.add("demo-x", "RUNNING")
            address = ray.address if self.answers else "http://127.0.0.1:9"
            environment["RAY_API_SERVER_ADDRESS"] = address
            driver = subprocess.Popen(
                entrypoint, shell=True, env=environment, start_new_session=True
            )
            while driver.poll() is None and not ray.stopped:
                time.sleep(0.05)
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGTERM)
                driver.wait()
                return "STOPPED"
        return "SUCCEEDED" if driver.returncode == 0 else "FAILED"


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    config = {"run.name": "Demo", "cluster.instance": "g5.12xlarge"}
    config["data.columns"] = '{text: "it\'s $5"}'
    files = render("kuberay", load(None, config), Options(ACCOUNT, tag="0.1.0"))
    (made,) = build(files, tmp_path / "rendered", "job")
    return made


@needs_kubectl
@pytest.mark.parametrize(
    ("ends", "statuses"),
    [
        (["done"], ["SUCCEEDED"]),
        (["stopped", "done"], ["STOPPED"]),  # on request, and with its budget spent
        (["refused", "done"], ["STOPPED"]),
        (["3 attempts have failed alike", "done"], ["STOPPED"]),
        (["lost driver", "stopped", "done"], ["FAILED", "STOPPED"]),
        (["exception", "storage", "lost driver", "done"], ["FAILED"] * 3),
    ],
)
def test_what_a_driver_has_decided_is_not_tried_again(
    job: dict[str, Any], ends: list[str], statuses: list[str], tmp_path: Path
) -> None:
    assert KubeRay(job, tmp_path, answers=True).ends(ends) == statuses
    assert (tmp_path / "tries").read_text() == "try\n" * len(statuses)


@needs_kubectl
def test_a_stop_is_final_also_where_ray_does_not_answer(
    job: dict[str, Any], tmp_path: Path
) -> None:
    assert KubeRay(job, tmp_path, answers=False).ends(["stopped", "done"]) == ["SUCCEEDED"]


@needs_kubectl
def test_stop_reaches_a_rayjob(job: dict[str, Any]) -> None:
    """Ray is asked, as it gives the job time to save."""
    from rayapp.jobs.package import STOP_WAIT
    from rayapp.jobs.remote import GRACE_S

    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert float(variables[STOP_WAIT]) >= GRACE_S


def test_a_lost_head_is_waited_for() -> None:
    """KubeRay gives up for good, without another try, on a head that is silent for 300 s; 300 s
    after a node is lost Kubernetes begins to replace its pods."""
    values = yaml.safe_load((TEMPLATES / "helm" / "kuberay-operator.yaml").read_text())
    variables = {one["name"]: one["value"] for one in values["env"]}
    assert int(variables["RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS"]) >= 1800


# ---- Drains ---------------------------------------------------------------------------------

FLEETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fixed": ("g5.12xlarge", "32", {}),
    "elastic": ("g5.12xlarge", "8:32", {}),
    "spot": ("g5.12xlarge", "32", {"market": "spot"}),
    "one node": ("g5.12xlarge", "2", {}),
    "data": ("g5.12xlarge", "32", {"data_nodes": 2}),
    "autoscaled": ("g5.12xlarge", "8:32", {"components": ("autoscaling",)}),
    "list": ("g5.12xlarge, p4d.24xlarge:spot", "32", {}),
}


@needs_kubectl
@pytest.mark.parametrize("fleet", FLEETS)
def test_every_worker_may_be_drained_and_no_head(fleet: str, tmp_path: Path) -> None:
    """Kubernetes evicts a pod if each budget that selects it has healthy - minAvailable > 0 pods
    (disruption.go, getExpectedPodCount): also in a fleet that lacks nodes, and of many clusters."""
    instance, workers, more = FLEETS[fleet]
    files = files_of("demo", instance, workers, **more)
    objects = [*build(files, tmp_path, "common"), *build(files, tmp_path, "cluster")]
    budgets = [one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"]
    assert check_manifests(objects) == []
    (cluster,) = [one for one in objects if one["kind"] == "RayCluster"]
    groups = {one["groupName"]: one["maxReplicas"] for one in cluster["spec"]["workerGroupSpecs"]}

    def allowed(pod: dict[str, str], healthy: list[dict[str, str]]) -> bool:
        return all(
            sum(budget["selector"]["matchLabels"].items() <= one.items() for one in healthy)
            > budget["minAvailable"]
            for budget in budgets
            if budget["selector"]["matchLabels"].items() <= pod.items()
        )

    head, worker = {"ray.io/node-type": "head"}, {"ray.io/node-type": "worker"}
    for missing in range(max(groups.values())):
        pods = [
            {**worker, "ray.io/cluster": "rayapp", "ray.io/group": group}
            for group, most in groups.items()
            for _ in range(max(1, most - missing))
        ]
        assert all(allowed(pod, pods) for pod in pods), f"{missing} of {groups} missing"
    for clusters in (1, 2, 30):
        heads = [{**head, "ray.io/cluster": f"demo-{number}"} for number in range(clusters)]
        assert not any(allowed(one, heads) for one in heads)
