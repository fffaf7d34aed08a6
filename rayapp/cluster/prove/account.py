"""What a proof does in an AWS account: find hosts, take them away, look for what is left.

Everything that the stacks of infra/ create has the tag Project. The Resource Groups Tagging API
finds it by that, also for a time after it is gone; IAM roles, and log groups that AWS creates, have
no such entry and are found by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

NOTICE_ACTION = "aws:ec2:send-spot-instance-interruptions"
# 2 minutes: the least that the action takes, and what EC2 itself gives.
NOTICE_MINUTES = 2
ROLE_S = 90.0  # until a new role can be assumed everywhere
POLL_S = 10.0
GONE = {
    "instance": ("describe_instances", "InstanceIds"),
    "natgateway": ("describe_nat_gateways", "NatGatewayIds"),
    "vpc-endpoint": ("describe_vpc_endpoints", "VpcEndpointIds"),
}
"""Kinds of EC2 that are listed after their end: how to ask for the state."""


class Refused(RuntimeError):
    """AWS did not do what was asked; the message says what it answered."""


@dataclass(frozen=True)
class AwsAccount:
    """An account, and the stacks of one name in it; `client(service)` returns a boto3 client."""

    name: str
    home: str
    """ecs or eks."""
    region: str
    number: str
    """12 digits."""
    client: Callable[[str], Any]

    @property
    def stack(self) -> str:
        """The prefix of the cluster's names."""
        return f"{self.name}-{self.home}"

    def workers(self) -> list[str]:
        """Return the ids of the running worker hosts, the oldest first."""
        filters = [
            {"Name": "tag:Project", "Values": [self.stack]},
            {"Name": "instance-state-name", "Values": ["running"]},
        ]
        pages = self.client("ec2").get_paginator("describe_instances").paginate(Filters=filters)
        hosts = [
            host
            for page in pages
            for reservation in page["Reservations"]
            for host in reservation["Instances"]
            if _tag(host, "Name") not in (f"{self.stack}-head", f"{self.stack}-system")
        ]
        return [host["InstanceId"] for host in sorted(hosts, key=lambda host: host["LaunchTime"])]

    def terminate(self, host: str) -> None:
        """End a host at once, as a machine that fails: its system gets no time to shut down."""
        self.client("ec2").terminate_instances(InstanceIds=[host], SkipOsShutdown=True)

    @contextmanager
    def spot_notice(self, host: str) -> Iterator[None]:
        """Have EC2 send a spot notice to a host, and end it 2 minutes later.

        The Fault Injection Service does it. Its role and template are deleted at the block's end.

        Raises:
            Refused: the host gets no notice.
        """
        role = f"{self.name}-spot-notice"
        iam, fis = self.client("iam"), self.client("fis")
        tags = {"Project": self.name}
        trusted = _policy({"Principal": {"Service": "fis.amazonaws.com"}}, "sts:AssumeRole")
        where = f"arn:aws:ec2:{self.region}:{self.number}:instance/{host}"
        send = _policy({"Resource": where}, "ec2:SendSpotInstanceInterruptions")
        see = _policy({"Resource": "*"}, "ec2:DescribeInstances")
        made = iam.create_role(
            RoleName=role,
            AssumeRolePolicyDocument=trusted,
            Tags=[{"Key": name, "Value": value} for name, value in tags.items()],
        )["Role"]
        template = None
        try:
            for name, policy in (("send", send), ("see", see)):
                iam.put_role_policy(RoleName=role, PolicyName=name, PolicyDocument=policy)
            template = fis.create_experiment_template(
                description="A spot notice for one host",
                roleArn=made["Arn"],
                stopConditions=[{"source": "none"}],
                targets={
                    "host": {
                        "resourceType": "aws:ec2:spot-instance",
                        "resourceArns": [where],
                        "selectionMode": "ALL",
                    }
                },
                actions={
                    "notice": {
                        "actionId": NOTICE_ACTION,
                        "parameters": {"durationBeforeInterruption": f"PT{NOTICE_MINUTES}M"},
                        "targets": {"SpotInstances": "host"},
                    }
                },
                tags=tags,
            )["experimentTemplate"]["id"]
            _start(fis, template)
            yield
        finally:
            if template is not None:
                fis.delete_experiment_template(id=template)
            for name in ("send", "see"):
                iam.delete_role_policy(RoleName=role, PolicyName=name)
            iam.delete_role(RoleName=role)

    def container_insights(self) -> list[str]:
        """Return the log groups that AWS itself creates for the cluster; no stack destroys them."""
        return [
            group["logGroupName"]
            for place in ("/aws/ecs/containerinsights", "/aws/containerinsights")
            for page in self.client("logs")
            .get_paginator("describe_log_groups")
            .paginate(logGroupNamePrefix=f"{place}/{self.stack}/")
            for group in page["logGroups"]
        ]

    def delete_container_insights(self) -> None:
        """Delete these log groups."""
        for group in self.container_insights():
            self.client("logs").delete_log_group(logGroupName=group)

    def left(self) -> list[str]:
        """Return the ARNs of what is there of the name's stacks; names of log groups and roles."""
        names = [self.name, *(f"{self.name}-{home}" for home in ("ecs", "eks"))]
        filters = [{"Key": "Project", "Values": names}]
        pages = self.client("resourcegroupstaggingapi").get_paginator("get_resources")
        arns = {
            found["ResourceARN"]
            for page in pages.paginate(TagFilters=filters)
            for found in page["ResourceTagMappingList"]
        }
        ours = (f"{names[1]}-", f"{names[2]}-", f"{self.name}-spot-notice")
        roles = {
            role["Arn"]
            for page in self.client("iam").get_paginator("list_roles").paginate()
            for role in page["Roles"]
            if role["RoleName"].startswith(ours)
        }
        there = [arn for arn in sorted(arns | roles) if not self._gone(arn)]
        return [*there, *self.container_insights()]

    def _gone(self, arn: str) -> bool:
        """Return whether a listed thing is gone or ends by itself."""
        _, _, service, _, _, rest = arn.split(":", 5)
        kind, _, name = rest.partition("/")
        try:
            if service == "ec2" and kind in GONE:
                return self._ended(kind, name)
            if service == "kms":
                key = self.client("kms").describe_key(KeyId=arn)["KeyMetadata"]
                return bool(key["KeyState"] == "PendingDeletion")
            if service == "ecs":
                return self._inactive(kind, arn)
        except ClientError as error:
            if "NotFound" in error.response["Error"]["Code"]:
                return True
            raise
        return False

    def _ended(self, kind: str, name: str) -> bool:
        action, ids = GONE[kind]
        answer = getattr(self.client("ec2"), action)(**{ids: [name]})
        if kind == "instance":
            hosts = [host for item in answer["Reservations"] for host in item["Instances"]]
            return all(host["State"]["Name"] == "terminated" for host in hosts)
        (items,) = [value for value in answer.values() if isinstance(value, list)]
        return all(item["State"].lower() == "deleted" for item in items)

    def _inactive(self, kind: str, arn: str) -> bool:
        """Return whether ECS keeps only the record of a thing that was deleted."""
        ecs = self.client("ecs")
        if kind == "cluster":
            items = ecs.describe_clusters(clusters=[arn])["clusters"]
        elif kind == "service":
            cluster = arn.split("/")[1]
            items = ecs.describe_services(cluster=cluster, services=[arn])["services"]
        elif kind == "capacity-provider":
            items = ecs.describe_capacity_providers(capacityProviders=[arn])["capacityProviders"]
        elif kind == "task-definition":
            items = [ecs.describe_task_definition(taskDefinition=arn)["taskDefinition"]]
        else:
            return False
        return all(item["status"] == "INACTIVE" for item in items)


def _start(fis: Any, template: str) -> None:
    """Start an experiment; again while its role, which is new, cannot be assumed.

    Raises:
        Refused: it has not begun to act.
    """
    until = time.monotonic() + ROLE_S
    experiment = fis.start_experiment(experimentTemplateId=template)["experiment"]
    while True:
        state = experiment["state"]
        if state["status"] in ("running", "completed"):
            return
        if time.monotonic() > until or state["status"] in ("stopping", "stopped", "cancelled"):
            raise Refused(f"no spot notice: the experiment is {state['status']}, {state['reason']}")
        time.sleep(POLL_S)
        if state["status"] == "failed":
            experiment = fis.start_experiment(experimentTemplateId=template)["experiment"]
        else:
            experiment = fis.get_experiment(id=experiment["id"])["experiment"]


def _policy(more: dict[str, Any], action: str) -> str:
    statement = {"Effect": "Allow", "Action": action, **more}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _tag(host: dict[str, Any], name: str) -> str | None:
    return next((tag["Value"] for tag in host.get("Tags", []) if tag["Key"] == name), None)
