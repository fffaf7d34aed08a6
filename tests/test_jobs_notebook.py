"""The handle of a run on a real cluster, and what its views show.

One cluster of two nodes with a token lives through all of it: submit, refuse a second, follow
through a connection that breaks, watch from a kernel that is started anew, stop, resume, finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nodes
import pytest
from patience import PATIENCE_S
from rich.console import Console
from run_folders import RunFolder
from stub_dashboard import Dashboard, dashboard

import rayapp as rayapp_module
from rayapp.__main__ import main
from rayapp.config import ConfigError
from rayapp.jobs import JobError, notebook, terminal
from rayapp.jobs.find import runs
from rayapp.jobs.handle import CURVES, Job, submit
from rayapp.jobs.notebook import Buttons
from rayapp.observe.activity import TRAINING, Activity
from rayapp.observe.attempts import GOES_ON, log_name, render_log
from rayapp.observe.columns import ACCOUNTED, Columns
from rayapp.observe.goodput import account
from rayapp.observe.run_folder import LEASE, STOP
from rayapp.observe.status import Progress
from rayapp.storage import Storage, open_storage

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
STEPS = 300


class Relay:
    """A TCP relay to the dashboard; `cut` breaks every connection through it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target, self._open = (host, int(port)), list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Break what is open; return how many connections that were."""
        broken, self._open = self._open, []
        for each in broken:
            with contextlib.suppress(OSError):  # the other side was quicker
                each.shutdown(socket.SHUT_RDWR)  # a thread that reads it would keep it open
            each.close()
        return len(broken) // 2

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass  # cut
        for each in (source, sink):
            each.close()


@pytest.fixture(scope="module")
def cluster(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(ROOT))
        environment.setenv("AWS_ENDPOINT_URL", s3_server)  # of the other services
        with nodes.with_jobs(folder, cpus=3, workers=1) as variables:
            yield variables


def rayapp(
    cluster: dict[str, str], *words: str, expect: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m rayapp`, as a user in a folder of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "rayapp", *words],
        env={**cluster, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=cluster["HOME"],
    )
    assert done.returncode == expect, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def kernel(cluster: dict[str, str], code: str) -> Any:
    """Run code in a Python that is new, as after a kernel's restart; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=cluster,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.drill
