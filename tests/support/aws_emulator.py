"""An AWS on this machine: moto's server, with what our Terraform needs and moto 5.2 lacks.

    python tests/support/aws_emulator.py -p 5000

moto writes its answers from botocore's model of a service, so an action it lacks is a function
that returns a dict in the API's own shape; `@action` adds it. `@fill` adds to what moto stores the
fields that it takes and forgets, without which a second plan of Terraform would show a change.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

os.environ.setdefault("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")

import moto.eks.urls as eks_urls
from moto.applicationautoscaling.responses import ApplicationAutoScalingResponse
from moto.autoscaling.models import (
    AutoScalingBackend,
    FakeAutoScalingGroup,
    FakeScalingPolicy,
    autoscaling_backends,
)
from moto.autoscaling.responses import AutoScalingResponse
from moto.budgets.responses import BudgetsResponse
from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import utcnow
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.models.launch_templates import LaunchTemplate
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.ec2.responses import EC2Response
from moto.ecs.responses import EC2ContainerServiceResponse
from moto.eks.exceptions import ResourceNotFoundException
from moto.eks.models import Nodegroup, eks_backends
from moto.eks.responses import EKSResponse
from moto.fsx.models import FileSystem
from moto.fsx.responses import FSxResponse
from moto.iam.access_control import IAMPolicyStatement, IAMRequestBase, PermissionResult
from moto.s3.models import FakeDeleteMarker
from moto.s3.responses import ACTION_MAP, S3Response
from moto.server import main
from moto.ssm.models import ssm_backends
from moto.ssm.responses import SimpleSystemManagerResponse

Handler = Callable[[Any], Any]


def action(responses: type) -> Callable[[Handler], Handler]:
    """Add the function to a service as the action of its name."""

    def add(function: Handler) -> Handler:
        setattr(responses, function.__name__, function)
        return function

    return add


def fill(owner: type, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a method by the function, which gets the original as its first argument."""

    def replace(function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)
        setattr(owner, name, lambda self, *args, **kw: function(original, self, *args, **kw))
        return function

    return replace


def store(backend: Any, kind: str) -> dict[Any, Any]:
    """Return the objects of a kind that moto does not know, kept beside its own."""
    if not hasattr(backend, "added"):
        backend.added = {}
    return backend.added.setdefault(kind, {})


# --- EC2: placement groups; echoes of launch templates and rules ------------------------------


@action(EC2Response)
def create_placement_group(self: Any) -> Any:
    name = self._get_param("GroupName")
    tags = [
        tag
        for spec in self._get_param("TagSpecifications", []) or []
        for tag in spec.get("Tags") or spec.get("Tag") or []
    ]
    group = {
        "GroupName": name,
        "GroupId": "pg-" + secrets.token_hex(8),
        "State": "available",
        "Strategy": self._get_param("Strategy"),
        "GroupArn": f"arn:aws:ec2:{self.region}:{self.current_account}:placement-group/{name}",
        "Tags": tags,
    }
    groups = store(self.ec2_backend, "placement_groups")
    if name in groups:
        raise EC2ClientError("InvalidPlacementGroup.Duplicate", f"{name} exists")
    groups[name] = group
    return ActionResult({"PlacementGroup": group})


@action(EC2Response)
def describe_placement_groups(self: Any) -> Any:
    groups = store(self.ec2_backend, "placement_groups")
    names = self._get_param("GroupNames", []) or list(groups)
    for name in names:
        if name not in groups:
            raise EC2ClientError("InvalidPlacementGroup.Unknown", f"'{name}' is unknown.")
    return ActionResult({"PlacementGroups": [groups[name] for name in names]})


@action(EC2Response)
def delete_placement_group(self: Any) -> Any:
    store(self.ec2_backend, "placement_groups").pop(self._get_param("GroupName"), None)
    return EmptyResult()


@fill(LaunchTemplate, "create_version")
def _template_without_its_own_tags(original: Any, self: Any, data: Any, description: Any) -> Any:
    specs = data.get("TagSpecifications") or []
    specs = [spec for spec in specs if spec.get("ResourceType") != "launch-template"]
    data.pop("TagSpecifications", None)
    return original(self, {**data, "TagSpecifications": specs} if specs else data, description)


SecurityGroupRule.description = property(
    lambda self: self.ip_range.get("Description") or self.source_group.get("Description")
)


