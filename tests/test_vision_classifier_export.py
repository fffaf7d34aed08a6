"""Image classifiers with weights: fine-tuned to other classes, exported, and checked to open."""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from pictures import as_folder, drawn, indexed
from reference import images
from rich.console import Console
from safetensors.torch import load_file, save_file
from test_vision_classifier_trainer import TINY, config_of
from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

from rayapp.model import WrongExport
from rayapp.model.classifier import (
    class_rows,
    last_layer,
    shape_of_classifier,
)
from rayapp.observe.activity import Phases
from rayapp.storage import open_storage
from rayapp.vision import classifier_run as checks
from rayapp.vision import classifier_run as preparation
from rayapp.vision import classifier_trainer
from rayapp.vision.classifier_run import order_of

CLASSES = ("checks", "cross", "disc", "dots")
HEADS = {  # classes of models; crane stands for one that ImageNet has twice
    "same": CLASSES,
    "turned": ("dots", "disc", "cross", "checks"),
    "others": ("zebra", "ant", "crane", "bee"),
    "some": ("dots", "crane", "crane", "checks", "zebra"),
    "doubled": ("disc", "disc", "cross", "checks"),
}
HEAD = ["classifier.1.bias", "classifier.1.weight"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images of 4 classes, weights for 7 without names, and for 4 of HEADS."""
    root = tmp_path_factory.mktemp("weights")
    as_folder(root / "data", drawn(4, 12))
    torch.manual_seed(0)
    ResNetForImageClassification(ResNetConfig(**TINY, num_labels=7)).save_pretrained(root / "seven")
    for name, labels in HEADS.items():
        config = ResNetConfig(**TINY, id2label=dict(enumerate(labels)))
        ResNetForImageClassification(config).save_pretrained(root / name)
    return root


def test_the_last_layer_is_what_follows_from_the_classes() -> None:
    for name in ("resnet-tiny", "efficientnet-b0"):
        shape, _ = shape_of_classifier(name, {}, ("a", "b", "c"))
        found = last_layer(shape)
        assert {size[0] for size in found.values()} == {3} and len(found) == 2, name


def test_a_last_layer_of_other_classes_is_drawn_anew_and_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is loaded; the same on any number of workers."""
    fields: dict[str, Any] = {"model__path": folder / "seven", "model__overrides": "{}"}
    config = config_of(folder, "told", **fields)
    out = io.StringIO()
    ready = checks.settle(checks.check(config, 2, 0), gpus=False)
    made = indexed(folder / "data", open_storage(f"{folder}/runs/.prepared"), 0.25)
    monkeypatch.setattr(preparation, "index", lambda *_: made)  # without Ray
    preparation.prepare(ready, False, Console(file=out, width=300), Phases())
    assert f"{HEAD[0]}, {HEAD[1]}: the last layer of" in out.getvalue()
    assert "has no class of the same name for 4 of these 4: checks, cross, " in out.getvalue()
    plan = json.loads((folder / "runs" / "told" / "plan.json").read_text())
    assert plan["drawn_anew"] == HEAD
    stored = load_file(folder / "seven" / "model.safetensors")
    heads = []
    for world, strategy in ((1, "ddp"), (2, "full_shard")):
        more = {"parallel.strategy": strategy, "train.max_steps": 0, "train.optimizer": "adamw"}
        more |= {"model.path": str(folder / "seven"), "run.name": f"images-{world}"}
        done = images.run(folder, world, {**more, "data.size": 32})
        exported = load_file(Path(done.run_url, "model", "model.safetensors"))
        assert all(torch.equal(exported[n], v) for n, v in stored.items() if n not in HEAD)
        assert exported[HEAD[1]].shape[0] == 4 and exported[HEAD[1]].std() > 0
        heads.append(exported[HEAD[1]])
    assert torch.equal(*heads)


@pytest.mark.parametrize("name", HEADS)
def test_rows_of_the_last_layer_go_to_the_classes_of_their_names(name: str, folder: Path) -> None:
    """On one rank and sharded over two; the rows of other classes are drawn, alike on both."""
    stored, heads = load_file(folder / name / "model.safetensors"), []
    labels = HEADS[name]
    names = [each for each in labels if labels.count(each) == 1]
    shape, source = shape_of_classifier(str(folder / name), {}, CLASSES)
    assert source is not None
    rows = class_rows(shape, source)
    assert rows == [labels.index(each) if each in names else None for each in CLASSES]
    for world, strategy in ((1, "ddp"), (2, "full_shard")):
        more = {"parallel.strategy": strategy, "train.max_steps": 0, "train.optimizer": "adamw"}
        more |= {"model.path": str(folder / name), "run.name": f"{name}-{world}", "data.size": 32}
        done = images.run(folder, world, more)
        exported = load_file(Path(done.run_url, "model", "model.safetensors"))
        values = json.loads(Path(done.run_url, "model", "config.json").read_text())
        assert list(values["id2label"].values()) == list(CLASSES)
        for number, each in enumerate(CLASSES):
            for part in HEAD:
                row = exported[part][number]
                if each in names:
                    assert torch.equal(row, stored[part][labels.index(each)]), each
                elif row.ndim:  # biases are drawn as 0
                    assert not any(torch.equal(row, one) for one in stored[part]), each
        heads.append(exported[HEAD[1]])
    assert torch.equal(*heads)


def test_names_of_classes_are_compared_in_one_spelling(tmp_path: Path) -> None:
    composed, apart = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    config = ResNetConfig(**TINY, id2label={0: "tea", 1: apart})
    ResNetForImageClassification(config).save_pretrained(tmp_path)
    shape, source = shape_of_classifier(str(tmp_path), {}, (composed, "tea"))
    assert source is not None and class_rows(shape, source) == [1, 0]


def test_the_export_opens_with_the_logits_that_were_trained(folder: Path) -> None:
    fields = {"model.path": str(folder / "seven"), "data.size": 32, "train.ema": 0.9}
    done = images.run(folder, 2, fields | {"run.name": "opens", "train.optimizer": "adamw"})
    found = json.loads(Path(done.run_url, "summary.json").read_text())["export_check"]
    assert found["rows"] == 4 and found["difference"] < 1e-5 and found["why"] is None
    assert AutoModelForImageClassification.from_pretrained(f"{done.run_url}/model").num_labels == 4


def double(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(
        tensors | {HEAD[1]: 2 * tensors[HEAD[1]]}, path / "model.safetensors", {"format": "pt"}
    )


def lose(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors[HEAD[1]]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def other_colours(path: Path) -> None:
    values = json.loads((path / "preprocessor_config.json").read_text())
    values["image_mean"] = [0.1, 0.9, 0.1]
    (path / "preprocessor_config.json").write_text(json.dumps(values))


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "another weight": (double, r"its logits on 4 images differ by 0\.\d+ of their norm"),
    "a weight less": (lose, "it lacks classifier.1.weight"),
    "another processor": (other_colours, "is another model than was trained"),
    "no processor": (lambda path: (path / "preprocessor_config.json").unlink(), "does not open: "),
}


def spoiling(rank: int, world: int, root: str, case: str) -> None:
    """Train no step, with an export that goes wrong in one way; all ranks raise the same."""
    spoil, said = SPOILT[case]
    check = classifier_trainer.check_export

    def spoilt(spec: Any, classifier: Any, where: Any, *more: Any) -> Any:
        if rank == 0:
            spoil(Path(where.url))
        torch.distributed.barrier()
        return check(spec, classifier, where, *more)

    classifier_trainer.check_export = spoilt
    fields = {"model__path": f"{root}/seven", "model__overrides": "{}", "train__max_steps": 0}
    config = config_of(Path(root), f"spoilt-{''.join(case.split())}", **fields)
    made = indexed(Path(root, "data"), open_storage(f"{root}/runs/.prepared"), 0.3)
    url = f"{config.run.storage}/{config.run.name}"
    spec = images.ImageSpec("rayapp.vision", config, made, order_of(config, made), url)
    with pytest.raises(WrongExport, match=said):
        images._train(rank, world, spec)
    torch.distributed.barrier()


@pytest.mark.parametrize("case", SPOILT)
def test_an_export_that_went_wrong_ends_the_run(case: str, folder: Path, tmp_path: Path) -> None:
    processes.spawn(spoiling, 2, str(tmp_path / "meet"), str(folder), case)
