"""What `rayapp.cluster` renders: golden files, schemas, refusals, and sizes that stand once."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import check_manifests
from task_definitions import check_task_definition

from rayapp import hardware
from rayapp.cluster import PLATFORMS, Options, cost, paths_of_this_machine, render, write
from rayapp.cluster.cluster_files import ROOT as TEMPLATES
from rayapp.cluster.options import IMAGE_CONTEXT, image_tag
from rayapp.cluster.sizes import fleet, node
from rayapp.config import ConfigError, RunConfig, load

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).with_name("golden")
CRDS = ROOT.parent / "shared" / "crds"
ACCOUNT = "123456789012"
LUSTRE = json.dumps(
    {
        "id": "fs-0123456789abcdef0",
        "dns_name": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
        "mount_name": "abcdefgh",
        "capacity_gib": 1200,
    }
)
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "cpu": ({"cluster.instance": "m6i.4xlarge", "cluster.workers": "1:4"}, {}),
    "g5": ({"cluster.instance": "g5.12xlarge", "cluster.workers": "8"}, {}),
    "p3": ({"cluster.instance": "p3.16xlarge", "cluster.workers": "16"}, {}),
    "p4d": ({"cluster.instance": "p4d.24xlarge", "cluster.workers": "16"}, {}),
    "p4de": ({"cluster.instance": "p4de.24xlarge", "cluster.workers": "16"}, {}),
    "p5": ({"cluster.instance": "p5.48xlarge", "cluster.workers": "16:64"}, {}),
    "spot": (
        {"cluster.instance": "g5.48xlarge", "cluster.workers": "8:32"},
        {
            "market": "spot",
            "components": ("kueue", "lustre"),
            "lustre": LUSTRE,
            "queue": "g5.48xlarge:4",
        },
    ),
    "autoscaling": (
        {"cluster.instance": "g5.12xlarge", "cluster.workers": "4:8"},
        {"components": ("autoscaling",)},
    ),
    "data": (
        {"cluster.instance": "g5.12xlarge", "cluster.workers": "8"},
        {
            "data_nodes": 3,
            "components": ("kueue", "lustre"),
            "lustre": LUSTRE,
            "queue": "g5.12xlarge:2",
        },
    ),
    "queue": (
        {"cluster.instance": "p5.48xlarge", "cluster.workers": "16"},
        {"components": ("kueue",), "queue": "p5.48xlarge:2"},
    ),
}
# The seed's set-ups for images, as their configs have them.
FROM_FILE = {
    "resnet50": "resnet50_imagenet.yaml",
    "efficientnet-b7": "efficientnet_b7_imagenet.yaml",
}
CASES |= {case: ({}, {"components": ("lustre",), "lustre": LUSTRE}) for case in FROM_FILE}
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed"
)
needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason="KubeRay's CRDs (1.7.0) are not beside this checkout"
)


def config_of(case: str) -> RunConfig:
    if case in FROM_FILE:
        return load(str(ROOT / "configs" / FROM_FILE[case]))
    return load(None, {"run.name": "demo", **CASES[case][0]})


def options_of(case: str, platform: str) -> Options:
    asked = dict(CASES[case][1])
    if platform == "ecs":
        asked = {name: asked[name] for name in asked if name in ("market", "data_nodes")}
    return Options(account=ACCOUNT, tag="0.1.0", **asked)


def rendered(case: str, platform: str) -> dict[str, str]:
    return render(platform, config_of(case), options_of(case, platform))


def same_as_golden(name: str, text: str) -> None:
    """Compare with the file; with GOLDEN=write in the environment, write it."""
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"{path} differs; if meant so, run with GOLDEN=write"


def build(folder: Path) -> str:
    """Return what `kubectl apply -k` would send."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_task_definitions(case: str) -> None:
    files = rendered(case, "ecs")
    roles = ["data", "head", "worker"] if case == "data" else ["head", "worker"]
    assert sorted(files) == sorted([*(f"{role}.json" for role in roles), "terraform.tfvars.json"])
    for name, text in files.items():
        same_as_golden(f"ecs-{case}/{name}", text)
    for role in roles:
        assert check_task_definition(json.loads(files[f"{role}.json"])) == []


LIST = "p5.48xlarge, p4d.24xlarge:spot@9.5, g5.12xlarge:spot"