def test_submit_watch_stop_resume_finish(
    cluster: dict[str, str], s3_bucket: str, tmp_path: Path
) -> None:
    storage = f"s3://{s3_bucket}/runs"
    run = open_storage(f"{storage}/demo")
    text = "".join(f"Line {i} says {i * i % 97}.\n" for i in range(3000))
    open_storage(f"s3://{s3_bucket}").write("data/text.txt", text.encode())
    submit = ["submit", str(ROOT / "configs/tiny_cpu.yaml"), f"--run.storage={storage}"]
    submit += ["--run.name=demo", f"--data.path=s3://{s3_bucket}/data", "--model.tokenizer=bytes"]
    submit += ["--model.overrides={num_hidden_layers: 1}", f"--train.max_steps={STEPS}"]
    submit += ["--train.tokens_per_step=1024", "--train.micro_batch=2", "--train.warmup_steps=0"]
    submit += ["--checkpoint.every_s=none", "--cluster.instance=g5.xlarge"]
    submit += ["--cluster.usd_per_hour=36", "--cluster.ignore_plan=true"]
    # Slow enough that a stop comes in the middle.
    submit += ["--eval.every_steps=1", "--eval.prompts="]
    sent = rayapp(cluster, *submit, "--tags={team: a}")
    address = cluster["RAY_API_SERVER_ADDRESS"]
    assert sent.stdout == f"job demo at {address}: results in {storage}/demo\n"
    second = rayapp(cluster, *submit, expect=2)
    assert "run.name=demo is running" in second.stderr and second.stderr.count("\n") == 1
    stranger = rayapp(cluster, "list", expect=1, RAY_AUTH_TOKEN="0" * 64)
    assert "does not accept the token" in stranger.stderr and stranger.stderr.count("\n") == 1

    relay = Relay(address)
    with (tmp_path / "followed.txt").open("w") as followed:
        follower = subprocess.Popen(
            [sys.executable, "-m", "rayapp", "logs", "demo", "--follow"],
            env={**cluster, "RAY_API_SERVER_ADDRESS": relay.address},
            stdout=followed,
            stderr=subprocess.STDOUT,
        )
        code = (
            "import json, time, rayapp\n"
            f"job = rayapp.job('demo', storage='{storage}')\n"
            "while len(job.metrics()) < {0}: time.sleep(0.5)\n"
            "table, now = job.metrics(), job.progress()\n"
            "print(json.dumps([list(map(int, table.step)), job.status(), now.num_steps]))\n"
        )
        steps, status, num_steps = kernel(cluster, code.format(3))
        assert (status, num_steps) == ("running", STEPS) and steps == list(range(1, len(steps) + 1))
        assert relay.cut() >= 1
        steps, status, _ = kernel(cluster, code.format(len(steps) + 3))  # another kernel
        assert steps == list(range(1, len(steps) + 1)), "the whole curve, from the first step"
        (listed,) = json.loads(rayapp(cluster, "list", "--json").stdout)
        assert (listed["run"], listed["job"]) == (f"{storage}/demo", "demo")
        assert listed["status"] == "running" and listed["cost_usd"] > 0
        stopped = rayapp(cluster, "stop", "demo", expect=3)
        assert stopped.stdout == "demo stopped\n"
        assert follower.wait(timeout=PATIENCE_S) == 3
    relay.close()
    code = "import json; from rayapp.jobs import JobsClient\n"
    code += "print(json.dumps(JobsClient.at().info('demo').status))"
    assert kernel(cluster, code) == "STOPPED", "a stop that was asked for is no failure"
    done = code.replace("'demo'", "'demo-2'")
    logs = rayapp(cluster, "logs", "demo").stdout
    assert (tmp_path / "followed.txt").read_text() == logs
    assert "model" in logs and "rows per step" in logs, "a job's log begins with its plan"
    at_stop = json.loads(run.read("result.json"))
    assert at_stop["status"] == "stopped" and at_stop["steps"] < STEPS

    resumed = rayapp(cluster, "resume", "demo", "--wait")
    assert resumed.stdout == f"job demo-2 at {address}: results in {storage}/demo\n"
    assert kernel(cluster, done) == "SUCCEEDED"
    lines = [json.loads(line) for line in run.read("metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["attempt"] for line in lines].index(2) == at_stop["steps"]
    again = rayapp(cluster, "resume", "demo", expect=2)
    assert f"{storage}/demo is done" in again.stderr
    code = f"import json, rayapp; result = rayapp.job('{storage}/demo').result()\n"
    code += "print(json.dumps([result.status, result.model_path, result.cost_usd]))"
    status, model_path, cost_usd = kernel(cluster, code)
    assert (status, model_path) == ("done", f"{storage}/demo/model")
    result = json.loads(run.read("result.json"))
    # Two workers on two machines of one GPU each.
    assert cost_usd == pytest.approx(2 * 36 * result["wall_s"] / 3600)
    # The cluster is gone; the run is not.
    gone = rayapp(cluster, "status", f"{storage}/demo", RAY_API_SERVER_ADDRESS="http://127.0.0.1:9")
    assert f"step {STEPS} / {STEPS}" in gone.stdout


@pytest.mark.full
def test_the_readmes_block_runs_as_written(
    cluster: dict[str, str], s3_server: str, tmp_path: Path
) -> None:
    """The bucket, the path of the config and the code are README's; the config is a small one."""
    import boto3

    boto3.client("s3", endpoint_url=s3_server).create_bucket(Bucket="bucket")
    text = "".join(f"Line {i} says {i * i % 97}.\n" for i in range(2000))
    open_storage("s3://bucket").write("data/text.txt", text.encode())
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny_cpu.yaml").write_text(
        "model: {path: tiny, tokenizer: bytes, overrides: {num_hidden_layers: 1}}\n"
        "data: {path: s3://bucket/data, seq_len: 128}\n"
        "train: {max_steps: 6, tokens_per_step: 1024, micro_batch: 2, warmup_steps: 0}\n"
    )
    block = re.search(r"```python\n(import rayapp\n.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    code = f"{block[1]}\nimport json; print()\n"
    code += "print(json.dumps([job.status(), job.result().steps]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**cluster, "MPLBACKEND": "agg"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["done", 6]
    code = "import json; from rayapp.jobs import JobsClient\n"
    code += "print(json.dumps({one.submission_id: [one.status, one.message] for one in"
    code += " JobsClient.at().jobs() if one.run_url == 's3://bucket/runs/demo'}))"
    jobs = kernel(cluster, code)
    statuses = [status for status, _ in jobs.values()]
    assert statuses == ["STOPPED", "SUCCEEDED"], f"a stop that was asked for is no failure: {jobs}"


@pytest.mark.drill
def test_a_run_stopped_at_any_moment_resumes_at_once(
    cluster: dict[str, str], s3_bucket: str
) -> None:
    """From the moment of submission to the report: no resume is refused, no driver lives on."""
    text = "".join(f"Line {i} says {i * i % 97}.\n" for i in range(2000))
    open_storage(f"s3://{s3_bucket}").write("data/text.txt", text.encode())
    code = f"""
import json, time, rayapp
job = rayapp.submit(
    {{"model": {{"path": "tiny", "tokenizer": "bytes", "overrides": {{"num_hidden_layers": 1}}}}}},
    data={{"path": "s3://{s3_bucket}/data", "seq_len": 128}},
    train={{"max_steps": 200, "tokens_per_step": 1024, "micro_batch": 2, "warmup_steps": 0}},
    run={{"name": "often", "storage": "s3://{s3_bucket}/runs"}},
)
ends = []
for seconds in (0, 0, 0.3, 0.3, 1, 1, 2, 4, 6, 8, 12, 16, 20, 24):
    time.sleep(seconds)
    ends.append(job.stop())
    if ends[-1] == "done":
        break
    job = job.resume()
print(json.dumps([ends, job.wait(), job.result().steps, job.metrics().step.tolist()]))
"""
    ends, status, steps, lines = kernel(cluster, code)
    assert set(ends) <= {"stopped", "done"} and ends.count("stopped") >= 8
    assert (status, steps, lines) == ("done", 200, list(range(1, 201)))
    code = "import json; from rayapp.jobs import JobsClient\n"
    code += "print(json.dumps([one.status for one in JobsClient.at().jobs()"
    code += f" if one.run_url == 's3://{s3_bucket}/runs/often']))"
    jobs = kernel(cluster, code)
    assert set(jobs) == {"STOPPED", "SUCCEEDED"} and jobs.count("SUCCEEDED") == 1


@pytest.mark.full
def test_what_the_cluster_cannot_run_is_said(
    cluster: dict[str, str], s3_bucket: str, tmp_path: Path
) -> None:
    """What only the cluster finds wrong is refused there, and the reason comes back."""
    submit = ["submit", f"--run.storage=s3://{s3_bucket}/runs", "--run.name=wrong"]
    submit += [f"--data.path=s3://{s3_bucket}/nothing", "--wait"]
    rayapp(cluster, *submit, expect=2)
    found = rayapp(cluster, "status", "wrong", expect=2)
    assert "refused" in found.stdout and "data.path=s3://" in found.stdout
    assert "is running" not in rayapp(cluster, *submit, expect=2).stderr
    unknown = rayapp(cluster, "status", "nobody", expect=2)
    assert "run=nobody is unknown" in unknown.stderr


@pytest.mark.full
def test_a_secret_reaches_every_process_and_no_listing(
    cluster: dict[str, str], s3_server: str
) -> None:
    code = """
import boto3, json, ray
from ray.job_submission import JobSubmissionClient
from rayapp import load
from rayapp.jobs import JobsClient, SubmitOptions, prepare
from dataclasses import replace
made = boto3.client("secretsmanager", region_name="us-west-2").create_secret(
    Name="reaches-every-process", SecretString="the value")
options = SubmitOptions(secrets={"HUB": made["ARN"]})
order = prepare(load(None, {"run.storage": "s3://b/r", "run.name": "secret"}), options)
task = "import os, ray; from rayapp.jobs import secrets; secrets.load(); ray.init(); "
task += "print(os.environ['HUB'] == ray.get(ray.remote(lambda: os.environ['HUB']).remote()), "
task += "len(os.environ['HUB']))"
cluster = JobsClient.at()
job = cluster.submit(replace(order, entrypoint=f'python -c "{task}"'))
info = cluster.wait(job)
told = json.dumps([str(vars(j)) for j in JobSubmissionClient(cluster.address).list_jobs()])
said = cluster.logs(job).splitlines()[-1]
print(json.dumps([info.status, said, "the value" in told, "arn:" in told]))
"""
    status, last, value_is_told, reference_is_told = kernel(cluster, code)
    assert (status, last) == ("SUCCEEDED", "True 9")
    assert not value_is_told and reference_is_told


# ---- What is made of a folder and of the answers of a cluster ----------------------------------

BEGAN = {"event": "started", "time": 2.0, "usd_per_hour": None, "seen_until": None}
LEFT = {"event": "ended", "time": 3.0, "status": "stopped", "reason": None, "seconds": {}}
ROOMY = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    """The user's own cluster."""
    with dashboard() as found:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", found.address)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        yield found


def folder_of(
    tmp_path: Path, *events: dict[str, Any], note: dict[str, Any] | None = None
) -> Storage:
    """A run's folder, and its lease while it has not ended."""
    run = open_storage(str(tmp_path / "runs" / "demo"))
    run.write("config.yaml", f"run: {{name: demo, storage: {tmp_path}/runs}}\n".encode())
    run.write("events.jsonl", "".join(json.dumps(event) + "\n" for event in events).encode())
    if note is not None:
        known = {"address": "http://127.0.0.1:9", "submission_id": "demo", "time": 1.0}
        run.write("submission.json", json.dumps({**known, "shipment": {}, **note}).encode())
    if events and events[-1]["event"] != "ended":
        run.write(LEASE, b"{}")
    return run


def quiet(run: Storage, seconds: float = 20.0) -> None:
    """Let the lease be that old."""
    past = time.time() - seconds
    os.utime(str(run.local_path(LEASE)), (past, past))


def said(capsys: pytest.CaptureFixture[str], expect: int, *words: str) -> str:
    assert main(list(words)) == expect
    return "".join(capsys.readouterr())


def test_a_folder_sends_nothing_anywhere(
    served: Dashboard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the token to the address that it names, nor a folder of the user's machine."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "notes.txt").write_text("private")
    with dashboard() as theirs:
        theirs.add("demo", "FAILED", start_time=1000)
        shipment = {
            "working_dir": str(home),
            "pip": ["a==1"],
            "env": {"A": "b"},
            "tags": {"t": "u"},
        }
        note = {"address": theirs.address, "shipment": shipment}
        url = folder_of(tmp_path, BEGAN, LEFT, note=note).url
        assert "stopped" in said(capsys, 3, "status", url)
        told = said(capsys, 1, "logs", url)
        assert f"The run was sent to {theirs.address}: set that address" in told
        refused = said(capsys, 2, "resume", url).splitlines()
        assert [line.split(" ")[0] for line in refused] == [
            f"working_dir={home}", "pip=a==1", 'env={"A":'
        ]  # fmt: skip
        assert theirs.asked == [] and served.sent == []
        served.add("demo", "FAILED")
        assert said(capsys, 0, "logs", url) == "logs of demo\n"
        again = ["--working_dir=none", "--pip=none", "--env={A: 010}"]
        assert f"job demo-2 at {served.address}" in said(capsys, 0, "resume", url, *again)
        assert theirs.asked == []
        theirs.add("demo-2", "RUNNING")
        assert said(capsys, 0, "logs", url, f"--address={theirs.address}") == "logs of demo-2\n"
    (sent,) = served.sent
    assert sent["runtime_env"]["env_vars"]["A"] == "010"
    assert not {"working_dir", "pip"} & set(sent["runtime_env"])
    assert sent["metadata"]["rayapp.tag.t"] == "u"


def test_code_that_a_folders_config_names_is_asked_for(
    served: Dashboard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path, BEGAN, LEFT, note={})
    run.write("config.yaml", (ROOT / "examples" / "own_code" / "config.yaml").read_bytes())
    run.write(
        "config.yaml",
        run.read("config.yaml").replace(b"own-code", f"demo\n  storage: {tmp_path}/runs".encode()),
    )
    served.add("demo", "FAILED", start_time=1000)
    names = {
        "data.format": "lab.data:notes",
        "train.loss": "lab.objectives:focal",
        "eval.metrics": "lab.objectives:accuracy",
        "run.hooks": "lab.hooks:Diary",
    }
    code = f"--code={','.join(names.values())}"
    refused = said(capsys, 2, "resume", run.url).splitlines()
    assert [line.split(" ")[0] for line in refused] == [f"{k}={v}" for k, v in names.items()]
    assert "anyone who can write to" in refused[0] and refused[0].endswith(code.removeprefix("--"))
    (some,) = said(capsys, 2, "resume", run.url, code.replace("focal,", "other,")).splitlines()
    assert some.startswith("train.loss=lab.objectives:focal is not run again") and not served.sent
    assert "job demo-2 at" in said(capsys, 0, "resume", run.url, code)


def test_an_upload_says_how_many_bytes(served: Dashboard, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "noise.bin").write_bytes(os.urandom(1_200_000))
    said = list[str]()
    where = {"name": "demo", "storage": str(tmp_path / "runs")}
    submit({"run": where}, working_dir=str(folder), say=said.append)
    (size,) = served.uploaded
    assert 1_200_000 < size < 1_210_000
    assert said == [
        f"uploading {folder} to {served.address}: 1.20 MB packed",
        f"job demo at {served.address}: results in {tmp_path}/runs/demo",
    ]


def test_preflight_gives_python_what_the_command_prints(
    served: Dashboard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"passed": False, "findings": [{"node": "a"}], "not_judged": [], "facts": {}}
    served.logs["preflight"] = f"a line of Ray's\n{json.dumps(facts, indent=1)}\n"
    served.late["preflight"] = {"status": "FAILED", "driver_exit_code": 1}
    config = {"run": {"storage": str(tmp_path)}}
    assert rayapp_module.preflight(config, timeout_s=60, train={"lr": 0.5}) == facts
    (sent,) = served.sent
    assert sent["entrypoint"].endswith("--train.lr=0.5 --json=true --timeout_s=60")
    served.jobs.clear()
    served.logs["preflight"] = "cluster.address=x is not reachable\n"
    served.late["preflight"] = {"status": "FAILED", "driver_exit_code": 2}
    with pytest.raises(JobError, match=r"preflight FAILED: cluster\.address=x is not reachable"):
        rayapp_module.preflight(config)
    with pytest.raises(ConfigError, match="min_gbit_per_s=-1 is not valid"):
        rayapp_module.preflight(config, min_gbit_per_s=-1)


@pytest.mark.full
def test_logs_outlive_the_cluster(
    served: Dashboard,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a run that was submitted, the cluster's while it knows the job; else the folder's."""
    direct, sent = folder_of(tmp_path / "a", BEGAN, LEFT), folder_of(tmp_path / "b", BEGAN, LEFT)
    no_log = said(capsys, 2, "logs", direct.url)
    assert "has no log" in no_log and "submitted" not in no_log
    sent.write(
        "submission.json", b'{"address": "", "submission_id": "demo", "time": 1, "shipment": {}}'
    )
    served.add("demo", "FAILED")
    for run in (direct, sent):
        for number in (1, 2):
            errors = {"rank 1": f"ValueError: boom {number}"}
            text = render_log(f"attempt {number}", "step 1", errors, "failed")
            run.write(log_name(number), text.encode())
    newest = "attempt 2\n==== driver\nstep 1\n==== rank 1\nValueError: boom 2\n==== end\nfailed\n"
    assert said(capsys, 0, "logs", direct.url) == newest
    followed = newest.partition("==== driver\n")[2]
    assert said(capsys, 3, "logs", direct.url, "--follow") == followed
    assert said(capsys, 0, "logs", sent.url) == "logs of demo\n"
    assert said(capsys, 0, "logs", sent.url, "--attempt=2") == newest
    assert said(capsys, 0, "logs", sent.url, "--attempt=1", "--rank=1") == "ValueError: boom 1\n"
    assert said(capsys, 0, "logs", sent.url, "--rank=1") == "ValueError: boom 2\n"
    assert "attempt=3 has no log in" in said(capsys, 2, "logs", sent.url, "--attempt=3")
    assert "rank=0 has left no error" in said(capsys, 2, "logs", sent.url, "--rank=0")
    assert "--rank=-1 is not valid" in said(capsys, 2, "logs", sent.url, "--rank=-1")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    assert said(capsys, 0, "logs", sent.url) == newest
    assert said(capsys, 3, "logs", sent.url, "--follow") == followed


def test_a_log_is_followed_until_its_command_has_printed_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's end is in its folder before the last lines of the log."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    run = folder_of(tmp_path, BEGAN, LEFT)
    run.write(LEASE, b"{}")
    run.write(log_name(1), render_log("head", "step 1", {}, GOES_ON).encode())
    following = Job(run.url).follow()
    assert next(following) == "step 1\n"
    run.write(log_name(1), render_log("head", "step 1\nsaved", {}, "the command ended").encode())
    run.delete(LEASE)
    assert "".join(following) == "saved\n==== end\nthe command ended\n"


def test_a_folder_names_no_other_job(served: Dashboard, tmp_path: Path) -> None:
    other = {"rayapp.run": "s3://bucket/runs/other"}
    served.add("other", "RUNNING", metadata=other, runtime_env=ROOMY)
    run = folder_of(tmp_path, BEGAN, note={"submission_id": "other"})
    quiet(run)
    handle = Job(run.url)
    assert handle.status() == "preparing"
    handle.stop(wait_s=0)
    assert served.stopped == []
    with pytest.raises(JobError, match=r"no job other of .* is known at"):
        handle.logs()
    run.write(
        "submission.json", b'{"address": "", "submission_id": "../x", "time": 1, "shipment": {}}'
    )
    with pytest.raises(ConfigError, match=r"submission\.json is damaged: submission_id"):
        handle.logs()


def test_a_resume_stays_in_its_folder(served: Dashboard, tmp_path: Path) -> None:
    run = folder_of(tmp_path, BEGAN, LEFT, note={})
    run.write("config.yaml", b"run: {name: demo, storage: s3://bucket/runs}\n")
    with pytest.raises(
        ConfigError,
        match=r"is of another folder: its .* name s3://bucket/runs/demo",
    ):
        Job(run.url).resume()


def test_a_handle_remembers_what_it_has_sent(served: Dashboard, tmp_path: Path) -> None:
    handle = submit(
        ROOT / "configs" / "tiny_cpu.yaml",
        run={"name": "demo", "storage": f"{tmp_path}/runs"},
        env={"A": "no"},
        say=lambda text: None,
    )
    served.add("demo", "STOPPED", metadata=served.sent[0]["metadata"], end_time=2000)
    assert handle.status() == "stopped"
    again = handle.resume(say=lambda text: None)
    first, second = served.sent
    assert again.run.url == f"{tmp_path}/runs/demo" and second["submission_id"] == "demo-2"
    assert first["entrypoint"] == second["entrypoint"]
    assert second["runtime_env"]["env_vars"]["A"] == "no"


def test_a_run_of_ray_job_submit_is_known(
    served: Dashboard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its metadata, in which its driver puts the run's folder."""
    run = folder_of(tmp_path, {**BEGAN, "submission_id": "raysubmit_1"}, LEFT)
    own = {"rayapp.run": run.url}
    ended = {"driver_exit_code": 3, "end_time": 4000}
    served.add("raysubmit_1", "FAILED", metadata=own, **ended)
    served.add("raysubmit_2", "RUNNING", metadata={"rayapp.run": f"{tmp_path}/runs/early"})
    served.add("raysubmit_3", "RUNNING")
    listed = {one["job"]: one for one in json.loads(said(capsys, 0, "list", "--json"))}
    assert {job: (one["run"], one["status"]) for job, one in listed.items()} == {
        "raysubmit_1": (run.url, "stopped"),
        "raysubmit_2": (f"{tmp_path}/runs/early", "starting"),
    }
    for words in (["demo"], [run.url]):
        assert "stopped" in said(capsys, 3, "status", *words)
        assert said(capsys, 0, "logs", *words) == "logs of raysubmit_1\n"
    assert "starting" in said(capsys, 0, "status", "early")
    assert "working_dir is missing" in said(capsys, 2, "resume", run.url)
    assert "job demo at" in said(capsys, 0, "resume", run.url, "--working_dir=none")


@pytest.mark.parametrize(
    ("status", "exit_code", "expected"), [("STOPPED", None, "stopped"), ("FAILED", 137, "lost")]
)
def test_a_job_that_ended_before_its_run_did(
    served: Dashboard, tmp_path: Path, status: str, exit_code: int | None, expected: str
) -> None:
    run = folder_of(tmp_path, {**BEGAN, "submission_id": "raysubmit_1"})
    handle = Job(run.url)
    served.add("raysubmit_1", "RUNNING")
    quiet(run)
    assert handle.status() == "preparing"
    served.add("raysubmit_1", status, driver_exit_code=exit_code, end_time=4000)
    run.write(LEASE, b"{}")
    assert handle.status() == "preparing", "its lease has just been renewed"
    quiet(run)
    found, now, _ = handle.snapshot()
    assert found == expected and now is not None and now.status == expected
    quiet(run, 60.0)
    assert handle.stop(wait_s=0) == expected
    assert run.exists(STOP) is (expected == "lost"), "KubeRay may start a lost driver again"
    run.delete(STOP)
    run.write("events.jsonl", json.dumps(BEGAN | {"time": 5000.0}).encode() + b"\n")
    run.write(LEASE, b"{}")
    quiet(run)
    assert handle.status() == "preparing", "a later command, of no job, is at work"


@pytest.mark.parametrize("roomy", [True, False])
def test_a_stop_is_stopped_in_rays_dashboard(
    served: Dashboard, tmp_path: Path, roomy: bool
) -> None:
    """But not where Ray would kill the job before it can save."""
    run = folder_of(tmp_path, BEGAN, note={})
    metadata = {"rayapp.run": run.url}
    served.add("demo", "RUNNING", metadata=metadata, runtime_env=ROOMY if roomy else {})
    assert Job(run.url).stop(wait_s=0) == "stopping"
    assert run.exists(STOP)
    assert served.stopped == (["demo"] if roomy else [])


@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_a_job_that_has_not_begun_is_ended_by_ray(
    served: Dashboard, tmp_path: Path, status: str
) -> None:
    """However little time Ray gives it: a starting driver takes the file STOP for an older one."""
    run = folder_of(tmp_path, note={})
    served.add("demo", status, metadata={"rayapp.run": run.url})
    handle = Job(run.url)
    served.stops_at_once = False
    assert handle.stop(wait_s=0) == ("pending" if status == "PENDING" else "starting")
    served.stops_at_once = True
    assert handle.stop() == "stopped"
    assert served.stopped == ["demo", "demo"] and not run.exists(STOP)
    with pytest.raises(JobError, match="is stopped: its job was stopped before it had saved"):
        handle.result()


@pytest.mark.parametrize(
    ("end", "expected"), [("done", "running"), ("stopped", "stopping"), ("failed", "running")]
)
def test_a_run_lasts_until_its_command_has_exited(
    served: Dashboard, tmp_path: Path, end: str, expected: str
) -> None:
    """It writes result.json and the report after its last event, and still holds the lease."""
    ended = LEFT | {"time": 4000.0, "status": end}
    run = folder_of(tmp_path, BEGAN, ended)
    assert Job(run.url).status() == end
    run.write(LEASE, b"{}")
    found, now, _ = Job(run.url).snapshot()
    assert found == expected and now is not None and now.status == expected
    with pytest.raises(TimeoutError):
        Job(run.url).wait(0.01)
    quiet(run, 200.0)
    assert Job(run.url).status() == end, "the command was killed in its report"

    run = folder_of(tmp_path, BEGAN | {"submission_id": "raysubmit_1"}, ended)
    served.add("raysubmit_1", "RUNNING")
    assert Job(run.url).status() == expected, "Ray's job has not ended"
    served.add("raysubmit_1", "SUCCEEDED", driver_exit_code=0, end_time=5000)
    assert Job(run.url).status() == end
    served.add("demo", "RUNNING", start_time=6000_000)
    resumed = Job(run.url, submission_id="demo")
    assert resumed.status() == "starting", "it has the lease, and has not begun to write"


def test_a_driver_that_cannot_renew_its_lease_is_not_starting(
    served: Dashboard, tmp_path: Path
) -> None:
    """Ray's job has not ended, and its command has begun: S3 does not answer, for instance."""
    run = folder_of(tmp_path, BEGAN | {"submission_id": "raysubmit_1"})
    served.add("raysubmit_1", "RUNNING")
    quiet(run, 200.0)
    found, now, _ = Job(run.url).snapshot()
    assert found == "running" and now is not None and now.reason is None


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"config": 7}, "config of type int is not valid"),
        ({"lr": 1}, r"lr=1 is unknown: .* Did you mean train\.lr\?"),
        ({"train": 1}, "train=1 is not valid: it must be a mapping of fields. .*"),
        ({"pip": "a==1"}, r"pip=a==1 is text: .* Set pip=\['a==1'\]"),
    ],
)
def test_what_submit_is_given_is_checked(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}$" if " .* " in problem else problem):
        submit(**{"config": str(ROOT / "configs" / "tiny_cpu.yaml"), **asked})


