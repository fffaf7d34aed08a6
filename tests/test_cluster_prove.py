"""`make prove-*`: the order of what it does, its page, and that it always tears down."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from proving import BIN, NAME, TASK, Hosts, Site
from terraform import ROOT, Cloud

from rayapp.cluster import Options, trials
from rayapp.cluster.proof import Failed, Proof
from rayapp.cluster.prove import main, masked, page, price
from rayapp.cluster.trials import FAIL, NOT_RUN, PASS, Step

UP, RUN, NOTICE, *_, SAME = trials.TRIALS
DOWN, LEFT = trials.WAY_DOWN

needs_terraform = pytest.mark.skipif(
    shutil.which("terraform") is None, reason="terraform is not installed"
)


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Return {step: (result, what was seen)} of a page."""
    found = re.findall(r"^\| (.+?) \| (PASS|FAIL|not run) \| \d* \| (.*) \|$", text, re.M)
    return {name: (result, seen) for name, result, seen in found}


def test_a_page_tells_all_but_the_account() -> None:
    seen = "arn:aws:ec2:us-west-2:123456789012:instance/i-1 is | left"
    listed = [Step("up", PASS, 61.4), Step("run", FAIL, 2.0, seen), Step("down")]
    whole = page("rayapp on ECS", {"region": "us-west-2"}, listed, ["make down-ecs NAME=x"])
    text = masked(whole)
    assert text.startswith("# rayapp on ECS: FAIL\n") and "123456789012" not in text
    assert rows(text)["run"] == (FAIL, seen.replace("123456789012", "ACCOUNT").replace("|", "\\|"))
    assert rows(text)["down"] == (NOT_RUN, "") and "| up | PASS | 61 |" in text
    assert "- `make down-ecs NAME=x`" in text
    assert "123456789012" in whole
    assert page("all", {}, [Step("up", PASS)], []).startswith("# all: PASS\n")


def proof_of(client: Callable[[str], Any], log: Path) -> Proof:
    return Proof(NAME, "ecs", "us-west-2", "123456789012", client, log, log)


TOLD_BY_TERRAFORM = """
$ make --no-print-directory down-base
Destroy complete? No.
╷
│ Error: deleting S3 Bucket (rayapp-prove): BucketNotEmpty
│ 
│   with module.storage.aws_s3_bucket.this,
╵
make: *** [Makefile:1: down-base] Error 1
"""


def test_what_terraform_says_is_told_without_its_frame(account: Cloud, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(TOLD_BY_TERRAFORM)
    proof = proof_of(account.client, tmp_path / "log")
    with pytest.raises(Failed) as raised:
        proof.needs(2, "make down-base")
    assert str(raised.value) == (
        "make down-base returned 2: Destroy complete? No. / Error: deleting S3 Bucket "
        "(rayapp-prove): BucketNotEmpty / with module.storage.aws_s3_bucket.this,"
    )


LINES = [{"step": n, "batch_digest": f"{n:016x}", "loss": 2.0, "workers": 2} for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, "3 digests equal, losses within 0 nats per token"),
        ({2: {"loss": 2.01}}, "3 digests equal, losses within 0.01 nats per token"),
        ({2: {"loss": 2.1}}, "digests are equal, losses differ by 0.1 nats per token"),
        ({1: {"loss": None}}, "digests are equal, losses differ by inf nats per token"),
        ({1: {"batch_digest": "0"}}, "batches differ, first at line 2 of 3 and 3"),
        ({2: None}, "batches differ, first at line 3 of 3 and 2"),
    ],
)
def test_both_runs_are_compared_step_by_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[int, dict[str, object] | None],
    seen: str,
) -> None:
    other = [
        {**line, **(change or {})}
        for number, line in enumerate(LINES)
        if (change := changes.get(number, {})) is not None
    ]
    lines = {trials.DISTURBED: LINES, trials.UNDISTURBED: other}
    monkeypatch.setattr(Proof, "run", lambda _, name: name)
    monkeypatch.setattr(trials.metrics, "read", lines.__getitem__)
    proof = proof_of(lambda _: None, tmp_path)
    passes = seen.startswith("3 digests")
    with contextlib.nullcontext() if passes else pytest.raises(Failed, match=re.escape(seen)):
        assert trials.compare(proof) == seen


