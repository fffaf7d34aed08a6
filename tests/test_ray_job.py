"""The same run as a Ray job: a cluster with token authentication, storage on S3."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nodes
import pytest
from patience import PATIENCE_S
from transformers import AutoModelForCausalLM

from rayapp.storage import open_storage

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture
def cluster(s3_server: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    with nodes.with_jobs(tmp_path, cpus=4) as environment:
        yield environment


def test_a_ray_job_trains_into_s3(cluster: dict[str, str], s3_bucket: str, tmp_path: Path) -> None:
    storage = f"s3://{s3_bucket}/runs"
    # What a user submits is a checkout; here without what its tests and builds leave in it.
    package = tmp_path / "working_dir"
    shutil.copytree(ROOT / "rayapp", package / "rayapp")
    shutil.copytree(ROOT / "configs", package / "configs")
    # A mark by which the workers' metrics tell that they run the code that was submitted.
    training = package / "rayapp" / "finetune" / "training.py"
    mark, code = "mfu=mfu(tokens, pairs, busy_s)", training.read_text()
    assert mark in code
    training.write_text(code.replace(mark, "mfu=0.125"))
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
    assert "step 6/6" in done.stdout and "tok/s" in done.stdout
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
    assert "is done: there is nothing to resume" in rayapp("resume", "job", expect=2)
    # Without the token, nothing.
    stranger = {**cluster, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    refused = subprocess.run(
        [str(BIN / "ray"), "job", "list"], env=stranger, capture_output=True, text=True
    )
    assert refused.returncode != 0
