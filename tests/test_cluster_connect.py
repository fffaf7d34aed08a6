"""The way into a cluster: what is run, where the token is kept, what the commands print."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from botocore.stub import Stubber
from patience import PATIENCE_S
from ports import free_port

from rayapp.__main__ import main
from rayapp.cluster.connect import (
    Forwarding,
    NotReachable,
    Way,
    through,
    to_ecs,
)
from rayapp.cluster.hosts import missing_tasks, wait_for_workers

ARN = "arn:aws:ecs:us-west-2:123456789012:task/rayapp-ecs/0123456789abcdef"
LISTED = {"cluster": "rayapp-ecs", "serviceName": "head", "desiredStatus": "RUNNING"}


def clients(tasks: list[dict[str, Any]]) -> Any:
    """Return boto3's clients with answers that are checked against AWS's model."""
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-west-2"}
    made = {name: boto3.client(name, **keys) for name in ("ecs", "ssm")}
    ecs, ssm = Stubber(made["ecs"]), Stubber(made["ssm"])
    arns = [task["taskArn"] for task in tasks]
    ecs.add_response("list_tasks", {"taskArns": arns}, LISTED)
    asked = {"cluster": "rayapp-ecs", "tasks": arns}
    if tasks:
        ecs.add_response("describe_tasks", {"tasks": tasks}, asked)
    parameter = {"Parameter": {"Name": "/rayapp-ecs/ray-token", "Value": "s3cret"}}
    wanted = {"Name": "/rayapp-ecs/ray-token", "WithDecryption": True}
    ssm.add_response("get_parameter", parameter, wanted)
    ecs.activate()
    ssm.activate()
    return made.__getitem__


def test_the_way_to_an_ecs_head() -> None:
    containers = [{"name": "metrics", "runtimeId": "m-1"}, {"name": "ray", "runtimeId": "r-1"}]
    task = {"taskArn": ARN, "lastStatus": "RUNNING", "containers": containers}
    way = to_ecs("rayapp", "us-west-2", 9000, clients([task]))
    assert way.token == "s3cret"
    assert "ecs:rayapp-ecs_0123456789abcdef_r-1" in way.command
    assert '{"portNumber": ["8265"], "localPortNumber": ["9000"]}' in way.command
    assert way.token not in " ".join(way.command)  # it would show in the process list


@pytest.mark.parametrize(
    "tasks", [[], [{"taskArn": ARN, "lastStatus": "PENDING", "containers": []}]]
)
def test_no_head(tasks: list[dict[str, Any]]) -> None:
    with pytest.raises(NotReachable, match="no running head"):
        to_ecs("rayapp", "us-west-2", 8265, clients(tasks))


def test_render_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster.instance=p5.48xlarge", "--cluster.workers=16", "--account=123456789012"]
    assert main(["render", "ecs", *words, f"--out={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "cost: 110.62 USD/h with 2 x p5.48xlarge (55.04 each, on demand)" in out
    assert {path.name for path in tmp_path.iterdir()} == {
        "head.json",
        "worker.json",
        "terraform.tfvars.json",
    }
    assert main(["render", "ecs", *words, "--marked=spot"]) == 2
    assert "--marked=spot is unknown" in capsys.readouterr().err
    assert main(["render", "ecss", *words]) == 2
    assert "ecss is unknown" in capsys.readouterr().err
    assert main(["connect", "mars"]) == 2


def test_connect_says_what_is_missing(tmp_path: Path) -> None:
    """Without a cluster, a reason and exit code 1, no traceback."""
    command = [sys.executable, "-m", "rayapp", "connect", "eks"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "KUBECONFIG": "/dev/null"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("failed: kubectl") and "Traceback" not in done.stderr


def test_what_the_docs_render(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every `render` of the docs renders, and the costs that they name are those printed."""
    root = Path(__file__).parent.parent
    text = "".join(path.read_text() for path in sorted((root / "docs").glob("*.md")))
    text = text.replace("\\\n", " ")  # one line, as to a shell
    lustre = '{"id": "fs-1", "dns_name": "a", "mount_name": "b", "capacity_gib": 4800}'
    more = ["--account=123456789012", f"--out={tmp_path}"]
    lines = re.findall(r"^rayapp render (.+)$", text, re.M)
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(re.sub(r'--lustre="[^"]+"', "--lustre", line))
        words = [f"--lustre={lustre}" if word == "--lustre" else word for word in words]
        words = [
            "configs/dolly_v2_7b_ecs.yaml" if word == "CONFIG.yaml" else word for word in words
        ]
        assert main(["render", *words, *more]) == 0, capsys.readouterr().err
    capsys.readouterr()
    for platform, config, named in (
        ("ecs", "dolly_v2_7b_ecs", "11.88 USD/h with 2 x g5.12xlarge, 0.54 idle"),
        ("kuberay", "llama3_1_8b_c4_eks", "220.81 USD/h with 4 x p5.48xlarge, 0.65 idle"),
    ):
        assert named in " ".join(text.split())
        assert main(["render", platform, f"{root}/configs/{config}.yaml", *more]) == 0
        busy, idle = re.findall(r"([\d.]+) USD/h", capsys.readouterr().out)
        assert f"{busy} USD/h" in named and f"{idle} idle" in named


