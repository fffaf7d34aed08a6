"""Runs as Ray jobs, on a cluster with token authentication, with their storage on S3."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nodes
import psutil
import pytest
from aws_config import endpoint_in_config
from patience import PATIENCE_S
from transformers import AutoModelForCausalLM

from rayapp.observe import metrics
from rayapp.observe.run_folder import RETRIED
from rayapp.storage import open_storage

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture
def cluster(
    s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Start a cluster that knows the S3 server by ~/.aws/config alone."""
    endpoint_in_config(s3_server, tmp_path, monkeypatch)
    with nodes.with_jobs(tmp_path, cpus=4) as environment:
        yield environment


@pytest.mark.full
def test_a_ray_job_trains_into_s3(cluster: dict[str, str], s3_bucket: str, tmp_path: Path) -> None:
    storage = f"s3://{s3_bucket}/runs"
    # What a user submits is a checkout; here without what its tests and builds leave in it.
    package = tmp_path / "working_dir"
    shutil.copytree(ROOT / "rayapp", package / "rayapp")
    shutil.copytree(ROOT / "configs", package / "configs")
    # A mark by which the workers' metrics tell that they run the code that was submitted.
    training = package / "rayapp" / "finetune" / "trainer.py"
    mark, code = '"mfu": mfu(counts.tokens, counts.attended_pairs, busy_s)', training.read_text()
    assert mark in code
    training.write_text(code.replace(mark, '"mfu": 0.125'))
    text = "".join(f"Line {i} says {i * i % 97}.\n" for i in range(2000))
    open_storage(f"s3://{s3_bucket}").write("data/text.txt", text.encode())
    command = [str(BIN / "ray"), "job", "submit", "--working-dir", str(package), "--"]
    command += ["python", "-m", "rayapp.finetune", "configs/tiny_cpu.yaml"]
    command += [f"--run.storage={storage}", "--run.name=job", f"--data.path=s3://{s3_bucket}/data"]
    command += ["--model.tokenizer=bytes", "--model.overrides={num_hidden_layers: 1}"]
    command += ["--train.max_steps=6", "--train.tokens_per_step=1024", "--train.micro_batch=2"]
    command += ["--train.warmup_steps=0", "--checkpoint.every_s=none", "--checkpoint.every_steps=3"]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    # A job's log has lines, not a bar that is redrawn.
    assert "step 6/6" in done.stdout and "tokens/s" in done.stdout
    printed = done.stdout.splitlines()
    of_ray = re.compile(r"pid=|\(raylet\)")
    assert list(filter(of_ray.search, printed)) == [], "lines of Ray's own processes"
    assert f"model in {storage}/job/model" in done.stdout
    run = open_storage(f"{storage}/job")
    lines = [json.loads(line) for line in run.read("metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(line["mfu"] == 0.125 for line in lines)
    assert run.dirs("checkpoints") == ["step-00000003", "step-00000006"]
    result = json.loads(run.read("result.json"))
    assert result["status"] == "done" and result["model_path"] == f"{storage}/job/model"
    for entry in run.list("model"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / entry.name.removeprefix("model/")).write_bytes(run.read(entry.name))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 1

    # The commands know it, although its command line alone says which run it is.
    def rayapp(*words: str, expect: int = 0) -> str:
        known = subprocess.run(
            [sys.executable, "-m", "rayapp", *words],
            env=cluster,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert known.returncode == expect, known.stdout + known.stderr
        return known.stdout + known.stderr

    (listed,) = json.loads(rayapp("list", "--json"))
    assert (listed["run"], listed["status"], listed["step"]) == (f"{storage}/job", "done", 6)
    assert listed["job"].startswith("raysubmit_")
    assert "step 6 / 6" in rayapp("status", "job")
    assert "step 6/6" in rayapp("logs", f"{storage}/job")
    kept = rayapp("logs", f"{storage}/job", "--attempt=1")
    assert "step 6/6" in kept and f"model in {storage}/job/model\n" in kept
    assert "is done: there is nothing to resume" in rayapp("resume", "job", expect=2)
    # In Ray's own list it has a name and a folder, which its command line did not set.
    job_list = subprocess.run([RAY, "job", "list"], env=cluster, capture_output=True, text=True)
    assert "'job_name': 'job'" in job_list.stdout and f"'{storage}/job'" in job_list.stdout
    # Without the token, nothing.
    stranger = {**cluster, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    refused = subprocess.run(
        [str(BIN / "ray"), "job", "list"], env=stranger, capture_output=True, text=True
    )
    assert refused.returncode != 0


RAY, RAYAPP = str(BIN / "ray"), (sys.executable, "-m", "rayapp")
STOP_WAIT = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}})
SMALL = (
    "--model.tokenizer=bytes",
    "--model.overrides={num_hidden_layers: 1, hidden_size: 64, intermediate_size: 128}",
    "--data.seq_len=128",
    "--train.tokens_per_step=1024",
    "--train.micro_batch=2",
    "--train.warmup_steps=0",
    "--checkpoint.every_s=none",
    "--checkpoint.export=false",
)


@pytest.fixture
def client(cluster: dict[str, str]) -> Callable[..., str]:
    """What runs a command beside the cluster and returns what it prints."""
    environment = {**cluster, "PYTHONPATH": str(ROOT)}  # jobs take it from the head

    def told(*command: str) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        return done.stdout + done.stderr

    return told


def wait_until(reached: Callable[[], bool], logs: Callable[[], str]) -> None:
    """Wait until a run is that far; fail with its logs."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, logs()
        time.sleep(0.5)


def line(job: str, storage: str, name: str, folder: Path, *more: str) -> list[str]:
    """Return README's line that sends a run, under a submission id."""
    text = folder / "text.txt"
    text.write_text("".join(f"Line {i} says {i * i % 97}.\n" for i in range(2000)))
    environment = json.loads(STOP_WAIT)
    environment["env_vars"]["PYTHONPATH"] = str(ROOT)  # instead of a working_dir
    sent = [RAY, "job", "submit", "--no-wait", "--runtime-env-json", json.dumps(environment)]
    sent += ["--submission-id", job, "--", sys.executable, "-m", "rayapp.finetune"]
    sent += [str(ROOT / "configs" / "tiny_cpu.yaml"), f"--run.storage={storage}"]
    return [*sent, f"--run.name={name}", f"--data.path={text}", *SMALL, *more]


@pytest.mark.drill
def test_a_job_that_ray_stops_has_saved_and_goes_on(
    client: Callable[..., str], s3_bucket: str, tmp_path: Path
) -> None:
    """The line, `ray job stop`, and the line again; the run is known by its folder throughout."""
    more = ("--train.max_steps=100000", "--cluster.workers=1")
    storage = f"s3://{s3_bucket}/runs"
    run = open_storage(f"{storage}/demo")

    def steps() -> int:
        return len(metrics.read(run))  # while it trains, what is on S3 is in segments

    def send(job: str, until: int) -> None:
        client(*line(job, storage, "demo", tmp_path, *more))
        wait_until(lambda: steps() >= until, lambda: client(RAY, "job", "logs", job))

    send("first", 5)
    assert "running" in client(*RAYAPP, "status", run.url)
    assert "demo" in client(*RAYAPP, "list")
    client(RAY, "job", "stop", "first")
    events = [json.loads(each) for each in run.read("events.jsonl").splitlines()]
    assert (events[-1]["event"], events[-1]["status"]) == ("ended", "stopped")
    saved = json.loads(run.read("result.json"))["steps"]
    assert saved == steps() and run.exists(f"checkpoints/step-{saved:08d}/COMMITTED")
    assert "'first' was stopped" in client(RAY, "job", "status", "first")
    assert "stopped" in client(*RAYAPP, "status", run.url)
    assert f"stopped after {saved} steps" in client(*RAYAPP, "logs", run.url)
    send("second", saved + 3)
    assert metrics.read(run)[saved]["attempt"] == 2
    client(RAY, "job", "stop", "second")


@pytest.mark.drill
def test_a_driver_that_ray_has_missed_saves_and_leaves(
    client: Callable[..., str], s3_bucket: str, tmp_path: Path
) -> None:
    """Ray sends its signals to the job's processes; here, as in the first second, not to all."""
    more = ("--train.max_steps=100000", "--cluster.workers=1")
    storage = f"s3://{s3_bucket}/runs"
    run = open_storage(f"{storage}/missed")
    sent = line("missed", storage, "missed", tmp_path, *more)
    at = sent.index("--") + 1
    client(*sent[:at], "sh", "-c", f"(setsid {shlex.join(sent[at:])} &); exec sleep 1000")

    def logs() -> str:
        return client(RAY, "job", "logs", "missed")

    wait_until(lambda: bool(metrics.read(run)), logs)
    client(RAY, "job", "stop", "missed")
    assert "'missed' was stopped" in client(RAY, "job", "status", "missed")
    wait_until(lambda: run.exists("result.json"), logs)
    assert json.loads(run.read("result.json"))["status"] == "stopped"
    assert "Ray has stopped this job, but not its command" in logs()


@pytest.mark.drill
def test_runs_that_share_a_cluster_all_end(
    client: Callable[..., str], s3_bucket: str, tmp_path: Path
) -> None:
    """Of 2, 1 and 1 workers on 4 CPUs: two train side by side, the third says what it waits for."""
    storage, deadline = f"s3://{s3_bucket}/runs", time.monotonic() + PATIENCE_S
    runs = {name: open_storage(f"{storage}/{name}") for name in ("two", "one", "more")}

    def send(name: str, workers: int, steps: int) -> None:
        more = (f"--train.max_steps={steps}", f"--cluster.workers={workers}")
        client(*line(name, storage, name, tmp_path, *more))

    def wait_for(name: str, file: str) -> None:
        wait_until(lambda: runs[name].exists(file), lambda: client(RAY, "job", "logs", name))

    send("two", 2, 100_000)
    send("one", 1, 100_000)
    for name in ("two", "one"):
        wait_for(name, "metrics.jsonl")
    send("more", 1, 5)
    while "waiting for room: 0 of 1 worker fit" not in (said := client(RAY, "job", "logs", "more")):
        assert time.monotonic() < deadline, said
    taken = "3 of 4 CPUs are taken by"  # in the order in which Ray lists them
    assert f"{taken} job two, job one" in said or f"{taken} job one, job two" in said, said
    for name in ("two", "one"):
        runs[name].write("STOP", b"asked")
    endings = {}
    for name, run in runs.items():
        wait_for(name, "result.json")
        endings[name] = json.loads(run.read("result.json"))["status"]
    assert endings == {"two": "stopped", "one": "stopped", "more": "done"}


@pytest.mark.full
def test_ray_calls_a_decided_end_stopped_where_failed_jobs_are_tried_again(
    client: Callable[..., str], s3_bucket: str, tmp_path: Path
) -> None:
    """As in a RayJob: KubeRay repeats what is FAILED. Refused by the parser, refused by the checks,
    stopped by the file STOP alone, and a driver that is killed."""
    storage = f"s3://{s3_bucket}/runs"

    def send(job: str, *more: str) -> None:
        sent = line(job, storage, job, tmp_path, "--cluster.workers=1", *more)
        at = sent.index("--runtime-env-json") + 1
        environment = json.loads(sent[at])
        environment["env_vars"][RETRIED] = "1"
        client(*sent[:at], json.dumps(environment), *sent[at + 1 :])

    def ends(job: str, status: str) -> None:
        told = f"'{job}' {status}"
        wait_until(lambda: told in client(RAY, "job", "status", job), lambda: logs(job))

    def logs(job: str) -> str:
        return client(RAY, "job", "logs", job)

    send("parsed", "--train.lr=x")
    send("checked", f"--data.path={tmp_path}/nowhere")
    for job, field in (("parsed", "train.lr=x"), ("checked", "data.path=")):
        ends(job, "was stopped")
        assert field in logs(job) and "exit code 2 is final" in logs(job)
    for job in ("asked", "killed"):
        run = open_storage(f"{storage}/{job}")
        send(job, "--train.max_steps=100000")
        wait_until(lambda run=run: bool(metrics.read(run)), lambda job=job: logs(job))
        if job == "asked":
            run.write("STOP", b"asked\n")
            ends(job, "was stopped")
            assert json.loads(run.read("result.json"))["status"] == "stopped"
        else:
            (driver,) = [
                one
                for one in psutil.process_iter(["cmdline"])
                if f"--run.name={job}" in (one.info["cmdline"] or [])
                and one.info["cmdline"][0] == sys.executable
            ]
            driver.kill()
            ends(job, "failed")


@pytest.mark.full
def test_a_package_of_ones_own_trains_and_is_known_again(
    cluster: dict[str, str], s3_bucket: str, tmp_path: Path
) -> None:
    """A data format, a loss, a metric and a hook; stopped, resumed, and refused when changed."""
    package = tmp_path / "working_dir"
    shutil.copytree(ROOT / "examples" / "own_code", package)
    storage = f"s3://{s3_bucket}/runs"
    run = open_storage(f"{storage}/own-code")
    diary = tmp_path / "diary.jsonl"
    environment = json.dumps({"env_vars": {"LAB_DIARY": str(diary)}})
    command = [str(BIN / "ray"), "job", "submit", "--working-dir", str(package)]
    command += ["--runtime-env-json", environment, "--"]
    command += ["python", "-m", "rayapp.finetune", "config.yaml", f"--run.storage={storage}"]
    command += ["--train.max_steps=60"]
    job = subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + PATIENCE_S
    while metrics.last(run) is None and time.monotonic() < until and job.poll() is None:
        time.sleep(0.2)
    run.write("STOP", b"asked\n")
    said, _ = job.communicate(timeout=PATIENCE_S)
    assert run.exists("result.json"), said[-5000:]
    assert json.loads(run.read("result.json"))["status"] == "stopped"
    ends = [json.loads(line) for line in diary.read_text().splitlines()]
    assert ends[-1] == {"run": "own-code", "status": "stopped"}
    assert ends[0]["step"] == 1

    def again() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=cluster, capture_output=True, text=True, timeout=PATIENCE_S
        )

    objectives = package / "lab" / "objectives.py"
    code = objectives.read_text()
    objectives.write_text(code.replace("gamma: float = 1.0", "gamma: float = 2.0"))
    refused = again()
    assert refused.returncode != 0
    assert "train.loss=lab.objectives:focal has changed" in refused.stdout + refused.stderr
    objectives.write_text(code)
    done = again()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    result = json.loads(run.read("result.json"))
    assert result["status"] == "done" and 0.0 <= result["eval_metrics"]["accuracy"] <= 1.0
    assert "accuracy 0." in done.stdout
    told = [json.loads(line) for line in diary.read_text().splitlines()]
    steps = [line["step"] for line in told if "step" in line]
    assert steps == list(range(1, 61))