def test_a_list_has_a_group_for_each_choice() -> None:
    config = load(None, {"cluster.instance": LIST, "cluster.workers": "16"})
    options = Options(account=ACCOUNT, tag="0.1.0")
    files = render("ecs", config, options)
    tasks = {"worker-1": "p5", "worker-2": "p4d", "worker-3": "g5.12xlarge"}
    assert sorted(files) == ["head.json", "terraform.tfvars.json", *(f"{t}.json" for t in tasks)]
    groups = json.loads(files["terraform.tfvars.json"])["workers"]
    assert {name: (g["max_nodes"], g["market"], g["task"]) for name, g in groups.items()} == {
        "1-p5-48xlarge-on-demand": (2, "on-demand", "worker-1"),
        "2-p4d-24xlarge-spot": (2, "spot", "worker-2"),
        "3-g5-12xlarge-spot": (4, "spot", "worker-3"),
    }
    assert all(group["nodes"] == 0 and group["preferred"] for group in groups.values())
    for (task, named), (kind, market) in zip(
        tasks.items(), [choice.place for choice in config.cluster.choices], strict=True
    ):
        assert kind.startswith(named)
        alone = render(
            "ecs", load(None, {"cluster.instance": kind, "cluster.workers": 16}), options
        )
        expected = json.loads(alone["worker.json"])
        expected["family"] = f"rayapp-ecs-{task}"
        labels = f"--labels=rayapp/instance={kind},rayapp/market={market}"
        expected["containerDefinitions"][0]["command"].append(labels)
        assert json.loads(files[f"{task}.json"]) == expected
        assert check_task_definition(expected) == [] and files["head.json"] == alone["head.json"]
    costs = cost("ecs", config, options).splitlines()
    assert [line.partition(" each")[0].rpartition("(")[2] for line in costs[:2]] == ["55.04", "9.5"]
    assert "4 x g5.12xlarge (spot: price not known here)" in costs[2]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_one_type_may_say_its_market(platform: str) -> None:
    """The same as by --market, on either platform."""
    kind, options = {"cluster.instance": "p4d.24xlarge:spot@9.5"}, Options(account=ACCOUNT)
    files = render(platform, load(None, kind), options)
    plain = load(None, {"cluster.instance": "p4d.24xlarge"})
    other = render(platform, plain, dataclasses.replace(options, market="spot"))
    assert differing(files, other) <= {"job/kustomization.yaml"} and sorted(files) == sorted(other)
    assert "1 x p4d.24xlarge (9.5 each, spot)" in cost(platform, load(None, kind), options)


@pytest.mark.parametrize("instance", ["g5.12xlarge", LIST])
def test_hosts_for_data_change_nothing_else(instance: str) -> None:
    """On ECS: a task definition and a group more; they are not placed with the workers."""
    config = load(None, {"cluster.instance": instance, "cluster.workers": "8"})
    options = Options(account=ACCOUNT, tag="0.1.0")
    with_data = dataclasses.replace(options, data_nodes=3)
    alone, files = (render("ecs", config, asked) for asked in (options, with_data))
    variables = json.loads(files.pop("terraform.tfvars.json"))
    group = variables["workers"].pop("data")
    assert variables == json.loads(alone.pop("terraform.tfvars.json"))
    task = json.loads(files.pop("data.json"))
    assert files == alone
    assert (group["instance_type"], group["nodes"], group["max_nodes"]) == ("m6i.8xlarge", 3, 3)
    assert (group["gpus"], group["placed"], group["task"]) == (0, False, "data")
    command = task["containerDefinitions"][0]["command"]
    assert "--num-cpus=30" in command and "--num-gpus=0" in command  # of 32, two are the host's
    assert task["family"] == "rayapp-ecs-data" and "--labels=rayapp/group=data" in command
    (line,) = set(cost("ecs", config, with_data).splitlines()) - {
        *cost("ecs", config, options).splitlines()
    }
    assert line.startswith("data: 3 x m6i.8xlarge beside the workers, 4.61 USD/h more (1.536 each")


@needs_kubectl
@pytest.mark.parametrize("instance", ["g5.12xlarge", LIST])
def test_pods_for_data_come_after_the_workers(instance: str, tmp_path: Path) -> None:
    """The patches of the workers' groups name them by place; these pods have the files too."""
    config = load(None, {"cluster.instance": instance, "cluster.workers": "8"})
    more: dict[str, Any] = {"components": ("lustre",), "lustre": LUSTRE}
    options = Options(account=ACCOUNT, tag="0.1.0", **more)
    groups = []
    for folder, asked in (
        ("alone", options),
        ("data", dataclasses.replace(options, data_nodes=3)),
    ):
        write(render("kuberay", config, asked), tmp_path / folder)
        (cluster,) = yaml.safe_load_all(build(tmp_path / folder / "cluster"))
        groups.append(cluster["spec"]["workerGroupSpecs"])
    alone, (*workers, data) = groups
    assert workers == alone
    assert (data["groupName"], data["labels"]) == ("data", {"rayapp/group": "data"})
    assert [data[name] for name in ("minReplicas", "replicas", "maxReplicas")] == [3, 3, 3]
    pod = data["template"]["spec"]
    assert pod["nodeSelector"] == {"rayapp/group": "data"} and "tolerations" not in pod
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    assert "/lustre" in [mount["mountPath"] for mount in container["volumeMounts"]]


