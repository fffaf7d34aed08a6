"""Check what starts where EC2 has room for some of cluster.instance alone, and what a run costs.

Terraform applies what is rendered for a list to the emulator, which refuses some instance types.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Node, cluster
from patience import PATIENCE_S
from terraform import ACCOUNT, REGION, Cloud, mirror

from rayapp.__main__ import main
from rayapp.cluster import Options, render, write
from rayapp.cluster.capacity import start
from rayapp.config import RunConfig, load
from rayapp.observe.goodput import read_events
from rayapp.storage import open_storage

TYPES = ("m7i.4xlarge", "c6i.4xlarge", "r6i.4xlarge")
CHOICES = "[m7i.4xlarge, c6i.4xlarge:spot@0.25, r6i.4xlarge@1.5]"
WITHOUT = "/emulator/without"
FIRST, SECOND, THIRD = (
    [f"worker-{number}-{name}-us-west-2{zone}" for zone in "ab"]
    for number, name in enumerate(
        ("m7i-4xlarge-on-demand", "c6i-4xlarge-spot", "r6i-4xlarge-on-demand"), start=1
    )
)

needs_terraform = pytest.mark.skipif(
    shutil.which("terraform") is None, reason="terraform is not installed"
)
pytestmark = [pytest.mark.full, needs_terraform]


def config() -> RunConfig:
    return load(None, {"cluster.instance": CHOICES, "cluster.workers": "16"})


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """The stack of ECS for a list of three types in two zones, and what it takes of the base's."""
    cloud = Cloud(tmp_path_factory.mktemp("cloud"))
    try:
        done = cloud.init("ecs")
        if done.returncode and mirror() is None:
            pytest.skip(f"the AWS provider cannot be had here: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
        place = {"LocationConstraint": REGION}
        bucket = f"rayapp-{ACCOUNT}-{REGION}"
        cloud.client("s3").create_bucket(Bucket=bucket, CreateBucketConfiguration=place)
        key = cloud.client("kms").create_key()["KeyMetadata"]["KeyId"]
        cloud.client("kms").create_alias(AliasName="alias/rayapp", TargetKeyId=key)
        cloud.client("ecr").create_repository(repositoryName="rayapp")
        rendered = cloud.folder / "rendered"
        write(render("ecs", config(), Options(account=ACCOUNT, tag="0.1.0")), rendered)
        variables = json.loads((rendered / "terraform.tfvars.json").read_text())
        more = {"rendered": str(rendered), "alarm_email": "nobody", "zones": 2}
        cloud.variables("ecs", {**variables, **more})
        cloud.apply("ecs")
        yield cloud
    finally:
        cloud.end()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayapp.cluster.capacity.POLL_S", 0.1)


def refuse(cloud: Cloud, *types: str) -> None:
    """Have the emulator's EC2 lack these instance types."""
    value = ",".join(types) or "none"
    cloud.client("ssm").put_parameter(Name=WITHOUT, Value=value, Type="String", Overwrite=True)


def wanted(cloud: Cloud) -> dict[str, tuple[int, int]]:
    """Return the tasks and the hosts that are wanted of each group of workers, if any are."""
    ecs, found = cloud.client("ecs"), {}
    for service in (*FIRST, *SECOND, *THIRD):
        (told,) = ecs.describe_services(cluster="rayapp-ecs", services=[service])["services"]
        asked = {"AutoScalingGroupNames": [f"rayapp-ecs-{service}"]}
        (group,) = cloud.client("autoscaling").describe_auto_scaling_groups(**asked)[
            "AutoScalingGroups"
        ]
        sizes = (told["desiredCount"], group["DesiredCapacity"])
        if any(sizes):
            found[service] = sizes
    return found


def hosts(cloud: Cloud) -> list[str]:
    """Return the instance types of the workers' hosts that run."""
    only = [
        {"Name": "instance-state-name", "Values": ["running"]},
        {"Name": "tag:Name", "Values": ["rayapp-ecs-worker-*"]},
    ]
    told = cloud.client("ec2").describe_instances(Filters=only)["Reservations"]
    return [one["InstanceType"] for each in told for one in each["Instances"]]


def test_a_list_starts_nothing_by_itself(cloud: Cloud) -> None:
    assert wanted(cloud) == {} and hosts(cloud) == []


def test_the_third_starts_where_two_are_refused(cloud: Cloud) -> None:
    refuse(cloud, *TYPES[:2])
    said = list[str]()
    assert start("rayapp", cloud.client, PATIENCE_S, said.append) == THIRD[0]
    assert [line.partition(" ")[0] for line in said] == [*FIRST, *SECOND, THIRD[0]]
    assert said[1].endswith(
        "cannot be had: We currently do not have sufficient m7i.4xlarge capacity in the "
        "Availability Zone you requested (us-west-2b). Launching EC2 instance failed."
    )
    assert said[-1] == f"{THIRD[0]} is up"
    assert wanted(cloud) == {THIRD[0]: (2, 2)}  # 16 workers and Ray Data on 14 CPUs each
    assert hosts(cloud) == ["r6i.4xlarge"] * 2
    refuse(cloud)
    asked = {"cluster": "rayapp-ecs", "service": THIRD[0]}
    cloud.client("ecs").update_service(**asked, desiredCount=1)  # as before a larger config
    again = list[str]()
    assert start("rayapp", cloud.client, PATIENCE_S, again.append) == THIRD[0]
    assert wanted(cloud) == {THIRD[0]: (2, 2)}
    assert again == said[-1:]  # what is up stays, whatever else there is room for
    done = cloud.plan("ecs")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_group_whose_hosts_do_not_come_back_is_left(cloud: Cloud) -> None:
    """As after spot instances were taken away: then the list begins at its first."""
    refuse(cloud, TYPES[2])
    asked = {"cluster": "rayapp-ecs", "service": THIRD[0]}
    cloud.client("ecs").update_service(**asked, desiredCount=2)  # ECS tries to replace them
    said = list[str]()
    assert start("rayapp", cloud.client, PATIENCE_S, said.append) == FIRST[0]
    assert said[0].startswith(f"{THIRD[0]} cannot be had: We currently do not have")
    assert wanted(cloud) == {FIRST[0]: (2, 2)} and hosts(cloud) == ["m7i.4xlarge"] * 2


def test_nothing_is_to_be_had(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says each reason, leaves nothing that goes on trying, and fails."""
    refuse(cloud, *TYPES)
    asked = {"cluster": "rayapp-ecs", "service": FIRST[0]}
    cloud.client("ecs").update_service(**asked, desiredCount=2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    assert main(["capacity", "ecs"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 6 and out.count("do not have sufficient") == 6
    assert err.startswith("failed: no group of cluster.instance can be had: worker-1-m7i-4xlarge")
    assert "Run the same again later" in err
    assert wanted(cloud) == {} and hosts(cloud) == []


def test_a_run_costs_what_started(cloud: Cloud, tmp_path: Path) -> None:
    """Ray's node has the labels that the third's task gives it; the run has the third's price."""
    ecs = cloud.client("ecs")
    (service,) = ecs.describe_services(cluster="rayapp-ecs", services=THIRD[:1])["services"]
    task = ecs.describe_task_definition(taskDefinition=service["taskDefinition"])["taskDefinition"]
    command = task["containerDefinitions"][0]["command"]
    (label,) = [word for word in command if word.startswith("--labels=")]
    with cluster(tmp_path) as nodes:
        nodes.append(Node(tmp_path / "worker.log", cpus=2, seats=1, head=nodes[0], more=[label]))
        settings = {
            "run.name": "priced",
            "run.storage": str(tmp_path),
            "run.max_usd": 100,
            "cluster.instance": CHOICES,
            "cluster.workers": 1,
            "cluster.address": nodes[0].address,
            "data.seq_len": 64,
            "train.tokens_per_step": 256,
            "train.micro_batch": 4,
            "train.max_steps": 2,
            "checkpoint.export": "false",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        done = subprocess.run(
            [sys.executable, "-m", "rayapp.finetune", *options],
            cwd=tmp_path,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = open_storage(str(tmp_path / "priced"))
    told: list[Any] = [event for event in read_events(run) if "instance" in event]
    assert {(each["nodes"], each["instance"], each["usd_per_hour"]) for each in told} == {
        (1, "r6i.4xlarge@1.5", 1.5)
    }
    ended = read_events(run)[-1]["time"]
    result = json.loads(run.read("result.json"))
    assert result["cost_usd"] == pytest.approx(1.5 * (ended - told[0]["time"]) / 3600, rel=0.01)
    assert json.loads(run.read("plan.json"))["instance"] == "r6i.4xlarge"
    assert "  - r6i.4xlarge@1.5\n" in run.read("config.yaml").decode()  # the list, for the next