@fill(FakeScalingPolicy, "__init__")
def _whole_policy(original: Any, self: Any, *args: Any, **kw: Any) -> None:
    original(self, *args, **kw)
    self.enabled = True
    self.predictive_scaling_configuration = self.predictive_scaling_configuration or None


# --- Application Auto Scaling: tags -----------------------------------------------------------


@action(ApplicationAutoScalingResponse)
def list_tags_for_resource(self: Any) -> str:
    tags = store(self.applicationautoscaling_backend, "tags")
    return json.dumps({"Tags": tags.get(self._get_param("ResourceARN"), {})})


@fill(ApplicationAutoScalingResponse, "register_scalable_target")
def _target_with_tags(original: Any, self: Any) -> Any:
    answer = original(self)
    tags = store(self.applicationautoscaling_backend, "tags")
    tags[json.loads(answer)["ScalableTargetARN"]] = self._get_param("Tags") or {}
    return answer


# --- Budgets: subscribers and tags ------------------------------------------------------------


@fill(BudgetsResponse, "create_budget")
def _budget_with_subscribers(original: Any, self: Any) -> Any:
    name = self._get_param("Budget")["BudgetName"]
    store(self.backend, "subscribers")[name] = self._get_param("NotificationsWithSubscribers") or []
    arn = f"arn:aws:budgets::{self.current_account}:budget/{name}"
    store(self.backend, "tags")[arn] = self._get_param("ResourceTags") or []
    return original(self)


@fill(BudgetsResponse, "create_notification")
def _notification_with_subscribers(original: Any, self: Any) -> Any:
    known = store(self.backend, "subscribers").setdefault(self._get_param("BudgetName"), [])
    keys = ("Notification", "Subscribers")
    known.append({key: self._get_param(key) for key in keys})
    return original(self)


@action(BudgetsResponse)
def describe_subscribers_for_notification(self: Any) -> str:
    wanted = self._get_param("Notification")
    for one in store(self.backend, "subscribers").get(self._get_param("BudgetName"), []):
        same = ("NotificationType", "ComparisonOperator", "Threshold")
        if all(one["Notification"][key] == wanted[key] for key in same):
            return json.dumps({"Subscribers": one["Subscribers"]})
    return json.dumps({"Subscribers": []})


def _budget_tags(self: Any) -> str:
    tags = store(self.backend, "tags").get(self._get_param("ResourceARN"), [])
    return json.dumps({"ResourceTags": tags})


BudgetsResponse.list_tags_for_resource = _budget_tags


# --- ECS and Auto Scaling: hosts that EC2 has, and those that it has not ---------------------


WITHOUT = "/emulator/without"
"""The parameter with the instance types that EC2 refuses, with commas, which a test sets; `?TYPE`
starts no host either, and does not say why."""
NO_ROOM = (
    "We currently do not have sufficient {type} capacity in the Availability Zone you requested "
    "({zone}). Launching EC2 instance failed."
)


@fill(EC2ContainerServiceResponse, "update_service")
def _with_its_hosts(original: Any, self: Any) -> Any:
    """Scale the group of a service's capacity provider, as ECS's managed scaling does.

    Without hosts its tasks do not run.
    """
    answer = original(self)
    cluster, service = self._get_param("cluster"), self._get_param("service")
    groups = autoscaling_backends[self.current_account][self.region].autoscaling_groups
    group, wanted = groups.get(f"{cluster}-{service}"), self._get_param("desiredCount")
    if group is None or wanted is None:
        return answer
    kinds = _without(self.current_account, self.region)
    if wanted and {group.instance_type, f"?{group.instance_type}"} & kinds:
        if group.instance_type in kinds:
            _tell(group, wanted, "Failed")
        group.desired_capacity = wanted  # it goes on trying
        self.ecs_backend._get_service(cluster, service).running_count = 0
    elif wanted > len(group.instance_states):
        group.set_desired_capacity(wanted)
        _tell(group, wanted, "Successful")
        for state in group.instance_states:
            state.protected_from_scale_in = True
    return answer


def _without(account: str, region: str) -> set[str]:
    parameter = ssm_backends[account][region].get_parameter(WITHOUT)
    return set(parameter.value.split(",")) if parameter else set()