@needs_kubectl
@pytest.mark.parametrize("case", CASES)
def test_manifests(case: str, tmp_path: Path) -> None:
    """The built cluster and job are as they were, and as KubeRay's rules want them."""
    files = rendered(case, "kuberay")
    write(files, tmp_path)
    same_as_golden(f"kuberay-{case}/terraform.tfvars.json", files["terraform.tfvars.json"])
    common = list(yaml.safe_load_all(build(tmp_path / "common")))
    for what in ("common", "cluster", "job"):
        text = build(tmp_path / what)
        if what != "job" or case in ("p5", "queue", *FROM_FILE):
            same_as_golden(f"kuberay-{case}/{what}.yaml", text)
        assert check_manifests([*common, *yaml.safe_load_all(text)]) == []


@needs_kubectl
@needs_crds
@pytest.mark.parametrize("case", CASES)
def test_manifests_are_valid_against_the_crds(case: str, tmp_path: Path) -> None:
    write(rendered(case, "kuberay"), tmp_path)
    for what, kind in (("cluster", "RayCluster"), ("job", "RayJob")):
        documents = list(yaml.safe_load_all(build(tmp_path / what)))
        assert kind in {document["kind"] for document in documents}
        assert check_manifests(documents, CRDS) == []


def _worker(cluster: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = cluster["spec"]["workerGroupSpecs"][0]
    return group


def _container(cluster: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = _worker(cluster)["template"]["spec"]["containers"][0]
    return container


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], Any], bool]] = {
    "an unknown field": (lambda c: c["spec"].update(workerGroupSpec=[]), True),
    "a deep unknown field": (lambda c: _container(c).update(imagePullPolicyy="Always"), True),
    "a number as text": (lambda c: _worker(c).update(replicas="2"), True),
    "text as a number": (lambda c: _worker(c)["rayStartParams"].update({"num-gpus": 8}), True),
    "no group name": (lambda c: _worker(c).pop("groupName"), True),
    "an unknown choice": (lambda c: c["spec"]["authOptions"].update(mode="tokens"), True),
    "an unknown version": (lambda c: c.update(apiVersion="ray.io/v2"), True),
    "too few replicas": (lambda c: _worker(c).update(minReplicas=99), False),
    "no volume": (lambda c: _container(c)["volumeMounts"].append({"name": "no"}), False),
    "GPU limits": (lambda c: _container(c)["resources"]["requests"].pop("nvidia.com/gpu"), False),
    "a secret": (lambda c: _container(c)["env"].append({"name": "HF_TOKEN", "value": "x"}), False),
    "no token": (lambda c: c["spec"].pop("authOptions"), False),
    "too little grace": (
        lambda c: _worker(c)["template"]["spec"].update(terminationGracePeriodSeconds=30),
        False,
    ),
    "labels for ray start": (lambda c: _worker(c)["rayStartParams"].update(labels="a=b"), False),
    "KubeRay's shell": (lambda c: _worker(c)["template"]["metadata"].pop("annotations"), False),
}


@needs_kubectl
@pytest.mark.parametrize("what", BREAKS)
def test_what_is_wrong_with_a_cluster_is_found(what: str, tmp_path: Path) -> None:
    change, by_schema = BREAKS[what]
    if by_schema and not CRDS.is_dir():
        pytest.skip("KubeRay's CRDs (1.7.0) are not beside this checkout")
    write(rendered("p4d", "kuberay"), tmp_path)
    documents = list(yaml.safe_load_all(build(tmp_path / "cluster")))
    cluster = next(document for document in documents if document["kind"] == "RayCluster")
    broken = copy.deepcopy(cluster)
    change(broken)
    assert check_manifests([cluster], CRDS if by_schema else None) == []
    assert len(check_manifests([broken], CRDS if by_schema else None)) >= 1


