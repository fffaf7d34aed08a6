"""Check what is said of adapters that cannot be trained further; test_model loads others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from rayapp.config import Lora
from rayapp.model import (
    adapter_problems,
    add_adapters,
    build,
    export_adapters,
    init_adapters,
    load_adapters,
    load_weights,
    merge_adapters,
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


FAMILIES: dict[str, Any] = {
    "llama": SHAPE,
    "gpt2": GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=str)
def test_an_adapter_of_peft_is_loaded_and_merged(
    family: str, options: dict[str, bool], tmp_path: Path
) -> None:
    import peft

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config(FAMILIES[family])
    base.save_pretrained(tmp_path / "base")
    targets = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "down_proj"]
    settings = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=targets, fan_in_fan_out=family == "gpt2", **options
    )
    adapted = peft.get_peft_model(base, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids).logits
        with adapted.disable_adapter():
            assert (adapted(input_ids=ids).logits - expected).abs().max() > 0.01
    source = resolve(str(tmp_path / "adapter"))
    assert source.adapter is not None and adapter_problems(source.adapter, source.config) == []
    for merged in (False, True):
        model = build(source.config, loss=no_loss, attention="eager")
        if not merged:
            add_adapters(model, source.adapter.lora)
        load_weights(model, source, "cpu")
        (merge_adapters if merged else load_adapters)(model, source.adapter)
        with torch.no_grad():
            logits = model.eval().hf(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
