"""A classifier's run against an oracle: one plain PyTorch process with torch's own batch-norm.

The oracle opens the same model folder with transformers, takes each step's images as one process
makes them, and steps torch's own optimizers; nothing else of rayapp is in it.
"""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import late
import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from pictures import as_folder, drawn, indexed
from sampled import sampled
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    EfficientNetConfig,
    PretrainedConfig,
    ResNetConfig,
    ViTConfig,
)

from rayapp.config import ConfigError, VisionConfig, load
from rayapp.data.images.batches import local_steps, step_images
from rayapp.data.images.index import Images
from rayapp.data.images.index import load as load_images
from rayapp.driver.checks import same_run
from rayapp.driver.growth import schedule_problem, stages_of
from rayapp.observe import metrics
from rayapp.order import EMPTY
from rayapp.storage import open_storage
from rayapp.train import schedule
from rayapp.train.checkpoint import commit, marker
from rayapp.train.checkpoint.marker import latest
from rayapp.train.loop import BadLoss
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import ImageSpec
from rayapp.train.step_sync import CONTINUE, STOP
from rayapp.vision import classifier_run as checks
from rayapp.vision import classifier_trainer
from rayapp.vision.classifier_run import order_of, plan_of

STEPS, CLASSES, BATCH = 12, 4, 12
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Not ReLU: where rounding puts a value to the other side of its kink, another gradient flows, and
# from there runs part, one worker and the oracle too (seen: 1e-7 to step 6, 8e-4 at step 11).
RESNET = ResNetConfig(
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 2],
    layer_type="basic",
    hidden_act="gelu",
    num_labels=CLASSES,
)
EFFICIENTNET = EfficientNetConfig(
    image_size=32,
    width_coefficient=0.2,
    depth_coefficient=0.3,
    hidden_dim=256,
    dropout_rate=0.0,
    drop_connect_rate=0.0,
    num_labels=CLASSES,
)
VIT = ViTConfig(
    image_size=32,
    patch_size=8,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=CLASSES,
)
SHAPES: dict[str, PretrainedConfig] = {"resnet": RESNET, "efficientnet": EFFICIENTNET, "vit": VIT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, their index, and a folder of random weights for each kind of model."""
    root = tmp_path_factory.mktemp("vision")
    as_folder(root / "data", drawn(CLASSES, 20))
    classes = sorted(path.name for path in (root / "data").iterdir())
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        model = AutoModelForImageClassification.from_config(shape)
        for module in model.modules():  # transformers' EfficientNet draws all of it around 0
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
        model.config.id2label = dict(enumerate(classes))  # by which the last layer is kept
        model.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def images(folder: Path) -> Images:
    return indexed(folder / "data", open_storage(str(folder / "prepared")), 0.2)


def config_of(folder: Path, name: str, **more: Any) -> VisionConfig:
    fields = {
        "run.name": name,
        "run.storage": f"{folder}/runs",
        "run.seed": "3",
        "model.path": f"{folder}/resnet",
        "data.path": f"{folder}/data",
        "data.size": "32",
        "data.crop_scale": "0.5,1",
        "data.mixup": "0.3",
        "data.cutmix": "0.3",
        "train.images_per_step": str(BATCH),
        "train.micro_batch": "6",
        "train.max_steps": str(STEPS),
        "train.lr": "0.05",
        "train.warmup_steps": "3",
        "train.weight_decay": "0.001",
        "train.label_smoothing": "0.1",
        "train.precision": "fp32",
        "checkpoint.every_s": "none",
    }
    overrides = {name.replace("__", "."): str(value) for name, value in more.items()}
    return load(None, fields | overrides, VisionConfig)


def spec_of(config: VisionConfig, images: Images) -> ImageSpec:
    run = f"{config.run.storage}/{config.run.name}"
    return ImageSpec("rayapp.vision", config, images, order_of(config, images), run)


def worker(rank: int, world: int, spec: ImageSpec) -> None:
    rows = spec.data.rows("train")
    summary = train_rank(
        spec,
        RankContext(
            torch.device("cpu"),
            lambda first: local_steps(rows, spec.config.data, spec.order, rank, world, first),
        ),
    )
    assert summary["status"] == "done", summary
    if rank == 0:
        path = Path(spec.run_url, "summary.json")
        path.write_text(json.dumps(summary))


def trained(folder: Path, spec: ImageSpec, world: int) -> list[dict[str, Any]]:
    """Train with so many workers; return the lines of metrics.jsonl."""
    rendezvous = folder / f"{spec.config.run.name}-{world}-{len(list(folder.iterdir()))}"
    processes.spawn(worker, world, str(rendezvous), spec)
    return metrics.read(open_storage(spec.run_url))


def summary_of(spec: ImageSpec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(spec.run_url, "summary.json").read_text())
    return found


def late_worker(rank: int, world: int, spec: ImageSpec) -> None:
    late.copy_late()
    worker(rank, world, spec)


@pytest.mark.full
def test_an_evaluation_that_is_given_up_leaves_no_trace(folder: Path, images: Images) -> None:
    """It evaluates the average of the weights; training goes on with their own values."""
    more = {"train.ema": 0.9, "train.max_steps": 6}
    spec = spec_of(config_of(folder, "given-up", **more, **{"eval.every_steps": 3}), images)
    processes.spawn(giving_up_worker, 2, str(folder / "given-up"), spec)
    lines = trained(folder, spec, 2)
    assert [line["step"] for line in lines if line["eval_loss"] is not None] == [4]
    whole = spec_of(config_of(folder, "not-given-up", **more, **{"eval.every_steps": 1}), images)
    expected = trained(folder, whole, 2)
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected]
    for name in ("eval_loss", "eval_top1", "eval_top5"):
        assert lines[3][name] == expected[3][name]
        assert summary_of(spec)[name] == summary_of(whole)[name]


def giving_up_worker(rank: int, world: int, spec: ImageSpec) -> None:
    seen: list[int] = []
    rows, batches = spec.data.rows("train"), classifier_trainer.held_out_batches

    def counted(*asked: Any) -> Any:
        for batch in batches(*asked):
            seen.append(batch.step)
            yield batch

    classifier_trainer.held_out_batches = counted
    schedule.LeaveWatcher.due = lambda self: STOP if seen else CONTINUE  # type: ignore[method-assign]
    look = spec.config.data
    summary = train_rank(
        spec,
        RankContext(
            torch.device("cpu"),
            lambda first: local_steps(rows, look, spec.order, rank, world, first),
        ),
    )
    assert (summary["status"], summary["steps"], seen) == ("stopped", 3, [0])


# ---- The oracle --------------------------------------------------------------------------------


def normal(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    """[n, S, S, 3] bytes as a model takes them."""
    values = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return (values - mean) / std


class Lars:
    """Layer-wise adaptive rates, by the paper's formula on one weight after another."""

    def __init__(self, model: nn.Module, momentum: float, decay: float) -> None:
        self.model, self.momentum, self.decay = model, momentum, decay
        self.velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(self, lr: float) -> None:
        for name, weight in self.model.named_parameters():
            decay, trust = (self.decay, None) if weight.ndim > 1 else (0.0, 1.0)
            if trust is None:
                norm = weight.norm()
                trust = 0.001 * norm / (weight.grad.norm() + decay * norm)
            change = lr * trust * (weight.grad + decay * weight)
            self.velocity[name] = self.momentum * self.velocity[name] + change
            weight.data -= self.velocity[name]


def oracle(
    spec: ImageSpec, split: int = 1, steps: int = STEPS, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Train in plain PyTorch, each step in `split` parts that batch-norm takes for itself."""
    train = spec.config.train
    model = AutoModelForImageClassification.from_pretrained(spec.config.model.path)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.momentum == 0.99:
            module.momentum = 0.01  # as EfficientNet's authors mean it
    model.train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}]
    groups.append({"params": others, "weight_decay": 0.0})
    lars = Lars(model, train.momentum, train.weight_decay)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        groups, lr=1.0, momentum=train.momentum, nesterov=True
    )
    if train.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=train.betas)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    losses, norms, rows = [], [], spec.data.rows("train")
    for step in range(steps):
        batch = step_images(rows, spec.config.data, spec.order, step, 0, 1)
        count = int(batch.counts().images)
        total = 0.0
        flat = [getattr(batch, n) for n in ("images", "labels", "others", "shares", "rows")]
        pixels, labels, mixed, shares, ids = (a.reshape(-1, *a.shape[2:]) for a in flat)
        for part in np.array_split(np.flatnonzero(ids >= 0), split):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                logits = model(normal(pixels[part])).logits.float()
            target = torch.zeros(len(part), logits.shape[1])
            own = torch.from_numpy(shares[part])
            places = torch.arange(len(part))
            target[places, torch.from_numpy(labels[part]).long()] += own
            target[places, torch.from_numpy(mixed[part]).long()] += 1 - own
            smooth = train.label_smoothing
            objective = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smooth)
            (objective / count).backward()
            total += float(F.cross_entropy(logits, target, reduction="sum").detach())
        losses.append(total / count)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        warm = min(1.0, (step + 1) / train.warmup_steps)
        done = max(0, step - train.warmup_steps) / (STEPS - train.warmup_steps)
        lr = train.lr * warm * (1 + math.cos(math.pi * done)) / 2
        if train.optimizer == "lars":
            with torch.no_grad():
                lars.step(lr)
        else:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        model.zero_grad()
        decay = min(train.ema, (step + 2) / (step + 11))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                average[name] = decay * average[name] + (1 - decay) * value
    return {"losses": losses, "norms": norms, "model": model, "average": average}


def assert_close(lines: list[dict[str, Any]], expected: dict[str, Any], most: float) -> None:
    assert len(lines) == len(expected["losses"])
    apart = [abs(line["loss"] - loss) for line, loss in zip(lines, expected["losses"], strict=True)]
    assert max(apart) <= most, apart
    norms = [line["grad_norm"] for line in lines]
    assert norms == pytest.approx(expected["norms"], rel=30 * most, abs=most)


def exported(spec: ImageSpec) -> dict[str, torch.Tensor]:
    model = AutoModelForImageClassification.from_pretrained(f"{spec.run_url}/model")
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "one worker": (1, {"train__micro_batch": BATCH}),
    "two workers": (2, {}),
    "four workers": (4, {"train__micro_batch": 3}),
    # At 0.05 the plain loop with 1 thread is not the one with 2: an element whose gradient is mere
    # rounding moves by the whole rate.
    "one worker, adamw": (
        1,
        {"train__micro_batch": BATCH, "train__optimizer": "adamw", "train__lr": 0.001},
    ),
    "lars": (2, {"train__optimizer": "lars", "train__lr": 0.3}),
    "full_shard": (2, {"parallel__strategy": "full_shard"}),
    "full_shard, lars": (
        2,
        {"parallel__strategy": "full_shard", "train__optimizer": "lars", "train__lr": 0.3},
    ),
    "shard_grad_op": (2, {"parallel__strategy": "shard_grad_op"}),
    "hybrid_shard": (2, {"parallel__strategy": "hybrid_shard", "parallel__replicas": 2}),
    "channels first": (2, {"train__channels_last": "false"}),
    "efficientnet": (2, {"model": "efficientnet", "data__size": 64, "train__lr": 0.01}),
    "vit": (2, {"model": "vit", "train__optimizer": "adamw", "train__lr": 0.001}),
}


@pytest.mark.parametrize("cell", sampled(CELLS, 3))
def test_every_step_is_that_of_a_plain_loop(cell: str, folder: Path, images: Images) -> None:
    """With synchronized batch-norm the workers' micro-batches are one batch to it."""
    world, settings = CELLS[cell]
    more = {k: v for k, v in settings.items() if k != "model"}
    path = f"{folder}/{settings.get('model', 'resnet')}"
    name = cell.replace(" ", "-").replace(",", "")
    config = config_of(
        folder, name, parallel__sync_batch_norm="true", model__path=path, train__ema=0.9, **more
    )
    spec = spec_of(config, images)
    lines = trained(folder, spec, world)
    expected = oracle(spec)
    assert_close(lines, expected, 1e-4)
    assert {line["workers"] for line in lines} == {world}
    found = exported(spec)  # the moving average, batch-norm's statistics included
    for name, value in expected["average"].items():
        if value.is_floating_point():
            torch.testing.assert_close(
                found[name], value, rtol=2e-3, atol=1e-4, msg=partial("{}: {}".format, name)
            )


def test_statistics_are_those_of_torch_batch_norm(folder: Path, images: Images) -> None:
    config = config_of(folder, "statistics", parallel__sync_batch_norm="true")
    spec = spec_of(config, images)
    trained(folder, spec, 2)
    found, expected = exported(spec), oracle(spec)["model"].state_dict()
    names = [name for name in expected if "running" in name or "tracked" in name]
    assert names
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.full
def test_without_synchronizing_the_number_of_workers_changes_nothing(
    folder: Path, images: Images
) -> None:
    """Losses, statistics and weights; each micro-batch has its own mean, as in a plain loop."""
    found = {}
    for world in (1, 2, 3):
        config = config_of(folder, f"own-{world}", train__micro_batch=3, train__ema=0.9)
        spec = spec_of(config, images)
        found[world] = trained(folder, spec, world), exported(spec), summary_of(spec)
    lines, state, summary = found[1]
    assert_close(lines, oracle(spec_of(config, images), split=4), 1e-4)
    for world in (2, 3):
        others, other_state, other_summary = found[world]
        assert [x["batch_digest"] for x in others] == [x["batch_digest"] for x in lines]
        assert [x["loss"] for x in others] == pytest.approx([x["loss"] for x in lines], abs=1e-4)
        for name, value in state.items():
            torch.testing.assert_close(other_state[name], value, rtol=1e-3, atol=1e-4, msg=name)
        assert other_summary["eval_loss"] == pytest.approx(summary["eval_loss"], abs=1e-4)
        assert other_summary["eval_top1"] == summary["eval_top1"]


def test_bf16_is_autocast(folder: Path, images: Images) -> None:
    config = config_of(folder, "bf16", parallel__sync_batch_norm="true", train__precision="bf16")
    spec = spec_of(config, images)
    lines = trained(folder, spec, 2)
    expected = oracle(spec, dtype=torch.bfloat16)
    apart = np.abs(np.subtract([x["loss"] for x in lines], expected["losses"]))
    assert apart.max() <= 3e-2


@pytest.mark.drill
def test_a_compiled_model_trains_as_it_is(folder: Path, images: Images) -> None:
    config = config_of(folder, "compiled", train__compile="true", train__micro_batch=BATCH)
    spec = spec_of(config, images)
    assert_close(trained(folder, spec, 1), oracle(spec), 1e-4)


# ---- Resume ------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_resume_is_bitwise_and_at_any_number_of_workers(folder: Path, images: Images) -> None:
    """Weights, momentum, statistics, average: all that a step needs is in the checkpoint.

    Its copy was made as late as the loop allows it.
    """
    more = {"train__micro_batch": 3, "train__ema": 0.9, "checkpoint__every_steps": 7}
    make = partial(config_of, folder, **more)
    whole = spec_of(make("whole"), images)
    expected = trained(folder, whole, 2)
    cut = spec_of(make("cut"), images)
    processes.spawn(late_worker, 2, str(folder / "late"), cut)
    shutil.rmtree(Path(cut.run_url, "checkpoints", f"step-{STEPS:08d}"))
    found, _ = latest(open_storage(cut.run_url))
    assert found is not None and found.step == 7 and found.state["images"] == 7 * BATCH
    for world in (2, 3):
        again = spec_of(make(f"cut-{world}"), images)
        storage = open_storage(again.run_url)
        for entry in open_storage(cut.run_url).list():
            storage.write(entry.name, open_storage(cut.run_url).read(entry.name))
        lines = trained(folder, again, world)
        assert [x["step"] for x in lines] == list(range(1, STEPS + 1))
        for name in ("batch_digest", "loss", "grad_norm"):
            values, wanted = ([x[name] for x in each] for each in (lines, expected))
            if world == 2 or name == "batch_digest":
                assert values == wanted, name
            else:
                assert values == pytest.approx(wanted, abs=2e-4), name
        state, wanted_state = exported(again), exported(whole)
        for name, value in wanted_state.items():
            if world == 2:
                assert torch.equal(state[name], value), name
            else:
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=2e-4)


# ---- What comes out ----------------------------------------------------------------------------


def test_a_finished_run_may_be_made_longer(folder: Path, images: Images) -> None:
    """One epoch, its last step short; a second with a schedule of its own."""
    fields = {"train__max_steps": "none", "train__images_per_step": 18, "train__warmup_steps": 1}
    once = config_of(folder, "grown", train__epochs=1, **fields)
    run, count = open_storage(f"{folder}/runs/grown"), images.counts["train"]
    assert count % 18
    first = order_of(once, images)
    done, cursor = first.num_steps, first.cursor(first.num_steps, images.fingerprint)
    run.write("config.yaml", once.to_yaml().encode())
    run.write("plan.json", json.dumps(plan_of(once, images, first, parameters=0)).encode())
    state = json.dumps({"step": done, "cursor": vars(cursor)}).encode()
    name = commit.claim(run, done, state)
    run.write(f"checkpoints/{name}/.metadata", b"")
    commit.commit(run, name, done, state, {".metadata": marker.Digest().file()})

    twice = {**fields, "train__epochs": 2}
    with pytest.raises(ConfigError, match=rf"with model.path={run.url}/model$"):
        same_run(run, config_of(folder, "grown", **twice))  # of a cosine, the end is in every step
    late = config_of(folder, "grown", train__schedule_from=done + 1, **twice)
    ahead = schedule_problem(late, run)
    assert ahead is not None and ahead.endswith(f"Set train.schedule_from={done}")
    longer = config_of(folder, "grown", train__schedule_from=done, train__lr=0.02, **twice)
    assert same_run(run, longer) == "interrupted" and schedule_problem(longer, run) is None
    stages = stages_of(run, images.fingerprint, count, longer.rows_per_step)
    assert stages == ((done, count),)
    second = order_of(longer, images, stages)
    steps = range(second.num_steps)
    seen = [int(row) for step in steps for row in second.rows(step) if row != EMPTY]
    assert sorted(seen[:count]) == sorted(seen[count:]) == list(range(count))
    assert [second.rows(n).tolist() for n in range(done)] == [
        first.rows(n).tolist() for n in range(done)
    ]


def test_what_is_exported_opens_in_transformers_and_classifies_alike(
    folder: Path, images: Images
) -> None:
    """By transformers' own processor, from the files: top-1, top-5 and the table of classes."""
    config = config_of(folder, "exported", train__max_steps=STEPS, data__eval_crop=0.8)
    spec = spec_of(config, images)
    trained(folder, spec, 2)
    summary = summary_of(spec)
    model = AutoModelForImageClassification.from_pretrained(f"{spec.run_url}/model").eval()
    assert [model.config.id2label[n] for n in range(CLASSES)] == list(images.classes)
    processor = AutoImageProcessor.from_pretrained(f"{spec.run_url}/model")
    assert (processor.size["shortest_edge"], processor.crop_size["height"]) == (40, 32)
    assert tuple(processor.image_mean) == MEAN and tuple(processor.image_std) == STD
    rows = images.rows("eval")
    from rayapp.data.images.augment import centred

    pixels = np.stack([centred(data, spec.config.data) for data in rows.read(range(len(rows)))])
    with torch.no_grad():
        logits = model(normal(pixels)).logits
    labels = torch.from_numpy(rows.records["label"].astype(np.int64))
    right = logits.argmax(-1) == labels
    assert summary["eval_top1"] == pytest.approx(float(right.float().mean()))
    assert summary["eval_top5"] == 1.0  # of 4 classes
    loss = F.cross_entropy(logits, labels)
    assert summary["eval_loss"] == pytest.approx(float(loss), abs=1e-4)
    each = {name: (count, good) for name, count, good in summary["classes"]["each"]}
    for number, name in enumerate(images.classes):
        of_class = labels == number
        assert each[name] == (int(of_class.sum()), int((right & of_class).sum()))
    confused = sum(count for *_, count in summary["classes"]["confused"])
    assert confused == int((~right).sum())


def test_a_loss_that_is_not_finite_names_its_images(folder: Path, images: Images) -> None:
    config = config_of(folder, "not-finite", train__lr="1e30", train__warmup_steps=0)
    processes.spawn(diverging, 2, str(folder / "diverging"), spec_of(config, images))


def diverging(rank: int, world: int, spec: ImageSpec) -> None:
    rows = spec.data.rows("train")
    with pytest.raises(BadLoss, match=r"is not finite; rows \d+.* of the prepared data cause it"):
        train_rank(
            spec,
            RankContext(
                torch.device("cpu"),
                lambda first: local_steps(rows, spec.config.data, spec.order, rank, world, first),
            ),
        )


# ---- Checks ------------------------------------------------------------------------------------


def test_every_problem_is_told_at_once(folder: Path) -> None:
    config = config_of(folder, "wrong", data__path="/nowhere", model__path="bert-tiny")
    with pytest.raises(ConfigError) as caught:
        checks.check(config, 2, 0)
    text = "\n".join(caught.value.problems)
    assert "data.path=/nowhere is empty" in text
    assert "model.path=bert-tiny is no folder" in text and "efficientnet-b7" in text
    language = config_of(folder, "wrong", model__path="tiny")
    with pytest.raises(ConfigError, match=r"model.path=tiny is no image classifier"):
        checks.check(language, 2, 0)


def test_an_index_is_found_again(images: Images) -> None:
    assert load_images(open_storage(images.url)) == images