def _tell(group: Any, wanted: int, code: str) -> None:
    """Add an activity."""
    ec2 = group.autoscaling_backend.ec2_backend
    zone = ec2.get_subnet(group.vpc_zone_identifier).availability_zone
    told = {
        "ActivityId": secrets.token_hex(8),
        "AutoScalingGroupName": group.name,
        "Cause": f"increasing the capacity from 0 to {wanted}.",
        "StartTime": utcnow(),
        "StatusCode": code,
    }
    if code == "Failed":
        told["StatusMessage"] = NO_ROOM.format(type=group.instance_type, zone=zone)
    store(group.autoscaling_backend, "activities").setdefault(group.name, []).insert(0, told)


@fill(AutoScalingResponse, "describe_scaling_activities")
def _activities(original: Any, self: Any) -> Any:
    told = store(self.autoscaling_backend, "activities").get(
        self._get_param("AutoScalingGroupName"), []
    )
    return ActionResult({"Activities": told[: self._get_param("MaxRecords", 100)]})


# --- ECS: fields of a service -----------------------------------------------------------------

SERVICE_DEFAULTS = {
    "enableExecuteCommand": False,
    "capacityProviderStrategy": None,
    "placementConstraints": None,
    "deploymentConfiguration": None,
    "availabilityZoneRebalancing": "DISABLED",
    "enableECSManagedTags": False,
}


@fill(EC2ContainerServiceResponse, "create_service")
def _whole_service(original: Any, self: Any) -> Any:
    answer = original(self)
    service = self.ecs_backend._get_service(
        self._get_param("cluster", "default"), self._get_param("serviceName")
    )
    for name, default in SERVICE_DEFAULTS.items():
        value = self._get_param(name)
        if (value := default if value is None else value) is not None:
            snake = "".join(
                "_" + c.lower() if c.isupper() else c for c in name.replace("ECS", "Ecs")
            )
            setattr(service, snake, value)
    if self._get_param("capacityProviderStrategy"):
        service.launch_type = None
    return answer


if os.environ.get("EMULATED_TASK"):  # every service has this task, which runs

    @action(EC2ContainerServiceResponse)
    def list_tasks(self: Any) -> Any:
        return ActionResult({"taskArns": [os.environ["EMULATED_TASK"]]})

    @action(EC2ContainerServiceResponse)
    def describe_tasks(self: Any) -> Any:
        arn = os.environ["EMULATED_TASK"]
        containers = [{"name": "ray", "runtimeId": f"{arn.rpartition('/')[2]}-1"}]
        task = {"taskArn": arn, "lastStatus": "RUNNING", "containers": containers}
        return ActionResult({"tasks": [task]})

    @fill(EC2ContainerServiceResponse, "describe_services")
    def _with_running_hosts(original: Any, self: Any) -> Any:
        """A task of a worker runs where a host of its service does; whoever plays them has tags."""
        cluster = self._get_param("cluster")
        running = ec2_backends[self.current_account][self.region].all_running_instances()
        names = [
            {tag["key"]: tag["value"] for tag in one.get_tags()}.get("Name") for one in running
        ]
        for service in self.ecs_backend.services.values():
            count = names.count(f"{cluster}-{service.name}")
            service.running_count = 1 if service.name == "head" else count
        return original(self)


# --- SSM: the name of every parameter that is read is known -----------------------------------


@fill(SimpleSystemManagerResponse, "get_parameter")
def _parameter(original: Any, self: Any) -> Any:
    """Answer for the AMIs that AWS publishes, of which moto's list has only some."""
    name = self._get_param("Name")
    if name.startswith("/aws/service/ecs/optimized-ami/amazon-linux-2023/"):
        arn = f"arn:aws:ssm:{self.region}::parameter{name}"
        value = {"Name": name, "Type": "String", "Value": "ami-0123456789abcdef0", "Version": 1}
        return json.dumps({"Parameter": {**value, "ARN": arn, "DataType": "text"}})
    return original(self)


# --- EKS: add-ons, access entries, pod identities; what a cluster and a node group echo --------


def _cluster(self: Any) -> str:
    return str(self._get_param("name") or self._get_param("clusterName"))