def _ray(definition: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = definition["containerDefinitions"][0]
    return container


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(famly="x"),
        lambda d: d.update(cpu=4),
        lambda d: _ray(d).update(ulimits={"name": "nofile"}),
        lambda d: d.update(requiresCompatibilities=["FARGATE"]),
        lambda d: _ray(d)["environment"].append({"name": "HF_TOKEN", "value": "x"}),
        lambda d: _ray(d).update(secrets=[]),
        lambda d: _ray(d).update(stopTimeout=300),
        lambda d: _ray(d).update(stopTimeout=60),
        lambda d: _ray(d)["command"].remove("--block"),
        lambda d: _ray(d).update(mountPoints=[{"sourceVolume": "no", "containerPath": "/x"}]),
    ],
)
def test_what_is_wrong_with_a_task_is_found(change: Callable[[dict[str, Any]], Any]) -> None:
    definition = json.loads(rendered("p4d", "ecs")["worker.json"])
    change(definition)
    assert len(check_task_definition(definition)) >= 1


def objects(case: str, **options: Any) -> list[dict[str, Any]]:
    """Return the objects of a rendered base and of the components that it takes."""
    asked = {**dataclasses.asdict(options_of(case, "kuberay")), **options}
    files = render("kuberay", config_of(case), Options(**asked))
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
    ]


