"""Drills of an image classifier: whatever happens to a run, it trains on the same images.

As tests/test_drills.py: real commands with a Ray of their own, compared step by step and in order
with plain processes that nothing happens to.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from drill import Drill, Undisturbed, assert_alike, assert_same, worker_counts
from nodes import join, seats, with_jobs
from patience import PATIENCE_S
from pictures import as_folder, as_tars, drawn
from transformers import AutoModelForImageClassification

from rayapp.config import VisionConfig, from_dict
from rayapp.data.images.batches import local_steps
from rayapp.data.images.index import load
from rayapp.observe.run_folder import PREPARED, REPORT
from rayapp.storage import open_storage
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import ImageSpec
from rayapp.vision.classifier_run import order_of

pytestmark = pytest.mark.drill

ROOT = Path(__file__).parent.parent


class ImageDrill(Drill):
    """One command that trains a classifier, with every kind of augmentation."""

    MODULE = "rayapp.vision"
    SETTINGS: ClassVar[dict[str, Any]] = {
        "data.size": 32,
        "data.randaugment": "{layers: 1}",
        "data.mixup": 0.2,
        "data.cutmix": 0.5,
        # GELU, and slow in learning: tests/test_vision.py says why.
        "model.overrides": "{hidden_act: gelu, embedding_size: 8, hidden_sizes: [8, 16],"
        " depths: [1, 1]}",
        "train.images_per_step": 24,
        "train.micro_batch": 4,
        "train.epochs": 3,
        "train.lr": 0.01,
        "train.label_smoothing": 0.1,
        "train.ema": 0.9,
        "train.precision": "fp32",
        "checkpoint.every_steps": 10,
        "checkpoint.every_s": "none",
        "cluster.workers": 2,
        "cluster.max_failures": 3,
    }

    def data(self, folder: Path) -> Path:
        """Write a folder per class."""
        pictures = folder / "pictures"
        return pictures if pictures.exists() else as_folder(pictures, drawn(10, 40))


def train_again(rank: int, world: int, storage: str, run: str, folder: str, steps: int) -> None:
    """Train what a run has trained, on one of so many plain processes."""
    asked = open_storage(run)
    config = from_dict(yaml.safe_load(asked.read("config.yaml")))
    assert isinstance(config, VisionConfig)
    off = config.checkpoint.model_copy(update={"every_steps": None, "export": False})
    config = config.model_copy(update={"checkpoint": off})
    fingerprint = json.loads(asked.read("plan.json"))["fingerprint"]
    images = load(open_storage(f"{storage}/{PREPARED}") / fingerprint)
    assert images is not None
    spec = ImageSpec("rayapp.vision", config, images, order_of(config, images), folder)
    ahead = local_steps(images.rows("train"), spec.config.data, spec.order, rank, world, 0)
    train_rank(spec, RankContext(torch.device("cpu"), lambda first: islice(ahead, first, steps)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Undisturbed:
    return Undisturbed(folder, train_again)


def test_a_killed_worker_changes_nothing(folder: Path, expected: Undisturbed) -> None:
    """Indexed and streamed by Ray Data, trained by Ray Train, as plain processes do: 1, 2 or 3."""
    drill = ImageDrill(folder, "killed")
    drill.wait_for_checkpoint(13)
    os.kill(drill.workers()[-1], signal.SIGKILL)
    drill.end(0)
    lines, result = drill.lines(), drill.result()
    assert_same(lines, expected(drill, 2))
    for workers in (1, 3):
        assert_alike(lines, expected(drill, workers))
    assert {line["attempt"] for line in lines} == {1, 2}
    (event,) = result["interruptions"]
    assert event["kind"] == "failure"
    assert result["status"] == "done" and 0 <= result["eval_top1"] <= result["eval_top5"] <= 1
    each = result["classes"]["each"]
    held = json.loads(drill.run.read("plan.json"))["data"]["images"]["eval"]
    assert sum(count for _, count, _ in each) == held
    assert sum(right for *_, right in each) == round(result["eval_top1"] * held)
    page = drill.run.read(REPORT).decode()
    assert "Most often confused" in page and "images/s" in page
    shown = drill.log.read_text()
    assert "images/s" in shown and "top-1" in shown and "micro-batches / 2 workers" in shown
    model = AutoModelForImageClassification.from_pretrained(result["model_path"])
    assert model.config.num_labels == 10 and model.config.id2label[0] == "checks"


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_takes_the_same_images(
    workers: int, folder: Path, expected: Undisturbed
) -> None:
    drill = ImageDrill(folder, f"workers-{workers}", {"cluster.workers": workers})
    drill.end(0)
    assert {line["workers"] for line in drill.lines()} == {workers}
    assert_same(drill.lines(), expected(drill, workers))
    assert_alike(drill.lines(), expected(drill, 2))


@pytest.mark.parametrize("worlds", [(1, 3, 2), (3, 2, 1)])
def test_the_order_outlives_every_change_of_workers(worlds: tuple[int, ...], folder: Path) -> None:
    """One command's driver dies, the next one is stopped, the last has other workers again.

    Images are large and epochs many, so that no machine is through before it has seen that it is
    to stop, and the learning rate is low, so that sums in another order do not grow apart.
    """
    name = "changes-" + "-".join(map(str, worlds))
    draw, longer = random.Random(name), {"data.size": 96, "train.epochs": 6, "train.lr": 1e-3}
    first = ImageDrill(folder, name, {"cluster.workers": worlds[0], **longer})
    first.wait_for_step(draw.randrange(3, 15))
    first.kill("driver")
    second = ImageDrill(folder, name, {"cluster.workers": worlds[1], **longer})
    second.wait_for_step(draw.randrange(19, 30))
    second.stop()
    last = ImageDrill(folder, name, {"cluster.workers": worlds[2], **longer})
    last.end(0)
    (apart := folder / f"{name}-undisturbed").mkdir()
    expected = Undisturbed(apart, train_again)
    for workers in (1, 2, 3):
        assert_alike(last.lines(), expected(last, workers))
    assert last.lines()[-1]["workers"] == worlds[2] and last.lines()[-1]["attempt"] == 3


def test_a_node_is_taken_away_and_another_comes(folder: Path) -> None:
    """2 workers, after a notice 1, and 2 again as soon as there is room: nothing is lost.

    Steps are long and batch-norm sees 16 images, as sums in another order grow apart with each
    step: of 24 images in micro-batches of 4 it was 1e-4 after 140 steps, and 1e-3 after 430. And
    a machine that is fast must not be through before the node is there.
    """
    with seats(folder, 2) as nodes:
        more = {"train.epochs": 200, "train.lr": 1e-3, "cluster.workers": "1:2"}
        more |= {"train.images_per_step": 96, "train.micro_batch": 16, "data.size": 64}
        placed = {"cluster.address": nodes[0].address, "cluster.resources": "{seat: 1}"}
        drill = ImageDrill(folder, "taken", {**more, **placed})
        drill.wait_for_step(13)
        nodes[1].preempt()
        drill.wait_for(lambda line: line["workers"] == 1)
        join(nodes, folder)
        drill.stop_after_change(2)
    (apart := folder / "taken").mkdir()
    assert_alike(drill.lines(), Undisturbed(apart, train_again)(drill, 1))
    assert worker_counts(drill.lines()) == [2, 1, 2]
    taken, grown = drill.result()["interruptions"]
    assert (taken["kind"], taken["lost_steps"]) == ("preemption", 0), taken
    assert (grown["kind"], grown["lost_steps"]) == ("resize", 0), grown


def test_tar_shards_and_a_run_on_s3(folder: Path, s3_server: str, s3_bucket: str) -> None:
    """The same images from shards under s3://; the command is killed, and goes on from there."""
    shards, bucket = as_tars(folder / "shards", drawn(10, 40), 60), f"s3://{s3_bucket}"
    for shard in shards.iterdir():
        open_storage(bucket).write(f"data/{shard.name}", shard.read_bytes())
    more = {"data.path": f"{bucket}/data", "cluster.workers": 2}
    first = ImageDrill(folder, "shards", more, storage=f"{bucket}/runs")
    first.wait_for_step(15)
    first.kill("driver")
    second = ImageDrill(folder, "shards", more, storage=f"{bucket}/runs")
    second.end(0)
    (folder / "s3").mkdir()
    assert_same(second.lines(), Undisturbed(folder / "s3", train_again)(second, 2))


def test_a_ray_job_trains_a_classifier(tmp_path: Path) -> None:
    """`rayapp submit` of vision_cpu.yaml, cut short: followed, listed, and reported."""
    with with_jobs(tmp_path, cpus=4) as environment:
        storage = f"{tmp_path}/runs"
        command = [sys.executable, "-m", "rayapp", "submit", str(ROOT / "configs/vision_cpu.yaml")]
        command += [f"--run.storage={storage}", "--run.name=job", "--follow"]
        command += ["--train.epochs=none", "--train.max_steps=12", "--data.size=32"]
        command += ["--checkpoint.every_steps=6"]
        variables = {**environment, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
        assert "step 12/12" in done.stdout and "images/s" in done.stdout
        assert "top-1" in done.stdout and f"model in {storage}/job/model" in done.stdout
        run = open_storage(f"{storage}/job")
        lines = [json.loads(line) for line in run.read("metrics.jsonl").splitlines()]
        assert [line["step"] for line in lines] == list(range(1, 13))
        status = subprocess.run(
            [sys.executable, "-m", "rayapp", "status", run.url],
            env=variables,
            capture_output=True,
            text=True,
        )
        assert status.returncode == 0 and "12" in status.stdout, status.stdout + status.stderr
