"""The stacks of infra/, applied with the real provider, read back, planned again and destroyed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from calls import Call, golden, judge, same_as_golden
from ceph import KEYS, Ceph
from patience import PATIENCE_S
from terraform import ACCOUNT, REGION, ROOT, Cloud, mirror

from rayapp.cluster import Options, render, write
from rayapp.config import RunConfig, load
from rayapp.driver.ray_workers import ray_storage
from rayapp.hardware import INSTANCES, instance
from rayapp.storage import MIN_PART_BYTES, StorageError, open_input, open_storage

DATA_NODES = 2
ECS_INSTANCE = "p4d.24xlarge"
EKS_INSTANCES = ("g5.12xlarge", "p3.8xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge")
FROM_FILE = {  # the seed's set-ups for images
    "p3.8xlarge": "resnet50_imagenet.yaml",
    "p4d.24xlarge": "efficientnet_b7_imagenet.yaml",
}
BUCKET = f"rayapp-{ACCOUNT}-{REGION}"
SECRETS = [
    f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hf-AbC123",
    f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/mine/wandb",
]
GPU_METRICS = {  # of the CloudWatch agent; the seeds' list
    *("utilization_gpu", "utilization_memory", "memory_total", "memory_used", "memory_free"),
    *("clocks_current_graphics", "clocks_current_sm", "clocks_current_memory"),
    *("temperature_gpu", "power_draw"),
}

needs_terraform = pytest.mark.skipif(
    shutil.which("terraform") is None, reason="terraform is not installed"
)
pytestmark = [pytest.mark.full, needs_terraform]


def config(instance_type: str, workers: str = "8:16") -> RunConfig:
    return load(None, {"cluster.instance": instance_type, "cluster.workers": workers})


def tfvars(
    platform: str, instance_type: str, file: str | None = None, **options: Any
) -> dict[str, Any]:
    described = load(str(ROOT / "configs" / file)) if file else config(instance_type)
    assert described.cluster.instance == instance_type
    asked = {"tag": "0.1.0", "data_nodes": DATA_NODES, **options}
    files = render(platform, described, Options(account=ACCOUNT, **asked))
    return json.loads(files["terraform.tfvars.json"])


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """All three stacks applied: two kinds of ECS workers, five of EKS, hosts for data on both."""
    cloud = Cloud(tmp_path_factory.mktemp("cloud"))
    try:
        first = cloud.init("base")
        if first.returncode and mirror() is None:
            pytest.skip(f"the AWS provider cannot be had here: {first.stderr[-300:]}")
        assert first.returncode == 0, first.stderr
        for stack in ("ecs", "eks"):
            assert (done := cloud.init(stack)).returncode == 0, done.stderr
        rendered = cloud.folder / "rendered"
        options = Options(account=ACCOUNT, data_nodes=DATA_NODES)
        write(render("ecs", config(ECS_INSTANCE), options), rendered)
        ecs, spot = tfvars("ecs", ECS_INSTANCE), tfvars("ecs", ECS_INSTANCE, market="spot")
        ecs["workers"] |= spot["workers"]
        eks = [tfvars("kuberay", one, FROM_FILE.get(one)) for one in EKS_INSTANCES]
        groups = {
            name.split(".")[0]: one["workers"]["workers"]
            for name, one in zip(EKS_INSTANCES, eks, strict=True)
        }
        groups["data"] = eks[0]["workers"]["data"]
        groups["p5"] |= {"market": "capacity-block", "reservation_id": "cr-0123456789abcdef0"}
        admins = [f"arn:aws:iam::{ACCOUNT}:role/admins"]
        cloud.variables("base", {"region": REGION})
        more = {"alarm_email": "a@example.com", "secret_arns": SECRETS}
        cloud.variables("ecs", {**ecs, "rendered": str(rendered), **more})
        eks_only = {"workers": groups, "lustre_gib": 1200, "admin_role_arns": admins, "nat": False}
        eks_only |= more
        cloud.variables("eks", {**eks[0], **eks_only})
        with ThreadPoolExecutor(3) as pool:
            # The provider watches the bucket's lifecycle rules for a minute: others go ahead.
            base = pool.submit(cloud.apply, "base")
            wait_for(lambda: cloud.client("ecr").describe_repositories(), base)
            wait_for(lambda: cloud.client("kms").describe_key(KeyId="alias/rayapp"), base)
            for applied in [pool.submit(cloud.apply, stack) for stack in ("ecs", "eks")] + [base]:
                applied.result()
        cloud.client("s3").put_object(Bucket=BUCKET, Key="runs/demo/model/x", Body=b"weights")
        yield cloud
    finally:
        cloud.end()


def wait_for(ask: Callable[[], Any], applying: Any) -> None:
    """Wait until AWS knows of a thing."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = ask()
        except ClientError:
            found = None
        if found and found.get("repositories", True):
            return
        assert not applying.done() or applying.result() is None
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.parametrize("stack", ["base", "ecs", "eks"])
def test_a_second_plan_is_empty(cloud: Cloud, stack: str) -> None:
    done = cloud.plan(stack)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


