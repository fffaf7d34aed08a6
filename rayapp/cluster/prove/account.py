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

# 2 minutes: the least that the action takes, and what EC2 itself gives.
NOTICE = {
    "actionId": "aws:ec2:send-spot-instance-interruptions",
    "parameters": {"durationBeforeInterruption": "PT2M"},
    "targets": {"SpotInstances": "host"},
}
ROLE_S = 90.0  # until a new role can be assumed everywhere
POLL_S = 10.0
ENDED = ("terminated", "deleted", "pendingdeletion", "inactive")
"""States of what is listed although it is gone, or ends by itself."""


class Failed(RuntimeError):
    """A step did not do what it should; the message says what was seen instead."""


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

    def _all(self, service: str, action: str, **asked: Any) -> Iterator[Any]:
        """Yield the items of all pages of an answer, in which they are the one list."""
        for page in self.client(service).get_paginator(action).paginate(**asked):
            for value in page.values():
                yield from value if isinstance(value, list) else ()

    def workers(self) -> list[str]:
        """Return the ids of the running worker hosts, the oldest first."""
        filters = [
            {"Name": "tag:Project", "Values": [self.stack]},
            {"Name": "instance-state-name", "Values": ["running"]},
        ]
        hosts = [
            (host["LaunchTime"], host["InstanceId"])
            for each in self._all("ec2", "describe_instances", Filters=filters)
            for host in each["Instances"]
            for tag in host["Tags"]
            if tag["Key"] == "Name" and not tag["Value"].endswith(("-head", "-system"))
        ]
        return [name for _, name in sorted(hosts)]

    @contextmanager
    def terminated(self, host: str) -> Iterator[None]:
        """End a host at once, as a machine that fails: its system gets no time to shut down."""
        self.client("ec2").terminate_instances(InstanceIds=[host], SkipOsShutdown=True)
        yield

    @contextmanager
    def spot_notice(self, host: str) -> Iterator[None]:
        """Have EC2 send a spot notice to a host, and end it 2 minutes later.

        The Fault Injection Service does it. Its role and template are deleted at the block's end.

        Raises:
            Failed: the host gets no notice.
        """
        iam, fis, role = self.client("iam"), self.client("fis"), f"{self.name}-spot-notice"
        where = f"arn:aws:ec2:{self.region}:{self.number}:instance/{host}"
        policies = {
            "send": _policy("ec2:SendSpotInstanceInterruptions", Resource=where),
            "see": _policy("ec2:DescribeInstances", Resource="*"),
        }
        made = iam.create_role(
            RoleName=role,
            AssumeRolePolicyDocument=_policy(
                "sts:AssumeRole", Principal={"Service": "fis.amazonaws.com"}
            ),
            Tags=[{"Key": "Project", "Value": self.name}],
        )["Role"]
        template = None
        try:
            for name, policy in policies.items():
                iam.put_role_policy(RoleName=role, PolicyName=name, PolicyDocument=policy)
            target = {"resourceType": "aws:ec2:spot-instance", "resourceArns": [where]}
            template = fis.create_experiment_template(
                description="A spot notice for one host",
                roleArn=made["Arn"],
                stopConditions=[{"source": "none"}],
                targets={"host": {**target, "selectionMode": "ALL"}},
                actions={"notice": NOTICE},
                tags={"Project": self.name},
            )["experimentTemplate"]["id"]
            _start(fis, template)
            yield
        finally:
            if template is not None:
                fis.delete_experiment_template(id=template)
            for name in policies:
                iam.delete_role_policy(RoleName=role, PolicyName=name)
            iam.delete_role(RoleName=role)

    def container_insights(self) -> list[str]:
        """Return the log groups that AWS itself creates for the cluster; no stack destroys them."""
        return [
            group["logGroupName"]
            for place in ("/aws/ecs/containerinsights", "/aws/containerinsights")
            for group in self._all(
                "logs", "describe_log_groups", logGroupNamePrefix=f"{place}/{self.stack}/"
            )
        ]

    def left(self) -> list[str]:
        """Return the ARNs of what is there of the name's stacks; names of log groups and roles."""
        names = [self.name, f"{self.name}-ecs", f"{self.name}-eks"]
        tagged = self._all(
            "resourcegroupstaggingapi",
            "get_resources",
            TagFilters=[{"Key": "Project", "Values": names}],
        )
        arns = {found["ResourceARN"] for found in tagged}
        ours = (f"{names[1]}-", f"{names[2]}-", f"{self.name}-spot-notice")
        roles = self._all("iam", "list_roles")
        arns |= {role["Arn"] for role in roles if role["RoleName"].startswith(ours)}
        return [arn for arn in sorted(arns) if not self._gone(arn)] + self.container_insights()

    def _gone(self, arn: str) -> bool:
        """Return whether a listed thing is gone or ends by itself."""
        try:
            states = list(self._states(arn))
        except ClientError as error:
            if "NotFound" in error.response["Error"]["Code"]:
                return True
            raise
        return all(state.lower() in ENDED for state in states)

    def _states(self, arn: str) -> Iterator[str]:
        """Yield the states of a thing that stays listed after its end; `there` of other kinds."""
        service, rest = arn.split(":")[2], arn.split(":", 5)[5]
        kind, _, name = rest.partition("/")
        ec2, ecs = self.client("ec2"), self.client("ecs")
        match service, kind:
            case "ec2", "instance":
                for group in ec2.describe_instances(InstanceIds=[name])["Reservations"]:
                    yield from (host["State"]["Name"] for host in group["Instances"])
                return
            case "ec2", "natgateway":
                told = ec2.describe_nat_gateways(NatGatewayIds=[name])["NatGateways"]
            case "ec2", "vpc-endpoint":
                told = ec2.describe_vpc_endpoints(VpcEndpointIds=[name])["VpcEndpoints"]
            case "kms", _:
                yield self.client("kms").describe_key(KeyId=arn)["KeyMetadata"]["KeyState"]
                return
            case "ecs", "cluster":
                told = ecs.describe_clusters(clusters=[arn])["clusters"]
            case "ecs", "service":
                cluster = name.partition("/")[0]
                told = ecs.describe_services(cluster=cluster, services=[arn])["services"]
            case "ecs", "capacity-provider":
                asked = {"capacityProviders": [arn]}
                told = ecs.describe_capacity_providers(**asked)["capacityProviders"]
            case "ecs", "task-definition":
                told = [ecs.describe_task_definition(taskDefinition=arn)["taskDefinition"]]
            case _:
                told = [{"State": "there"}]
        yield from (each.get("State") or each.get("status") for each in told)


def _start(fis: Any, template: str) -> None:
    """Start an experiment; again while its role, which is new, cannot be assumed.

    Raises:
        Failed: it has not begun to act.
    """
    until = time.monotonic() + ROLE_S
    experiment = fis.start_experiment(experimentTemplateId=template)["experiment"]
    while (state := experiment["state"])["status"] not in ("running", "completed"):
        status = state["status"]
        if time.monotonic() > until or status in ("stopping", "stopped", "cancelled"):
            raise Failed(f"no spot notice: the experiment is {status}, {state['reason']}")
        time.sleep(POLL_S)
        again = status == "failed"
        asked = {"experimentTemplateId": template} if again else {"id": experiment["id"]}
        experiment = (fis.start_experiment if again else fis.get_experiment)(**asked)["experiment"]


def _policy(action: str, **more: Any) -> str:
    statement = {"Effect": "Allow", "Action": action, **more}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})