def test_a_bucket_with_versions_can_be_emptied(account: Cloud) -> None:
    """As Terraform destroys it: its versioning is suspended first."""
    s3, name = account.client("s3"), "with-versions"
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    s3.put_object(Bucket=name, Key="a", Body=b"1")
    s3.delete_object(Bucket=name, Key="a")
    s3.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Suspended"})
    told = s3.list_object_versions(Bucket=name)
    for one in told.get("Versions", []) + told.get("DeleteMarkers", []):
        s3.delete_object(Bucket=name, Key="a", VersionId=one["VersionId"])
    s3.delete_bucket(Bucket=name)


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    cloud = emulated(tmp_path_factory.mktemp("account"))
    yield cloud
    cloud.end()


def emulated(folder: Path) -> Cloud:
    """Return an account whose services have their tasks at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_ECS_SERVICE_RUNNING", "3")
        patch.setenv("EMULATED_TASK", TASK)
        return Cloud(folder)


@pytest.mark.full
@pytest.mark.parametrize("home", ["ecs", "eks"])
def test_a_cluster_that_does_not_come_up_goes_down(
    account: Cloud, tmp_path: Path, home: str
) -> None:
    site = Site(account, tmp_path, f"infra/{home} apply")
    done = site.prove(home, "YES=1", "API_CIDRS=203.0.113.7/32")
    assert done.returncode == 2, done.stderr  # make's code of a command that failed
    assert "cost: at most " in done.stdout and "USD/h with 1 x m6i.2xlarge and 3 x" in done.stdout
    found = rows(site.page(home))
    assert list(found)[:2] == [UP, RUN] and list(found)[-2:] == [DOWN, LEFT]
    assert found[UP][0] == FAIL and "stand-in: terraform fails here" in found[UP][1]
    assert {found[name][0] for name in list(found)[1:-2]} == {NOT_RUN}
    assert found[DOWN][0] == PASS and found[LEFT][0] == PASS
    assert site.page(home).startswith(f"# rayapp on {home.upper()}: FAIL")
    assert "To remove by hand" not in site.page(home)
    calls = site.calls()
    assert [call for call in calls if "infra/base destroy" in call]
    assert not [call for call in calls if "TF_WORKSPACE=rayapp-us" in call]
    assert all(f"-var=name={NAME}" in call for call in calls if "infra/base apply" in call)


def within(site: Site, monkeypatch: pytest.MonkeyPatch, *make: str) -> None:
    """Have this process be one at the site; `make` are variables of make."""
    monkeypatch.chdir(site.folder)
    for name, value in site.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MAKEFLAGS", " ".join(["--", f"BIN={BIN}", *make]))
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)


def test_a_cluster_without_its_hosts_goes_down(
    account: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(account, tmp_path)
    within(site, monkeypatch, "CAPACITY=true")  # Terraform's stand-in makes no nodes to wait for
    monkeypatch.setattr(trials, "LISTED_S", 0.0)
    assert main(["eks", "--yes=1", "--api_cidrs=203.0.113.7/32"]) == 1
    found = rows(site.page("eks"))
    assert found[UP] == (FAIL, "0 of 3 worker hosts run")
    calls = site.calls()
    places = [
        next(number for number, call in enumerate(calls) if part in call)
        for part in (
            "infra/base apply",
            "-target=aws_eks_cluster.this",
            "kubectl --request-timeout=30s version",
            "ecr describe-images",
            "helm upgrade --install kuberay-operator",
            f"kubectl apply -k build/{NAME}-us-west-2/kuberay/cluster",
            "kubectl delete",
            "infra/eks destroy",
            "infra/base destroy",
        )
    ]
    assert places == sorted(places), calls
    assert found[DOWN][0] == PASS and found[LEFT][0] == PASS


def test_what_a_failed_tear_down_leaves_is_named(
    account: Cloud,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    site = Site(account, tmp_path, "infra/ecs apply", "infra/base destroy")
    within(site, monkeypatch)
    monkeypatch.setattr(trials, "LEFT_S", 0.0)
    sns, go_down = account.client("sns"), trials.go_down

    def leaves_a_topic(proof: Proof) -> str:
        tags = [{"Key": "Project", "Value": NAME}]
        sns.create_topic(Name="alarms", Tags=tags)
        return go_down(proof)

    monkeypatch.setitem(trials.WAY_DOWN, DOWN, leaves_a_topic)
    arn = "arn:aws:sns:us-west-2:123456789012:alarms"
    try:
        assert main(["ecs", "--yes=1"]) == 1
    finally:
        sns.delete_topic(TopicArn=arn)
    text, found = site.page("ecs"), rows(site.page("ecs"))
    assert found[DOWN][0] == FAIL and "make down-base returned" in found[DOWN][1]
    assert len([call for call in site.calls() if "infra/base destroy" in call]) == 2
    assert found[LEFT] == (FAIL, "1 things are left, listed below")
    hand = text.partition("## To remove by hand")[2]
    assert f"- `make down-ecs NAME={NAME} REGION=us-west-2`" in hand
    assert f"make down-base NAME={NAME} REGION=us-west-2 BUCKET={NAME}-ACCOUNT-us-west-2" in hand
    assert "- `arn:aws:sns:us-west-2:ACCOUNT:alarms`" in hand
    assert arn in capsys.readouterr().out  # with the account, for whom it is


def test_a_name_that_is_taken_is_refused(account: Cloud, tmp_path: Path) -> None:
    topic = account.client("sns").create_topic(
        Name="mine", Tags=[{"Key": "Project", "Value": f"{NAME}-eks"}]
    )["TopicArn"]
    site = Site(account, tmp_path)
    done = site.prove("ecs", "YES=1")
    account.client("sns").delete_topic(TopicArn=topic)
    assert f"name={NAME} is taken: 1 things have its tags, e.g. {topic}" in done.stderr
    assert not site.calls()


@pytest.mark.full
def test_it_asks_before_it_starts(account: Cloud, tmp_path: Path) -> None:
    site = Site(account, tmp_path)
    done = site.prove("ecs", answer="y")
    assert "cost: at most 3.73 USD" in done.stdout and "nothing was started" in done.stdout
    assert done.returncode == 2 and not site.calls()
    done = site.prove("ecs", "REGION=ap-south-1", "YES=1")
    assert "region=ap-south-1 is impossible" in done.stderr and not site.calls()


def test_the_price_in_the_docs_is_what_is_told() -> None:
    (ecs, eks) = [price(home, Options())[1].split()[3] for home in ("ecs", "eks")]
    text = (ROOT / "docs" / "ecs.md").read_text()
    assert f"the most that it can cost ({ecs} USD; on EKS {eks})" in text


@pytest.mark.drill
@pytest.mark.timeout(5400)
@needs_terraform
@pytest.mark.parametrize("home", ["ecs", "eks"])
def test_z_all_of_a_proof(tmp_path: Path, home: str) -> None:
    """With Terraform itself: hosts are nodes of Ray here, S3 is the emulator's."""
    (tmp_path / "account").mkdir()
    (tmp_path / "site").mkdir()
    cloud = emulated(tmp_path / "account")
    try:
        site = Site(cloud, tmp_path / "site", terraform=True)
        with Hosts(site, home) as hosts:
            done = site.prove(home, "API_CIDRS=203.0.113.7/32")
        text = site.page(home)
        assert done.returncode == 0, f"{text}\n{done.stderr[-2000:]}\n{hosts.problems}"
    finally:
        cloud.end()
    found = rows(text)
    print(text)
    assert {result for result, _ in found.values()} == {PASS}
    assert "0 steps lost" in found[NOTICE][1]
    assert "digests equal" in found[SAME][1]
    assert len(hosts.noticed) == 1
