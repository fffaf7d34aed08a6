"""Check what starts on EKS where EC2 has room for some of cluster.instance alone, and its cost.

Terraform applies what is rendered for a list to the emulator, which refuses some instance types;
kubectl is a stand-in that keeps the RayCluster and refuses calls that the real one would not take.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import check_manifests
from patience import PATIENCE_S
from priced import CHOICES, costs_the_third
from proving import Site
from terraform import ACCOUNT, Cloud

from rayapp.__main__ import main
from rayapp.cluster import Options, render, write
from rayapp.cluster.connect import NotReachable
from rayapp.cluster.hosts import start, wait_for_workers
from rayapp.config import INSTANCE_LABEL, MARKET_LABEL, RunConfig, load

TYPES = ("m7i.4xlarge", "c6i.4xlarge", "r6i.4xlarge")
GROUPS = ("1-m7i-4xlarge-on-demand", "2-c6i-4xlarge-spot", "3-r6i-4xlarge-on-demand")
FIRST, SECOND, THIRD = GROUPS
WITHOUT = "/emulator/without"
NODES = 2  # 16 workers and Ray Data on 14 CPUs each

needs_terraform = pytest.mark.skipif(
    shutil.which("terraform") is None, reason="terraform is not installed"
)
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")


def config(instance: str = CHOICES) -> RunConfig:
    return load(None, {"cluster.instance": instance, "cluster.workers": "16"})


def node_group(cloud: Cloud, group: str, kind: str, subnet: str) -> None:
    """Make a node group as Terraform does."""
    data = {"ImageId": "ami-12c6146b"}
    ec2 = cloud.client("ec2")
    template = ec2.create_launch_template(LaunchTemplateName=group, LaunchTemplateData=data)
    cloud.client("eks").create_nodegroup(
        clusterName="rayapp-eks",
        nodegroupName=f"rayapp-eks-{group}",
        subnets=[subnet],
        nodeRole=f"arn:aws:iam::{ACCOUNT}:role/node",
        instanceTypes=[kind],
        scalingConfig={"minSize": 0, "maxSize": NODES, "desiredSize": 0},
        launchTemplate={"id": template["LaunchTemplate"]["LaunchTemplateId"]},
    )


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A cluster with a node group for each type, made without Terraform."""
    cloud = Cloud(tmp_path_factory.mktemp("account"))
    ec2 = cloud.client("ec2")
    try:
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
        role = f"arn:aws:iam::{ACCOUNT}:role/cluster"
        network = {"subnetIds": [subnet]}
        made = {"name": "rayapp-eks", "roleArn": role, "resourcesVpcConfig": network}
        cloud.client("eks").create_cluster(**made)
        for group, kind in zip((*GROUPS, "system"), (*TYPES, "m6i.2xlarge"), strict=True):
            node_group(cloud, group, kind, subnet)
        yield cloud
    finally:
        cloud.end()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayapp.cluster.hosts.POLL_S", 0.1)


class Kube(Site):
    """The stand-in of kubectl, in this process's PATH, with the rendered cluster applied."""

    def __init__(self, cloud: Cloud, folder: Path, patch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        super().__init__(cloud, folder)
        for name, value in self.environment.items():
            if name in ("PATH", "STAND_INS") or name.startswith("AWS_"):
                patch.setenv(name, value)
        self.apply(CHOICES)

    def apply(self, instance: str) -> None:
        """Do as `make up-eks` does with a config."""
        options = Options(account=ACCOUNT, tag="0.1.0")
        write(render("kuberay", config(instance), options), self.folder / "rendered")
        words = ["kubectl", "apply", "-k", str(self.folder / "rendered" / "cluster")]
        subprocess.run(words, check=True)

    def pods(self) -> dict[str, int]:
        """Return the replicas of the groups that have any."""
        told = yaml.safe_load(Path(f"{self.log}.raycluster").read_text())
        groups = told["spec"]["workerGroupSpecs"]
        return {one["groupName"]: one["replicas"] for one in groups if one["replicas"]}

    def nodes(self) -> dict[str, tuple[int, int]]:
        """Return the nodes that are wanted and those that run of each group, if any are."""
        found = {}
        for group in GROUPS:
            asked = {"clusterName": "rayapp-eks", "nodegroupName": f"rayapp-eks-{group}"}
            told = self.cloud.client("eks").describe_nodegroup(**asked)["nodegroup"]
            (hosts,) = told["resources"]["autoScalingGroups"]
            scaling = self.cloud.client("autoscaling")
            names = {"AutoScalingGroupNames": [hosts["name"]]}
            (one,) = scaling.describe_auto_scaling_groups(**names)["AutoScalingGroups"]
            assert told["scalingConfig"]["desiredSize"] == one["DesiredCapacity"]
            counts = (one["DesiredCapacity"], len(one["Instances"]))
            if counts != (0, 0):
                found[group] = counts
        return found


@pytest.fixture
def kube(
    account: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Kube]]:
    """The account with nothing started, and kubectl."""
    refuse(account)
    made = Kube(account, tmp_path / "site", monkeypatch)
    yield lambda: made
    scaling = account.client("autoscaling")
    for group in scaling.describe_auto_scaling_groups()["AutoScalingGroups"]:
        name = group["AutoScalingGroupName"]
        scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=0)