# ---- Watching ----------------------------------------------------------------------------------


class Watched:
    """A handle whose run is running for some looks, and then done, or interrupted."""

    name = "demo"

    def __init__(self, *moments: str | BaseException) -> None:
        self.moments = list(moments)

    def snapshot(self) -> tuple[str, None, Columns]:
        moment = self.moments.pop(0)
        if isinstance(moment, BaseException):
            raise moment
        return moment, None, Columns()

    def reason(self) -> None:
        return None


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the cells of a notebook show, in turn."""
    from IPython import display

    found: list[str] = []

    class Handle:
        def update(self, html: Any) -> None:
            found.append(html.data)

    def show(shown: Any, display_id: bool = False) -> Handle:
        if isinstance(shown, display.HTML):  # not the buttons
            found.append(shown.data)
        return Handle()

    monkeypatch.setattr(display, "display", show)
    return found


def test_an_interrupted_watch_says_that_the_run_goes_on() -> None:
    console = Console(record=True, file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        terminal.show(Watched(KeyboardInterrupt()), 0.0, console)
    assert "the run goes on" in console.export_text()


@pytest.mark.full
def test_a_notebook_watches_on_beside_its_next_cells(
    cells: list[str], monkeypatch: pytest.MonkeyPatch, served: Dashboard, tmp_path: Path
) -> None:
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    run = folder_of(tmp_path, {**BEGAN, "submission_id": None})
    assert Job(run.url).watch(every_s=0.01) is None
    (thread,) = (each for each in threading.enumerate() if each.name == "watch demo")
    assert thread.daemon
    run.write("events.jsonl", "".join(json.dumps(e) + "\n" for e in (BEGAN, LEFT)).encode())
    thread.join(PATIENCE_S)
    assert "stopped" in cells[-1] and not thread.is_alive()
    assert Job(run.url).watch(every_s=0.01, block=True) == "stopped"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        Job(run.url).watch(block=True)  # no next cell runs
    thread = notebook.show_on(lambda: Watched("running", OSError("<b>gone")), 0.0)
    thread.join(PATIENCE_S)
    assert cells[-1] == "<p>no longer watched: &lt;b&gt;gone</p>"


def test_buttons_stop_resume_and_show(tmp_path: Path) -> None:
    """Each in a thread with a handle of its own; an error is shown, and the button works again."""
    asked: list[str] = []

    class Asked:
        run = RunFolder(open_storage(str(tmp_path)), "demo", steps=4).run

        def stop(self, wait_s: float) -> None:
            asked.append(f"stop {wait_s}")

        def resume(self, say: Any) -> None:
            raise ConfigError(["<b>no"])

        def logs(self) -> str:
            return "a < b"

    box = Buttons(Asked, lambda: None)  # type: ignore[arg-type]

    def click(name: str) -> str:
        box.buttons[name].click()
        for thread in threading.enumerate():
            if thread.name == f"button {name}":
                thread.join(PATIENCE_S)
        assert not box.buttons[name].disabled
        return box.below.value

    assert "saves a checkpoint" in click("Stop") and asked == ["stop 0"]
    assert click("Resume") == "<p>&lt;b&gt;no</p>"
    assert "a &lt; b" in click("Logs") and click("Logs") == ""
    assert "srcdoc=" in click("Report")
    box.saw("running")
    assert not box.buttons["Stop"].disabled and box.buttons["Resume"].disabled
    box.saw("stopped")
    assert box.buttons["Stop"].disabled and not box.buttons["Resume"].disabled
    box.saw("done")
    assert box.buttons["Resume"].disabled


def test_steps_come_in_a_loop_and_in_an_asyncio_program(tmp_path: Path) -> None:
    folder = RunFolder(open_storage(str(tmp_path)), "demo", steps=4)
    folder.train(4)
    folder.end("done")
    job = Job(folder.run.url)
    assert [line["step"] for line in job.steps()] == [1, 2, 3, 4]

    async def both() -> tuple[list[int], str]:
        return [line["step"] async for line in job.steps()], await job

    assert asyncio.run(both()) == ([1, 2, 3, 4], "done")
    assert "<svg" in job._repr_html_()


def test_a_result_has_rays_names(tmp_path: Path) -> None:
    folder = RunFolder(open_storage(str(tmp_path)), "demo", steps=4)
    folder.train(4)
    folder.end("done")
    result = Job(folder.run.url).result()
    assert result["steps"] == result.steps == 4 and result.path == folder.run.url
    assert result.metrics is not None and result.metrics["step"] == 4
    assert list(result.metrics_dataframe["step"]) == [1, 2, 3, 4]
    assert result.checkpoint is None and result.error is None
    assert "<td>done</td>" in result._repr_html_()
    assert pickle.loads(pickle.dumps(result)) == result


def test_the_table_of_steps_has_its_columns_before_the_first_step(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    folder = RunFolder(storage, "demo", steps=1)
    before = Job(folder.run.url).metrics()
    assert len(before) == 0 and before.plot("step", "loss") is not None
    folder.train(1)
    assert list(Job(folder.run.url).metrics().columns) == list(before.columns)
    (storage / "images").write("config.yaml", b"task: vision\n")
    assert "images_per_s" in Job((storage / "images").url).metrics().columns


def test_runs_of_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        folder = RunFolder(open_storage(str(tmp_path)), name, steps=2)
        folder.train(2)
        folder.end("done")
    (tmp_path / "other").mkdir()
    found = runs(storage=str(tmp_path))
    assert [job.name for job in found] == ["a", "b"]
    assert "<td>done</td>" in found._repr_html_()


# ---- The views -------------------------------------------------------------------------------


class Words(HTMLParser):
    """The text and the tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def steps_of(lines: list[dict[str, Any]]) -> Columns:
    return Columns.of(lines, (*ACCOUNTED, *CURVES))


