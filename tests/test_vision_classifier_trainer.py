"""Check what a classifier's run is made of: scores, checks, the plan shown, its job, validation."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
from pictures import as_folder, drawn, indexed
from rich.console import Console
from torch import nn
from transformers import AutoModelForImageClassification, ResNetConfig

from rayapp.__main__ import main
from rayapp.config import ConfigError, VisionConfig, load
from rayapp.config.vision import RandAugment
from rayapp.data.images import drawn_shapes
from rayapp.data.images.batches import StepImages, local_steps
from rayapp.data.images.index import Images
from rayapp.driver import display as driver_display
from rayapp.observe.activity import Phases
from rayapp.observe.run_folder import CHECKPOINTS
from rayapp.storage import open_storage
from rayapp.train.checkpoint.marker import latest
from rayapp.train.engine import Engine
from rayapp.train.loop import Interrupted
from rayapp.train.rank import RankContext, train_rank, validate
from rayapp.train.spec import ImageSpec
from rayapp.train.step_sync import STOP
from rayapp.vision import classifier_run, classifier_trainer
from rayapp.vision import classifier_run as checks
from rayapp.vision.classifier_run import index, order_of, plan_of
from rayapp.vision.classifier_trainer import Scores, evaluate

CLASSES, STEPS = 4, 6
TINY = {"hidden_act": "gelu", "embedding_size": 4, "hidden_sizes": [8], "depths": [1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parts")
    as_folder(root / "data", [*drawn(CLASSES, 12), ("disc/notes.txt", b"round")])
    return root


@pytest.fixture(scope="module")
def images(folder: Path) -> Images:
    return indexed(folder / "data", open_storage(str(folder / "runs/.prepared")), 0.3)


def config_of(folder: Path, name: str, **more: Any) -> VisionConfig:
    fields = {
        "run.name": name,
        "run.storage": f"{folder}/runs",
        "model.overrides": json.dumps(TINY),
        "data.path": f"{folder}/data",
        "data.eval_fraction": "0.3",
        "data.size": "32",
        "train.images_per_step": "8",
        "train.micro_batch": "4",
        "train.max_steps": str(STEPS),
        "train.schedule": "constant",
        "checkpoint.every_s": "none",
    }
    overrides = {name.replace("__", "."): str(value) for name, value in more.items()}
    return load(None, fields | overrides, VisionConfig)


def spec_of(config: VisionConfig, images: Images) -> ImageSpec:
    url = f"{config.run.storage}/{config.run.name}"
    return ImageSpec("rayapp.vision", config, images, order_of(config, images), url)


# ---- Scores ------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Give the logits that stand in the first bytes of an image."""

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor, **rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        logits = images.flatten(1)[:, :7].float() / 10
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return loss, loss, logits


@pytest.mark.parametrize("world", [1, 3])
def test_scores_are_counted_by_hand(world: int, tmp_path: Path) -> None:
    processes.spawn(_scored, world, str(tmp_path / "meet"))