@pytest.mark.parametrize("home", ["ecs", "eks"])
def test_up_renders_and_tells_the_cost_before_it_applies(home: str) -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        ["make", "-n", f"up-{home}", "CONFIG=run.yaml"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    steps = ("-m rayapp render", "infra/base apply", "docker push", f"infra/{home} apply")
    places = [done.stdout.rindex(step) for step in steps]  # EKS's cluster comes before its nodes
    assert places == sorted(places)
    assert "-auto-approve" not in done.stdout
    down = subprocess.run(
        ["make", "-n", f"down-{home}"], cwd=root, capture_output=True, text=True, check=True
    )
    assert "infra/base destroy" not in down.stdout and f"infra/{home} destroy" in down.stdout


LISTENS = """
import socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
"""
ONCE, ALWAYS = LISTENS + "server.accept()", LISTENS + "time.sleep(600)"
# `aws` starts the session manager's plug-in, which listens.
BY_A_CHILD = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ALWAYS!r}, sys.argv[1]])"
)
# Another user's process, which came between the look at the port and the command.
BY_ANOTHER = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {ALWAYS!r}, sys.argv[1]], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port; what still listens on it at the end is ended."""
    given = free_port()
    yield given
    for connection in psutil.net_connections("tcp"):
        if connection.laddr[1] == given and connection.status == "LISTEN":
            assert connection.pid is not None
            psutil.Process(connection.pid).kill()


def forwarding(code: str, port: int, folder: Path) -> Forwarding:
    way = Way([sys.executable, "-c", code, str(port)], "s3cret")
    return Forwarding(way, port, folder / "new" / "token")


@pytest.mark.parametrize("code", [ONCE, BY_A_CHILD], ids=["once", "by a child"])
def test_a_command_runs_with_the_port_forwarded(code: str, port: int, tmp_path: Path) -> None:
    """What forwards it may end after each connection, and is started again."""
    run = f"""
import os, socket, stat, time
assert os.environ["RAY_API_SERVER_ADDRESS"] == "http://127.0.0.1:{port}"
token = os.environ["RAY_AUTH_TOKEN_PATH"]
assert stat.S_IMODE(os.stat(token).st_mode) == 0o600 and open(token).read() == "s3cret"
assert stat.S_IMODE(os.stat(os.path.dirname(token)).st_mode) == 0o700
until = time.monotonic() + 60
for _ in range(2):
    while socket.socket().connect_ex(("127.0.0.1", {port})):
        assert time.monotonic() < until
        time.sleep(0.1)
raise SystemExit(7)
"""
    way = forwarding(code, port, tmp_path)
    try:
        assert through(way, [sys.executable, "-c", run]) == 7
    finally:
        way.end()
    assert "s3cret" not in str(way.variables) and not list((tmp_path / "new").iterdir())
    until = time.monotonic() + PATIENCE_S
    with socket.socket() as client:
        while client.connect_ex(("127.0.0.1", port)) == 0:
            assert time.monotonic() < until


@pytest.mark.parametrize(
    ("code", "taken", "message"),
    [
        ("raise SystemExit(1)", False, "is closed: `.*` has not forwarded it"),
        ("raise SystemExit(1)", True, "is taken: another process listens on it"),
        (ALWAYS, True, "is taken: another process listens on it"),
        (BY_ANOTHER, False, "is closed: `.*` has not forwarded it"),
    ],
)
def test_the_token_waits_for_the_forwarding_itself(
    code: str,
    taken: bool,
    message: str,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another listener on the port would be sent the token, which is code on every node."""
    monkeypatch.setattr("rayapp.cluster.connect.FORWARDED_S", 3.0)
    squatter = socket.create_server(("127.0.0.1", port)) if taken else None
    way, ran = forwarding(code, port, tmp_path), tmp_path / "ran"
    try:
        with pytest.raises(NotReachable, match=message):
            through(way, ["touch", str(ran)])
        assert not ran.exists() and not list(tmp_path.rglob("token"))
    finally:
        way.end()
        if squatter is not None:
            squatter.close()