def moment(lines: list[dict[str, Any]], **more: Any) -> Progress:
    began = {"event": "started", "time": 0.0, "usd_per_hour": 36.0, "seen_until": None}
    known = {"status": "running", "step": len(lines), "num_steps": 10, "left_s": 4000.0}
    known |= {"line": lines[-1] if lines else None, "reason": None, "updated_s": 1.0}
    return Progress(**{**known, "account": account([began], Columns.of(lines), now=100.0), **more})


def line(step: int, **more: Any) -> dict[str, Any]:
    idle = {"data_wait_s": 0.1, "checkpoint_stall_s": 0.0, "eval_s": 0.0, "step_s": 1.0}
    rest = {"loss": 2.0 / step, "tokens_per_s": 1234.5, "mfu": None, "peak_gib": 1.5, "workers": 2}
    return idle | rest | {"step": step, "time": float(step), "attempt": 1, "eval_loss": None} | more


def test_a_page_shows_the_figures_and_lets_nothing_out() -> None:
    lines = [line(n) for n in range(1, 8)] + [line(8, loss=None, eval_loss=1.25)]
    hostile = "</pre><script>alert(1)</script>"
    text = notebook.render(
        "<b>name", f"failed{hostile}", moment(lines, reason=hostile), steps_of(lines)
    )
    found = Words(text)
    assert not {"script", "b>name", "iframe", "img", "link"} & set(found.tags)
    assert "".join(found.words).count(hostile) == 2 and "<b>name" in found.words
    for expected in ("8 / 10", "1,234", "1.50 GiB", "1:06:40", "$1.00 of $41.00"):
        assert expected in found.words, expected
    assert found.tags.count("svg") == 3
    assert "http" not in text


