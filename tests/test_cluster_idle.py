"""Check which clusters of an account are said to stand idle, and that nothing else is said."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from run_folders import eventful

from rayapp.__main__ import main
from rayapp.cluster.idle import idle_clusters
from rayapp.storage import Storage, open_storage

ACCOUNT, REGION = "123456789012", "us-west-2"


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws():
        yield


def hosts(stack: str, group: str, kind: str, count: int, **more: Any) -> list[str]:
    tags = [{"Key": "Project", "Value": stack}, {"Key": "Name", "Value": f"{stack}-{group}"}]
    specs = [{"ResourceType": "instance", "Tags": tags}]
    asked = {"ImageId": "ami-12c6146b", "InstanceType": kind, "TagSpecifications": specs, **more}
    made = boto3.client("ec2").run_instances(**asked, MinCount=count, MaxCount=count)
    return [one["InstanceId"] for one in made["Instances"]]


def found(folder: Path) -> list[str]:
    """Return the lines where the buckets' folders of runs lie in a folder here."""

    def runs(url: str) -> Storage:
        place = folder / url.removeprefix("s3://")
        place.mkdir(parents=True, exist_ok=True)
        return open_storage(str(place))

    return idle_clusters(ACCOUNT, REGION, boto3.client, runs)


def test_hosts_without_a_run_are_told(account: None, tmp_path: Path) -> None:
    hosts("rayapp-ecs", "worker-on-demand", "g5.12xlarge", 2)
    hosts("rayapp-ecs", "head", "m6i.2xlarge", 1)
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
    hosts("team-two-eks", "1-p4d-24xlarge-spot", "p4d.24xlarge", 1, **spot)
    hosts("team-two-eks", "system", "m6i.2xlarge", 1)
    gone = hosts("gone-ecs", "worker-on-demand", "g5.12xlarge", 1)
    boto3.client("ec2").terminate_instances(InstanceIds=gone)
    hosts("another-project", "worker", "g5.12xlarge", 1)
    (ecs, eks) = found(tmp_path)
    assert ecs.startswith("rayapp-ecs in us-west-2 stands idle: 2 x g5.12xlarge (11.34 USD/h)")
    assert f"no run in s3://rayapp-{ACCOUNT}-us-west-2/runs is under way" in ecs
    assert ecs.endswith("`make down-ecs NAME=rayapp` ends it")
    assert "team-two-eks in us-west-2 stands idle: 1 x p4d.24xlarge (price not known)" in eks
    assert eks.endswith("`make down-eks NAME=team-two` ends it")


def test_a_run_that_is_under_way_is_why_hosts_stand(account: None, tmp_path: Path) -> None:
    hosts("rayapp-ecs", "worker-on-demand", "g5.12xlarge", 2)
    folder = tmp_path / f"rayapp-{ACCOUNT}-us-west-2" / "runs"
    eventful(open_storage(str(folder)), "one")
    (folder / "no-run").mkdir()
    assert len(found(tmp_path)) == 1  # it has ended
    lease = {
        "id": "a",
        "host": "h",
        "pid": 1,
        "process": None,
        "machine": [],
        "renewed": time.time(),
    }
    begun = {"event": "started", "time": time.time(), "seen_until": None, "usd_per_hour": None}
    with (folder / "one" / "events.jsonl").open("a") as events:
        events.write(json.dumps(begun) + "\n")
    (folder / "one" / "LEASE").write_text(json.dumps(lease))
    assert found(tmp_path) == []


def test_list_tells_of_them(
    account: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boto3.client("s3").create_bucket(
        Bucket=f"rayapp-{ACCOUNT}-{REGION}",
        CreateBucketConfiguration={"LocationConstraint": REGION},
    )
    hosts("rayapp-ecs", "worker-on-demand", "g5.12xlarge", 1)
    assert main(["list", f"--storage={tmp_path}"]) == 0
    assert "rayapp-ecs in us-west-2 stands idle: 1 x g5.12xlarge" in capsys.readouterr().out
    assert main(["list", f"--storage={tmp_path}", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize("without", ["credentials", "region", "a way to AWS"])
def test_list_is_quiet_without_aws(
    without: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    if without == "region":
        monkeypatch.delenv("AWS_DEFAULT_REGION")
    if without != "credentials":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    (tmp_path / "runs").mkdir()
    assert main(["list", f"--storage={tmp_path}/runs"]) == 0
    out, err = capsys.readouterr()
    assert "idle" not in out + err and "Traceback" not in err


def test_what_aws_refuses_is_told(
    account: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is no bucket of that name for a cluster whose hosts run."""
    hosts("rayapp-ecs", "worker-on-demand", "g5.12xlarge", 1)
    assert main(["list", f"--storage={tmp_path}"]) == 0
    assert "idle clusters are not known: " in capsys.readouterr().out
