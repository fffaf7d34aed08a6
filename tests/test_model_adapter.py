"""Check what is said of adapters that cannot be trained further; test_model loads others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from rayapp.config import Lora
from rayapp.model import (
    adapter_problems,
    add_adapters,
    build,
    export_adapters,
    init_adapters,
    no_loss,
    resolve,
)
from rayapp.model.adapter import UNSUPPORTED
from rayapp.storage import open_storage

SHAPE = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter as it is exported, beside its base, of which config.json is enough here."""
    SHAPE.save_pretrained(tmp_path / "base")
    model = build(SHAPE, loss=no_loss)
    add_adapters(model, Lora(rank=2, alpha=4, dropout=0.1, targets=("q_proj", "up_proj")))
    model.to_empty(device="cpu")
    init_adapters(model, 0)
    folder = open_storage(str(tmp_path / "adapter"))
    export_adapters(model, folder, base=str(tmp_path / "base"))
    return tmp_path / "adapter"


def change_settings(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


def test_the_settings_are_those_it_was_trained_with(adapter: Path) -> None:
    source = resolve(str(adapter))
    assert source.adapter is not None
    assert source.adapter.lora == Lora(rank=2, alpha=4, dropout=0.1, targets=("q_proj", "up_proj"))
    assert source.config.hidden_size == 16 and source.base == str(adapter.parent / "base")
    assert adapter_problems(source.adapter, source.config) == []


BAD: dict[str, tuple[dict[str, Any], str]] = {
    **{option: ({option: ["x"]}, f"another kind: it has {option}") for option in UNSUPPORTED},
    "peft_type": ({"peft_type": "LOHA"}, "another kind: it has peft_type LOHA"),
    "bias": ({"bias": "all"}, "another kind: it has bias all"),
    "no rank": ({"r": None}, "damaged adapter_config.json"),
    "pattern": ({"target_modules": ".*q_proj"}, "target_modules=.*q_proj is a pattern"),
    "no base": ({"base_model_name_or_path": None}, "adapter without its base"),
    "relative base": ({"base_model_name_or_path": "../base"}, "no absolute path, URL or hub id"),
    "base is gone": ({"base_model_name_or_path": "/gone/x"}, "adapter without its base /gone/x"),
    "preset": ({"base_model_name_or_path": "tiny"}, "on the preset tiny, .* model.init_from=RUN"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_further_is_named(adapter: Path, case: str) -> None:
    values, expected = BAD[case]
    change_settings(adapter, **values)
    with pytest.raises(ValueError, match=expected) as caught:
        resolve(str(adapter))
    assert "\n" not in str(caught.value)


def problem_of(adapter: Path) -> str:
    source = resolve(str(adapter))
    assert source.adapter is not None
    (problem,) = adapter_problems(source.adapter, source.config)
    assert "\n" not in problem
    return problem


def test_tensors_that_do_not_fit_are_named(adapter: Path) -> None:
    prefix = "base_model.model.model.layers.0"
    first, other = f"{prefix}.mlp.up_proj.lora_A.weight", f"{prefix}.mlp.x.lora_A.weight"
    change_tensors(adapter, lambda tensors: tensors.update({other: torch.zeros(2, 2)}))
    assert f"has tensors of no adapter, {other}: " in problem_of(adapter)
    change_tensors(adapter, lambda tensors: tensors.pop(other))
    change_tensors(adapter, lambda tensors: tensors.update({first: torch.zeros(3, 16)}))
    assert f"does not fit its base {adapter.parent / 'base'} in {first}: " in problem_of(adapter)
    change_tensors(adapter, lambda tensors: tensors.pop(first))
    assert f"lacks {first}: " in problem_of(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in problem_of(adapter)


def test_a_base_of_another_family_is_named(adapter: Path) -> None:
    change_settings(adapter, target_modules=["query_key_value"])
    assert "whose blocks have no linear layer query_key_value" in problem_of(adapter)
