"""Check what a run starts from: adapters that an earlier run has exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_loop import config_of, inputs, spec_of, train  # noqa: F401  a fixture
from transformers import AutoModelForCausalLM

from rayapp.config import Config, ConfigError, Lora
from rayapp.finetune.check import check
from rayapp.planner import ask

LORA = Lora(rank=3, alpha=12, targets=("down_proj", "q_proj"))


def with_model(config: Config, **fields: Any) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update=fields)})


@pytest.fixture(scope="module")
def first(inputs: Path) -> tuple[list[Any], Path]:  # noqa: F811
    """A run of adapters: its steps, and its exported adapter."""
    config = with_model(config_of(inputs, "first", lr=3e-2), lora=LORA)
    lines, _ = train(config, inputs, world=2, num_steps=10)
    return lines, inputs / "runs" / "first" / "model"


def checked(folder: Path, path: Path, **fields: Any) -> Config:
    config = config_of(folder, "next", schedule="constant")
    config = with_model(config, path=str(path), **fields)
    return check(config, None, 0).config


def problems(folder: Path, path: Path, **fields: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(folder, path, **fields)
    assert not any("\n" in line for line in caught.value.problems)
    return caught.value.problems


def test_a_run_goes_on_with_the_adapter_of_another(
    inputs: Path,  # noqa: F811
    first: tuple[list[Any], Path],
) -> None:
    """Its first loss, on the same rows, is lower; the base stays the first run's base."""
    earlier, adapter = first
    config = checked(inputs, adapter)
    assert config.model.lora == LORA
    lines, _ = train(config, inputs, world=2, num_steps=2)
    assert lines[0]["batch_digest"] == earlier[0]["batch_digest"]
    assert lines[0]["loss"] < earlier[0]["loss"] - 0.1
    exported = Path(inputs, "runs", "next", "model", "adapter_config.json")
    assert json.loads(exported.read_text())["base_model_name_or_path"] == str(inputs / "model")


def test_all_weights_of_the_merged_model_can_be_trained(
    inputs: Path,  # noqa: F811
    first: tuple[list[Any], Path],
) -> None:
    import peft

    config = checked(inputs, first[1], adapter="merge")
    assert config.model.lora is None
    train(config.model_copy(update={"run": config.run.model_copy(update={"name": "whole"})}),
          inputs, world=2, num_steps=0)  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    expected = peft.PeftModel.from_pretrained(base, first[1])
    ids = torch.arange(40)[None] + 10
    whole = AutoModelForCausalLM.from_pretrained(inputs / "runs" / "whole" / "model")
    torch.testing.assert_close(whole(ids).logits, expected(ids).logits)


def test_other_adapters_than_those_in_the_folder_are_refused(
    inputs: Path,  # noqa: F811
    first: tuple[list[Any], Path],
) -> None:
    path = first[1]
    found = problems(inputs, path, lora=Lora(rank=4, alpha=8))
    assert [line.partition(" is in conflict")[0] for line in found] == [
        "model.lora.rank=4",
        "model.lora.alpha=8.0",
        "model.lora.targets=all",
    ]
    assert f"the adapter model.path={path} has 3. Set model.lora.rank=3" in found[0]
    same = LORA.model_copy(update={"targets": ("q_proj", "down_proj"), "dropout": 0.2})
    assert checked(inputs, path, lora=same).model.lora == same
    new = Lora(rank=4, merge=True)
    assert checked(inputs, path, lora=new, adapter="merge").model.lora == new
    assert "no folder holds the base" in problems(inputs, path, lora=Lora(), adapter="merge")[0]
    four = Lora(quantize="nf4", merge=True)
    assert "held in 4 bits" in problems(inputs, path, lora=four, adapter="merge")[0]
    assert "is an adapter of" in problems(inputs, path, from_scratch=True)[0]
    assert "is no adapter" in problems(inputs, inputs / "model", adapter="merge")[0]


def test_a_plan_knows_the_adapter(inputs: Path, first: tuple[list[Any], Path]) -> None:  # noqa: F811
    config = with_model(config_of(inputs, "next"), path=str(first[1]))
    layout = ask(config).layout
    assert layout.shape.hidden == 32 and layout.lora_rank is None
    from rayapp.planner import with_adapters_lora

    layout = ask(with_adapters_lora(config)).layout
    assert layout.lora_rank == 3 and layout.lora_targets == ("down_proj", "q_proj")
    merged = with_model(config, adapter="merge")
    assert with_adapters_lora(merged) == merged
