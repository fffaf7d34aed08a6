"""The real Terraform, with the real AWS provider, against the emulator."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import boto3
import pytest
from patience import PATIENCE_S
from ports import free_port

ROOT = Path(__file__).parents[2]
REGION, ACCOUNT = "us-west-2", "123456789012"
# What the provider would ask of real endpoints before it starts; only the emulator lacks them. A
# missing action is an error 500, which the provider repeats for minutes unless told otherwise.
OVERRIDE = """
provider "aws" {
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  s3_use_path_style           = true
  max_retries                 = 2
}
"""


def mirror() -> Path | None:
    """Return a folder of providers on this machine; None: they come from the registry."""
    places = [Path("/"), Path.home() / ".terraform.d", Path("/usr/share"), Path("/usr/local/share")]
    tail = "registry.terraform.io/hashicorp/aws"
    for place in places:
        for found in (path for stars in ("*", "*/*") for path in place.glob(f"{stars}/{tail}")):
            return found.parents[2]
    return None


class Cloud:
    """An emulated account, and stacks of infra/ copied into a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "CHECKPOINT_DISABLE": "1",
            "TF_IN_AUTOMATION": "1",
        }
        shutil.copytree(
            ROOT / "infra",
            folder / "infra",
            ignore=shutil.ignore_patterns(".terraform", "*.tfstate*"),
        )
        for stack in ("base", "ecs", "eks"):
            (folder / "infra" / stack / "emulator_override.tf").write_text(OVERRIDE)
        self.log = folder / "emulator.log"
        emulator = Path(__file__).with_name("aws_emulator.py")
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(emulator), "-H", "127.0.0.1", "-p", str(port)],
                env={
                    name: v for name, v in self.environment.items() if not name.startswith("AWS_")
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.post("reset-auth", str(10**9))  # no IAM until a test asks for it

    def post(self, what: str, body: str) -> None:
        """Tell moto itself something; wait for it to be up."""
        deadline = time.monotonic() + PATIENCE_S
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/{what}", body.encode(), headers)
        while True:
            try:
                urllib.request.urlopen(request, timeout=10).read()
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.2)
            else:
                return

    def client(self, service: str, **credentials: str) -> Any:
        """Return a boto3 client; without credentials, of one who may do all."""
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=REGION,
            **(credentials or {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}),
        )

    def terraform(self, stack: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Terraform in a stack."""
        return subprocess.run(
            ["terraform", f"-chdir={self.folder / 'infra' / stack}", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def init(self, stack: str) -> subprocess.CompletedProcess[str]:
        found = mirror()
        options = [] if found is None else [f"-plugin-dir={found}"]
        return self.terraform(stack, "init", "-input=false", "-no-color", *options)

    def stand_in_for_base(self, stack: str) -> None:
        """Initialise a stack and make what it reads of the base's, without applying that one."""
        done = self.init(stack)
        if done.returncode and mirror() is None:
            pytest.skip(f"the AWS provider cannot be had here: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
        place = {"LocationConstraint": REGION}
        bucket = f"rayapp-{ACCOUNT}-{REGION}"
        self.client("s3").create_bucket(Bucket=bucket, CreateBucketConfiguration=place)
        key = self.client("kms").create_key()["KeyMetadata"]["KeyId"]
        self.client("kms").create_alias(AliasName="alias/rayapp", TargetKeyId=key)
        self.client("ecr").create_repository(repositoryName="rayapp")

    def variables(self, stack: str, values: dict[str, Any]) -> None:
        """Say what a stack's variables are, for every command on it from now on."""
        path = self.folder / "infra" / stack / "terraform.tfvars.json"
        path.write_text(json.dumps(values))

    def apply(self, stack: str) -> None:
        """Apply a stack; what it did is in the folder's log of its name."""
        options = ("-auto-approve", "-input=false", "-no-color", "-parallelism=30")
        done = self.terraform(stack, "apply", *options)
        (self.folder / f"{stack}.log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr[-4000:] + self.log.read_text()[-2000:]

    def plan(self, stack: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Plan; exit code 0 is no change, 1 an error, 2 a change."""
        options = ("-detailed-exitcode", "-input=false", "-no-color", "-lock=false")
        return self.terraform(stack, "plan", *options, *arguments)

    def destroy(self, stack: str) -> subprocess.CompletedProcess[str]:
        options = ("-auto-approve", "-input=false", "-no-color", "-parallelism=30")
        return self.terraform(stack, "destroy", *options)

    def state(self, stack: str) -> str:
        return (self.folder / "infra" / stack / "terraform.tfstate").read_text()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=PATIENCE_S)