def test_nothing_comes_in_from_anywhere(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    vpcs = {vpc["VpcId"] for vpc in ec2.describe_vpcs()["Vpcs"] if not vpc["IsDefault"]}
    assert len(vpcs) == 2
    groups = [g for g in ec2.describe_security_groups()["SecurityGroups"] if g["VpcId"] in vpcs]
    assert len(groups) >= 7  # nodes, endpoints and the default one of each, Lustre's, EKS's own
    for group in groups:
        for rule in group["IpPermissions"]:
            assert not rule.get("IpRanges") and not rule.get("Ipv6Ranges"), group
            known = {other["GroupId"] for other in groups}
            assert {pair["GroupId"] for pair in rule["UserIdGroupPairs"]} <= known
    for subnet in ec2.describe_subnets()["Subnets"]:
        assert subnet["VpcId"] not in vpcs or not subnet["MapPublicIpOnLaunch"]
    cluster = cloud.client("eks").describe_cluster(name="rayapp-eks")["cluster"]
    assert cluster["resourcesVpcConfig"]["endpointPublicAccess"] is False
    services = cloud.client("ecs")
    for name in ("head", "worker-on-demand", "worker-spot"):
        (one,) = services.describe_services(cluster="rayapp-ecs", services=[name])["services"]
        network = one["networkConfiguration"]["awsvpcConfiguration"]
        assert network.get("assignPublicIp", "DISABLED") == "DISABLED"


def test_without_nat_there_is_no_way_out(cloud: Cloud) -> None:
    """EKS here has nat = false, ECS has it: one gateway, and HTTPS the only way through."""
    ec2 = cloud.client("ec2")
    (gateway,) = ec2.describe_nat_gateways()["NatGateways"]
    subnet = cloud.client("eks").describe_cluster(name="rayapp-eks")["cluster"]
    assert gateway["VpcId"] != subnet["resourcesVpcConfig"]["vpcId"]
    for group in ec2.describe_security_groups()["SecurityGroups"]:
        if "-nodes-" in group["GroupName"]:
            wide = [rule for rule in group["IpPermissionsEgress"] if rule["IpRanges"]]
            assert [(rule["FromPort"], rule["ToPort"]) for rule in wide] == [(443, 443)]
    endpoints = ec2.describe_vpc_endpoints()["VpcEndpoints"]
    kinds = [one["VpcEndpointType"] for one in endpoints if one["ServiceName"].endswith(".s3")]
    assert kinds == ["Gateway", "Gateway"]


def launch_templates(cloud: Cloud) -> dict[str, dict[str, Any]]:
    """Return {group: data} of every launch template's newest version."""
    ec2, found = cloud.client("ec2"), {}
    for template in ec2.describe_launch_templates()["LaunchTemplates"]:
        (newest,) = ec2.describe_launch_template_versions(
            LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Latest"]
        )["LaunchTemplateVersions"]
        name = re.sub(r"-[0-9a-z]{26}$", "", template["LaunchTemplateName"])
        found[name] = newest["LaunchTemplateData"]
    return found


def test_hosts_are_closed_and_encrypted(cloud: Cloud) -> None:
    templates = launch_templates(cloud)
    assert len(templates) == 3 + 1 + len(EKS_INSTANCES) + 2
    for name, data in templates.items():
        assert data["MetadataOptions"]["HttpTokens"] == "required", name
        assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1, name
        assert all(disk["Ebs"]["Encrypted"] for disk in data["BlockDeviceMappings"]), name
        assert "KeyName" not in data, name
        for card in data["NetworkInterfaces"]:
            assert not card.get("AssociatePublicIpAddress"), name
        script = base64.b64decode(data["UserData"]).decode()
        assert "AmazonCloudWatch" in script or "amazon-cloudwatch-agent" in script, name
    assert (
        "ECS_ENABLE_SPOT_INSTANCE_DRAINING=true"
        in base64.b64decode(templates["rayapp-ecs-worker-spot"]["UserData"]).decode()
    )


def test_every_node_has_all_its_fabric_adapters(cloud: Cloud) -> None:
    wanted = {f"rayapp-eks-{name.split('.')[0]}": name for name in EKS_INSTANCES}
    wanted |= {"rayapp-ecs-worker-on-demand": ECS_INSTANCE, "rayapp-ecs-worker-spot": ECS_INSTANCE}
    templates = launch_templates(cloud)
    for group, name in wanted.items():
        cards = templates[group]["NetworkInterfaces"]
        efa = [card for card in cards if card.get("InterfaceType", "").startswith("efa")]
        assert len(efa) == instance(name).efa_interfaces, group
        assert [card["NetworkCardIndex"] for card in cards] == list(range(len(cards)))
        assert [card["DeviceIndex"] for card in cards] == [0] + [1] * (len(cards) - 1)


def test_the_placement_group_is_the_workers(cloud: Cloud) -> None:
    """Mixed types in one group lack capacity; a reservation has its own place."""
    (ecs, eks) = sorted(
        group["GroupName"]
        for group in cloud.client("ec2").describe_placement_groups()["PlacementGroups"]
    )
    groups = cloud.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    of_ecs = [group for group in groups if group["AutoScalingGroupName"].startswith("rayapp-ecs")]
    placed = {group["AutoScalingGroupName"]: group.get("PlacementGroup") for group in of_ecs}
    workers = {f"rayapp-ecs-worker-{market}" for market in ("on-demand", "spot")}
    others = dict.fromkeys(("rayapp-ecs-head", "rayapp-ecs-worker-data"))
    assert placed == {**others, **dict.fromkeys(workers, ecs)}
    assert all(group["MinSize"] == 0 for group in of_ecs)
    of_eks = {
        name.removeprefix("rayapp-eks-"): data.get("Placement", {}).get("GroupName")
        for name, data in launch_templates(cloud).items()
        if name.startswith("rayapp-eks")
    }
    free = {"system": None, "data": None, "p5": None}  # p5 has a capacity block
    assert of_eks == {name.split(".")[0]: eks for name in EKS_INSTANCES} | free


def changed(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Return the changes of attributes that a plan shows."""
    assert done.returncode == 2, done.stdout + done.stderr
    return {" ".join(line.split()) for line in done.stdout.splitlines() if " -> " in line}


def test_workers_come_back_from_idle(cloud: Cloud) -> None:
    """What the idle alarm has set to none is what `make up-*` starts again."""
    ecs, eks = cloud.client("ecs"), cloud.client("eks")
    service = {"cluster": "rayapp-ecs", "service": "worker-on-demand"}
    group = {"clusterName": "rayapp-eks", "nodegroupName": "rayapp-eks-p4d"}
    size = eks.describe_nodegroup(**group)["nodegroup"]["scalingConfig"]
    ecs.update_service(**service, desiredCount=0)
    eks.update_nodegroup_config(**group, scalingConfig={**size, "desiredSize": 0})
    try:
        assert "~ desired_count = 0 -> 2" in changed(cloud.plan("ecs"))
        assert f"~ desired_size = 0 -> {size['desiredSize']}" in changed(cloud.plan("eks"))
    finally:
        ecs.update_service(**service, desiredCount=2)
        eks.update_nodegroup_config(**group, scalingConfig=size)


def test_a_larger_config_changes_the_workers_alone(cloud: Cloud) -> None:
    rendered = tfvars("ecs", ECS_INSTANCE)["workers"]
    rendered["on-demand"] |= {"nodes": 3, "max_nodes": 3}
    rendered |= tfvars("ecs", ECS_INSTANCE, market="spot")["workers"]
    found = changed(cloud.plan("ecs", f"-var=workers={json.dumps(rendered)}"))
    numbers = {"~ desired_count = 2 -> 3", "~ max_capacity = 2 -> 3", "~ max_size = 2 -> 3"}
    assert numbers <= found
    assert found - numbers <= {"~ maximum_scaling_step_size = 2 -> 3"}, found


def test_nodes_let_efa_lock_memory_and_use_their_own_disks(cloud: Cloud) -> None:
    """AL2023 locks 8 MiB at most, with which libfabric registers no buffers."""
    for name, data in launch_templates(cloud).items():
        script = base64.b64decode(data["UserData"]).decode()
        (disk,) = data["BlockDeviceMappings"]
        gpus = not name.endswith(("-head", "-system", "-data"))
        assert (disk["Ebs"].get("Throughput"), disk["Ebs"].get("Iops")) == (
            (1000, 6000) if gpus else (None, None)
        ), name
        if name.startswith("rayapp-eks"):
            assert ("LimitMEMLOCK=infinity" in script) is gpus, name
            assert ("strategy: RAID0" in script) is gpus, name


def test_capacity_is_bought_as_asked(cloud: Cloud) -> None:
    templates = launch_templates(cloud)
    market = {name: data.get("InstanceMarketOptions") for name, data in templates.items()}
    assert market["rayapp-ecs-worker-spot"] == {"MarketType": "spot"}
    assert market["rayapp-ecs-worker-on-demand"] is None
    block = templates["rayapp-eks-p5"]
    assert block["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    target = block["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": "cr-0123456789abcdef0"}
    assert block["InstanceType"] == "p5.48xlarge"
    eks = cloud.client("eks")
    group = eks.describe_nodegroup(clusterName="rayapp-eks", nodegroupName="rayapp-eks-p4d")
    (taint,) = group["nodegroup"]["taints"]
    assert taint == {"key": "nvidia.com/gpu", "value": "true", "effect": "NO_SCHEDULE"}
    assert group["nodegroup"]["scalingConfig"]["minSize"] == 0


def test_the_set_ups_for_images_have_their_nodes(cloud: Cloud) -> None:
    """ResNet-50 on up to 4 p3.8xlarge, EfficientNet-B7 on up to 3 p4d.24xlarge with 4 EFA each."""
    eks, templates = cloud.client("eks"), launch_templates(cloud)
    for name, nodes, adapters in (("p3", 4, 0), ("p4d", 3, 4)):
        group = f"rayapp-eks-{name}"
        found = eks.describe_nodegroup(clusterName="rayapp-eks", nodegroupName=group)["nodegroup"]
        assert found["scalingConfig"]["maxSize"] == nodes
        kinds = [card.get("InterfaceType", "") for card in templates[group]["NetworkInterfaces"]]
        assert sum(kind.startswith("efa") for kind in kinds) == adapters
    (system,) = cloud.client("fsx").describe_file_systems()["FileSystems"]
    nodes_in = {found["subnets"][0], *system["SubnetIds"]}
    assert len(nodes_in) == 1, "the file system is where the nodes are"


@pytest.mark.parametrize("stack", ["ecs", "eks"])
def test_the_dashboard_has_every_gpu(cloud: Cloud, stack: str) -> None:
    body = cloud.client("cloudwatch").get_dashboard(DashboardName=f"rayapp-{stack}")
    widgets = json.loads(body["DashboardBody"])["widgets"]
    seen = set()
    for widget in widgets:
        for (metric,) in widget["properties"]["metrics"]:
            pattern = r'"nvidia_smi_(\w+)" AutoScalingGroupName="([^"]+)" index="(\d+)"'
            for found in re.finditer(pattern, metric["expression"]):
                # The agent drops `host` where it appends dimensions of its own.
                schema = "AutoScalingGroupName,InstanceId,arch,index,name}"
                assert f"{{rayapp-{stack},{schema}" in metric["expression"]
                seen.add((found[2], found[1], int(found[3])))
    names = [ECS_INSTANCE, ECS_INSTANCE] if stack == "ecs" else list(EKS_INSTANCES)
    assert len(seen) == len(GPU_METRICS) * sum(instance(name).gpus for name in names)
    assert {metric for _, metric, _ in seen} == GPU_METRICS
    agent = cloud.client("ssm").get_parameter(Name=f"/rayapp-{stack}/cloudwatch-agent")
    collected = json.loads(agent["Parameter"]["Value"])["metrics"]
    assert set(collected["metrics_collected"]["nvidia_gpu"]["measurement"]) == GPU_METRICS
    places = [(w["x"], w["y"]) for w in widgets]
    assert len(set(places)) == len(places), "widgets lie on one another"


def test_alarms_tell_and_stop(cloud: Cloud) -> None:
    alarms = cloud.client("cloudwatch").describe_alarms()["MetricAlarms"]
    names = {alarm["AlarmName"] for alarm in alarms}
    for stack in ("ecs", "eks"):
        assert {f"rayapp-{stack}-no-progress", f"rayapp-{stack}-head-down"} <= names
    idle = {alarm["AlarmName"]: alarm for alarm in alarms if alarm["AlarmName"].endswith("-idle")}
    assert len(idle) == 2 + len(EKS_INSTANCES) + 2
    by_cpu = {name for name, alarm in idle.items() if alarm["MetricName"] == "CPUUtilization"}
    assert by_cpu == {"rayapp-ecs-worker-data-idle", "rayapp-eks-data-idle"}
    scaled = cloud.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    groups = {group["AutoScalingGroupName"] for group in scaled}
    eks = cloud.client("eks")
    for name in eks.list_nodegroups(clusterName="rayapp-eks")["nodegroups"]:
        group = eks.describe_nodegroup(clusterName="rayapp-eks", nodegroupName=name)["nodegroup"]
        groups |= {one["name"] for one in group["resources"]["autoScalingGroups"]}
    assert {alarm["Dimensions"][0]["Value"] for alarm in idle.values()} <= groups
    scaling = cloud.client("application-autoscaling")
    policies = scaling.describe_scaling_policies(ServiceNamespace="ecs")["ScalingPolicies"]
    for policy in policies:
        (step,) = policy["StepScalingPolicyConfiguration"]["StepAdjustments"]
        assert step["ScalingAdjustment"] == 0
    arns = {policy["PolicyARN"] for policy in policies}
    scaling = cloud.client("autoscaling")
    for policy in scaling.describe_policies()["ScalingPolicies"]:
        if policy["PolicyType"] != "StepScaling":
            continue
        (step,) = policy["StepAdjustments"]
        assert (policy["AdjustmentType"], step["ScalingAdjustment"]) == ("ExactCapacity", 0)
        arns.add(policy["PolicyARN"])
    assert len(arns) == 2 + len(EKS_INSTANCES) + 2
    for name, alarm in idle.items():
        assert len(arns & set(alarm["AlarmActions"])) == 1, f"{name} stops nothing"
    for stack, missing in (("ecs", "notBreaching"), ("eks", "breaching")):
        head = next(alarm for alarm in alarms if alarm["AlarmName"] == f"rayapp-{stack}-head-down")
        assert head["TreatMissingData"] == missing  # EKS's metric goes with its pod
    told = cloud.client("sns").list_subscriptions()["Subscriptions"]
    assert [one["Endpoint"] for one in told] == ["a@example.com"] * 2
    for group in cloud.client("logs").describe_log_groups()["logGroups"]:
        assert group["retentionInDays"] == 365 and group["kmsKeyId"], group["logGroupName"]


def test_the_bucket_keeps_results_and_nothing_else_reaches_them(cloud: Cloud) -> None:
    s3 = cloud.client("s3")
    assert s3.get_bucket_versioning(Bucket=BUCKET)["Status"] == "Enabled"
    block = s3.get_public_access_block(Bucket=BUCKET)["PublicAccessBlockConfiguration"]
    assert set(block.values()) == {True}
    (rule,) = s3.get_bucket_encryption(Bucket=BUCKET)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "aws:kms"
    (tls,) = json.loads(s3.get_bucket_policy(Bucket=BUCKET)["Policy"])["Statement"]
    assert tls["Effect"] == "Deny"
    assert tls["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    rules = s3.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    kept = {
        rule["Filter"]["Prefix"]: rule["NoncurrentVersionExpiration"]["NoncurrentDays"]
        for rule in rules
        if "NoncurrentVersionExpiration" in rule
    }
    # What `checkpoint.keep` deletes is paid for one day more; inputs can be restored.
    assert kept == {"runs/": 1, "data/": 14, "models/": 14}
    for rule in rules:
        # Nothing that is current ever expires: neither the newest checkpoint nor model/.
        expiration = rule.get("Expiration", {})
        assert "Days" not in expiration and "Date" not in expiration and "Transitions" not in rule
    key = cloud.client("kms").describe_key(KeyId="alias/rayapp")["KeyMetadata"]
    assert cloud.client("kms").get_key_rotation_status(KeyId=key["KeyId"])["KeyRotationEnabled"]
    (repository,) = cloud.client("ecr").describe_repositories()["repositories"]
    assert repository["imageScanningConfiguration"]["scanOnPush"]
    assert repository["imageTagMutability"] == "IMMUTABLE"


MATH = {  # CloudWatch's metric math, by its documentation; None: no data point
    "ABS": lambda values: [None if v is None else abs(v) for v in values],
    "DIFF": lambda values: [
        None if None in pair else pair[1] - pair[0]
        for pair in zip([None, *values], values, strict=False)
    ],
    "FILL": lambda values, filler: fill(values, filler),
    "RUNNING_SUM": lambda values: list(itertools.accumulate(values)),
    "IF": lambda asked, yes, no: [
        yes if one else other for one, other in zip(asked, no, strict=True)
    ],
}


def fill(values: list[float | None], filler: float | str) -> list[float | None]:
    filled: list[float | None] = []
    for value in values:
        before = filled[-1] if filled else None
        filled.append(value if value is not None else before if filler == "REPEAT" else filler)
    return filled


def rings(alarm: dict[str, Any], **series: list[float | None]) -> bool:
    """Say whether an alarm on metric math goes off in the course of these data points."""
    (expression,) = [one["Expression"] for one in alarm["Metrics"] if one["ReturnData"]]
    periods, of = alarm["EvaluationPeriods"], alarm.get("DatapointsToAlarm")
    assert alarm["TreatMissingData"] == "notBreaching"
    assert alarm["ComparisonOperator"] == "LessThanOrEqualToThreshold"
    for end in range(1, len(series["step"]) + 1):
        seen = {name: values[max(0, end - periods) : end] for name, values in series.items()}
        values = eval(expression, {**MATH, "REPEAT": "REPEAT"}, seen)
        breaching = [v for v in values if v is not None and v <= alarm["Threshold"]]
        if len(breaching) >= (of or periods):
            return True
    return False


def alarm_of(cloud: Cloud, name: str) -> dict[str, Any]:
    listed = cloud.client("cloudwatch").describe_alarms(AlarmNames=[name])
    (alarm,) = listed["MetricAlarms"]
    return alarm


@pytest.mark.parametrize(
    ("step", "ended", "expected"),
    [
        ([10.0 * n for n in range(20)], {}, False),  # it goes on
        ([10, 20, 30, *[30] * 10], {}, True),  # it hangs
        ([10, 20, 30, *[None] * 10], {}, True),  # its driver died, and nothing more is told
        ([10, 20, 30, *[None] * 10], {2: 1}, False),  # it ended in the period of its last step
        ([10, 20, 30, *[None] * 10], {3: 1}, False),  # or in the next one
        ([10, 20, None, 30, 40, 50, 60, 70, 80], {}, False),  # a period without a data point
        ([10, *[None] * 10, 10, 20, 30], {0: 1}, False),  # another run, later
        ([10, *[None] * 3, *[20] * 12], {0: 1}, True),  # another run, which hangs
        ([None] * 20, {}, False),  # no run
    ],
)
def test_an_alarm_tells_a_run_that_died_from_one_that_ended(
    cloud: Cloud, step: list[float | None], ended: dict[int, float], expected: bool
) -> None:
    for stack in ("ecs", "eks"):
        alarm = alarm_of(cloud, f"rayapp-{stack}-no-progress")
        given = [ended.get(n) for n in range(len(step))]
        assert rings(alarm, step=step, ended=given) is expected
        metrics = {one["Id"]: one["MetricStat"] for one in alarm["Metrics"] if "MetricStat" in one}
        assert metrics["ended"]["Metric"]["MetricName"] == "ray_rayapp_failed"
        assert metrics["ended"]["Stat"] == "SampleCount"  # told by every end, as 0 or 1


def test_a_failed_run_rings(cloud: Cloud) -> None:
    for stack in ("ecs", "eks"):
        alarm = alarm_of(cloud, f"rayapp-{stack}-run-failed")
        assert (alarm["MetricName"], alarm["Statistic"]) == ("ray_rayapp_failed", "Maximum")
        assert alarm["ComparisonOperator"] == "GreaterThanThreshold" and alarm["Threshold"] == 0
        assert alarm["AlarmActions"] and alarm["TreatMissingData"] == "notBreaching"


def allowed(call: Callable[[], Any]) -> bool:
    """Say whether IAM let a call through; what it found then does not matter."""
    try:
        call()
    except ClientError as error:
        code = error.response["Error"]["Code"]
        return code not in ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403")
    return True


def credentials_of(cloud: Cloud, role: str) -> dict[str, str]:
    """Take a role; return its keys as boto3 names them."""
    given = cloud.client("sts").assume_role(
        RoleArn=f"arn:aws:iam::{ACCOUNT}:role/{role}", RoleSessionName="test"
    )["Credentials"]
    return {
        "aws_access_key_id": given["AccessKeyId"],
        "aws_secret_access_key": given["SecretAccessKey"],
        "aws_session_token": given["SessionToken"],
    }


@pytest.mark.parametrize("role", ["rayapp-ecs-task", "rayapp-eks-run", "rayapp-ecs-execution"])
def test_a_role_reaches_its_own_and_nothing_else(cloud: Cloud, role: str) -> None:
    """Real calls with the role's credentials, IAM on."""
    admin = cloud.client("s3")
    for key in ("runs/r/x", "data/x", "secrets/x"):
        admin.put_object(Bucket=BUCKET, Key=key, Body=b"1")
    elsewhere = f"other-{role}"
    place = {"LocationConstraint": REGION}
    admin.create_bucket(Bucket=elsewhere, CreateBucketConfiguration=place)
    as_role = credentials_of(cloud, role)
    s3, ssm = cloud.client("s3", **as_role), cloud.client("ssm", **as_role)
    cloud.post("reset-auth", "0")
    try:
        found = {
            "put runs": allowed(lambda: s3.put_object(Bucket=BUCKET, Key="runs/r/y", Body=b"")),
            "get runs": allowed(lambda: s3.get_object(Bucket=BUCKET, Key="runs/r/x")),
            "delete runs": allowed(lambda: s3.delete_object(Bucket=BUCKET, Key="runs/r/y")),
            "get data": allowed(lambda: s3.get_object(Bucket=BUCKET, Key="data/x")),
            "put data": allowed(lambda: s3.put_object(Bucket=BUCKET, Key="data/y", Body=b"")),
            "know the bucket": allowed(lambda: s3.head_bucket(Bucket=BUCKET)),
            "know the absent": allowed(lambda: s3.head_object(Bucket=BUCKET, Key="runs/r/none")),
            "list runs": allowed(lambda: s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/r/")),
            "list others": allowed(lambda: s3.list_objects_v2(Bucket=BUCKET, Prefix="secrets/")),
            "get others": allowed(lambda: s3.get_object(Bucket=BUCKET, Key="secrets/x")),
            "put elsewhere": allowed(lambda: s3.put_object(Bucket=elsewhere, Key="x", Body=b"")),
            "change the bucket": allowed(lambda: s3.delete_bucket_policy(Bucket=BUCKET)),
            "parameters": allowed(lambda: ssm.describe_parameters()),
            "iam": allowed(cloud.client("iam", **as_role).list_users),
            "ec2": allowed(cloud.client("ec2", **as_role).describe_instances),
            "ecs": allowed(cloud.client("ecs", **as_role).list_clusters),
            "secrets": allowed(cloud.client("secretsmanager", **as_role).list_secrets),
        }
    finally:
        cloud.post("reset-auth", str(10**9))
    mine = {"put runs", "get runs", "delete runs", "get data", "list runs"}
    mine |= {"know the bucket", "know the absent"}
    mine = set() if role.endswith("execution") else mine
    assert {what for what, yes in found.items() if yes} == mine


@pytest.mark.parametrize("role", ["rayapp-ecs-task", "rayapp-eks-run"])
def test_a_role_may_make_the_calls_of_a_run(
    cloud: Cloud, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage's own and those of Ray Train's file system, with IAM on."""
    given = {name.upper(): value for name, value in credentials_of(cloud, role).items()}
    for name, value in {**given, "AWS_REGION": REGION, "AWS_ENDPOINT_URL_S3": cloud.url}.items():
        monkeypatch.setenv(name, value)
    cloud.post("reset-auth", "0")
    try:
        run = open_storage(f"s3://{BUCKET}/runs/{role}")
        run.check_writable()
        assert run.stat("absent") is None and run.list() == []
        etag = run.create("LEASE", b"1")
        assert etag and run.replace_if("LEASE", b"2", etag)
        run.write("checkpoint", b"x" * (MIN_PART_BYTES + 1))
        assert [entry.name for entry in run.list()] == ["LEASE", "checkpoint"]
        files, path = ray_storage(f"s3://{BUCKET}/runs/{role}/.ray")
        files.create_dir(f"{path}/{role}", recursive=True)
        with files.open_output_stream(f"{path}/{role}/state") as out:
            out.write(b"1")
        assert open_input(f"s3://{BUCKET}/data").stat("absent") is None
        for entry in run.list():
            run.delete(entry.name)
        with pytest.raises(StorageError, match="access denied"):
            open_storage(f"s3://{BUCKET}/data").check_writable()
        with pytest.raises(StorageError, match="access denied"):
            open_storage(f"s3://{BUCKET}/secrets").list()
    finally:
        cloud.post("reset-auth", str(10**9))


def ceph_client(ceph: Ceph, environment: dict[str, str]) -> Any:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    keys = {name.lower(): environment[name] for name in names}
    return boto3.client("s3", endpoint_url=ceph.url, region_name="us-east-1", **keys)


def test_a_run_trains_with_no_more_than_its_role_has(
    cloud: Cloud, ceph: Ceph, tmp_path: Path
) -> None:
    """Start to result, on a server that judges the role's policy as it was applied."""
    name = "rayapp-ecs-task"
    iam = cloud.client("iam")
    (policy,) = iam.list_role_policies(RoleName=name)["PolicyNames"]
    document = iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]
    document["Statement"] = [one for one in document["Statement"] if "s3:" in str(one["Action"])]
    admin = ceph_client(ceph, KEYS)
    admin.create_bucket(Bucket=BUCKET)
    words = "\n".join(f"line {number} of a text to train on" for number in range(3000))
    admin.put_object(Bucket=BUCKET, Key="data/text.txt", Body=words.encode())
    admin.put_object(Bucket=BUCKET, Key="secrets/x", Body=b"1")
    environment = {name: v for name, v in os.environ.items() if not name.startswith("AWS_")}
    environment |= {
        **ceph.user("run", document),
        "AWS_ENDPOINT_URL_S3": ceph.url,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(tmp_path),
    }
    settings = {
        "run.storage": f"s3://{BUCKET}/runs",
        "run.name": "role",
        "model.path": "tiny",
        "model.tokenizer": "bytes",
        "data.path": f"s3://{BUCKET}/data",
        "data.seq_len": 32,
        "train.tokens_per_step": 128,
        "train.micro_batch": 2,
        "train.max_steps": 6,
        "checkpoint.every_steps": 2,
        "checkpoint.keep": 1,
        "cluster.workers": "2",
        "cluster.address": "local",
    }
    options = [f"--{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "rayapp.finetune", *options]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    user = ceph_client(ceph, environment)
    found = user.get_object(Bucket=BUCKET, Key="runs/role/result.json")["Body"].read()
    assert json.loads(found)["status"] == "done"
    assert not allowed(lambda: user.get_object(Bucket=BUCKET, Key="secrets/x"))
    assert not allowed(lambda: user.list_objects_v2(Bucket=BUCKET, Prefix="secrets/"))
    assert not allowed(lambda: user.put_object(Bucket=BUCKET, Key="data/y", Body=b""))


METRICS = f"arn:aws:cloudwatch:{REGION}:{ACCOUNT}:dataset/default"
# What the calls of a drill leave out: a model of the bucket's, and the metrics of the side-car.
FURTHER = [
    Call("boto3", "s3:GetObject", "BUCKET/models/<file>"),
    Call("boto3", "s3:ListBucket", "BUCKET", (("s3:prefix", "models/"),)),
]
FORBIDDEN = [
    Call("", "s3:GetObject", "BUCKET/secrets/x"),
    Call("", "s3:ListBucket", "BUCKET", (("s3:prefix", "secrets/"),)),
    Call("", "s3:PutObject", "BUCKET/data/x"),
    Call("", "s3:DeleteObject", "BUCKET/data/x"),
    Call("", "s3:PutObject", "BUCKET/models/x"),
    Call("", "s3:AbortMultipartUpload", "BUCKET/models/x"),
    Call("", "s3:DeleteObjectVersion", "BUCKET/runs/r/x"),
    Call("", "s3:PutObjectAcl", "BUCKET/runs/r/x"),
    Call("", "s3:GetObject", "another-bucket/runs/r/x"),
    Call("", "s3:DeleteBucket", "BUCKET"),
    Call("", "s3:PutBucketPolicy", "BUCKET"),
    Call("", "kms:ScheduleKeyDeletion", "KEY"),
    Call("", "kms:PutKeyPolicy", "KEY"),
    Call("", "cloudwatch:PutMetricData", METRICS, (("cloudwatch:namespace", "another"),)),
]
ROLES = ["rayapp-ecs-task", "rayapp-eks-run"]


def verdicts_on(
    cloud: Cloud, role: str, asked: list[Call], transport: str = "true"
) -> dict[Call, dict[str, Any]]:
    """Judge calls by the documents of a role, of the bucket and of its key, as applied."""
    iam, kms, s3 = (cloud.client(service) for service in ("iam", "kms", "s3"))
    assert not iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]
    names = iam.list_role_policies(RoleName=role)["PolicyNames"]
    policies = [iam.get_role_policy(RoleName=role, PolicyName=name) for name in names]
    key = kms.describe_key(KeyId="alias/rayapp")["KeyMetadata"]["Arn"]
    of_key = kms.get_key_policy(KeyId=key, PolicyName="default")["Policy"]
    of_bucket = s3.get_bucket_policy(Bucket=BUCKET)["Policy"]

    def simulation(call: Call) -> dict[str, Any]:
        service, place = call.action.split(":")[0], call.resource.replace("BUCKET", BUCKET)
        resource = {"s3": f"arn:aws:s3:::{place}", "kms": key}.get(service, place)
        mine = {"s3": place.split("/")[0] == BUCKET, "kms": True}.get(service, False)
        request = {
            "principal": f"arn:aws:sts::{ACCOUNT}:assumed-role/{role}/run",
            "action": call.action,
            "resource": {"resource": resource, "accountId": ACCOUNT},
            "contextVariables": {"aws:SecureTransport": transport, **dict(call.keys)},
        }
        found: dict[str, Any] = {
            "request": request,
            "identityPolicies": [
                {"name": each["PolicyName"], "policy": each["PolicyDocument"]} for each in policies
            ],
            "serviceControlPolicies": [],
            "resourceControlPolicies": [],
        }
        if mine:
            found["resourcePolicy"] = json.loads(of_bucket if service == "s3" else of_key)
        return found

    return dict(zip(asked, judge([simulation(call) for call in asked]), strict=True))


def not_allowed(verdicts: dict[Call, dict[str, Any]]) -> list[str]:
    return [
        f"{verdict['result']}: {call}"
        for call, verdict in verdicts.items()
        if verdict["result"] != "Allowed"
    ]


@pytest.mark.parametrize("role", ROLES)
def test_iam_allows_every_call_of_a_run(cloud: Cloud, role: str) -> None:
    """By a real evaluator: the calls that the drill on Ceph has recorded, and what few others."""
    namespace = (("cloudwatch:namespace", role.rpartition("-")[0]),)
    more = [*FURTHER, Call("agent", "cloudwatch:PutMetricData", METRICS, namespace)]
    verdicts = verdicts_on(cloud, role, [*golden(), *more])
    denied = not_allowed(verdicts)
    assert not denied, f"{role} may not make these calls of a run:\n" + "\n".join(denied)
    by = {call: " ".join(verdicts[call]["by"]) or None for call in golden()}
    same_as_golden(by)


@pytest.mark.parametrize("role", ROLES)
def test_iam_allows_no_other_call(cloud: Cloud, role: str) -> None:
    verdicts = verdicts_on(cloud, role, FORBIDDEN)
    found = {str(call): verdict["result"] for call, verdict in verdicts.items()}
    assert found == dict.fromkeys(map(str, FORBIDDEN), "ImplicitlyDenied")
    in_clear = [call for call in golden() if call.action.startswith("s3:")]
    results = verdicts_on(cloud, role, in_clear, transport="false").values()
    assert {verdict["result"] for verdict in results} == {"ExplicitlyDenied"}


def test_ecs_may_read_the_token_and_no_task_may(cloud: Cloud) -> None:
    """By the documents: the emulator judges resources of S3 alone."""
    iam = cloud.client("iam")
    token = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/rayapp-ecs/ray-token"
    readers = {}
    for role in iam.list_roles()["Roles"]:
        for name in iam.list_role_policies(RoleName=role["RoleName"])["PolicyNames"]:
            document = iam.get_role_policy(RoleName=role["RoleName"], PolicyName=name)
            for statement in document["PolicyDocument"]["Statement"]:
                if "ssm:GetParameter" in str(statement["Action"]):
                    readers[role["RoleName"]] = statement["Resource"]
    agents = {name: arn for name, arn in readers.items() if name.endswith(("-host", "-node"))}
    assert all(arn.endswith("/cloudwatch-agent") for arn in agents.values())
    rest = {name: arn for name, arn in readers.items() if name not in agents}
    runs = {"rayapp-ecs-task": SECRETS[1], "rayapp-eks-run": SECRETS[1]}  # told by secret_arns
    assert rest == {"rayapp-ecs-execution": token, **runs}


@pytest.mark.parametrize("role", ROLES)
def test_a_run_may_read_the_secrets_that_it_is_told_of(cloud: Cloud, role: str) -> None:
    """What `RAYAPP_SECRETS` refers to, where the stack's secret_arns names it."""
    secret, parameter = SECRETS
    calls = [
        Call("", "secretsmanager:GetSecretValue", secret),
        Call("", "ssm:GetParameter", parameter),
    ]
    assert not not_allowed(verdicts_on(cloud, role, calls))
    others = [
        Call("", "secretsmanager:GetSecretValue", secret.replace("hf-", "others-")),
        Call("", "ssm:GetParameter", parameter.replace("mine", "others")),
    ]
    found = {verdict["result"] for verdict in verdicts_on(cloud, role, others).values()}
    assert found == {"ImplicitlyDenied"}


def test_no_policy_has_a_wildcard_that_is_not_argued() -> None:
    """In every document, an action or a resource with a `*` has its reason on the same line."""
    argued = 0
    for path in sorted((ROOT / "infra").rglob("*.tf")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r"\s*(actions|resources|not_actions)\s*=", line) and "*" in line:
                assert re.search(r"\]\s*#\s*\S+", line), f"{path}:{number}: {line.strip()}"
                argued += 1
    assert argued >= 10  # the pattern still finds them


def test_roles_have_no_action_with_a_wildcard(cloud: Cloud) -> None:
    iam, seen = cloud.client("iam"), 0
    for role in iam.list_roles()["Roles"]:
        for name in iam.list_role_policies(RoleName=role["RoleName"])["PolicyNames"]:
            document = iam.get_role_policy(RoleName=role["RoleName"], PolicyName=name)
            for statement in document["PolicyDocument"]["Statement"]:
                actions = statement["Action"]
                actions = [actions] if isinstance(actions, str) else actions
                assert not [action for action in actions if "*" in action], (role, statement)
                seen += 1
    assert seen > 15


def test_the_token_is_in_no_state_and_no_file(cloud: Cloud) -> None:
    found = cloud.client("ssm").get_parameter(Name="/rayapp-ecs/ray-token", WithDecryption=True)
    token = found["Parameter"]["Value"]
    assert re.fullmatch(r"[A-Za-z0-9]{64}", token) and found["Parameter"]["Type"] == "SecureString"
    places = [path for path in cloud.folder.rglob("*") if path.is_file()]
    places = [path for path in places if ".terraform" not in path.parts]
    assert len([path for path in places if path.name == "terraform.tfstate"]) == 3
    assert not [path for path in places if token.encode() in path.read_bytes()]
    definitions = cloud.client("ecs").list_task_definitions()["taskDefinitionArns"]
    for arn in definitions:
        described = cloud.client("ecs").describe_task_definition(taskDefinition=arn)
        assert token not in json.dumps(described, default=str)


def test_tasks_run_as_rendered(cloud: Cloud) -> None:
    ecs = cloud.client("ecs")
    for role in ("head", "worker", "data"):
        wanted = json.loads((cloud.folder / "rendered" / f"{role}.json").read_text())
        found = ecs.describe_task_definition(taskDefinition=f"rayapp-ecs-{role}")["taskDefinition"]
        for name in ("cpu", "memory", "networkMode", "taskRoleArn", "executionRoleArn"):
            assert found[name] == wanted[name]
        for one, other in zip(
            found["containerDefinitions"], wanted["containerDefinitions"], strict=True
        ):
            assert {key: one[key] for key in other} == other


def test_what_comes_before_the_nodes_starts_none(cloud: Cloud) -> None:
    """The targets of `make up-eks`, planned for an account without the stack."""
    makefile = (ROOT / "Makefile").read_text()
    phases = re.findall(r"infra/eks|/eks apply ((?:-target=\S+|\s|\\)+)", makefile)
    targets = [phase.replace("\\", " ").split() for phase in phases if phase]
    assert len(targets) == 2 and len(targets[1]) >= 6
    for asked in targets:
        done = cloud.plan("eks", f"-state={cloud.folder}/none.tfstate", *asked)
        assert done.returncode == 2, done.stderr
        created = re.findall(r"# (\S+) will be created", done.stdout)
        assert "aws_eks_cluster.this" in created
        assert not [name for name in created if name.startswith("module.nodes")]
        for target in asked:  # an unknown one is only warned of
            name = target.removeprefix("-target=")
            assert [one for one in created if re.sub(r"\[.*", "", one) == name], name
    assert "module.system.aws_eks_node_group.this[0]" in created


def test_the_cluster_is_not_billed_for_extended_support(cloud: Cloud) -> None:
    cluster = cloud.client("eks").describe_cluster(name="rayapp-eks")["cluster"]
    assert cluster["upgradePolicy"] == {"supportType": "STANDARD"}
    text = (ROOT / "infra" / "eks" / "variables.tf").read_text()
    (until,) = re.findall(r"standard support until (\d{4}-\d\d-\d\d)", text)
    assert cluster["version"] == "1.35" and until == "2027-03-27"


def test_failing_nodes_are_found(cloud: Cloud) -> None:
    """Node repair sees GPUs and EFA by its agent alone."""
    addons = cloud.client("eks").list_addons(clusterName="rayapp-eks")["addons"]
    assert "eks-node-monitoring-agent" in addons


def test_pods_get_their_role(cloud: Cloud) -> None:
    eks = cloud.client("eks")
    found = eks.list_pod_identity_associations(clusterName="rayapp-eks")["associations"]
    accounts = {(one["namespace"], one["serviceAccount"]) for one in found}
    assert ("rayapp", "rayapp") in accounts and len(accounts) == 4
    link = cloud.client("fsx").describe_data_repository_associations()["Associations"]
    assert {one["DataRepositoryPath"] for one in link} == {
        f"s3://{BUCKET}/data",
        f"s3://{BUCKET}/models",
    }


@pytest.mark.parametrize(
    ("stack", "values", "message"),
    [
        ("eks", {"api_cidrs": '["0.0.0.0/0"]'}, "not for everyone"),
        ("ecs", {"head_count": "2"}, "two heads"),
        ("ecs", {"alarm_email": ""}, "alarm_email must be an address"),
        ("eks", {"alarm_email": ""}, "alarm_email must be an address"),
        ("eks", {"secret_arns": '["hf_token"]'}, "secret_arns must be ARNs"),
    ],
)
def test_what_is_not_safe_is_refused(
    cloud: Cloud, stack: str, values: dict[str, str], message: str
) -> None:
    arguments = [f"-var={name}={value}" for name, value in values.items()]
    done = cloud.plan(stack, "-refresh=false", *arguments)
    assert done.returncode == 1 and message in " ".join(done.stderr.split())


def test_every_instance_is_of_a_known_size() -> None:
    assert {*EKS_INSTANCES, ECS_INSTANCE} <= INSTANCES.keys()


def test_variables_are_typed_and_told() -> None:
    """What stacks or modules have in common is one file in infra/shared, which they link to."""
    infra = ROOT / "infra"
    for path in sorted(infra.rglob("*.tf")):
        for block in re.split(r"\n(?=variable )", path.read_text()):
            if block.startswith("variable "):
                assert re.search(r"^  description = ", block, re.M), f"{path}: {block[:40]}"
                assert re.search(r"^  type +=", block, re.M), f"{path}: {block[:40]}"
    more = {"base": {"versions.tf"}, "ecs_nodes": {"machine.tf"}, "eks_nodes": {"machine.tf"}}
    more |= {stack: {"versions.tf", "shared.tf"} for stack in ("ecs", "eks")}
    for folder in {path.parent for path in infra.rglob("*.tf")} - {infra / "shared"}:
        own = {"main.tf", "variables.tf", "outputs.tf"}
        assert {path.name for path in folder.glob("*.tf")} == own | more.get(folder.name, set())
        links = {path.name: path.resolve().parent for path in folder.iterdir() if path.is_symlink()}
        assert links == dict.fromkeys(more.get(folder.name, ()), infra / "shared")


def leftovers(cloud: Cloud) -> dict[str, list[str]]:
    """Return what an account still has, by kind, without what AWS itself put there."""
    ec2, iam = cloud.client("ec2"), cloud.client("iam")
    scaling, logs = cloud.client("autoscaling"), cloud.client("logs")
    return {
        "vpcs": [v["VpcId"] for v in ec2.describe_vpcs()["Vpcs"] if not v["IsDefault"]],
        "endpoints": [
            v["VpcEndpointId"]
            for v in ec2.describe_vpc_endpoints()["VpcEndpoints"]
            if v["State"] != "deleted"
        ],
        "templates": [str(t) for t in ec2.describe_launch_templates()["LaunchTemplates"]],
        "groups": [str(g) for g in scaling.describe_auto_scaling_groups()["AutoScalingGroups"]],
        "placement": [str(g) for g in ec2.describe_placement_groups()["PlacementGroups"]],
        "ecs": [
            c["clusterName"]
            for c in cloud.client("ecs").describe_clusters(clusters=["rayapp-ecs"])["clusters"]
            if c["status"] == "ACTIVE"
        ],
        "eks": cloud.client("eks").list_clusters()["clusters"],
        "roles": [r["RoleName"] for r in iam.list_roles()["Roles"]],
        "logs": [g["logGroupName"] for g in logs.describe_log_groups()["logGroups"]],
        "alarms": [str(a) for a in cloud.client("cloudwatch").describe_alarms()["MetricAlarms"]],
        "topics": [str(t) for t in cloud.client("sns").list_topics()["Topics"]],
        "file systems": [
            str(f) for f in cloud.client("fsx").describe_file_systems()["FileSystems"]
        ],
        "parameters": [
            p["Name"]
            for p in cloud.client("ssm").describe_parameters()["Parameters"]
            if p["Name"].startswith("/rayapp")
        ],
    }


def test_z_teardown_leaves_the_results(cloud: Cloud) -> None:
    """Last: it destroys what the others look at."""
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(cloud.destroy, ("ecs", "eks")):
            assert done.returncode == 0, done.stderr[-3000:]
    left = {kind: names for kind, names in leftovers(cloud).items() if names}
    assert not left
    s3 = cloud.client("s3")
    assert s3.get_object(Bucket=BUCKET, Key="runs/demo/model/x")["Body"].read() == b"weights"
    assert cloud.plan("base").returncode == 0
    # Not even destroying the base stack takes results: only asked by the bucket's name.
    refused = cloud.destroy("base")
    assert refused.returncode == 1 and "BucketNotEmpty" in refused.stderr
    assert s3.get_object(Bucket=BUCKET, Key="runs/demo/model/x")["Body"].read() == b"weights"
