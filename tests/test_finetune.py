"""The command line, end to end: what bad input gets, and what a run leaves."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from drill import without_ray
from patience import PATIENCE_S
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
)

from rayapp import order
from rayapp.cli.runs import status
from rayapp.config import Config, from_dict, load
from rayapp.data import prepared as prepared_data
from rayapp.data import tokens
from rayapp.data.token_rows import step_rows
from rayapp.driver import ray_workers
from rayapp.driver import ray_workers as validation
from rayapp.driver.ray_session import connected, end_workers
from rayapp.driver.stop import Budget
from rayapp.finetune import auto
from rayapp.finetune.__main__ import main
from rayapp.finetune.prepared_run import order_of
from rayapp.observe import metrics
from rayapp.observe.run_folder import PREPARED
from rayapp.storage import open_storage
from rayapp.train.checkpoint.marker import steps_done
from rayapp.train.own_time import EVERY_STEPS, SAMPLES
from rayapp.train.spec import LanguageSpec

TEXT = "".join(
    f"Line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} says {i * i % 97}.\n" for i in range(900)
)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 128}
SHAPES = {
    "gpt_neox": GPTNeoXConfig(**SMALL, **HEADS, dtype="float32"),
    "llama_tied": LlamaConfig(
        **SMALL, **HEADS, num_key_value_heads=2, tie_word_embeddings=True, dtype="float32"
    ),
    "mixtral": MixtralConfig(
        **SMALL, **HEADS, num_key_value_heads=2, num_local_experts=4, dtype="float32"
    ),
}
FAST = [
    "--data.seq_len=64",
    "--train.tokens_per_step=512",
    "--train.micro_batch=2",
    "--train.lr=3e-3",
]
FAST += ["--train.precision=fp32", "--data.eval_fraction=0.1", "--cluster.max_failures=0"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, JSONL of several kinds, and three small models of several shards each."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "text.txt").write_text(TEXT)
    (folder / "empty.txt").write_text("")
    lines = [json.dumps({"text": line}) for line in TEXT.splitlines()]
    (folder / "good.jsonl").write_text("\n".join(lines))
    (folder / "broken.jsonl").write_text("\n".join([*lines[:2], '{"text": "cut of', *lines[2:8]]))
    (folder / "columns.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape)
        model.save_pretrained(folder / name, max_shard_size="150KB")
        tokens.byte_tokenizer().save_pretrained(folder / name)
        assert len(list((folder / name).glob("*.safetensors"))) > 1
    shutil.copytree(folder / "llama_tied", folder / "weightless")
    for path in (folder / "weightless").glob("model*"):
        path.unlink()
    shutil.copytree(folder / "llama_tied", folder / "missing_shard")
    sorted((folder / "missing_shard").glob("*.safetensors"))[1].unlink()
    shutil.copytree(folder / "llama_tied", folder / "cut_shard")
    cut = sorted((folder / "cut_shard").glob("*.safetensors"))[0]
    cut.write_bytes(cut.read_bytes()[:-100])
    tokens.train_bpe(iter([TEXT]), 400).save_pretrained(folder / "large_tokenizer")
    return folder


@pytest.fixture(scope="module")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray on this machine for all runs in this process."""
    import ray

    temporary = tempfile.mkdtemp()  # short: Ray makes sockets below it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            _temp_dir=temporary,
        )
        yield
        ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


def command(files: Path, storage: Path, name: str, *more: str) -> list[str]:
    """A command line that would run; `more` overrides what comes before."""
    base = [f"--run.storage={storage}", f"--run.name={name}", f"--data.path={files / 'text.txt'}"]
    base += [f"--model.path={files / 'llama_tied'}", "--train.max_steps=20", *FAST]
    replaced = {argument.split("=")[0] for argument in more}
    return [a for a in base if a.split("=")[0] not in replaced] + list(more)


# ---- What bad input gets ---------------------------------------------------------------------