def test_a_command_ends_where_another_takes_the_port(port: int, tmp_path: Path) -> None:
    """Between the end of the forwarding and its next start."""
    code = f"""{ONCE}
server.close()
subprocess.Popen([sys.executable, "-c", {ALWAYS!r}, sys.argv[1]], start_new_session=True)
until = time.monotonic() + 60
while socket.socket().connect_ex(("127.0.0.1", int(sys.argv[1]))):
    assert time.monotonic() < until
"""
    way = forwarding(code, port, tmp_path)
    run = f"import socket, time; socket.create_connection(('127.0.0.1', {port})); time.sleep(600)"
    try:
        with pytest.raises(NotReachable, match="is taken"):
            through(way, [sys.executable, "-c", run])
    finally:
        way.end()
    assert not list(tmp_path.rglob("token"))


KUBECTL = """#!{python}
import base64, socket, sys, time
words = [word for word in sys.argv[1:] if not word.startswith("-")]
if words == ["get", "rayjob/demo"]:
    print("demo-x7k2p", end="")
elif words == ["get", "secret/demo-x7k2p"]:
    print(base64.b64encode(b"s3cret").decode(), end="")
elif words[:2] == ["port-forward", "service/demo-x7k2p-head-svc"] and words[2].endswith(":8265"):
    server = socket.create_server(("127.0.0.1", int(words[2].partition(":")[0])))
    time.sleep({seconds})
else:
    sys.exit(f"unknown: {{words}}")
"""
SHOW = 'echo "$RAY_API_SERVER_ADDRESS $(basename $RAY_AUTH_TOKEN_PATH) $(cat $RAY_AUTH_TOKEN_PATH)"'


@pytest.mark.parametrize("stays", [True, False])
def test_the_way_to_the_cluster_of_a_rayjob(stays: bool, tmp_path: Path) -> None:
    """On a free port, with a token's file of its own, which goes with the connection."""
    text = KUBECTL.format(python=sys.executable, seconds=600 if stays else 2)
    (tmp_path / "kubectl").write_text(text)
    (tmp_path / "kubectl").chmod(0o755)
    command = [sys.executable, "-m", "rayapp", "connect", "eks", "--job=demo"]
    command += ["--", "sh", "-c", SHOW] if stays else []
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if stays:
        assert done.returncode == 0, done.stderr
        found = re.fullmatch(r"http://127.0.0.1:(\d+) (\S+) s3cret\n", done.stdout)
        assert found is not None and found[2] == f"rayapp-eks-us-west-2-{found[1]}.token"
    else:  # the shell that has read these lines would send the token to the next listener
        assert done.returncode == 1 and "`kubectl` has ended" in done.stderr
        assert done.stdout.count("export RAY_") == 3
    assert not list((tmp_path / ".rayapp").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["connect", "eks", "--name=../../x"], "name=../../x is malformed"),
        (["connect", "ecs", "--region=../x"], "region=../x is malformed"),
        (["capacity", "eks", "--name=../../x"], "name=../../x is malformed"),
        (["connect", "ecs", "--job=demo"], "--job=demo is impossible: ECS has no RayJob"),
        (["connect", "eks", "--port=x"], "--port=x is not valid"),
        (["connect", "eks", "--port=65536"], "--port=65536 is not valid"),
    ],
)
def test_what_no_cluster_is_called(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a name would also be that of a file outside ~/.rayapp."""
    assert main(words) == 2
    assert message in capsys.readouterr().err


WHY = "We currently do not have sufficient p5.48xlarge capacity in the zone"


def services(running: int) -> Any:
    """Return boto3's clients of a cluster with as many of its 2 workers."""
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-west-2"}
    made = {name: boto3.client(name, **keys) for name in ("ecs", "autoscaling")}
    ecs, groups = Stubber(made["ecs"]), Stubber(made["autoscaling"])
    name = "worker-on-demand"
    ecs.add_response("list_services", {"serviceArns": [name]}, {"cluster": "rayapp-ecs"})
    service = {"serviceName": name, "runningCount": running, "desiredCount": 2}
    ecs.add_response("describe_services", {"services": [service]})
    activity = {
        "ActivityId": "1",
        "AutoScalingGroupName": f"rayapp-ecs-{name}",
        "Cause": "scaling",
        "StartTime": 0,
        "StatusCode": "Failed",
        "StatusMessage": WHY,
    }
    asked = {"AutoScalingGroupName": f"rayapp-ecs-{name}", "MaxRecords": 1}
    groups.add_response("describe_scaling_activities", {"Activities": [activity]}, asked)
    ecs.activate()
    groups.activate()
    return made.__getitem__


def test_a_group_without_capacity_says_why() -> None:
    said = list[str]()
    line = f"service worker-on-demand is incomplete: 1 of 2 tasks run, {WHY}"
    with pytest.raises(NotReachable, match=r"Take another cluster\.instance"):
        wait_for_workers("ecs", "rayapp", services(1), -1.0, said.append)
    assert said == [line]
    assert missing_tasks("rayapp", services(2)) == []