def children(
    kind: str, listed: str, key: str, wrapper: str, make: Callable[[Any], tuple[str, dict]]
) -> None:
    """Add create, describe, update, delete and list for one kind of child of an EKS cluster."""

    def find(self: Any) -> tuple[dict[Any, Any], tuple[str, str]]:
        known = store(self.eks_backend, kind)
        place = (_cluster(self), unquote(self._get_param(key) or ""))
        if place not in known:
            raise ResourceNotFoundException(
                clusterName=place[0],
                nodegroupName=None,
                fargateProfileName=None,
                addonName=None,
                message=f"No {kind} found for {place}",
            )
        return known, place

    def create(self: Any) -> Any:
        self.eks_backend.describe_cluster(_cluster(self))
        name, child = make(self)
        child |= {"clusterName": _cluster(self), "tags": self._get_param("tags") or {}}
        child |= {"createdAt": utcnow(), "modifiedAt": utcnow()}
        store(self.eks_backend, kind)[(_cluster(self), name)] = child
        return ActionResult({wrapper: child})

    def describe(self: Any) -> Any:
        known, place = find(self)
        return ActionResult({wrapper: known[place]})

    def delete(self: Any) -> Any:
        known, place = find(self)
        return ActionResult({wrapper: known.pop(place)})

    def list_(self: Any) -> Any:
        mine = {k[1]: v for k, v in store(self.eks_backend, kind).items() if k[0] == _cluster(self)}
        whole = kind == "pod_identity_association"
        return ActionResult({listed: list(mine.values() if whole else mine)})

    plural = kind[:-1] + "ies" if kind.endswith("y") else f"{kind}s"
    for name, function in {
        f"create_{kind}": create,
        f"describe_{kind}": describe,
        f"delete_{kind}": delete,
        f"list_{plural}": list_,
    }.items():
        setattr(EKSResponse, name, function)


def _arn(self: Any, kind: str, *rest: str) -> str:
    place = "/".join((kind, _cluster(self), *rest))
    return f"arn:aws:eks:{self.region}:{self.current_account}:{place}"


def _addon(self: Any) -> tuple[str, dict]:
    name = self._get_param("addonName")
    return name, {
        "addonName": name,
        "status": "ACTIVE",
        "addonVersion": self._get_param("addonVersion") or "v1.0.0-eksbuild.1",
        "health": {"issues": []},
        "addonArn": _arn(self, "addon", name, secrets.token_hex(8)),
        "configurationValues": self._get_param("configurationValues"),
    }


def _entry(self: Any) -> tuple[str, dict]:
    principal = self._get_param("principalArn")
    return principal, {
        "principalArn": principal,
        "kubernetesGroups": self._get_param("kubernetesGroups") or [],
        "accessEntryArn": _arn(self, "access-entry", secrets.token_hex(8)),
        "username": principal,
        "type": self._get_param("type") or "STANDARD",
    }


def _identity(self: Any) -> tuple[str, dict]:
    name = "a-" + secrets.token_hex(8)
    return name, {
        "namespace": self._get_param("namespace"),
        "serviceAccount": self._get_param("serviceAccount"),
        "roleArn": self._get_param("roleArn"),
        "associationId": name,
        "associationArn": _arn(self, "podidentityassociation", name),
    }


children("addon", "addons", "addonName", "addon", _addon)
children("access_entry", "accessEntries", "principalArn", "accessEntry", _entry)
children("pod_identity_association", "associations", "associationId", "association", _identity)


@action(EKSResponse)
def associate_access_policy(self: Any) -> Any:
    scope = {"type": self._get_param("accessScope")["type"], "namespaces": []}
    policy = {
        "policyArn": self._get_param("policyArn"),
        "accessScope": scope,
        "associatedAt": utcnow(),
        "modifiedAt": utcnow(),
    }
    principal = unquote(self._get_param("principalArn"))
    store(self.eks_backend, "policies").setdefault((_cluster(self), principal), []).append(policy)
    answer = {"clusterName": _cluster(self), "principalArn": principal}
    return ActionResult({**answer, "associatedAccessPolicy": policy})


@action(EKSResponse)
def list_associated_access_policies(self: Any) -> Any:
    principal = unquote(self._get_param("principalArn"))
    policies = store(self.eks_backend, "policies").get((_cluster(self), principal), [])
    answer = {"clusterName": _cluster(self), "principalArn": principal}
    return ActionResult({**answer, "associatedAccessPolicies": policies})


@action(EKSResponse)
def disassociate_access_policy(self: Any) -> Any:
    principal = unquote(self._get_param("principalArn"))
    store(self.eks_backend, "policies").pop((_cluster(self), principal), None)
    return EmptyResult()