BAD = {
    "unknown field": (["--train.lrr=1"], ["train.lrr=1 is unknown", "Did you mean train.lr?"]),
    "mixture without an end": (
        ["--data.path=stdlib", "--data.mixture={{stdlib: 1}}", "--train.max_steps=none"],
        ["train.max_steps=none is missing"],
    ),
    "mixture and path": (["--data.mixture={{stdlib: 1}}"], ["data.path=", "is in conflict"]),
    "mixture of nothing": (
        ["--data.path=stdlib", "--data.mixture={{gone.jsonl: 1, stdlib: 0}}"],
        ["data.mixture.stdlib=0", "greater than 0"],
    ),
    "missing part of a mixture": (
        ["--data.path=stdlib", "--data.mixture={{stdlib: 1, {files}/gone.jsonl: 2}}"],
        ["data.mixture=", "gone.jsonl is missing"],
    ),
    "wrong type": (["--train.micro_batch=two"], ["train.micro_batch=two", "whole number"]),
    "missing data": (["--data.path={files}/none.txt"], ["data.path=", "none.txt is missing"]),
    "empty data": (["--data.path={files}/empty.txt"], ["data.path=", "is empty"]),
    "not JSON": (["--data.path={files}/broken.jsonl"], ["broken.jsonl:3 is not JSON"]),
    "no column": (["--data.path={files}/columns.jsonl"], ["columns.jsonl:1 has no column 'text'"]),
    "no weights": (["--model.path={files}/weightless"], ["weightless", "no weights"]),
    "shard missing": (["--model.path={files}/missing_shard"], ["model-00002-of-", "missing"]),
    "shard truncated": (["--model.path={files}/cut_shard"], ["model-00001-of-", "truncated"]),
    "vocabulary": (
        ["--model.tokenizer={files}/large_tokenizer"],
        ["large_tokenizer is too large for the model", "400 tokens", "320"],
    ),
    "seq_len": (
        ["--data.seq_len=256", "--train.tokens_per_step=1024"],
        ["data.seq_len=256 is above the model's limit", "128"],
    ),
    "not divisible": (
        ["--train.tokens_per_step=1000"],
        ["train.tokens_per_step=1000 is not divisible", "896 or 1_024"],
    ),
    "unwritable": (["--run.storage={files}/text.txt/runs"], ["run.storage=", "is not writable"]),
    "too many workers": (["--cluster.workers=640"], ["cluster.workers=640 is more than"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_before_anything_starts(
    case: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    more, expected = BAD[case]
    code = main(command(files, tmp_path, "bad", *(a.format(files=files) for a in more)))
    message = capsys.readouterr().err
    assert code == 2, message
    for text in expected:
        assert text in message
    assert not ray.is_initialized()
    assert not (tmp_path / "bad").exists()


def test_all_problems_come_in_one_message(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"--data.path={files}/none.txt", f"--model.path={files}/weightless"]
    more += ["--cluster.workers=640", f"--run.storage={files}/text.txt/runs"]
    assert main(command(files, tmp_path, "bad", *more)) == 2
    message = capsys.readouterr().err
    for text in ("run.storage=", "none.txt is missing", "no weights", "cluster.workers=640"):
        assert text in message


def test_an_absent_bucket_is_named(
    files: Path, tmp_path: Path, s3_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(files, tmp_path, "bad", "--run.storage=s3://no-such-bucket-here/runs")) == 2
    message = capsys.readouterr().err
    assert "run.storage=s3://no-such-bucket-here/runs is not writable" in message
    assert "does not exist" in message


def test_denied_access_is_named(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Denies(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_DELETE = do_PUT

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Denies)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    code = main(command(files, tmp_path, "bad", "--run.storage=s3://bucket/runs"))
    server.shutdown()
    assert code == 2
    assert "access denied" in capsys.readouterr().err.lower()


def test_the_command_itself_exits_with_2(tmp_path: Path) -> None:
    """The same through a real process; a typo is told in about a second."""
    done = subprocess.run(
        [sys.executable, "-m", "rayapp.finetune", "--data.seqlen=3", "--train.tokens_per_step=x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "Did you mean data.seq_len?" in done.stderr and "train.tokens_per_step=x" in done.stderr


# ---- Runs ------------------------------------------------------------------------------------


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.drill
def test_a_mixture_trains_on_its_shares(
    files: Path, tmp_path: Path, ray_here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    text, lines = str(files / "text.txt"), str(files / "good.jsonl")
    shares = f"--data.mixture={{{text}: 3, {lines}: 1}}"
    assert main(command(files, tmp_path, "mixture", "--data.path=stdlib", shares)) == 0
    assert f"source {lines} 25.0% of the rows" in " ".join(capsys.readouterr().out.split())
    plan = json.loads((tmp_path / "mixture" / "plan.json").read_text())
    sources = plan["data"]["sources"]
    assert set(sources) == {text, lines}
    rows = sum(part["train"]["rows"] for part in sources.values())
    assert plan["data"]["train"]["rows"] == rows and plan["epochs"] == 20 * 8 / rows
    digests = [line["batch_digest"] for line in lines_of(tmp_path / "mixture")]
    assert len(set(digests)) == 20


@pytest.mark.drill
def test_a_mixture_is_the_same_for_any_number_of_workers(
    files: Path, tmp_path: Path, ray_here: None
) -> None:
    shares = f"--data.mixture={{{files / 'text.txt'}: 3, {files / 'good.jsonl'}: 1}}"
    digests = []
    for workers in (1, 2, 3):
        name, count = f"mixture-{workers}", f"--cluster.workers={workers}"
        argv = command(files, tmp_path, name, "--data.path=stdlib", shares, count)
        assert main([*argv, "--checkpoint.export=false"]) == 0
        digests.append([line["batch_digest"] for line in lines_of(tmp_path / name)])
    assert digests[1:] == digests[:1] * 2 and len(set(digests[0])) == 20


@pytest.mark.full
def test_checkpoints_are_validated_beside_training(
    files: Path,
    tmp_path: Path,
    ray_here: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task apart gives a checkpoint the loss that training itself gave that step."""
    # A look each time the driver wakes, and it does once more when training is over: the run's
    # three seconds may lie between two looks of the usual five.
    monkeypatch.setattr(validation, "VALIDATION_POLL_S", 0.0)
    argv = command(files, tmp_path, "validated", "--train.max_steps=60", "--cluster.workers=1")
    argv += ["--eval.checkpoints=true", "--eval.every_steps=5"]
    argv += ["--checkpoint.every_steps=5", "--checkpoint.keep=20"]
    assert main(argv) == 0
    lines = (tmp_path / "validated" / "validation.jsonl").read_text().splitlines()
    found = {line["step"]: line for line in map(json.loads, lines)}
    inside = {line["step"]: line for line in lines_of(tmp_path / "validated")}
    # The last step is evaluated after the loop.
    inside[60] = json.loads((tmp_path / "validated" / "result.json").read_text())
    assert found and all(step % 5 == 0 for step in found)
    for step in found:
        for name in ("eval_loss", "eval_loss_per_byte"):
            assert abs(found[step][name] - inside[step][name]) < 1e-4
    said = " ".join(capsys.readouterr().out.split())
    step, line = next(iter(found.items()))
    assert f"checkpoint of step {step}: held-out loss {line['eval_loss']:.4f}" in said


@pytest.mark.full
@pytest.mark.parametrize("workers", ["2:3", "2"])
def test_a_run_that_waits_for_room_can_be_stopped(
    files: Path, tmp_path: Path, ray_here: None, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    """Another job holds 3 of 4 CPUs, and 2 workers find no place."""
    import ray

    class Other:
        def ready(self) -> bool:
            return True

    other = ray.remote(num_cpus=3)(Other).remote()
    assert ray.get(other.ready.remote())

    def stop() -> None:
        while not (tmp_path / "waiting" / "plan.json").exists():
            time.sleep(0.05)
        time.sleep(3.0)
        (tmp_path / "waiting" / "STOP").touch()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop)
        code = main(command(files, tmp_path, "waiting", f"--cluster.workers={workers}"))
        stopping.result()
    ray.kill(other)
    said = capsys.readouterr().out
    wanted = "at least 2 workers" if ":" in workers else "2 workers"
    # A task that has prepared data may hold the fourth CPU a moment longer.
    waiting = rf"waiting for room: 0 of {wanted} fit; [34] of 4 CPUs are taken by"
    assert code == 3 and re.search(waiting, said), said
    result = json.loads((tmp_path / "waiting" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("stopped", 0)


@pytest.mark.full
def test_workers_that_cannot_reach_one_another_end_the_run(
    files: Path,
    tmp_path: Path,
    ray_here: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Workers whose process group has failed leave room for those of the next attempt."""
    monkeypatch.setitem(ray_workers.CPU_ENVIRONMENT, "GLOO_SOCKET_IFNAME", "nowhere")
    code = main(
        command(files, tmp_path, "apart", "--cluster.workers=3", "--cluster.max_failures=1")
    )
    assert code == 1, capsys.readouterr().out
    result = json.loads((tmp_path / "apart" / "result.json").read_text())
    assert result["status"] == "failed" and "nowhere" in result["reason"], result
    events = (tmp_path / "apart" / "events.jsonl").read_text().splitlines()
    failures = [line for line in events if json.loads(line)["event"] == "interrupted"]
    assert len(failures) == 2, "there was a second attempt"


@pytest.mark.full
def test_a_stop_in_the_first_moments_ends_the_run(
    files: Path, tmp_path: Path, ray_here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked for as soon as the lease is there, before the data are prepared."""
    run = tmp_path / "early"

    def stop() -> None:
        while not (run / "LEASE").exists():
            time.sleep(0.001)
        (run / "STOP").touch()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop)
        code = main(command(files, tmp_path, "early", "--train.max_steps=3"))
        stopping.result()
    assert code == 3 and "stopped after 0 steps" in capsys.readouterr().out
    assert json.loads((run / "result.json").read_text())["status"] == "stopped"
    assert not (run / "metrics.jsonl").exists()
    assert main(command(files, tmp_path, "early", "--train.max_steps=3")) == 0


@pytest.mark.full
def test_a_run_saves_when_its_money_is_spent_and_goes_on_with_more(
    files: Path,
    tmp_path: Path,
    ray_here: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At 1 USD a second: it ends between two checkpoints, twice, and the second is farther."""
    run = open_storage(str(tmp_path / "spent"))
    check, steps = Budget.check, 0

    def check_after_a_step(self: Budget) -> None:
        line = metrics.last(run)
        if line is not None and line["step"] > steps:  # the start may cost more than the budget
            check(self)

    monkeypatch.setattr(Budget, "check", check_after_a_step)
    argv = ["--train.max_steps=100_000", "--checkpoint.every_steps=90_000"]
    argv += ["--checkpoint.every_s=none", "--cluster.workers=1", "--cluster.instance=g5.12xlarge"]
    argv += ["--cluster.ignore_plan=true", "--cluster.usd_per_hour=3600"]

    def spend(usd: float) -> dict[str, Any]:
        code = main(command(files, tmp_path, "spent", *argv, f"--run.max_usd={usd:g}"))
        told = " ".join(capsys.readouterr().out.split())
        result: dict[str, Any] = json.loads(run.read("result.json"))
        assert (code, result["status"]) == (3, "stopped"), told
        assert f"run.max_usd={usd:g} is reached: the run has taken" in result["reason"]
        assert result["reason"] in told and result["cost_usd"] >= usd
        assert steps_done(run) == result["steps"]  # nothing is lost
        return result

    result = spend(5.0)
    steps = result["steps"]
    assert 0 < steps < 90_000
    again = spend(math.ceil(result["cost_usd"]) + 5.0)
    assert steps < again["steps"] < 90_000 and again["lost_steps"] == 0


@pytest.mark.full
def test_workers_that_do_no_step_can_be_ended(ray_here: None, tmp_path: Path) -> None:
    import ray.train.torch

    def never_step() -> None:
        (tmp_path / "entered").touch()
        time.sleep(PATIENCE_S)

    kit: Any = ray.train
    trainer = kit.torch.TorchTrainer(
        never_step,
        scaling_config=kit.ScalingConfig(num_workers=1),
        run_config=kit.RunConfig(storage_path=str(tmp_path)),
    )
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(trainer.fit)
        while not (tmp_path / "entered").exists() and not future.done():
            time.sleep(0.1)
        end_workers()
        with pytest.raises(ray.exceptions.RayActorError):
            future.result(PATIENCE_S / 2)


@pytest.mark.drill
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_folder_loads_trains_and_exports(
    name: str, files: Path, tmp_path: Path, ray_here: None
) -> None:
    prompts = "--eval.prompts=Line 1" if name == "gpt_neox" else "--eval.prompts="
    argv = command(files, tmp_path, name, f"--model.path={files / name}", prompts)
    assert main(argv) == 0
    lines = lines_of(tmp_path / name)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
    before = AutoModelForCausalLM.from_pretrained(files / name)
    ids = torch.arange(40)[None] + 10
    assert not torch.equal(exported(ids).logits, before(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / name / "model")
    assert (
        tokenizer("Line 1").input_ids
        == AutoTokenizer.from_pretrained(files / name)("Line 1").input_ids
    )
    result = json.loads((tmp_path / name / "result.json").read_text())
    assert result["status"] == "done" and result["eval_loss"] < lines[0]["loss"]


@pytest.mark.drill
def test_after_no_step_the_export_is_the_input(files: Path, tmp_path: Path, ray_here: None) -> None:
    """The other shapes come back the same without Ray, in test_model."""
    name = "mixtral"
    argv = command(files, tmp_path, name, f"--model.path={files / name}", "--train.max_steps=0")
    assert main(argv) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
    before = AutoModelForCausalLM.from_pretrained(files / name)
    ids = torch.arange(40)[None] + 10
    assert torch.equal(exported(ids).logits, before(ids).logits)


@pytest.mark.drill
def test_auto_takes_what_fits_and_half_of_it_when_it_does_not(
    files: Path,
    tmp_path: Path,
    ray_here: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = command(files, tmp_path, "auto", "--train.micro_batch=auto", "--train.max_steps=3")
    argv += [
        "--checkpoint.export=false",
        "--cluster.workers=2",
    ]  # no failure is allowed: this is none

    def train_in_memory_for_two_rows(
        spec: LanguageSpec,
    ) -> dict[str, Any]:  # inside, so that it is pickled
        from rayapp.driver.worker import work
        from rayapp.train import loop

        real = loop.train_step

        def step(engine: Any, batch: Any, agreement: Any) -> Any:
            if batch.input_ids.shape[1] > 2:
                torch.empty(2**55, dtype=torch.uint8)
            return real(engine, batch, agreement)

        loop.train_step = step
        return work(spec)

    monkeypatch.setattr(
        "rayapp.driver.ray_workers.entry", lambda job: partial(train_in_memory_for_two_rows, job)
    )
    assert main(argv) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "auto micro-batch of 4 rows, planned " in said
    assert "can't allocate memory: you tried to allocate 36028797018963968 bytes" in said
    again = "again with train.micro_batch=2: 8 rows / 2 = 4 micro-batches / 2 workers = 2 each"
    assert again in said
    result = json.loads((tmp_path / "auto" / "result.json").read_text())
    assert [event["step"] for event in result["interruptions"]] == [0]
    asked, plan = tmp_path / "auto" / "config.yaml", tmp_path / "auto" / "plan.json"
    assert yaml.safe_load(asked.read_text())["train"]["micro_batch"] == 2
    lines = lines_of(tmp_path / "auto")
    plain = without_ray(str(tmp_path), str(tmp_path / "auto"), 2, tmp_path / "plain", 3)
    for name in ("step", "batch_digest", "loss", "tokens"):
        assert [line[name] for line in lines] == [line[name] for line in plain]
    # Another size has the same rows.
    prepared = prepared_data.load(
        open_storage(str(tmp_path)) / PREPARED / json.loads(plan.read_text())["fingerprint"]
    )
    assert prepared is not None
    config = from_dict(yaml.safe_load(asked.read_text()), kind=Config)
    four = order_of(config.with_micro_batch(4), prepared)
    for line in lines:
        rows = step_rows(prepared.rows("train"), four, line["step"] - 1, 0, 1)
        places = zip(rows.positions.ravel(), rows.input_ids.reshape(8, -1), strict=True)
        digest = order.combine(order.row_digest(int(place), ids) for place, ids in places)
        assert digest == line["batch_digest"]


def test_a_node_is_asked_what_memory_is_free(ray_here: None) -> None:
    def per_worker(workers: str) -> float:
        config = from_dict({"cluster": {"workers": workers, "gpu": "false"}})
        return auto._capacity_gib(config, False)

    free_gib = psutil.virtual_memory().available / 2**30  # other tests take and free some
    assert 0.5 * free_gib < 2 * per_worker("2") < psutil.virtual_memory().total / 2**30
    assert per_worker("1") == pytest.approx(2 * per_worker("2"), rel=0.3)


def test_ray_without_a_dashboard_asks_no_other_ray(ray_here: None) -> None:
    """Ray tells 8265 all the same; the run's actors must not ask who is there."""
    import ray
    from ray.dashboard.utils import get_address_for_submission_client
    from ray.util.state import get_actor
    from ray.util.state.exception import ServerUnavailable

    with connected(from_dict({"cluster": {"workers": "1"}}), "local"):
        assert not get_address_for_submission_client(None).endswith(":8265")
        with pytest.raises(ServerUnavailable):
            get_actor("0" * 32, timeout=5)
        assert os.environ["RAY_ADDRESS"] == ray.get_runtime_context().gcs_address
    assert "RAY_ADDRESS" not in os.environ and "RAY_API_SERVER_ADDRESS" not in os.environ


@pytest.mark.drill
def test_workers_of_ray_give_the_run_of_a_plain_process(
    files: Path, tmp_path: Path, ray_here: None
) -> None:
    """Through Ray Train and Ray Data; 8 rows in 4 micro-batches do not divide among 3."""
    argv = command(files, tmp_path, "three", "--cluster.workers=3", "--checkpoint.export=false")
    assert main(argv) == 0
    lines = lines_of(tmp_path / "three")
    plain = without_ray(str(tmp_path), str(tmp_path / "three"), 1, tmp_path / "plain", 20)
    assert len(lines) == 20
    for name in ("step", "batch_digest", "lr", "tokens"):
        assert [line[name] for line in lines] == [line[name] for line in plain]
    np.testing.assert_allclose(
        [line["loss"] for line in lines], [line["loss"] for line in plain], rtol=0, atol=1e-4
    )


@pytest.mark.drill
def test_few_bad_rows_are_counted_and_many_stop_the_run(
    files: Path, tmp_path: Path, ray_here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad line far from the head of the file is found while preparing."""
    good = (files / "good.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text(f"{good}\nnot json\n")
    argv = command(files, tmp_path, "few", f"--data.path={tmp_path / 'data.jsonl'}")
    argv = [*[a for a in argv if "max_steps" not in a], "--train.max_steps=1"]
    assert main([*argv, "--checkpoint.export=false"]) == 0
    plan = json.loads((tmp_path / "few" / "plan.json").read_text())
    assert sum(plan["data"]["bad"].values()) == 1
    assert "data.jsonl:901" in capsys.readouterr().out
    assert main([*argv, "--run.name=many", "--data.bad_rows=0.0001"]) == 2
    assert "data.jsonl:901 is not JSON" in capsys.readouterr().err


@pytest.mark.xdist_group("test_finetune.py: a command with a Ray of its own")
def test_the_command_leaves_the_run_folder_and_knows_it_again(files: Path, tmp_path: Path) -> None:
    """A real process that starts its own Ray: exit codes, files, a second call, another config."""
    argv = command(files, tmp_path, "cli", "--train.max_steps=3", "--eval.prompts=Line 1")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": tempfile.mkdtemp()}
    environment.pop("RAY_ADDRESS", None)

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-m", "rayapp.finetune", *argv, *more]
        return subprocess.run(call, capture_output=True, text=True, env=environment, cwd=tmp_path)

    first = run()
    assert first.returncode == 0, first.stdout + first.stderr
    for text in ("rows per step", "512 tokens / 64 = 8", "step 3/3", "held-out loss", "model in"):
        assert text in first.stdout
    printed = (first.stdout + first.stderr).splitlines()
    of_ray = re.compile(r"pid=|\(raylet\)")
    assert list(filter(of_ray.search, printed)) == [], "lines of Ray's own processes"
    assert "torchao" not in first.stdout + first.stderr, "a line of what only GPUs need"
    found = {
        p.relative_to(tmp_path / "cli").as_posix()
        for p in (tmp_path / "cli").rglob("*")
        if p.is_file()
    }
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "result.json"):
        assert name in found
    plan = json.loads((tmp_path / "cli" / "plan.json").read_text())
    assert 0.8 < plan["peak_terms_gib"]["slack"] < 1.0, "of a process, not of a GPU"
    folder = "checkpoints/step-00000003"
    assert {f"{folder}/{n}" for n in ("COMMITTED", "state.json", ".metadata")} <= found
    assert {"model/config.json", "model/tokenizer.json", "model/model.safetensors"} <= found
    log = (tmp_path / "cli" / "logs" / "attempt-1.txt").read_text()
    kept = iter(log.splitlines())
    before_the_sample = first.stdout.partition("\nsample ")[0].splitlines()
    while before_the_sample[0].startswith("importing torch"):  # on a slow machine, before the log
        del before_the_sample[0]
    assert all(line in kept for line in before_the_sample), "in this order"
    told = subprocess.run(
        [sys.executable, "-m", "rayapp", "logs", str(tmp_path / "cli")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert told.stdout == log, told.stderr
    sessions = sorted(Path(environment["RAY_TMPDIR"]).glob("**/session_*"))
    assert sessions
    second = run()
    assert second.returncode == 0 and "already done" in second.stdout
    other = run("--train.lr=1e-5")
    assert sorted(Path(environment["RAY_TMPDIR"]).glob("**/session_*")) == sessions, "started Ray"
    assert other.returncode == 2
    assert "run.name=cli is taken" in other.stderr and "train.lr: 0.003 -> 1e-05" in other.stderr
    shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)


OWN = """from torch.nn.functional import cross_entropy

def loss(logits, labels):
    nats = cross_entropy(logits, labels, reduction="none")
    return nats if len(labels) < 9 else SUM

def metric(logits, labels):
    if len(labels) > 8:
        raise ValueError("no vocabulary file")
    return labels * 0.0
"""


@pytest.mark.full
def test_own_code_that_fails_in_the_workers_is_named_once_mended_and_goes_on(
    files: Path, tmp_path: Path
) -> None:
    """On the few tokens of the check it is right. A metric that raises is left out."""
    own = ["--train.loss=lab:loss", "--eval.metrics=lab:metric,lab:loss", "--eval.every_steps=2"]
    own += ["--cluster.max_failures=3", "--cluster.workers=1", "--checkpoint.export=false"]
    argv = command(files, tmp_path, "own", "--train.max_steps=4", *own)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": tempfile.mkdtemp()}
    environment.pop("RAY_ADDRESS", None)
    for text, code, attempts in (("nats.sum()", 1, 1), ("nats", 0, 2)):
        (tmp_path / "lab.py").write_text(OWN.replace("SUM", text))
        call = [sys.executable, "-m", "rayapp.finetune", *argv]
        done = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=tmp_path)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == code, said
        events = map(json.loads, (tmp_path / "own" / "events.jsonl").read_text().splitlines())
        assert sum(event["event"] == "workers" for event in events) == attempts, said
        if code:
            assert "failed: rank 0: train.loss=lab:loss is not usable: it must return one" in said
    assert said.count("eval.metrics=lab:metric raised ValueError: no vocabulary file. It is") == 1
    result = json.loads((tmp_path / "own" / "result.json").read_text())
    assert result["eval_metrics"] == {"loss": pytest.approx(result["eval_loss"])}
    assert lines_of(tmp_path / "own")[1]["eval_metrics"].keys() == {"loss"}
    shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)


SLOW = """
import time
import torch
import torch.distributed as dist

def loss(logits, labels):
    if dist.is_initialized() and dist.get_rank() == 1:
        time.sleep(0.1)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")
"""


@pytest.mark.full
def test_a_rank_that_lags_and_a_profile_are_told(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    steps = EVERY_STEPS * SAMPLES + 2
    own = ["--train.loss=slow:loss", "--train.profile_steps=4:6", f"--train.max_steps={steps}"]
    argv = command(files, tmp_path, "slow", *own, "--cluster.workers=2")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": tempfile.mkdtemp()}
    environment.pop("RAY_ADDRESS", None)
    call = [sys.executable, "-m", "rayapp.finetune", *argv]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=tmp_path)
    said = done.stdout + done.stderr
    named = f"rank 1 on {socket.gethostname()} computes "
    assert done.returncode == 0 and named in said, said
    run, trace = tmp_path / "slow", "steps-4-5.trace.json.gz"
    assert f"profile in {run}/profiles: {trace}" in done.stdout
    page = (run / "report.html").read_text()
    assert f'href="profiles/{trace}"' in page and (run / "profiles" / trace).exists()
    assert named in page
    assert status([str(run)]) == 0 and named in " ".join(capfd.readouterr().out.split())
    shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)


@pytest.mark.full
def test_a_run_in_a_kernel_prints_what_the_command_does(files: Path, tmp_path: Path) -> None:
    """Jupyter's kernels ask for colours, and their output is no terminal."""
    argv = command(files, tmp_path, "kernel", "--train.max_steps=2", "--cluster.workers=1")
    fields = dict(argument.removeprefix("--").split("=", 1) for argument in argv)
    code = "import rayapp\nfrom rayapp.finetune import finetune\n"
    code += f"finetune(rayapp.load(None, {fields}))"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": tempfile.mkdtemp()}
    environment |= {"FORCE_COLOR": "1", "TERM": "xterm-color"}
    environment.pop("RAY_ADDRESS", None)
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "step 2/2" in said, said
    odd = re.compile(r"\x1b|\r|torchao|Enum|pid=|\(raylet\)|PreemptionWatcher|WARN")
    assert list(filter(odd.search, said.splitlines())) == [], said
    shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)


TINY_TRIAL = {
    "data.path": "stdlib",
    "data.seq_len": "64",
    "model.tokenizer": "bytes",
    "model.overrides": "{num_hidden_layers: 1, hidden_size: 64, intermediate_size: 128}",
    "train.tokens_per_step": "512",
    "train.micro_batch": "4",
    "train.max_steps": "6",
    "cluster.workers": "1",
}


@pytest.mark.drill
def test_a_trial_of_ray_tune_reports_each_step(ray_here: None, files: Path, tmp_path: Path) -> None:
    from ray import tune

    def trial(given: dict[str, Any]) -> None:
        from rayapp.finetune import finetune

        more = {
            "data.path": str(files / "text.txt"),
            "run.storage": str(tmp_path),
            "run.name": f"lr-{given['lr']}",
        }
        config = load(None, TINY_TRIAL | more | {"train.lr": str(given["lr"])})
        finetune(config, on_step=lambda line: tune.report({"loss": line["loss"]}))

    tuner = tune.Tuner(
        trial,
        param_space={"lr": tune.grid_search([1e-3, 1e-2])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(tmp_path / ".tune"), name="demo"),
    )
    results = tuner.fit()
    assert [result.error for result in results] == [None, None]
    reported = [result.metrics["training_iteration"] for result in results]
    assert reported == [6, 6]
    losses = {result.config["lr"]: result.metrics["loss"] for result in results}
    assert losses[1e-2] < losses[1e-3]


@pytest.mark.full
@pytest.mark.parametrize(("limit", "trials"), [("max_concurrent_trials=1", 2), ("", 4)])
def test_the_documented_trials_end(tmp_path: Path, limit: str, trials: int) -> None:
    """On 4 CPUs, which four trials would hold; with a config of the folder they are started in."""
    page = (Path(__file__).parent.parent / "docs" / "own_code.md").read_text()
    (code,) = re.findall(r"```python\n(import os\n.*?)```", page, re.DOTALL)
    assert "max_concurrent_trials=1" in code and "[1e-3, 3e-3]" in code
    code = code.replace("max_concurrent_trials=1", limit)
    code = code.replace("[1e-3, 3e-3]", str([n / 1000 for n in range(1, trials + 1)]))
    temporary = tempfile.mkdtemp()
    start = f"import ray\nray.init('local', num_cpus=4, _temp_dir={temporary!r})\n"
    (tmp_path / "sweep.py").write_text(
        f"{start}{code}for each in results:\n    print('ended', each.error, flush=True)\n"
    )
    tree: dict[str, Any] = {"cluster": {"workers": "2"}, "data": {"path": "text.txt"}}
    for field, value in TINY_TRIAL.items():
        section, name = field.split(".")
        tree.setdefault(section, {}).setdefault(name, yaml.safe_load(value))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny_cpu.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "text.txt").write_text(TEXT)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "sweep.py"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=4 * PATIENCE_S,
    )
    shutil.rmtree(temporary, ignore_errors=True)
    said = done.stdout + done.stderr
    if limit:
        assert said.count("ended None") == trials, said
        assert {each.name for each in (tmp_path / "runs").glob("lr-*")} == {"lr-0.001", "lr-0.002"}
        assert len(list((tmp_path / "runs" / ".prepared").glob("*/manifest.json"))) == 1
    else:
        assert said.count("ended None") < trials, said
        refused = r"(\d) trials that wait as this one does hold \1 of 4 CPUs, and a run needs 3"
        assert re.search(refused, said), said
        assert "Set max_concurrent_trials=1 in tune.TuneConfig, or fewer CPUs for a trial" in said
