"""A classifier that cannot fit is refused before anything starts; the plan in plan.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pictures import as_folder, drawn, indexed
from rich.console import Console

from rayapp.config import VisionConfig, from_dict
from rayapp.data.images.index import Images
from rayapp.model.classifier import shape_of_classifier
from rayapp.observe.activity import Phases
from rayapp.planner import size_problem
from rayapp.storage import open_storage
from rayapp.train.planning import forecast
from rayapp.train.spec import ImageSpec
from rayapp.vision import classifier_run, train_classifier
from rayapp.vision import classifier_run as checks


def config(path: str = "resnet50", size: int = 224, **cluster: Any) -> VisionConfig:
    found = from_dict(
        {
            "task": "vision",
            "model": {"path": path},
            "data": {"path": "images", "size": size},
            "train": {"images_per_step": 256, "micro_batch": 64},
            "cluster": {"workers": "2", **cluster},
        }
    )
    assert isinstance(found, VisionConfig)
    return found


def shape(path: str, classes: int = 0) -> Any:
    return shape_of_classifier(path, {}, [f"class {n}" for n in range(classes)])[0]


def test_what_cannot_fit_is_refused_and_what_would_is_named() -> None:
    large = config("efficientnet-b7", 600, instance="p4d.24xlarge")
    problem = size_problem(forecast(large, shape("efficientnet-b7", 1000)))
    assert problem is not None
    assert problem.startswith("cluster.instance=p4d.24xlarge is too small: the plan is 1")
    assert "train.micro_batch=" in problem
    assert problem.endswith("or cluster.ignore_plan=true to start anyway")
    assert size_problem(forecast(config(instance="p4d.24xlarge"), shape("resnet50", 1000))) is None


def test_what_is_not_known_is_no_misfit() -> None:
    from transformers import ViTConfig

    assert size_problem(forecast(config(), shape("resnet50"))) is None  # no instance is named
    assert forecast(config(instance="p4d.24xlarge"), ViTConfig()) is None


def test_the_forecast_knows_what_was_counted() -> None:
    counted = {"steps": 100, "images": 25_600}
    found = forecast(config(instance="p4d.24xlarge"), shape("resnet50", 10), **counted)
    assert found is not None and found.hours is not None and found.epoch_hours is not None
    assert found.question.steps == 100
    assert found.question.layout.shape.parameters == 25_557_032 - 990 * 2049


def test_the_command_refuses_before_it_holds_anything(tmp_path: Path) -> None:
    import ray

    as_folder(tmp_path / "images", drawn(2, 3))
    tree = {
        "task": "vision",
        "run": {"storage": str(tmp_path), "name": "r"},
        "model": {"path": "efficientnet-b7"},
        "data": {"path": str(tmp_path / "images"), "size": 600},
        "cluster": {"instance": "g5.xlarge", "workers": "1", "address": "local"},
    }
    with pytest.raises(ValueError, match=r"cluster\.instance=g5\.xlarge is too small: "):
        train_classifier(from_dict(tree))  # type: ignore[arg-type]
    assert not ray.is_initialized()
    assert not (tmp_path / "r").exists()


def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: bool = False, **cluster: str
) -> tuple[dict[str, Any], Images, ImageSpec]:
    """Return the plan.json of a run up to its start, its images and its job."""
    root = as_folder(tmp_path / "images", drawn(3, 8))
    images = indexed(root, open_storage(str(tmp_path / "index")))
    monkeypatch.setattr(classifier_run, "index", lambda *_: images)
    tree = {
        "task": "vision",
        "run": {"storage": str(tmp_path), "name": "r"},
        "model": {"path": "resnet-tiny"},
        "data": {"path": str(root), "size": 32},
        "train": {"images_per_step": 8, "micro_batch": 4, "epochs": 2, "precision": "fp32"},
        "cluster": {"workers": "2", "address": "local", **cluster},
    }
    described = from_dict(tree)
    assert isinstance(described, VisionConfig)
    ready = checks.check(described, 8, 0)
    spec, _ = classifier_run.prepare(ready, gpus, Console(quiet=True), Phases())
    return json.loads(open_storage(str(tmp_path / "r")).read("plan.json")), images, spec


def test_plan_json_holds_the_plan_with_what_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, images, spec = planned(tmp_path, monkeypatch, instance="p3.8xlarge")
    assert plan["fits"] is True and plan["steps"] == spec.order.num_steps
    assert plan["images_per_s"]["value"] > 0 and plan["hours"]["value"] > 0
    epoch = images.counts["train"] / plan["images_per_s"]["value"] / 3600
    assert plan["epoch_hours"]["value"] == pytest.approx(epoch, rel=1e-4)
    assert plan["data"]["images"] == images.counts


@pytest.mark.parametrize(("gpus", "slack_gib"), [(False, 0.8), (True, 1.3)])
def test_a_run_on_no_named_instance_is_planned_for_what_it_has(
    gpus: bool, slack_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the tensors a process without a GPU, or CUDA's context."""
    plan, _, _ = planned(tmp_path, monkeypatch, gpus)
    assert plan["peak_terms_gib"]["slack"] == pytest.approx(slack_gib, abs=0.02)