for _path in (
    "addons$",
    "addons/(?P<addonName>[^/]+)$",
    "access-entries$",
    "access-entries/(?P<principalArn>.+)/access-policies/(?P<policyArn>.+)$",
    "access-entries/(?P<principalArn>.+)/access-policies$",
    "access-entries/(?P<principalArn>.+)$",
    "pod-identity-associations$",
    "pod-identity-associations/(?P<associationId>[^/]+)$",
):
    place = "{0}/clusters/(?P<name>[^/]+)/" + _path
    eks_urls.url_paths[place] = eks_urls.response.dispatch


@fill(EKSResponse, "create_cluster")
def _whole_cluster(original: Any, self: Any) -> Any:
    answer = original(self)
    cluster = self.eks_backend.describe_cluster(self._get_param("name"))
    cluster.access_config = {
        "authenticationMode": "CONFIG_MAP",
        "bootstrapClusterCreatorAdminPermissions": True,
        **(self._get_param("accessConfig") or {}),
    }
    cluster.upgrade_policy = self._get_param("upgradePolicy") or {"supportType": "EXTENDED"}
    ec2 = ec2_backends[self.current_account][self.region]
    network = {
        "securityGroupIds": [],
        "endpointPublicAccess": True,
        "endpointPrivateAccess": False,
        **cluster.resources_vpc_config,
    }
    if network["endpointPublicAccess"]:
        network.setdefault("publicAccessCidrs", ["0.0.0.0/0"])
    network["vpcId"] = ec2.describe_subnets(subnet_ids=network["subnetIds"])[0].vpc_id
    name = f"eks-cluster-sg-{cluster.name}-{secrets.token_hex(4)}"
    group = ec2.create_security_group(name, "Made by EKS", vpc_id=network["vpcId"])
    cluster.resources_vpc_config = {**network, "clusterSecurityGroupId": group.id}
    return answer


@fill(EKSResponse, "delete_cluster")
def _cluster_with_its_group(original: Any, self: Any) -> Any:
    cluster = self.eks_backend.describe_cluster(_cluster(self))
    answer = original(self)
    ec2 = ec2_backends[self.current_account][self.region]
    ec2.delete_security_group(group_id=cluster.resources_vpc_config["clusterSecurityGroupId"])
    return answer


@fill(Nodegroup, "__init__")
def _whole_nodegroup(original: Any, self: Any, *args: Any, **kw: Any) -> None:
    original(self, *args, **kw)
    if not kw.get("remote_access"):
        self.remote_access = None
        self.resources.pop("remoteAccessSecurityGroup", None)
    if self.launch_template:
        self.disk_size = kw.get("disk_size")
    cluster = eks_backends[kw["account_id"]][kw["region_name"]].clusters[kw["cluster_name"]]
    self.version = kw.get("version") or cluster.version
    self.release_version = f"{self.version}.0-20250101"


@fill(EKSResponse, "create_nodegroup")
def _nodegroup_with_settings(original: Any, self: Any) -> Any:
    answer = original(self)
    group = self.eks_backend.describe_nodegroup(_cluster(self), self._get_param("nodegroupName"))
    group.update_config = self._get_param("updateConfig") or {"maxUnavailable": 1}
    group.node_repair_config = self._get_param("nodeRepairConfig")
    if group.launch_template:
        _hosts_of(group, self.current_account, self.region)
    return answer


# The Auto Scaling group of a node group; `kind` is the instance type that EKS gives it. Its hosts
# come when Auto Scaling is told of them, not with the node group: some tests play the hosts.
_template_type = FakeAutoScalingGroup.instance_type
FakeAutoScalingGroup.instance_type = property(
    lambda self: getattr(self, "kind", None) or _template_type.__get__(self)
)
_template_image = FakeAutoScalingGroup.image_id
FakeAutoScalingGroup.image_id = property(
    lambda self: "ami-12c6146b" if hasattr(self, "kind") else _template_image.__get__(self)
)


def _hosts_of(group: Nodegroup, account: str, region: str) -> None:
    """Make a node group's Auto Scaling group."""
    name = group.resources["autoScalingGroups"][0]["name"]
    template = {"LaunchTemplateId": group.launch_template["id"]}
    most = group.scaling_config["maxSize"]
    made = autoscaling_backends[account][region].create_auto_scaling_group(
        name=name,
        availability_zones=[],
        desired_capacity=0,
        min_size=0,
        max_size=most,
        launch_config_name="",
        launch_template=template,
        vpc_zone_identifier=",".join(group.subnets),
        default_cooldown=None,
        health_check_period=None,
        health_check_type=None,
        load_balancers=[],
        target_group_arns=[],
        placement_group=None,
        termination_policies=[],
        tags=[],
    )
    made.kind, made.nodegroup = (group.instance_types or [""])[0], group


