"""Check the description of a classifier's run: its fields, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_config import FORM

from rayapp.config import (
    Config,
    ConfigError,
    VisionConfig,
    combined_problems,
    differences,
    fields,
    from_dict,
    load,
    parse_yaml,
)

CONFIGS = Path(__file__).parent.parent / "configs"
# The surface is closed: a field that comes or goes is a decision, and is made here too.
SURFACE = {
    "model": "path from_scratch overrides",
    "data": "path format eval_path eval_fraction size eval_crop crop_scale flip randaugment mixup"
    " cutmix mean std count bad_images workers",
    "train": "max_steps epochs schedule decay warmup_steps schedule_from on_spike spike_sigmas"
    " profile_steps images_per_step micro_batch optimizer lr min_lr momentum betas weight_decay"
    " label_smoothing ema grad_clip precision channels_last compile",
    "parallel": "strategy replicas sync_batch_norm",
    "data.randaugment": "layers magnitude",
}
SHARED = ("run", "checkpoint", "eval", "cluster")
FIELDS = [f"{section}.{name}" for section, names in SURFACE.items() for name in names.split()]
CHANGED = {
    "data.crop_scale": "0.5, 1",
    "data.randaugment": "{layers: 3, magnitude: 5}",
    "data.mean": "0.5,0.5,0.5",
    "train.optimizer": "lars",
    "train.ema": "0.999",
    "train.betas": "0.8,0.9",
    "parallel.sync_batch_norm": "true",
    "model.overrides": "{depths: [1, 1]}",
    "cluster.workers": "2:64",
}


def image_config(**overrides: Any) -> VisionConfig:
    named = {name.replace("__", "."): str(value) for name, value in overrides.items()}
    return load(None, named, VisionConfig)


def test_the_surface_is_closed_and_documented() -> None:
    every, language = fields(VisionConfig), fields(Config)
    own = [name for name in every if name.partition(".")[0] not in SHARED and "." in name]
    assert own == FIELDS and every["task"] == "Kind of the model to train."
    for name, text in every.items():
        assert len(text) > 10 and text.endswith("."), name
        if name.partition(".")[0] in SHARED:
            assert text == language[name] or name == "eval.prompts"


def test_the_task_says_what_is_trained() -> None:
    config = load(str(CONFIGS / "resnet50_imagenet.yaml"))
    assert isinstance(config, VisionConfig) and combined_problems(config) == []
    assert config.micro_batches_per_step == 16
    assert (config.cluster.min_workers, config.cluster.max_workers) == (4, 16)
    with pytest.raises(
        ConfigError, match=r"task=vision is for another command.*Run python -m rayapp.vision"
    ):
        load(str(CONFIGS / "resnet50_imagenet.yaml"), None, Config)
    with pytest.raises(ConfigError, match=r"task=speech is unknown.*one of vision"):
        from_dict({"task": "speech"})
    assert isinstance(from_dict({"task": "vision"}), VisionConfig)


def test_nothing_is_lost_in_yaml_and_overrides() -> None:
    config = load(None, CHANGED, VisionConfig)
    assert config.data.randaugment is not None and config.data.randaugment.layers == 3
    assert config.data.crop_scale == (0.5, 1.0) and config.cluster.max_workers == 64
    assert from_dict(parse_yaml(config.to_yaml())) == config
    assert config.to_yaml().startswith("task: vision\n")
    again = load(None, config.to_overrides() | {"task": "vision"})
    assert again == config


def test_what_makes_it_another_run() -> None:
    old = image_config()
    for field, value in CHANGED.items():
        new = load(None, {field: value}, VisionConfig)
        free = field.startswith(("cluster.", "train.on_spike", "train.spike_sigmas"))
        assert bool(differences(old, new)) != free, field
    assert differences(old, image_config(data__workers=3, checkpoint__keep=5)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train__images_per_step": 100}, "Set train.images_per_step=64 or 128"),
        ({"train__max_steps": 3, "train__epochs": 1}, "train.epochs=1 is in conflict"),
        ({"data__eval_path": "x", "data__eval_fraction": 0.2}, "Set data.eval_fraction=0"),
        ({"data__crop_scale": "0.5,0.1"}, "data.crop_scale=0.5, 0.1 is not a range"),
        ({"data__crop_scale": "0,1"}, "data.crop_scale=0.0, 1.0 is not a range"),
        ({"parallel__replicas": 2}, "parallel.replicas=2 is ineffective"),
        ({"data__std": "0,1,1"}, "data.std.0=0 is not valid: it must be greater than 0"),
        ({"train__tokens_per_step": 64}, "train.tokens_per_step=64 is unknown"),
        ({"train__lable_smoothing": 0.1}, "Did you mean train.label_smoothing?"),
        ({"data__randaugment": "{magnitude: 31}"}, "data.randaugment.magnitude=31 is"),
        ({"train__optimizer": "adam"}, "train.optimizer=adam is"),
        ({"train__ema": 1}, "train.ema=1 is"),
        ({"parallel__strategy": "no_shard"}, "parallel.strategy=no_shard is"),
        ({"cluster__workers": "4:2"}, "cluster.workers=4:2 is not a range"),
    ],
)
def test_the_words_of_a_refusal(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        image_config(**overrides)
    (line,) = caught.value.problems
    assert words in line and FORM.fullmatch(line), line


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        image_config(train__lr=-1, data__flip=2, data__size="big", modle__path="x")
    found = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    for name in ("train.lr=-1", "data.flip=2", "data.size=big", "Did you mean model"):
        assert name in found


def test_what_a_classifier_lacks_is_refused_with_a_way() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"model.init_from": "first"}, VisionConfig)
    (problem,) = caught.value.problems
    assert problem.startswith("model.init_from=first is not available: a classifier starts from an")
    assert problem.endswith("Set model.path=RUN/model")