def refuse(cloud: Cloud, *types: str) -> None:
    """Have the emulator's EC2 lack these instance types."""
    value = ",".join(types) or "none"
    cloud.client("ssm").put_parameter(Name=WITHOUT, Value=value, Type="String", Overwrite=True)


def test_the_third_of_three_starts(account: Cloud, kube: Callable[[], Kube]) -> None:
    refuse(account, *TYPES[:2])
    said = list[str]()
    assert start("eks", "rayapp", account.client, PATIENCE_S, said.append) == THIRD
    assert [line.partition(" ")[0] for line in said] == list(GROUPS)
    assert "do not have sufficient m7i.4xlarge capacity" in said[0]
    assert "do not have sufficient c6i.4xlarge capacity" in said[1]
    assert said[2] == f"{THIRD} is up"
    assert kube().nodes() == {THIRD: (NODES, NODES)} and kube().pods() == {THIRD: NODES}
    refuse(account)
    again = list[str]()
    assert start("eks", "rayapp", account.client, PATIENCE_S, again.append) == THIRD
    assert again == said[-1:]  # what is up stays, whatever else there is room for


def test_no_pod_waits_for_nodes_that_are_refused(account: Cloud, kube: Callable[[], Kube]) -> None:
    refuse(account, TYPES[0])
    start("eks", "rayapp", account.client, PATIENCE_S, print)
    patches = [call for call in kube().calls() if "patch raycluster" in call]
    assert len(patches) == 1 and '"value": "2-c6i-4xlarge-spot"' in patches[0]


def test_a_group_whose_pods_do_not_come_is_left(account: Cloud, kube: Callable[[], Kube]) -> None:
    """As where its image cannot be pulled on that type's nodes."""
    kube().say(unready=[FIRST])
    said = list[str]()
    assert start("eks", "rayapp", account.client, 1.0, said.append) == SECOND
    assert said[0] == f"{FIRST} cannot be had: 0 of 2 workers run after 1 s"
    assert kube().nodes() == {SECOND: (NODES, NODES)} and kube().pods() == {SECOND: NODES}


def test_pods_that_were_applied_away_come_back(account: Cloud, kube: Callable[[], Kube]) -> None:
    """A second `make up-eks` applies groups without pods; their nodes are there."""
    refuse(account, TYPES[0])
    start("eks", "rayapp", account.client, PATIENCE_S, print)
    kube().apply(CHOICES)
    refuse(account)
    assert kube().pods() == {}
    assert start("eks", "rayapp", account.client, PATIENCE_S, print) == SECOND
    assert kube().pods() == {SECOND: NODES}


def test_one_of_two_that_are_wanted_ends(account: Cloud, kube: Callable[[], Kube]) -> None:
    scaling = account.client("autoscaling")
    for group in (FIRST, THIRD):
        asked = {"clusterName": "rayapp-eks", "nodegroupName": f"rayapp-eks-{group}"}
        told = account.client("eks").describe_nodegroup(**asked)["nodegroup"]
        name = told["resources"]["autoScalingGroups"][0]["name"]
        scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=NODES)
    assert start("eks", "rayapp", account.client, PATIENCE_S, print) == FIRST
    assert kube().nodes() == {FIRST: (NODES, NODES)}


def test_nothing_is_to_be_had(
    account: Cloud, kube: Callable[[], Kube], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says each reason, leaves nothing that goes on trying, and fails."""
    refuse(account, *TYPES)
    assert main(["capacity", "eks"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and out.count("do not have sufficient") == 3
    assert err.startswith(f"failed: no group of cluster.instance can be had: {FIRST} cannot")
    assert kube().nodes() == {} and kube().pods() == {}


def test_groups_of_two_lists_are_told(account: Cloud, kube: Callable[[], Kube]) -> None:
    kube().apply("[m7i.4xlarge, c6i.4xlarge:spot]")
    with pytest.raises(NotReachable, match=f"no group {THIRD}, which rayapp-eks has nodes for"):
        start("eks", "rayapp", account.client, PATIENCE_S, print)


def test_one_type_is_waited_for(
    account: Cloud, kube: Callable[[], Kube], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is chosen; a Ray cluster without its pods says why EC2 starts no host."""
    kube().say(unready=["workers"])
    kube().apply("m7i.4xlarge")
    refuse(account, TYPES[1])
    scaling = account.client("autoscaling")
    asked = {"clusterName": "rayapp-eks", "nodegroupName": f"rayapp-eks-{SECOND}"}
    told = account.client("eks").describe_nodegroup(**asked)["nodegroup"]
    name = told["resources"]["autoScalingGroups"][0]["name"]
    scaling.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=NODES)
    said = list[str]()
    with pytest.raises(NotReachable, match=r"0 of 2 workers are ready, We currently do not have"):
        wait_for_workers("eks", "rayapp", account.client, 0.3, said.append)
    assert len(said) == 1 and "c6i.4xlarge" in said[0]
    kube().say(unready=[])
    wait_for_workers("eks", "rayapp", account.client, 0.3, said.append)
    assert len(said) == 1