@fill(AutoScalingBackend, "set_desired_capacity")
def _nodes(original: Any, self: Any, name: str, wanted: int) -> None:
    """Let a node group's hosts come, or say why they do not."""
    group = self.autoscaling_groups[name]
    if not hasattr(group, "nodegroup"):
        return original(self, name, wanted)
    kinds = _without(self.account_id, self.region_name)
    if wanted and {group.kind, f"?{group.kind}"} & kinds:
        if group.kind in kinds:
            _tell(group, wanted, "Failed")
        group.desired_capacity = wanted  # it goes on trying
    else:
        original(self, name, wanted)
        _tell(group, wanted, "Successful")
    group.nodegroup.scaling_config = {**group.nodegroup.scaling_config, "desiredSize": wanted}


@fill(EKSResponse, "delete_nodegroup")
def _nodegroup_with_its_hosts(original: Any, self: Any) -> Any:
    name = self._get_param("nodegroupName")
    group = self.eks_backend.describe_nodegroup(_cluster(self), name)
    groups = autoscaling_backends[self.current_account][self.region].autoscaling_groups
    gone = groups.pop(group.resources["autoScalingGroups"][0]["name"], None)
    if gone is not None:
        gone.set_desired_capacity(0)
    return original(self)


# --- FSx: a life cycle, links to S3 -----------------------------------------------------------


@fill(FileSystem, "to_dict")
def _available(original: Any, self: Any) -> dict:
    described = original(self)
    if not hasattr(self, "created"):
        self.created = time.time()
    described |= {
        "Lifecycle": "AVAILABLE",
        "OwnerId": self.backend.account_id,
        "VpcId": "vpc-00000000",
        "FileSystemTypeVersion": "2.15",
        "NetworkInterfaceIds": ["eni-" + self.file_system_id[3:]],
        "CreationTime": self.created,
    }
    lustre = {
        "MountName": "fsx",
        "WeeklyMaintenanceStartTime": "1:05:00",
        **(self.lustre_configuration or {}),
    }
    if (lustre.get("MetadataConfiguration") or {}).get("Mode") == "AUTOMATIC":
        lustre["MetadataConfiguration"] = {"Mode": "AUTOMATIC", "Iops": 12000}
    return {**described, "LustreConfiguration": lustre}


@fill(FSxResponse, "describe_file_systems")
def _known_file_systems(original: Any, self: Any) -> Any:
    """Say which is not found: the provider waits for that after a deletion."""
    for name in json.loads(self.body).get("FileSystemIds") or []:
        if name not in self.fsx_backend.file_systems:
            kind = "FileSystemNotFound"
            text = json.dumps({"__type": kind, "message": f"File system '{name}' does not exist."})
            return 400, {"status": 400, "x-amzn-ErrorType": kind}, text
    return original(self)


@fill(FSxResponse, "delete_file_system")
def _gone_at_once(original: Any, self: Any) -> Any:
    """Say that it was not there: told that it is being deleted, the provider waits ten minutes."""
    original(self)
    kind = "FileSystemNotFound"
    text = json.dumps({"__type": kind, "message": "It does not exist any more."})
    return 400, {"status": 400, "x-amzn-ErrorType": kind}, text


@action(FSxResponse)
def create_data_repository_association(self: Any) -> str:
    asked = json.loads(self.body)
    name = "dra-" + secrets.token_hex(8)
    place = f"{asked['FileSystemId']}/{name}"
    arn = f"arn:aws:fsx:{self.region}:{self.current_account}:association/{place}"
    asked.pop("ClientRequestToken", None)
    link = {
        "ImportedFileChunkSize": 1024,
        "BatchImportMetaDataOnCreate": False,
        "Tags": [],
        **asked,
    }
    link |= {"AssociationId": name, "ResourceARN": arn, "Lifecycle": "AVAILABLE"}
    link["CreationTime"] = time.time()
    store(self.fsx_backend, "links")[name] = link
    if link["Tags"]:
        self.fsx_backend.tag_resource(arn, {tag["Key"]: tag["Value"] for tag in link["Tags"]})
    return json.dumps({"Association": link})