@pytest.mark.parametrize("lines", [[], [line(1)], [line(1, loss=None), line(2, loss=None)]])
def test_what_is_not_known_is_said_to_be(lines: list[dict[str, Any]]) -> None:
    """In a notebook it is left out."""
    text = notebook.render("x", "running", moment(lines), steps_of(lines))
    assert "n/a" not in text and "MFU" not in text and "goodput" in text
    assert notebook.render("x", "pending", None, Columns())
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(terminal.render("x", "running", moment(lines), steps_of(lines)))
    assert "n/a" in console.export_text()


def test_what_the_tiles_show_is_not_said_twice() -> None:
    def text(phase: str) -> str:
        now = moment([line(1)], activity=Activity(phase, 0.0, "its detail"))
        return notebook.render("x", "running", now, steps_of([line(1, grad_norm=0.5)]))

    assert "evaluating" in text("evaluating") and "its detail" in text("evaluating")
    assert "its detail" not in text(TRAINING)
    assert Words(text(TRAINING)).tags.count("svg") == 4, "with the gradient norm"


def test_a_long_run_is_shown_without_lists_of_its_steps() -> None:
    """A million steps as pairs of Python's numbers would be 170 MiB."""
    count = 20_000
    steps = steps_of([line(n) for n in range(1, count + 1)])
    tracemalloc.start()
    terminal.render("x", "running", moment([line(count)]), steps)
    notebook.render("x", "running", moment([line(count)]), steps)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 * count, peak / count