@needs_kubectl
@pytest.mark.parametrize("case", ["queue", "spot", "data"])
def test_a_queue_can_admit_the_cluster_and_the_job(case: str, tmp_path: Path) -> None:
    """Every pod has a flavor with its nodes, every resource a quota, and the quota is enough."""
    write(rendered(case, "kuberay"), tmp_path)
    common = list(yaml.safe_load_all(build(tmp_path / "common")))
    (queue,) = [each for each in common if each["kind"] == "ClusterQueue"]
    assert {each["apiVersion"] for each in common if "kueue" in each["apiVersion"]} == {
        "kueue.x-k8s.io/v1beta2"
    }
    for what, kind in (("cluster", "RayCluster"), ("job", "RayJob")):
        documents = list(yaml.safe_load_all(build(tmp_path / what)))
        (asking,) = [each for each in documents if each["kind"] == kind]
        assert asking["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rayapp"
        assert check_manifests([*common, *documents]) == []
    (cluster,) = yaml.safe_load_all(build(tmp_path / "cluster"))
    asked = _container(cluster)["resources"]["requests"]
    (group,) = queue["spec"]["resourceGroups"]
    quotas = {
        flavor["name"]: {one["name"]: one["nominalQuota"] for one in flavor["resources"]}
        for flavor in group["flavors"]
    }
    for name, amount in asked.items():
        quota = str(quotas["rayapp-workers"][name])
        one = float(str(amount).removesuffix("Mi"))
        assert float(quota.removesuffix("Mi")) == _worker(cluster)["replicas"] * one, name
    without = copy.deepcopy(queue)
    without["spec"]["resourceGroups"][0]["coveredResources"].remove("nvidia.com/gpu")
    one_flavor = [each for each in common if each["metadata"]["name"] != "rayapp-system"]
    assert check_manifests([without, *common[:-1], cluster]) != []
    assert check_manifests([*one_flavor, cluster]) != []


@needs_kubectl
def test_a_job_takes_nothing_with_it_that_a_cluster_needs(tmp_path: Path) -> None:
    """What `kubectl delete -k job` deletes; the namespace would take all else in it along."""
    write(rendered("spot", "kuberay"), tmp_path)

    def names(folder: str) -> set[tuple[str, str]]:
        documents = yaml.safe_load_all(build(tmp_path / folder))
        return {(each["kind"], each["metadata"]["name"]) for each in documents}

    assert names("job") == {("RayJob", "demo")} and names("cluster") == {("RayCluster", "rayapp")}
    assert ("Namespace", "rayapp") in names("common")


@needs_kubectl
def test_a_job_can_be_applied_again_and_costs_nothing_after_its_end(tmp_path: Path) -> None:
    write(rendered("p5", "kuberay"), tmp_path)
    (job,) = yaml.safe_load_all(build(tmp_path / "job"))
    assert job["spec"]["ttlSecondsAfterFinished"] <= 60
    values = yaml.safe_load((TEMPLATES / "helm" / "kuberay-operator.yaml").read_text())
    assert {"name": "DELETE_RAYJOB_CR_AFTER_JOB_FINISHES", "value": "true"} in values["env"]


@needs_kubectl
def test_every_pod_is_locked(tmp_path: Path) -> None:
    """The submitter's and the autoscaler's too, which KubeRay makes without a security context."""
    write(rendered("autoscaling", "kuberay"), tmp_path)
    (job,) = yaml.safe_load_all(build(tmp_path / "job"))
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"]["spec"]]
    pods += [_worker({"spec": cluster})["template"]["spec"]]
    pods += [job["spec"]["submitterPodTemplate"]["spec"]]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    containers = [container for pod in pods for container in pod["containers"]]
    found = [container["securityContext"] for container in containers]
    found.append(cluster["autoscalerOptions"]["securityContext"])
    assert found == [locked] * len(found)


@needs_kubectl
def test_the_autoscaler_sees_the_heads_sessions_and_is_not_undone(tmp_path: Path) -> None:
    """KubeRay gives its container the volume `ray-logs`; applying again would reset replicas."""
    write(rendered("autoscaling", "kuberay"), tmp_path)
    (cluster,) = yaml.safe_load_all(build(tmp_path / "cluster"))
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    (mount,) = [one for one in head["volumeMounts"] if one["mountPath"] == "/tmp/ray"]
    assert mount["name"] == "ray-logs"
    assert "replicas" not in _worker(cluster) and _worker(cluster)["minReplicas"] == 0
    variables = json.loads(rendered("autoscaling", "kuberay")["terraform.tfvars.json"])
    group = variables["workers"]["workers"]
    assert (group["autoscaled"], group["nodes"]) == (True, 0)


def test_the_device_plug_in_of_efa_is_that_of_its_chart() -> None:
    """An older one offers no EFA on p6 and p5.4xlarge, whose pods then wait for ever."""
    assert "image" not in yaml.safe_load(
        (TEMPLATES / "helm" / "efa-device-plugin.yaml").read_text()
    )
    for path in (ROOT / "Makefile", TEMPLATES / "helm" / "efa-device-plugin.yaml"):
        (version,) = re.findall(r"--version v0\.5\.(\d+) --namespace kube-system", path.read_text())
        assert int(version) >= 30, path


def test_a_job_whose_data_is_not_in_its_pods_is_told_of() -> None:
    """It would fail on three clusters, one after another."""
    file = str(ROOT / "configs" / "llama3_1_8b_c4_eks.yaml")
    (told,) = paths_of_this_machine(load(file))
    assert told.startswith("data.path=c4/en is not in its pods") and "--data.path=s3://" in told
    assert not paths_of_this_machine(load(file, {"data.path": "s3://bucket/data/c4"}))
    assert not paths_of_this_machine(config_of("resnet50"))  # on Lustre


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("asked", "minutes"), [("30", 30), ("none", 0)])
def test_idle_workers_go_when_the_config_says(platform: str, asked: str, minutes: int) -> None:
    config = load(None, {"cluster.instance": "g5.12xlarge", "cluster.idle_minutes": asked})
    files = render(platform, config, Options(account=ACCOUNT))
    assert json.loads(files["terraform.tfvars.json"])["idle_minutes"] == minutes


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rays_dashboard_knows_servers_of_ones_own(platform: str) -> None:
    servers = {"prometheus": "http://prometheus.monitoring:9090", "grafana": "https://g.example"}
    options = Options(account=ACCOUNT, **servers)
    files = render(platform, config_of("cpu"), options)
    if platform == "ecs":
        heads = [_ray(json.loads(files["head.json"]))]
        assert not check_task_definition(json.loads(files["head.json"]))
    else:
        base = yaml.safe_load(files["base/raycluster.yaml"])
        pod = base["spec"]["headGroupSpec"]["template"]["spec"]
        heads = [one for one in pod["containers"] if one["name"] == "ray-head"]
    (variables,) = (
        {
            one["name"]: one["value"]
            for one in head["env" if platform == "kuberay" else "environment"]
        }
        for head in heads
    )
    assert variables["RAY_PROMETHEUS_HOST"] == servers["prometheus"]
    assert variables["RAY_GRAFANA_HOST"] == servers["grafana"]
    assert not any("RAY_GRAFANA_HOST" in text for text in rendered("cpu", platform).values())


def test_ranks_speak_over_the_tasks_own_interface() -> None:
    """The first one of a task in awsvpc mode is the agent's, with one address in every task."""
    container = _ray(json.loads(rendered("p4d", "ecs")["worker.json"]))
    variables = {one["name"]: one["value"] for one in container["environment"]}
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "eth0"


