"""Fill in the templates of cluster/ for a config; refuse configs that the cluster could not run."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

import yaml

from rayapp.cluster import sizes
from rayapp.cluster.groups import Files, groups_of, pods, tasks
from rayapp.cluster.options import COMPONENTS, Options, bucket, image_tag, option_problems, stack
from rayapp.config import RunConfig
from rayapp.config.text import flatten, shipped
from rayapp.hardware import instance
from rayapp.observe.run_folder import RETRIED

ROOT = shipped("cluster")
# Ray drains for DRAIN_S seconds and is killed after GRACE_S. A spot notice comes 2 minutes ahead on
# either platform, and ECS's longest stopTimeout is 2 minutes too.
DRAIN_S, GRACE_S = 100, 120
# Seconds from `ray job stop` to SIGKILL unless the job sets its own; the driver saves in this time.
# Ray's default is 3.
JOB_STOP_S = 600
# The head takes a node for dead after this many checks in a row without an answer: by 6 s if
# its address refuses them, by 20 s if nothing comes back. Ray's own are 3 s, 10 s and 5.
HEALTH_PERIOD_MS, HEALTH_TIMEOUT_MS, HEALTH_FAILURES = 1000, 3000, 5
SUBMITTER_CPUS, SUBMITTER_MIB = 1, 1024  # of the submitter's pod and the head's side-car
QUEUE_LABEL = {"kueue.x-k8s.io/queue-name": "rayapp"}
# KubeRay takes 47 letters of a RayJob, and appends 6 for its cluster, whose secret it cuts at 50.
RAYJOB_LETTERS = 40
AGENT_IMAGE = "public.ecr.aws/cloudwatch-agent/cloudwatch-agent:1.300062.0b1304"

Values: TypeAlias = dict[str, Any]
"""The values of the `${name}` placeholders in the files."""


def render(platform: str, config: RunConfig, options: Options) -> Files:
    """Return {path: text} of all files that a platform needs, terraform.tfvars.json included.

    Raises:
        ConfigError: with every problem.
    """
    problems = option_problems(platform, options)
    options = sizes.bought(config, options, problems)
    head, fleets, data = sizes.machines_of(platform, config, options, problems)
    groups, each = groups_of(platform, options, fleets, data), list[Files]()
    for group in groups:
        values = _values(platform, config, options, head, group.fleet) | group.values
        each.append(_ecs(values) if platform == "ecs" else _kuberay(config, group.options, values))
    files = (tasks if platform == "ecs" else pods)(each, groups)
    variables = {
        "name": options.name,
        "region": options.region,
        **({} if platform == "ecs" else {"api_cidrs": list(options.api_cidrs)}),
        "head": sizes.machine_variables(head, sizes.HEAD_DISK_GIB),
        "workers": {group.name: group.variables for group in groups},
        "idle_minutes": config.cluster.idle_minutes or 0,
    }
    files["terraform.tfvars.json"] = json.dumps(variables, indent=2) + "\n"
    return files


def cost(platform: str, config: RunConfig, options: Options) -> str:
    """Return the cost in USD per hour, training and idle, a line for each instance type.

    Raises:
        ConfigError: the machines cannot be placed; with every problem.
    """
    problems: list[str] = []
    options = sizes.bought(config, options, problems)
    head, fleets, data = sizes.machines_of(platform, config, options, problems)
    where = options.region, options.market
    lines = [sizes.cost_line(platform, workers, head.instance, *where) for workers in fleets]
    lines += [] if data is None else [sizes.data_cost_line(data, options.region)]
    return "\n".join(lines)


def paths_of_this_machine(config: RunConfig) -> list[str]:
    """Return a line for each path of the config that a pod does not have, unless it is a hub id."""
    if len(config.cluster.choices) > 1:  # there is no folder `job`
        return []
    values = flatten(config.model_dump(mode="json"))
    given = {field: values.get(field) for field in ("data.path", "data.eval_path")}
    return [
        f"{field}={path} is not in its pods, unless it is an id of the hub. Render it with "
        f"--{field}=s3://BUCKET/data/..."
        for field, path in given.items()
        if isinstance(path, str) and not path.startswith(("s3://", "/lustre/", "stdlib"))
    ]


def write(files: Files, folder: Path) -> None:
    """Write rendered files into a folder, subfolders included."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _values(
    platform: str, config: RunConfig, options: Options, head: sizes.Node, workers: sizes.Fleet
) -> Values:
    worker, name = workers.worker, stack(platform, options)
    registry = f"{options.account}.dkr.ecr.{options.region}.amazonaws.com"
    values: Values = {
        "account": options.account,
        "region": options.region,
        "stack": name,
        "log_group": f"/{name}/ray",
        "image": f"{registry}/{options.name}:{options.tag or image_tag()}",
        "agent_image": AGENT_IMAGE,
        "ray_version": version("ray"),
        "drain_s": DRAIN_S,
        "grace_s": GRACE_S,
        "job_stop_s": JOB_STOP_S,
        "health_period_ms": HEALTH_PERIOD_MS,
        "health_timeout_ms": HEALTH_TIMEOUT_MS,
        "health_failures": HEALTH_FAILURES,
        "instance": worker.instance.name,
        "group": "workers",
        "group_index": 0,
        "replicas": workers.max_nodes,
        "min_nodes": workers.min_nodes,
        "max_nodes": workers.max_nodes,
        "worker_cpus": worker.cpus,
        "worker_cpu_units": worker.cpus * 1024,
        "worker_gpus": sizes.gpus_of(config, worker.instance),
        "worker_efa": worker.efa,
        "hugepages_mib": sizes.HUGEPAGES_POD_MIB,
        "head_pod_cpus": head.cpus,
        "head_cpu_units": head.cpus * 1024,
    }
    servers = {"RAY_PROMETHEUS_HOST": options.prometheus, "RAY_GRAFANA_HOST": options.grafana}
    values["servers"] = {name: url for name, url in servers.items() if url is not None}
    for role, machine in (("head", head), ("worker", worker)):
        values[f"{role}_memory_mib"] = machine.memory_mib
        values[f"{role}_object_store_bytes"] = machine.object_store_bytes
        values[f"{role}_shared_memory_mib"] = machine.shared_memory_mib
    for key, file in (("agent_config", "agent.json"), ("prometheus_config", "prometheus.yaml")):
        text = _fill(ROOT / "cloudwatch" / file, values)
        values[key] = json.dumps(text)  # a JSON string is a YAML scalar too
    return values


