"""Check what starts where EC2 has room for some of cluster.instance alone, and what a run costs.

Terraform applies what is rendered for a list to the emulator, which refuses some instance types.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S
from priced import CHOICES, costs_the_third
from terraform import ACCOUNT, REGION, Cloud

from rayapp.__main__ import main
from rayapp.cluster import Options, render, write
from rayapp.cluster.connect import NotReachable
from rayapp.cluster.hosts import start
from rayapp.cluster.preflight.facts import requirements_of
from rayapp.config import RunConfig, load

TYPES = ("m7i.4xlarge", "c6i.4xlarge", "r6i.4xlarge")
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
MORE = [f"worker-{number}-m5-large-spot-us-west-2{zone}" for number in (4, 5) for zone in "abc"]


def config() -> RunConfig:
    return load(None, {"cluster.instance": CHOICES, "cluster.workers": "16"})


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """The stack of ECS for a list of three types in two zones, and what it takes of the base's."""
    cloud = Cloud(tmp_path_factory.mktemp("cloud"))
    try:
        cloud.stand_in_for_base("ecs")
        rendered = cloud.folder / "rendered"
        write(render("ecs", config(), Options(account=ACCOUNT, tag="0.1.0")), rendered)
        variables = json.loads((rendered / "terraform.tfvars.json").read_text())
        more = {"rendered": str(rendered), "alarm_email": "nobody", "zones": 2}
        cloud.variables("ecs", {**variables, **more})
        cloud.apply("ecs")
        yield cloud
    finally:
        cloud.end()


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A cluster with groups for a list of five types, made without Terraform: more than ECS tells
    of at once."""
    cloud = Cloud(tmp_path_factory.mktemp("account"))
    ecs, ec2, scaling = (cloud.client(name) for name in ("ecs", "ec2", "autoscaling"))
    try:
        ecs.create_cluster(clusterName="rayapp-ecs")
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        task = [{"name": "ray", "image": "ray", "memory": 512}]
        ecs.register_task_definition(family="worker", containerDefinitions=task)
        made = {"cluster": "rayapp-ecs", "taskDefinition": "worker"}
        ecs.create_service(**made, serviceName="head", desiredCount=0)
        subnets = {
            zone: ec2.create_subnet(
                VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=f"{REGION}{zone}"
            )["Subnet"]["SubnetId"]
            for n, zone in enumerate("abc")
        }
        for service in (*FIRST, *SECOND, *THIRD, *MORE):
            kind = ".".join(service.split("-")[2:4])
            group = f"rayapp-ecs-{service}"
            data = {"ImageId": "ami-12c6146b", "InstanceType": kind}
            ec2.create_launch_template(LaunchTemplateName=group, LaunchTemplateData=data)
            scaling.create_auto_scaling_group(
                AutoScalingGroupName=group,
                LaunchTemplate={"LaunchTemplateName": group, "Version": "$Latest"},
                MinSize=0,
                MaxSize=2,
                VPCZoneIdentifier=subnets[service[-1]],
                NewInstancesProtectedFromScaleIn=True,
                Tags=[{"Key": "Name", "Value": group, "PropagateAtLaunch": True}],
            )
            ecs.create_service(**made, serviceName=service, desiredCount=0)
        yield cloud
    finally:
        cloud.end()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayapp.cluster.hosts.POLL_S", 0.1)


def here(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands of this process ask the emulator."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")


def refuse(cloud: Cloud, *types: str) -> None:
    """Have the emulator's EC2 lack these instance types."""
    value = ",".join(types) or "none"
    cloud.client("ssm").put_parameter(Name=WITHOUT, Value=value, Type="String", Overwrite=True)


def wanted(cloud: Cloud) -> dict[str, tuple[int, int]]:
    """Return the tasks and the hosts that are wanted of each group of workers, if any are."""
    ecs, found = cloud.client("ecs"), {}
    groups = cloud.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    sizes = {one["AutoScalingGroupName"]: one["DesiredCapacity"] for one in groups}
    for group in [name for name in sizes if name.startswith("rayapp-ecs-worker-")]:
        service = group.removeprefix("rayapp-ecs-")
        (told,) = ecs.describe_services(cluster="rayapp-ecs", services=[service])["services"]
        if told["desiredCount"] or sizes[group]:
            found[service] = (told["desiredCount"], sizes[group])
    return found


def hosts(cloud: Cloud) -> list[str]:
    """Return the instance types of the workers' hosts that run."""
    only = [
        {"Name": "instance-state-name", "Values": ["running"]},
        {"Name": "tag:Name", "Values": ["rayapp-ecs-worker-*"]},
    ]
    told = cloud.client("ec2").describe_instances(Filters=only)["Reservations"]
    return [one["InstanceType"] for each in told for one in each["Instances"]]


def test_the_last_of_many_groups_starts(account: Cloud) -> None:
    refuse(account, *TYPES)
    said = list[str]()
    assert start("ecs", "rayapp", account.client, PATIENCE_S, said.append) == MORE[0]
    assert [line.partition(" ")[0] for line in said] == [*FIRST, *SECOND, *THIRD, MORE[0]]
    assert "sufficient r6i.4xlarge capacity" in said[5] and "(us-west-2b)" in said[5]
    assert wanted(account) == {MORE[0]: (2, 2)} and hosts(account) == ["m5.large"] * 2