@action(FSxResponse)
def describe_data_repository_associations(self: Any) -> Any:
    links = store(self.fsx_backend, "links")
    names = json.loads(self.body).get("AssociationIds") or list(links)
    for name in names:
        if name not in links:
            text = json.dumps({"__type": "DataRepositoryAssociationNotFound", "message": name})
            return 400, {"status": 400}, text
    return json.dumps({"Associations": [links[name] for name in names]})


@action(FSxResponse)
def delete_data_repository_association(self: Any) -> str:
    name = json.loads(self.body)["AssociationId"]
    store(self.fsx_backend, "links").pop(name, None)
    answer = {"AssociationId": name, "Lifecycle": "DELETING", "DeleteDataInFileSystem": False}
    return json.dumps(answer)


# --- S3: a bucket with versions is emptied -----------------------------------------------------

# moto disposes of every version of a key that it forgets, and its delete markers lack the method:
# emptying a bucket whose versioning has been suspended would be an error 500.
FakeDeleteMarker.dispose = lambda self, garbage=False: None


# --- IAM: conditions; what S3 asks of ListBucket -----------------------------------------------

ACTION_MAP["BUCKET"]["HEAD"]["DEFAULT"] = "ListBucket"
request_keys = threading.local()  # condition keys of the request that a thread answers


@fill(IAMRequestBase, "check_action_permitted")
def _with_its_keys(original: Any, self: Any, resource: str) -> None:
    """Let conditions see what the request says; its transport is taken for TLS, as in AWS."""
    query = dict(parse_qsl(urlsplit(self._path).query, keep_blank_values=True))
    known = {"aws:SecureTransport": "true"}
    known |= {f"s3:{name}": query[name] for name in ("prefix", "delimiter") if name in query}
    for name in self._data.get("Namespace") or []:
        known["cloudwatch:namespace"] = name
    request_keys.known = known
    try:
        original(self, resource)
    finally:
        request_keys.known = {}


@fill(IAMPolicyStatement, "is_action_permitted")
def _with_conditions(
    original: Any,
    self: Any,
    action: str,
    resource: str = "*",
    principal: Any = None,
    incoming_condition_values: Any = None,
) -> Any:
    """Hold a statement whose condition is not met to say nothing; moto would take it as it is."""
    known = {**getattr(request_keys, "known", {}), **(incoming_condition_values or {})}
    for operator, block in (self._statement.get("Condition") or {}).items():
        for key, wanted in block.items():
            wanted = [wanted] if isinstance(wanted, str) else wanted
            if not met(operator, known.get(key), wanted):
                return PermissionResult.NEUTRAL
    bare = {key: value for key, value in self._statement.items() if key != "Condition"}
    return original(
        IAMPolicyStatement(bare), action, resource, principal, incoming_condition_values
    )


def met(operator: str, value: str | None, wanted: list[str]) -> bool:
    """Judge a condition as IAM does: a key that the request lacks meets none but IfExists."""
    if value is None:
        return operator.endswith("IfExists")
    kind = operator.removesuffix("IfExists")
    if kind == "Bool":
        return value.lower() in [str(one).lower() for one in wanted]
    if kind == "StringEquals":
        return value in wanted
    if kind in ("StringLike", "ArnLike"):
        patterns = [re.escape(one).replace(r"\*", ".*").replace(r"\?", ".") for one in wanted]
        return any(re.fullmatch(pattern, value, re.S) for pattern in patterns)
    raise NotImplementedError(f"the emulator cannot judge {operator}")


@fill(S3Response, "_authenticate_and_authorize_s3_action")
def _with_the_right_to_know(
    original: Any, self: Any, bucket_name: str | None = None, key_name: str | None = None
) -> None:
    """Tell that a key is absent only to who may list the bucket; others are refused."""
    original(self, bucket_name=bucket_name, key_name=key_name)
    if not key_name or self.method not in ("GET", "HEAD"):
        return
    if self.backend.get_object(bucket_name, key_name) is None:
        asked, self.data["Action"] = self.data["Action"], "ListBucket"
        original(self, bucket_name=bucket_name)
        self.data["Action"] = asked


if __name__ == "__main__":
    main(sys.argv[1:])