def _fill(path: Path, values: Values) -> str:
    return Template(path.read_text(encoding="utf-8")).substitute(values)


def _ecs(values: Values) -> Files:
    gpus, allowed = values["worker_gpus"], ["read", "write"]
    needs = [{"type": "GPU", "value": str(gpus)}] if gpus else []
    paths = [f"/dev/infiniband/uverbs{card}" for card in range(values["worker_efa"])]
    devices = [{"hostPath": p, "containerPath": p, "permissions": allowed} for p in paths]
    values["worker_gpu_requirements"] = json.dumps(needs)
    values["worker_efa_devices"] = json.dumps(devices)
    files = {}
    for role in ("head", "worker"):
        definition = json.loads(_fill(ROOT / "ecs" / f"{role}.json", values))
        if role == "head":
            container = definition["containerDefinitions"][0]
            container["environment"] += [
                {"name": name, "value": url} for name, url in values["servers"].items()
            ]
        files[f"{role}.json"] = json.dumps(definition, indent=2) + "\n"
    return files


def _kuberay(config: RunConfig, options: Options, values: Values) -> Files:
    """Return kustomize folders: `cluster` is a RayCluster that stays, `job` a run with its own."""
    chosen = [name for name in COMPONENTS if name in options.components]
    if options.market == "spot" and "spot" not in chosen:
        chosen.append("spot")
    common = ["namespace", "access", "network", "disruption", "metrics"]
    common += ["lustre"] if "lustre" in chosen else []
    if options.queue is not None:
        common.append("kueue")
        values |= _quota(options, options.queue, values)
    if values["worker_gpus"]:
        chosen.append("gpu")
    if "lustre" in chosen:
        chosen.append("lustre-head")
    if values["worker_efa"]:
        chosen.append("efa")
    storage = config.run.storage.rstrip("/")
    storage = storage if storage.startswith("s3://") else f"s3://{bucket(options)}/runs"
    # Two shells and Ray's own quoting read this line, so all else of a run is in its config.
    command = f"python -m {config.MODULE} /etc/rayapp/run.yaml".split()
    command += [f"--run.storage={storage}", f"--run.name={config.run.name}"]
    values |= {
        "server_variables": "".join(
            f'\n              - {{name: {name}, value: "{url}"}}'
            for name, url in values["servers"].items()
        ),
        "common": json.dumps([f"{name}.yaml" for name in common]),
        "components": json.dumps([f"../components/{name}" for name in sorted(chosen)]),
        "job_labels": json.dumps(QUEUE_LABEL if "kueue" in chosen else {}),
        "entrypoint": json.dumps(shlex.join(command)),
        "rayjob": rayjob_name(config.run.name, storage, options),
        "run_config": json.dumps(config.to_yaml()),
        "retried": RETRIED,
        "retries": options.retries,
    }
    if options.lustre is not None:
        lustre = json.loads(options.lustre)
        values |= {f"lustre_{name}": lustre[name] for name in ("id", "dns_name", "mount_name")}
        values["lustre_gib"] = lustre["capacity_gib"]
    wanted = [ROOT / "kuberay" / name for name in ("base", "cluster", "job")]
    wanted += [ROOT / "kuberay" / "components" / name for name in chosen]
    paths = [path for top in wanted for path in top.rglob("*.yaml")]
    paths += [ROOT / "kuberay" / "common" / f"{name}.yaml" for name in (*common, "kustomization")]
    files = {str(path.relative_to(ROOT / "kuberay")): _fill(path, values) for path in sorted(paths)}
    for text in files.values():
        list(yaml.safe_load_all(text))  # raises if a filled-in value broke the YAML
    return files