def test_kubectl_that_reaches_nothing_is_told(
    account: Cloud, kube: Callable[[], Kube], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{kube().log}.raycluster").unlink()
    assert main(["capacity", "eks"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("failed: kubectl get fails: stand-in: no such RayCluster")
    assert "aws eks update-kubeconfig" in err


@needs_kubectl
def test_the_groups_are_what_kuberay_takes(tmp_path: Path) -> None:
    """A group for each type: its size, market, devices, labels of Ray; without pods."""
    kinds = "[p5.48xlarge, p4d.24xlarge:spot@9.5, m7i.4xlarge]"
    lustre = json.dumps({"id": "fs-1", "dns_name": "d", "mount_name": "m", "capacity_gib": 1200})
    options = Options(account=ACCOUNT, components=("lustre",), lustre=lustre)
    write(render("kuberay", config(kinds), options), tmp_path)
    built = {
        what: list(yaml.safe_load_all(kustomize(tmp_path / what))) for what in ("common", "cluster")
    }
    assert check_manifests([*built["common"], *built["cluster"]]) == []
    (cluster,) = built["cluster"]
    groups = cluster["spec"]["workerGroupSpecs"]
    seen = list[Any]()
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        limits = container["resources"]["limits"]
        assert pod["nodeSelector"]["rayapp/group"] == group["groupName"]
        assert [mount["name"] for mount in container["volumeMounts"]].count("lustre") == 1
        assert (group["replicas"], group["minReplicas"]) == (0, 0)
        assert "labels" not in group["rayStartParams"]  # KubeRay refuses them there
        labels = (group["labels"][INSTANCE_LABEL], group["labels"][MARKET_LABEL])
        spot = pod["nodeSelector"].get("eks.amazonaws.com/capacityType")
        efa = limits.get("vpc.amazonaws.com/efa")
        seen.append((*labels, group["maxReplicas"], limits.get("nvidia.com/gpu"), efa, spot))
    assert seen == [
        ("p5.48xlarge", "on-demand", 2, "8", "32", None),
        ("p4d.24xlarge", "spot", 2, "8", "4", "SPOT"),
        ("m7i.4xlarge", "on-demand", 2, None, None, None),
    ]
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert [volume["name"] for volume in head["volumes"]].count("lustre") == 1
    assert not (tmp_path / "job").exists()


def kustomize(folder: Path) -> str:
    words = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """The stack of EKS for a list of three types, and what it takes of the base's."""
    cloud = Cloud(tmp_path_factory.mktemp("cloud"))
    try:
        cloud.stand_in_for_base("eks")
        options = Options(account=ACCOUNT, tag="0.1.0")
        text = render("kuberay", config(), options)["terraform.tfvars.json"]
        cloud.variables("eks", {**json.loads(text), "alarm_email": "nobody"})
        cloud.apply("eks")
        yield cloud
    finally:
        cloud.end()


@pytest.mark.full
@needs_terraform
def test_what_terraform_makes_starts_the_third(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty at first; the third runs where two are refused; a plan changes nothing then."""
    site = Kube(cloud, tmp_path / "site", monkeypatch)
    assert site.nodes() == {}
    refuse(cloud, *TYPES[:2])
    assert start("eks", "rayapp", cloud.client, PATIENCE_S, print) == THIRD
    assert site.nodes() == {THIRD: (NODES, NODES)} and site.pods() == {THIRD: NODES}
    only = [{"Name": "instance-type", "Values": [TYPES[2]]}]
    (told,) = cloud.client("ec2").describe_instances(Filters=only)["Reservations"]
    tags = {one["Key"]: one["Value"] for one in told["Instances"][0]["Tags"]}
    assert tags["Name"] == f"rayapp-eks-{THIRD}"
    places = cloud.client("ec2").describe_placement_groups()["PlacementGroups"]
    assert {f"rayapp-eks-{group}" for group in GROUPS} <= {one["GroupName"] for one in places}
    done = cloud.plan("eks")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_a_run_costs_what_started(tmp_path: Path) -> None:
    """Ray's node has the labels that the third's pods give it; the run has the third's price."""
    files = render("kuberay", config(), Options(account=ACCOUNT))
    group = yaml.safe_load(files["base/raycluster.yaml"])["spec"]["workerGroupSpecs"][2]
    labels = ",".join(f"{key}={value}" for key, value in group["labels"].items())
    costs_the_third(tmp_path, f"--labels={labels}")  # KubeRay's option for such labels