def test_one_of_two_that_are_wanted_ends(account: Cloud) -> None:
    """As where a command was killed between two groups: else both would be paid for."""
    refuse(account)
    asked = {"cluster": "rayapp-ecs", "service": FIRST[1]}
    account.client("ecs").update_service(**asked, desiredCount=2)
    assert start("ecs", "rayapp", account.client, PATIENCE_S, print) == FIRST[1]
    assert wanted(account) == {FIRST[1]: (2, 2)} and hosts(account) == ["m7i.4xlarge"] * 2


def test_a_group_that_says_nothing_is_not_waited_for_without_end(account: Cloud) -> None:
    refuse(account, "?m7i.4xlarge", *TYPES[1:], "m5.large")
    asked = {"cluster": "rayapp-ecs", "service": FIRST[1]}
    account.client("ecs").update_service(**asked, desiredCount=2)
    said = list[str]()
    with pytest.raises(NotReachable, match=r"no group of cluster\.instance can be had: worker-1"):
        start("ecs", "rayapp", account.client, 0.3, said.append)
    assert said[0] == f"{FIRST[1]} cannot be had: 0 of 2 workers run after 0 s"
    assert len(said) == 12 and wanted(account) == {} and hosts(account) == []


def test_a_cluster_for_one_type_has_nothing_to_choose(account: Cloud) -> None:
    ecs = account.client("ecs")
    ecs.create_cluster(clusterName="other-ecs")
    made = {"cluster": "other-ecs", "taskDefinition": "worker"}
    ecs.create_service(**made, serviceName="worker-on-demand", desiredCount=0)
    assert start("ecs", "other", account.client, PATIENCE_S, print) is None


def test_a_cluster_that_is_not_there(
    account: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here(account, monkeypatch)
    assert main(["capacity", "ecs", "--name=none"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("failed: ") and "Cluster not found" in err and "Traceback" not in err
    assert main(["capacity", "k8s"]) == 2
    assert "k8s is unknown: there is no such cluster. Set ecs or eks" in capsys.readouterr().err


def test_a_preflight_requires_no_type_of_a_list() -> None:
    """Any of them may have started."""
    for text, known in (("p5.48xlarge", True), ("p5.48xlarge,p4d.24xlarge", False)):
        required = requirements_of(load(None, {"cluster.instance": text}))
        assert (required.instance is not None) == known


@pytest.mark.full
@needs_terraform
def test_a_list_starts_nothing_by_itself(cloud: Cloud) -> None:
    assert wanted(cloud) == {} and hosts(cloud) == []


@pytest.mark.full
@needs_terraform
def test_the_third_starts_where_two_are_refused(cloud: Cloud) -> None:
    refuse(cloud, *TYPES[:2])
    said = list[str]()
    assert start("ecs", "rayapp", cloud.client, PATIENCE_S, said.append) == THIRD[0]
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
    assert start("ecs", "rayapp", cloud.client, PATIENCE_S, again.append) == THIRD[0]
    assert wanted(cloud) == {THIRD[0]: (2, 2)}
    assert again == said[-1:]  # what is up stays, whatever else there is room for
    done = cloud.plan("ecs")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@needs_terraform
def test_a_group_whose_hosts_do_not_come_back_is_left(cloud: Cloud) -> None:
    """As after spot instances were taken away: then the list begins at its first."""
    refuse(cloud, TYPES[2])
    asked = {"cluster": "rayapp-ecs", "service": THIRD[0]}
    cloud.client("ecs").update_service(**asked, desiredCount=2)  # ECS tries to replace them
    said = list[str]()
    assert start("ecs", "rayapp", cloud.client, PATIENCE_S, said.append) == FIRST[0]
    assert said[0].startswith(f"{THIRD[0]} cannot be had: We currently do not have")
    assert wanted(cloud) == {FIRST[0]: (2, 2)} and hosts(cloud) == ["m7i.4xlarge"] * 2


@pytest.mark.full
@needs_terraform
def test_nothing_is_to_be_had(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says each reason, leaves nothing that goes on trying, and fails."""
    refuse(cloud, *TYPES)
    asked = {"cluster": "rayapp-ecs", "service": FIRST[0]}
    cloud.client("ecs").update_service(**asked, desiredCount=2)
    here(cloud, monkeypatch)
    assert main(["capacity", "ecs"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 6 and out.count("do not have sufficient") == 6
    assert err.startswith("failed: no group of cluster.instance can be had: worker-1-m7i-4xlarge")
    assert "Run the same again later" in err
    assert wanted(cloud) == {} and hosts(cloud) == []


@pytest.mark.full
@needs_terraform
def test_a_run_costs_what_started(cloud: Cloud, tmp_path: Path) -> None:
    """Ray's node has the labels that the third's task gives it; the run has the third's price."""
    ecs = cloud.client("ecs")
    (service,) = ecs.describe_services(cluster="rayapp-ecs", services=THIRD[:1])["services"]
    task = ecs.describe_task_definition(taskDefinition=service["taskDefinition"])["taskDefinition"]
    command = task["containerDefinitions"][0]["command"]
    (label,) = [word for word in command if word.startswith("--labels=")]
    costs_the_third(tmp_path, label)
