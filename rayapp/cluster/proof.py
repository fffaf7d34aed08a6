"""What a proof does: run `make` and rayapp, find hosts, take them away, see what is left.

Everything that the stacks of infra/ create has the tag Project. The Resource Groups Tagging API
finds it by that, also for a time after it is gone; IAM roles, and log groups that AWS creates, have
no such entry and are found by name.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from rayapp.observe import status
from rayapp.observe.run_folder import EXIT_CODES
from rayapp.storage import Storage, open_storage

# 2 minutes: the least that the action takes, and what EC2 itself gives.
NOTICE = {
    "actionId": "aws:ec2:send-spot-instance-interruptions",
    "parameters": {"durationBeforeInterruption": "PT2M"},
    "targets": {"SpotInstances": "host"},
}
ROLE_S = 90.0  # until a new role can be assumed everywhere
POLL_S, RUN_POLL_S = 10.0, 5.0
ENDED = ("terminated", "deleted", "pendingdeletion")  # states of what is listed yet
FRAME = " \t╷│╵"  # Terraform's, around its errors


class Failed(RuntimeError):
    """A step did not do what it should; the message says what was seen instead."""


@dataclass
class Proof:
    """A proof that is under way: the account and the stacks of its name there, and its commands."""

    name: str
    home: str
    """ecs or eks."""
    region: str
    number: str
    """Of the account: 12 digits."""
    client: Callable[[str], Any]
    """Takes a service, returns a boto3 client."""
    config: Path
    """The YAML file of the runs, which the cluster is rendered for."""
    log: Path
    """Takes what the commands print."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of `make`, for every target: NAME, REGION and others."""
    until: float = math.inf
    """time.monotonic() after which only the way down goes on."""
    taken: list[str] = field(default_factory=list)
    """Ids of the hosts that were taken away."""
    remaining: list[str] = field(default_factory=list)
    """What is left of the stacks when they are destroyed."""

    @property
    def stack(self) -> str:
        """The prefix of the cluster's names."""
        return f"{self.name}-{self.home}"

    @property
    def bucket(self) -> str:
        """The bucket of the base stack."""
        return f"{self.name}-{self.number}-{self.region}"

    @property
    def storage(self) -> str:
        """What is given as run.storage."""
        return f"s3://{self.bucket}/runs"

    def run(self, name: str) -> Storage:
        """Return the folder of a run."""
        return open_storage(f"{self.storage}/{name}")

    def _all(self, service: str, action: str, **asked: Any) -> Iterator[Any]:
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
        policies = {"see": _policy("ec2:DescribeInstances", Resource="*")}
        policies["send"] = _policy("ec2:SendSpotInstanceInterruptions", Resource=where)
        assumed = _policy("sts:AssumeRole", Principal={"Service": "fis.amazonaws.com"})
        tags = [{"Key": "Project", "Value": self.name}]
        made = iam.create_role(RoleName=role, AssumeRolePolicyDocument=assumed, Tags=tags)["Role"]
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
        asked = "logs", "describe_log_groups"
        places = ("/aws/ecs/containerinsights", "/aws/containerinsights")
        begins = [f"{place}/{self.stack}/" for place in places]
        groups = (g for each in begins for g in self._all(*asked, logGroupNamePrefix=each))
        return [group["logGroupName"] for group in groups]

    def left(self) -> list[str]:
        """Return the ARNs of what is there of the name's stacks; names of log groups and roles."""
        names = [self.name, f"{self.name}-ecs", f"{self.name}-eks"]
        tags = [{"Key": "Project", "Values": names}]
        tagged = self._all("resourcegroupstaggingapi", "get_resources", TagFilters=tags)
        arns = {found["ResourceARN"] for found in tagged}
        ours = (f"{names[1]}-", f"{names[2]}-", f"{self.name}-spot-notice")
        roles = self._all("iam", "list_roles")
        arns |= {role["Arn"] for role in roles if role["RoleName"].startswith(ours)}
        return [arn for arn in sorted(arns) if not self._gone(arn)] + self.container_insights()

    def _gone(self, arn: str) -> bool:
        """Return whether a listed thing has ended, or costs nothing, as what is left of ECS."""
        service, rest = arn.split(":")[2], arn.split(":", 5)[5]
        kind, _, name = rest.partition("/")
        ec2 = self.client("ec2")
        try:
            match service, kind:
                case "ecs", _:
                    return True
                case "kms", _:
                    states = [self.client("kms").describe_key(KeyId=arn)["KeyMetadata"]["KeyState"]]
                case "ec2", "instance":
                    told = ec2.describe_instances(InstanceIds=[name])["Reservations"]
                    states = [host["State"]["Name"] for each in told for host in each["Instances"]]
                case "ec2", "natgateway":
                    told = ec2.describe_nat_gateways(NatGatewayIds=[name])
                    states = [each["State"] for each in told["NatGateways"]]
                case "ec2", "vpc-endpoint":
                    told = ec2.describe_vpc_endpoints(VpcEndpointIds=[name])
                    states = [each["State"] for each in told["VpcEndpoints"]]
                case _:
                    return False
        except ClientError as error:
            if "NotFound" in error.response["Error"]["Code"]:
                return True
            raise
        return all(state.lower() in ENDED for state in states)

    def left_s(self, most: float = math.inf) -> float:
        """Return the seconds until `until`, or `most` if that is less."""
        return min(most, max(0.0, self.until - time.monotonic()))

    def make(self, target: str, more: Mapping[str, str], timeout_s: float | None = None) -> int:
        """Run a target of the Makefile; return its exit code. `more` are further variables."""
        given = {**self.variables, **more}
        words = [f"{name}={value}" for name, value in given.items() if value]
        return self.command(["make", "--no-print-directory", target, *words], timeout_s)

    def command(self, words: list[str], timeout_s: float | None) -> int:
        """Run a command, with its output in the log; return its exit code.

        Ctrl-C is for this program, which then tears down: the command gets SIGINT, by which
        Terraform saves its state, and is waited for.

        Raises:
            Failed: it has not ended after `timeout_s` seconds, and was ended.
        """
        with self.log.open("a", encoding="utf-8") as output:
            output.write(f"\n$ {' '.join(words)}\n")
            output.flush()
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = subprocess.Popen(words, **streams, start_new_session=True)
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                what = " ".join(words[:3])
                raise Failed(f"`{what}` was ended after {timeout_s:.0f} s: time is over") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait()

    def rayapp(self, *words: str) -> int:
        """Run a command of rayapp through `rayapp connect`, as a user does; return its code."""
        rayapp = [sys.executable, "-m", "rayapp"]
        way = [*rayapp, "connect", self.home, f"--name={self.name}", f"--region={self.region}"]
        way += ["--", *rayapp, *words]
        return self.command(way, self.left_s())

    def needs(self, code: int, what: str) -> None:
        """Raise unless a command has returned 0.

        Raises:
            Failed: with the last lines of the log.
        """
        if code:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            ours = ("make", "$ ")  # what was called, not what it said
            words = [line.strip(FRAME) for line in lines if not line.startswith(ours)]
            said = " / ".join([*filter(None, words)][-3:])
            raise Failed(f"{what} returned {code}: {said[-400:]}")

    def submit(self, name: str, **more: str) -> None:
        """Send a run of the config."""
        given = [f"--{field}={value}" for field, value in more.items()]
        given = [f"--run.storage={self.storage}", f"--run.name={name}", *given]
        self.needs(self.rayapp("submit", str(self.config), *given), "rayapp submit")

    def wait(self, name: str, true: Callable[[status.Progress], bool], limit_s: float) -> None:
        """Wait until something is true of a run.

        Raises:
            Failed: the run has ended without it, or time is over.
        """
        until, folder = time.monotonic() + self.left_s(limit_s), self.run(name)
        while True:
            seen = "it has not begun"
            with suppress(status.NoRun):
                now = status.read(folder)
                if true(now):
                    return
                seen = f"it is {now.status} at step {now.step}"
                if now.status in EXIT_CODES:
                    raise Failed(f"run {name}: {seen}. {now.reason or ''}")
            if time.monotonic() > until:
                raise Failed(f"run {name}: {seen}, and time is over")
            time.sleep(RUN_POLL_S)


def _start(fis: Any, template: str) -> None:
    """Start an experiment; again while its role, which is new, cannot be assumed."""
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