def _quota(options: Options, queue: str, head: Values) -> Values:
    kind, _, count = queue.partition(":")
    worker = sizes.worker_node(instance(kind, "queue"), options, kube=True)
    data = sizes.node(instance(options.data_instance, "data_instance"), efa=False)
    nodes = int(count)
    return {
        "quota_cpus": nodes * worker.cpus,
        "quota_memory_mib": nodes * worker.memory_mib,
        "quota_gpus": nodes * worker.instance.gpus,
        "quota_efa": nodes * worker.efa,
        "quota_hugepages_mib": nodes * sizes.HUGEPAGES_POD_MIB if worker.efa else 0,
        "quota_data_cpus": options.data_nodes * data.cpus,
        "quota_data_memory_mib": options.data_nodes * data.memory_mib,
        "quota_system_cpus": head["head_pod_cpus"] + SUBMITTER_CPUS,
        "quota_system_memory_mib": head["head_memory_mib"] + SUBMITTER_MIB,
    }


def rayjob_name(name: str, storage: str, options: Options) -> str:
    """Return the name of a run's RayJob, which no other run's has: a DNS-1035 label.

    It is run.name where that is such a label and the run is in the cluster's bucket, else it ends
    in a digest of the run's folder. A run.name that ends like one has another appended.

    >>> rayjob_name("demo", "s3://rayapp-123456789012-us-west-2/runs", Options("123456789012"))
    'demo'
    >>> rayjob_name("Demo", "s3://rayapp-123456789012-us-west-2/runs", Options("123456789012"))
    'demo-f2b44a5a'
    """
    label = rf"(?!rayapp$|.*-[0-9a-f]{{8}}$)[a-z]([a-z0-9-]{{0,{RAYJOB_LETTERS - 2}}}[a-z0-9])?"
    if re.fullmatch(label, name) and storage == f"s3://{bucket(options)}/runs":
        return name  # `rayapp` is the cluster that stays, whose service would be the RayJob's
    words = re.sub(r"[^a-z0-9]+", "-", name.lower())
    words = words if words[0].isalpha() else f"run-{words}"
    digest = hashlib.sha256(f"{storage}/{name}".encode()).hexdigest()[:8]
    return f"{words[: RAYJOB_LETTERS - 9].rstrip('-')}-{digest}"