def _scored(rank: int, world: int) -> None:
    draw = np.random.default_rng(5)
    count, classes, size = 40, 7, 4
    drawn = [draw.permutation(256)[:12] for _ in range(count)]  # no two equal logits in an image
    pixels = np.stack(drawn).astype(np.uint8).reshape(count, 2, 2, 3)
    labels = draw.integers(0, classes, count).astype(np.int32)

    def batches() -> Any:
        for first in range(0, -(-count // size), world):
            ids = (first + rank) * size + np.arange(size)
            rows, at = np.where(ids < count, ids, -1), np.minimum(ids, count - 1)
            ones, none = np.ones(size, np.float32), np.zeros(size, np.uint64)
            arrays = (pixels[at], labels[at], labels[at], ones, none, rows)
            yield StepImages(first, *(array[None] for array in arrays))

    engine = Engine(
        model=Fixed(),
        optimizers=[],
        lr_at=lambda step: 0.0,
        device=torch.device("cpu"),
        grad_clip=None,
        control=dist.group.WORLD,
    )
    scores = evaluate(engine, batches(), classes)
    logits = pixels.reshape(count, -1)[:, :classes] / 10
    ranks = np.argsort(-logits, 1, kind="stable")
    right = ranks[:, 0] == labels
    top5 = (ranks[:, :5] == labels[:, None]).any(1)
    likelihood = logits[np.arange(count), labels] - np.log(np.exp(logits).sum(1))
    found = scores.figures()
    assert found["eval_top1"] == right.mean() and found["eval_top5"] == top5.mean()
    assert found["eval_loss"] == pytest.approx(-likelihood.mean(), rel=1e-5)
    assert int(scores.confusion.sum()) == count

    def drawn_until_left() -> Any:
        for number, batch in enumerate(batches()):
            if number == 1 and rank == 0:
                engine.leave_due = lambda: STOP
            assert number <= 1
            yield batch

    engine.interruptible = True
    with pytest.raises(Interrupted):  # on all ranks, at the same batch
        evaluate(engine, drawn_until_left(), classes)
    assert engine.model.training
    table = np.zeros((classes, classes), int)
    np.add.at(table, (labels, ranks[:, 0]), 1)
    assert scores.confusion.tolist() == table.tolist()


def test_the_table_names_classes_and_what_they_are_taken_for() -> None:
    confusion = torch.tensor([[5, 2, 0], [1, 7, 3], [0, 0, 4]])
    table = Scores(loss=11.0, top5=22, confusion=confusion).table(("cat", "dog", "owl"))
    assert table["each"] == [("cat", 7, 5), ("dog", 11, 7), ("owl", 4, 4)]
    assert table["confused"] == [("dog", "owl", 3), ("cat", "dog", 2), ("dog", "cat", 1)]
    many = torch.arange(36).reshape(6, 6)
    confused = Scores(0.0, 0, many).table("abcdef")["confused"]
    assert len(confused) == classifier_trainer.CONFUSIONS
    assert confused[0] == ("f", "e", 34) and confused[-1][-1] >= 10


# ---- Checks and the plan -----------------------------------------------------------------------


def test_checks_find_what_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    ready = checks.check(config_of(folder, "ready", data__path="data"), 2, 0)
    assert ready.config.data.path == str(folder / "data") and ready.config.data.format == "folder"
    assert len(ready.source.files) == CLASSES * 12 + 1 and ready.eval_source is None
    assert ready.run.url == f"{folder}/runs/ready"
    (folder / "resnet-tiny").mkdir()  # a preset is a preset, also beside a folder of its name
    again = checks.check(config_of(folder, "ready", data__path="data"), 2, 0)
    assert again.config.model.path == "resnet-tiny"
    (folder / "resnet-tiny").rmdir()
    with pytest.raises(ConfigError) as caught:
        config = config_of(
            folder,
            "wrong",
            data__eval_path=f"{folder}/nothing",
            data__eval_fraction=0,
            model__overrides="{depths: three}",
            cluster__workers=64,
        )
        checks.check(config, 2, 0)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "data.eval_path=" in text
    assert "model.overrides={'depths': 'three'} is not a shape of resnet: " in text
    assert "cluster.workers=64 is more than this machine can place" in text


def test_too_many_bad_files_are_refused_by_name(folder: Path, images: Images) -> None:
    """One of 49 is none: within 3 %, not within 1 %."""
    for allowed in (0.03, 0.01):
        config = config_of(folder, "bad", data__bad_images=allowed)
        ready = checks.check(config, 2, 0)
        if allowed > 0.02:
            assert index(ready, config, Phases()) == images
            continue
        with pytest.raises(
            ConfigError, match=r"unusable in 2\.0% .*disc/notes\.txt is not an imag"
        ):
            index(ready, config, Phases())


def test_the_plan_is_shown_as_equations(folder: Path, images: Images) -> None:
    config = config_of(folder, "plan", parallel__sync_batch_norm="true", cluster__workers="2")
    order, out = order_of(config, images), io.StringIO()
    classifier_run.show(Console(file=out, width=200), config, images, order, 12_345)
    text = out.getvalue()
    trained = images.counts["train"]
    for part in (
        "12,345 parameters, ddp",
        "batch-norm over all workers' micro-batches",
        f"{trained} images in 4 classes",
        "8 images / 4 per micro-batch = 2 micro-batches / 2 workers = 1 each",
        f"6 x 8 = 48 images = {48 / trained:.2f} epochs",
        "1 of 49: 1 not an image; e.g. disc/notes.txt",
    ):
        assert part in text, part
    plan = plan_of(config, images, order, 12_345)
    assert (plan["steps"], plan["images"], plan["micro_batches_per_step"]) == (STEPS, 48, 2)
    assert plan["epochs"] == pytest.approx(48 / trained)
    assert plan["data"]["bad"] == {"not an image": 1} and plan["data"]["classes"] == CLASSES
    epochs = order_of(config_of(folder, "e", train__max_steps="none", train__epochs=2), images)
    assert epochs.num_steps == -(-2 * trained // 8)


def test_figures_of_a_line_are_in_images() -> None:
    line = {"loss": 0.5, "images_per_s": 1234.0, "eval_loss": 0.25, "eval_top1": 0.9}
    assert driver_display.figures_of(line) == (
        "loss 0.5000  images/s 1,234  held-out loss 0.2500  top-1 90 %"
    )


def test_a_job_is_told_all_and_travels(folder: Path, images: Images) -> None:
    more = {"data__randaugment": "{layers: 2, magnitude: 7}", "data__mixup": 0.2}
    config = config_of(folder, "job", **more, data__cutmix=1, data__flip=0.25)
    spec = spec_of(config, images)
    assert pickle.loads(pickle.dumps(spec)) == spec
    look = spec.config.data
    assert look.randaugment == RandAugment(layers=2, magnitude=7)
    assert (look.mixup, look.cutmix, look.flip, look.size) == (0.2, 1.0, 0.25, 32)
    assert (
        spec.data.fingerprint == images.fingerprint and spec.data.held_out == images.counts["eval"]
    )
    assert config_of(folder, "none").data.randaugment is None
    assert "8 rows / 4 = 2 micro-batches / 2 workers = 1 each" in spec.accumulation(2)


def test_the_set_that_rayapp_draws_is_drawn_once(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn_shapes, "PER_CLASS", 2)
        config = config_of(tmp_path, "drawn", data__path=drawn_shapes.NAME)
        first = checks.check(config, 2, 0)
        patch.setattr(drawn_shapes, "one", None)  # nothing is drawn again
        assert checks.check(config, 2, 0) == first
    assert len(first.source.files) == 2 * len(drawn_shapes.CLASSES) + len(drawn_shapes.damaged())


def test_commands_refuse_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    from rayapp.vision.__main__ import main as vision

    assert vision(["--train.lrr=3"]) == 2
    assert "train.lrr=3 is unknown" in capsys.readouterr().err
    assert vision(["--help"]) == 0
    assert "train.images_per_step" in capsys.readouterr().out
    assert main(["submit", "--task=vision", "--train.tokens_per_step=3"]) == 2
    assert "train.tokens_per_step=3 is unknown" in capsys.readouterr().err


# ---- Training ----------------------------------------------------------------------------------


def _train(rank: int, world: int, spec: ImageSpec, steps: int, poisoned: int = -1) -> None:
    def batches(first: int) -> Any:
        rows = spec.data.rows("train")
        for batch in islice(
            local_steps(rows, spec.config.data, spec.order, rank, world, first), steps
        ):
            broken = batch.step == poisoned
            yield replace(batch, shares=batch.shares * np.float32("nan")) if broken else batch

    summary = train_rank(spec, RankContext(torch.device("cpu"), batches))
    if rank == 0:
        Path(spec.run_url, "summary.json").write_text(json.dumps(summary))


def test_a_skipped_step_leaves_weights_statistics_and_average(
    folder: Path, images: Images, tmp_path: Path
) -> None:
    """The run whose last step is not finite ends as the one that lacks it."""
    states = {}
    for name, steps, poisoned in (("skips", STEPS, STEPS - 1), ("lacks", STEPS - 1, -1)):
        config = config_of(
            tmp_path,
            name,
            train__on_spike="skip",
            train__max_steps=steps,
            train__ema=0.9,
            data__path=f"{folder}/data",
        )
        spec = spec_of(config, images)
        processes.spawn(_train, 2, str(tmp_path / f"{name}-meet"), spec, steps, poisoned)
        model = AutoModelForImageClassification.from_pretrained(f"{spec.run_url}/model")
        states[name] = model.state_dict()
    for key, value in states["lacks"].items():
        assert torch.equal(states["skips"][key], value), key


def test_a_run_that_began_with_an_index_of_version_2_goes_on_with_it(
    folder: Path, tmp_path: Path
) -> None:
    """Its images are decoded as they were; a new run's are not."""
    root = open_storage(f"{tmp_path}/runs/.prepared")
    old, new = (indexed(folder / "data", root, 0.3, version=version) for version in (2, 3))
    fields = {"data__path": f"{folder}/data", "data__bad_images": 0.1, "train__max_steps": 1}
    for name, began in (("began", old), ("new", None)):
        config = config_of(tmp_path, name, checkpoint__every_steps=1, **fields)
        if began is not None:
            processes.spawn(_train, 1, str(tmp_path / "meet"), spec_of(config, began), 1)
        found = index(checks.check(config, 2, 0), config, Phases())
        assert found == (began or new)
        assert found.rows("train").as_stored is (found == old)


def test_a_checkpoint_is_validated_as_training_evaluates(
    images: Images, folder: Path, tmp_path: Path
) -> None:
    config = config_of(
        tmp_path, "valid", train__ema=0.5, train__lr=0.5, checkpoint__every_steps=STEPS
    )
    spec = spec_of(config, images)
    processes.spawn(_train, 2, str(tmp_path / "meet"), spec, STEPS)
    found, _ = latest(open_storage(spec.run_url))
    assert found is not None and found.step == STEPS
    line = validate(spec, found.name.removeprefix(f"{CHECKPOINTS}/"), STEPS)
    summary = json.loads(Path(spec.run_url, "summary.json").read_text())
    assert line["eval_loss"] == pytest.approx(summary["eval_loss"], abs=1e-5)
    assert (line["step"], line["eval_top1"]) == (STEPS, summary["eval_top1"])


def test_published_weights_are_fine_tuned(images: Images, tmp_path: Path) -> None:
    """A folder of weights is where training begins, or only its shape."""
    torch.manual_seed(3)
    shape = ResNetConfig(**TINY, layer_type="basic", num_labels=CLASSES)
    AutoModelForImageClassification.from_config(shape).save_pretrained(tmp_path / "given")
    given = AutoModelForImageClassification.from_pretrained(tmp_path / "given").state_dict()
    same = {}
    for from_scratch in ("false", "true"):
        config = config_of(
            tmp_path,
            f"from-{from_scratch}",
            model__path=f"{tmp_path}/given",
            model__overrides="{}",
            model__from_scratch=from_scratch,
            train__max_steps=1,
            train__lr=1e-9,
        )
        spec = spec_of(config, images)
        processes.spawn(_train, 1, str(tmp_path / f"meet-{from_scratch}"), spec, 1)
        model = AutoModelForImageClassification.from_pretrained(f"{spec.run_url}/model")
        name = "resnet.embedder.embedder.convolution.weight"
        same[from_scratch] = torch.allclose(model.state_dict()[name], given[name], atol=1e-6)
    assert same == {"false": True, "true": False}
