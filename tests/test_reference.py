"""Runs of rayapp against a trainer of one page that shares no code with it (tests/reference).

The product's own check, preparation, training and export, in plain processes; every step's loss,
gradient norm, rate and tokens, the held-out loss, and every exported tensor are compared.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import as_folder, drawn
from PIL import Image
from reference import compare, grid, images, labels, made, plain, product
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

VIT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def wrong(done: dict[str, product.Done]) -> dict[str, list[str]]:
    found = {}
    for name, each in done.items():
        exact = each.config["train"]["precision"] == "fp32"
        found[name] = (compare.problems if exact else compare.problems_in_bf16)(each)
    return {name: problems for name, problems in found.items() if problems}


@pytest.mark.parametrize("part", range(4))
def test_named_runs_train_what_their_configs_say(part: int, tmp_path: Path) -> None:
    assert wrong(product.run(grid.named(tmp_path)[part::4], tmp_path)) == {}


@pytest.mark.parametrize("runs", [slice(3), pytest.param(slice(3, None), marks=pytest.mark.full)])
def test_preferences_train_what_their_configs_say(runs: slice, tmp_path: Path) -> None:
    done = product.run(grid.preferences(tmp_path)[runs], tmp_path)
    assert wrong(done) == {}
    for name in done.keys() & {"dpo", "dpo-adapters", "dpo-experts", "dpo-dora"}:
        first, *_, last = done[name].metrics
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
        assert last["rewards/margins"] > 0.01


@pytest.mark.parametrize(
    "count", [pytest.param(12, marks=pytest.mark.full), pytest.param(40, marks=pytest.mark.drill)]
)
def test_drawn_configs_train_what_they_say(count: int, tmp_path: Path) -> None:
    assert wrong(product.run(grid.draw(count, tmp_path), tmp_path)) == {}


@pytest.mark.full
def test_rows_hold_each_piece_of_the_files_with_its_labels(tmp_path: Path) -> None:
    """Also under a tokenizer like sentencepiece's; two epochs hold each trained piece twice."""
    files, kinds = made.make_data(tmp_path), {"bpe": made.bpe(), "unigram": made.unigram()}
    for name, tokenizer in kinds.items():
        model = made.make_model("llama", tmp_path / name, tokenizer)
        for kind in ("text", "prompt", "chat"):
            file = files[kind]
            if kind == "chat" and name == "unigram":  # it has no template
                continue
            for truncate in (False, True):
                fields = grid.BASE | {"model.path": str(model), "data.path": str(file)}
                fields |= {"data.truncate": truncate, "train.max_steps": "none", "train.epochs": 2}
                run = product.Run(f"{name}-{kind}-{truncate}", fields)
                done = product.unread(product.prepared(run, tmp_path))
                trained = [row for rows in done.steps() for part in rows for row in part]
                twice = Counter(labels.pieces(trained))
                assert {count % 2 for count in twice.values()} == {0}
                once = Counter({piece: count // 2 for piece, count in twice.items()})
                expected = labels.wanted(tokenizer, kind, file, 64, truncate)
                assert once + Counter(labels.pieces(done.held_out())) == expected, run.name


@pytest.mark.full
def test_families_train_what_they_are(tmp_path: Path) -> None:
    assert wrong(product.run(grid.families(tmp_path, 4), tmp_path)) == {}


@pytest.mark.drill
def test_every_family_trains_what_it_is(tmp_path: Path) -> None:
    assert wrong(product.run(grid.families(tmp_path), tmp_path)) == {}


@pytest.mark.full
def test_compiled_blocks_train_what_their_config_says(tmp_path: Path) -> None:
    assert wrong(product.run(grid.compiled(tmp_path), tmp_path)) == {}


@pytest.mark.full
def test_8_bits_stay_near_the_page(tmp_path: Path) -> None:
    """No element of an embedding moves further; the losses are near."""
    (done,) = product.run([grid.in_8_bits(tmp_path)], tmp_path).values()
    expected = plain.train(done.config, done.steps(), done.spec.order.num_steps, [])
    ours = [line["loss"] for line in done.metrics]
    assert ours == pytest.approx(expected.loss, abs=0.03)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight
        for path in (done.config["model"]["path"], done.folder / "model")
    )
    theirs = expected.model.get_input_embeddings().weight
    assert float((after - before).abs().max()) < 1.1 * float((theirs - before).abs().max())


# ---- Images ------------------------------------------------------------------------------------


def make_vit(root: Path, size: int, patch: int) -> str:
    torch.manual_seed(0)
    classes = sorted(path.name for path in (root / "data").iterdir())
    names = dict(enumerate(classes))  # by which the last layer is kept
    config = ViTConfig(image_size=size, patch_size=patch, id2label=names, **VIT)
    ViTForImageClassification(config).save_pretrained(root / "vit")
    return str(root / "vit")


def as_png(data: bytes) -> bytes:
    """Return an image without JPEG, which rayapp decodes at a fraction of its size."""
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").save(out, "PNG")
    return out.getvalue()


@pytest.mark.full
def test_a_vit_trains_on_the_crops_mirrors_and_mixtures_that_it_says(tmp_path: Path) -> None:
    as_folder(tmp_path / "data", [(name, as_png(data)) for name, data in drawn(4, 12)])
    fields = {"model.path": make_vit(tmp_path, 32, 8), "train.optimizer": "adamw"}
    fields |= {"train.lr": 1e-3, "train.label_smoothing": 0.1, "train.ema": 0.9, "data.size": 32}
    fields |= {"data.crop_scale": "0.3,1", "data.mixup": 0.4, "data.cutmix": 1.0}
    spec = images.run(tmp_path, 2, fields)
    losses, norms, average = images.train(spec)
    text = Path(spec.run_url, "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=compare.LOSS)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=compare.GRAD_NORM)
    exported = AutoModelForImageClassification.from_pretrained(f"{spec.run_url}/model")
    for name, value in exported.state_dict().items():
        torch.testing.assert_close(value, average[name], rtol=0, atol=2e-5)


def test_images_are_cropped_by_the_exported_processor_as_they_were_evaluated(
    tmp_path: Path,
) -> None:
    """At size 384, where the shortest side of 512 needs no scaling: to the last bits."""
    generator = np.random.default_rng(0)
    for number in range(16):
        small = generator.integers(0, 256, (8, 10, 3)).astype(np.uint8)
        path = tmp_path / "data" / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(small).resize((640, 512)).save(path)
    fields = {"model.path": make_vit(tmp_path, 384, 96), "train.max_steps": 0}
    fields |= {"data.size": 384, "data.eval_crop": 0.75}
    spec = images.run(tmp_path, 1, fields)
    summary = json.loads(Path(spec.run_url, "summary.json").read_text())
    model = AutoModelForImageClassification.from_pretrained(f"{spec.run_url}/model").eval()
    processor, rows = (
        AutoImageProcessor.from_pretrained(f"{spec.run_url}/model"),
        spec.data.rows("eval"),
    )
    files = [Image.open(io.BytesIO(data)) for data in rows.read(range(len(rows)))]
    labels = torch.from_numpy(rows.records["label"].astype(np.int64))
    with torch.no_grad():
        logits = model(**processor(files, return_tensors="pt")).logits
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert summary["eval_loss"] == pytest.approx(float(loss), abs=compare.LOSS)