def head_of(platform: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the head's pod or task, and its containers."""
    if platform == "ecs":
        task = json.loads(rendered("cpu", "ecs")["head.json"])
        return task, task["containerDefinitions"]
    (cluster,) = [each for each in objects("cpu") if each["kind"] == "RayCluster"]
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    return pod, pod["containers"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_stopped_job_has_time_to_save(platform: str) -> None:
    """Ray kills a job's driver this long after `ray job stop`; 3 s after where nothing is set."""
    _, (ray, _) = head_of(platform)
    variables = {one["name"]: one["value"] for one in ray.get("environment", ray.get("env"))}
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "600"


def test_the_side_car_can_write_and_has_credentials() -> None:
    """As an unprivileged user, in an image whose folders are root's, without instance metadata."""
    pod, (_, agent) = head_of("kuberay")
    assert pod["securityContext"]["runAsNonRoot"] and agent["name"] == "metrics"
    empty = {one["name"] for one in pod["volumes"] if one.get("emptyDir") == {}}
    mounts = {one["mountPath"]: one for one in agent["volumeMounts"]}
    for folder in ("etc", "logs", "var"):  # what the agent makes at its start
        mount = mounts[f"/opt/aws/amazon-cloudwatch-agent/{folder}"]
        assert mount["name"] in empty and not mount.get("readOnly")
    variables = {one["name"]: one.get("value") for one in agent["env"]}
    assert variables["RUN_WITH_IRSA"] == "True"  # else: on premises, by a profile that is not there
    (settings,) = [
        each["data"]["agent.json"]
        for each in objects("cpu")
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "rayapp-metrics"
    ]
    assert json.loads(settings)["agent"]["region"] == "us-west-2"


def test_the_image_can_do_what_the_configs_ask_for() -> None:
    """Triton compiles C on the node; 4 bits, fp8, Liger, MLflow and W&B are extras."""
    text = (TEMPLATES / "Dockerfile").read_text()
    (packages,) = re.findall(r"apt-get install -y --no-install-recommends ([^&\\\n]+)", text)
    assert {"gcc", "g++", "libc6-dev"} <= set(packages.split())
    (extras,) = re.findall(r"pip install .*\.\[([\w,]+)\]", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) == {"gpu", "liger", "trackers"}
    assert set(extras.split(",")) <= known["optional-dependencies"].keys()


def refused(platform: str = "ecs", overrides: Any = None, **options: Any) -> str:
    config = load(None, {"cluster.instance": "g5.12xlarge", **(overrides or {})})
    with pytest.raises(ConfigError) as caught:
        render(platform, config, Options(**{"account": ACCOUNT, **options}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ({"cluster.instance": "none"}, {}, "cluster.instance=none is missing"),
        ({"cluster.instance": "g5.13xlarge"}, {}, "Did you mean g5.1"),
        ({"cluster.resources": "{CPU: 47}"}, {}, "cluster.resources.CPU=47 is too much"),
        ({"cluster.resources": "{GPU: 8}"}, {}, "can have 4"),
        ({"cluster.resources": "{memory: 300e9}"}, {}, "cluster.resources.memory=3e+11"),
        ({"cluster.resources": "{seat: 1}"}, {}, "can have 0"),
        (
            {"cluster.resources": "{accelerator_type:H100: 0.001}"},
            {},
            "cluster.resources.accelerator_type:H100=0.001 is too much",
        ),
        ({"cluster.instance": "m6i.4xlarge", "cluster.gpu": "true"}, {}, "has no GPU"),
        ({"cluster.instance": "g5.2xlarge"}, {"efa": "true"}, "no Elastic Fabric Adapter"),
        (
            {"cluster.instance": "p3.8xlarge"},
            {},
            "the image's PyTorch has no code for its GPU V100",
        ),
        ({"cluster.instance": "p3.8xlarge"}, {"tag": image_tag()}, "set --tag to it"),
        ({}, {"account": None}, "account=none is missing"),
        ({}, {"account": "12"}, "12 digits"),
        ({}, {"name": "Ray_App"}, "name=Ray_App is malformed"),
        ({}, {"market": "spott"}, "market=spott is unknown"),
        ({}, {"market": "capacity-block"}, "reservation=none is missing"),
        ({}, {"head": "g5"}, "head=g5 is unknown"),
        ({}, {"components": ("kueue",)}, "ECS has none"),
        ({}, {"queue": "g5.12xlarge:2"}, "ECS has no Kueue"),
        ({}, {"queue": "g5.12xlarge"}, "queue=g5.12xlarge is malformed"),
        ({}, {"queue": "g5.13xlarge:2"}, "queue=g5.13xlarge is unknown"),
        (
            {},
            {"components": ("autoscaling", "kueue")},
            "components autoscaling and kueue exclude each other",
        ),
        ({}, {"api_cidrs": ("203.0.113.7/32",)}, "ECS has no API server"),
        ({}, {"api_cidrs": ("home",)}, "api_cidrs=home is malformed"),
        ({}, {"api_cidrs": ("0.0.0.0/0",)}, "api_cidrs=0.0.0.0/0 is too wide"),
        ({}, {"prometheus": "prometheus:9090"}, "prometheus=prometheus:9090 is malformed"),
        ({}, {"grafana": 'http://g"x'}, "Set --grafana to e.g. http"),
        ({"cluster.instance": LIST}, {"market": "spot"}, "market=spot is ambiguous: cluster.inst"),
        (
            {"cluster.instance": LIST},
            {"reservation": "cr-01234567"},
            "a reservation is of one type",
        ),
        ({"cluster.instance": "g5.12xlarge,p5"}, {}, "cluster.instance=p5 is unknown"),
        (
            {"cluster.instance": "g5.12xlarge,g5.xlarge"},
            {"efa": "true"},
            "g5.xlarge has no Elastic",
        ),
        (
            {"cluster.instance": "g5.12xlarge:spot"},
            {"market": "capacity-block", "reservation": "cr-01234567"},
            "market=capacity-block is ambiguous: cluster.instance is bought as spot",
        ),
        ({}, {"data_nodes": 2, "data_instance": "m6"}, "data_instance=m6 is unknown"),
        ({}, {"data_nodes": 2, "data_instance": "g5.xlarge"}, "which preparing data does not use"),
        (
            {"cluster.instance": "m6i.4xlarge"},
            {"data_nodes": 2},
            "workers without GPUs would train on these hosts too",
        ),
        ({"cluster.gpu": "false"}, {"data_nodes": 2}, "data_nodes is impossible"),
        ({"run.storage": "s3://elsewhere/runs"}, {}, f"s3://rayapp-{ACCOUNT}-us-west-2/runs. Set"),
    ],
)
def test_what_no_cluster_could_run_is_refused(
    overrides: dict[str, str], options: dict[str, Any], message: str
) -> None:
    assert message in refused("ecs", overrides, **options)


def test_all_problems_at_once() -> None:
    text = refused("ecs", {"cluster.resources": "{GPU: 8, CPU: 99}"}, account="12", efa="maybe")
    assert len(text.splitlines()) == 4, text


@pytest.mark.parametrize("component", ["kueue", "autoscaling"])
def test_what_sees_one_group_takes_no_list(component: str) -> None:
    text = refused("kuberay", {"cluster.instance": LIST}, components=(component,))
    assert text.startswith(f"component {component} is impossible where cluster.instance is a list")


def test_the_lustre_component_needs_its_file_system() -> None:
    assert "lustre=none is missing" in refused("kuberay", components=("lustre",))


def test_nodes_follow_from_workers() -> None:
    def machines(instance: str, workers: str, elsewhere: bool = False, **more: str) -> Any:
        asked = {"cluster.instance": instance, "cluster.workers": workers}
        config = load(None, {**asked, **{f"cluster.{name}": v for name, v in more.items()}})
        problems: list[str] = []
        machine = node(hardware.instance(instance), efa=True)
        found = fleet(config, machine, problems, data_elsewhere=elsewhere)
        assert found is not None and not problems
        return found.min_nodes, found.max_nodes

    assert machines("g5.12xlarge", "8") == (2, 2)
    assert machines("g5.12xlarge", "1:9") == (1, 3)
    assert machines("p5.48xlarge", "16:64") == (2, 8)
    assert machines("m5.xlarge", "2") == (1, 1)
    assert machines("m5.xlarge", "3") == (1, 2)  # a CPU stays for Ray Data
    assert machines("m5.xlarge", "1:2", resources="{CPU: 2}") == (1, 2)
    whole = f"{{CPU: {node(hardware.instance('g5.12xlarge'), efa=True).cpus}, GPU: 4}}"
    assert machines("g5.12xlarge", "2", resources=whole) == (2, 3)
    assert machines("g5.12xlarge", "2", resources=whole, elsewhere=True) == (2, 2)


def differing(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_every_size_stands_in_hardware_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One figure changed there changes every file that it is in, and no file has one of its own."""
    before = {platform: rendered("p4d", platform) for platform in PLATFORMS}
    one = hardware.INSTANCES["p4d.24xlarge"]
    for change, ecs, kuberay in (
        (
            {"efa_interfaces": 2},
            {"worker.json", "terraform.tfvars.json"},
            {"components/efa/kustomization.yaml", "terraform.tfvars.json"},
        ),
        (
            {"gpus": 4},
            {"worker.json", "terraform.tfvars.json"},
            {
                "base/raycluster.yaml",
                "components/gpu/kustomization.yaml",
                "terraform.tfvars.json",
            },
        ),
        ({"vcpus": 64}, {"worker.json"}, {"base/raycluster.yaml"}),
        ({"memory_gib": 512.0}, {"worker.json"}, {"base/raycluster.yaml"}),
    ):
        table = {**hardware.INSTANCES, one.name: dataclasses.replace(one, **change)}
        monkeypatch.setattr(hardware, "INSTANCES", table)
        after = {platform: rendered("p4d", platform) for platform in PLATFORMS}
        assert differing(before["ecs"], after["ecs"]) == ecs, change
        assert differing(before["kuberay"], after["kuberay"]) == kuberay, change


def test_no_instance_type_stands_in_the_files() -> None:
    pattern = re.compile(r"\b[a-z]\d[a-z0-9-]*\.(\d*xlarge|large|metal)\b")
    paths = [path for path in TEMPLATES.rglob("*") if path.is_file()]
    paths += (ROOT / "infra").rglob("*.tf")
    assert len(paths) > 30
    found = [
        f"{path}: {name[0]}"
        for path in paths
        for name in [pattern.search(path.read_text())]
        if name is not None
    ]
    assert not found


def test_nothing_rendered_is_secret() -> None:
    for platform in PLATFORMS:
        for name, text in rendered("p5", platform).items():
            for match in re.finditer(r'"?(\w*(TOKEN|SECRET|PASSWORD)\w*)"?[:=]\s*"?(\S+)', text):
                pytest.fail(f"{name}: {match[0]}")


def test_another_source_is_another_image(tmp_path: Path) -> None:
    """The registry refuses a tag that it has; so does a second deploy, if the tag were the same."""
    for name in IMAGE_CONTEXT:
        place = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        place(ROOT / name, tmp_path / name)
    before = image_tag(tmp_path)
    assert before == image_tag() and re.fullmatch(r"[0-9.]+-[0-9a-f]{12}", before)
    config, options = config_of("g5"), Options(account=ACCOUNT)
    assert f"rayapp:{before}" in render("ecs", config, options)["worker.json"]
    (tmp_path / "rayapp" / "hardware" / "gpus.csv").write_text("changed")
    assert image_tag(tmp_path) != before
    (tmp_path / "rayapp" / "hardware" / "gpus.csv").write_bytes(
        (ROOT / "rayapp" / "hardware" / "gpus.csv").read_bytes()
    )
    (tmp_path / "rayapp" / "__pycache__").mkdir(exist_ok=True)
    (tmp_path / "rayapp" / "__pycache__" / "x.pyc").write_text("")
    assert image_tag(tmp_path) == before
    copied = re.findall(r"^COPY (.+) \S+$", (TEMPLATES / "Dockerfile").read_text(), re.M)
    assert {"cluster", *" ".join(copied).split()} == set(IMAGE_CONTEXT)


def test_images_are_pinned() -> None:
    for platform in PLATFORMS:
        for text in rendered("p5", platform).values():
            for name in re.findall(r'"?image"?: "?([^\s",}]+)', text):
                assert re.search(r":[0-9][\w.-]+$", name), name
    first = (TEMPLATES / "Dockerfile").read_text().splitlines()
    sources = [line for line in first if line.startswith("FROM ")]
    assert sources and all("@sha256:" in line or re.search(r":\d", line) for line in sources)


def test_hosts_and_image_have_the_same_efa_installer() -> None:
    """The driver of the host and the library of the container belong together."""
    pattern = re.compile(r"EFA_INSTALLER=([0-9.]+)|aws-efa-installer-([0-9.]+)\.tar")
    script = ROOT / "infra" / "modules" / "ecs_nodes" / "user_data.sh"
    found = {
        version
        for path in (TEMPLATES / "Dockerfile", script)
        for match in pattern.finditer(path.read_text())
        for version in match.groups()
        if version
    }
    assert len(found) == 1, found


@pytest.mark.drill
def test_the_image_installs_in_a_clean_environment(tmp_path: Path) -> None:
    """The Dockerfile's pip line, with what it copies, in an environment of its own."""
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "setup.py", tmp_path / "setup.py")
    for name in ("rayapp", "cluster", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    text = (TEMPLATES / "Dockerfile").read_text()
    (line,) = re.findall(r"^RUN (pip install .*)$", text, re.M)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    command = [str(tmp_path / "venv" / "bin" / "python"), "-m", *shlex.split(line)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ray = [str(tmp_path / "venv" / "bin" / "ray"), "--version"]
    assert "2.60" in subprocess.run(ray, capture_output=True, text=True, check=True).stdout
