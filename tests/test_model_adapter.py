"""Check what is said of adapters that cannot be trained further; test_model loads others."""

from __future__ import annotations

import json
import warnings
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
from rayapp.model.adapter import adapted
from rayapp.storage import open_storage

SHAPE = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
IDS = torch.arange(12)[None]


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


# Settings that peft 0.21 or another version has, and that change what an adapter computes.
OTHERS: dict[str, Any] = {
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "layers_to_transform": [0],
    "lora_bias": True,
    "bias": "all",
    "peft_type": "LOHA",
    "init_lora_weights": "pissa",
    "layer_replication": [[0, 1]],
    "use_qalora": True,
    "of_a_later_version": {"x": 1},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    **{n: ({n: v}, rf"another kind: it has {n} .*\. Merge it into") for n, v in OTHERS.items()},
    "drawn": ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.* peft cannot merge it"),
    "alora": ({"alora_invocation_tokens": [3]}, r"it has alora_.* \[3\]\. .* peft cannot merge it"),
    "no rank": ({"r": None}, "damaged adapter_config.json"),
    "pattern": ({"target_modules": ".*q_proj", "r": "x"}, "damaged adapter_config.json"),
    "rows": ({"trainable_token_indices": {"a": [1], "b": [2]}}, "damaged.*other tokens for the"),
    "no base": ({"base_model_name_or_path": None}, "adapter without its base"),
    "a number": ({"base_model_name_or_path": 7}, "adapter without its base"),
    "relative base": ({"base_model_name_or_path": "../base"}, "no absolute path, URL or hub id"),
    "base is gone": ({"base_model_name_or_path": "/gone/x"}, "adapter without its base /gone/x"),
    "revision": (
        {"base_model_name_or_path": "org/x", "revision": "v2"},
        "of revision v2 of its base org/x, .*hf download org/x --revision v2 --local-dir",
    ),
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
    with pytest.raises(ValueError, match="has no adapter_model"):
        resolve(str(adapter))


def test_a_base_of_another_family_is_named(adapter: Path) -> None:
    change_settings(adapter, target_modules=["query_key_value"])
    assert "whose blocks have no linear layer query_key_value" in problem_of(adapter)


TWO = LlamaConfig.from_dict(SHAPE.to_dict() | {"num_hidden_layers": 2})
TIED = LlamaConfig.from_dict(TWO.to_dict() | {"tie_word_embeddings": True})
GPT2 = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
Q_OF_ALL = [f"model.layers.{n}.self_attn.q_proj" for n in range(2)]
OF_BLOCKS = r"(?:.*?(?:text).*?)|(?:\bmodel\.layers\.[\d]{1,}\.self_attn\.(?:q_proj|v_proj))"
PLAIN = {"target_modules": ["q_proj", "down_proj"]}
ROWS = {"trainable_token_indices": [5, 3]}
TRANSPOSED = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
# What peft makes, and the targets found, or what is said.
MADE: dict[str, tuple[Any, dict[str, Any], tuple[str, ...] | str]] = {
    f"{name} {' '.join(more)}": (config, settings | more, tuple(sorted(settings["target_modules"])))
    for name, config, settings in (("llama", TWO, PLAIN), ("gpt2", GPT2, TRANSPOSED))
    for more in ({}, {"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "gaussian"})
}
MADE |= {
    "pattern": (TWO, {"target_modules": r".*\.self_attn\.(q|v)_proj"}, ("q_proj", "v_proj")),
    "unsloth's": (TWO, {"target_modules": OF_BLOCKS}, ("q_proj", "v_proj")),
    "full names": (TWO, {"target_modules": Q_OF_ALL}, ("q_proj",)),
    "excluded": (TWO, PLAIN | {"exclude_modules": ["down_proj"]}, ("q_proj",)),
    "a layer": (TWO, {"target_modules": Q_OF_ALL[:1]}, "adapts a part of the layers, without"),
    "head": (TWO, {"target_modules": ["q_proj", "lm_head"]}, "adapts lm_head of its base "),
    "inputs": (TWO, {"target_modules": ["q_proj", "embed_tokens"]}, "adapts embed_tokens of "),
    "rows tied": (TIED, PLAIN | ROWS, ("down_proj", "q_proj")),
    "rows": (
        TWO,
        PLAIN | {"trainable_token_indices": {"embed_tokens": [5, 3], "lm_head": [5, 3]}},
        ("down_proj", "q_proj"),
    ),
    "rows of one": (TWO, PLAIN | ROWS, "adapts a part of the layers, without base_model.model.lm"),
    "resized": (TWO, PLAIN | {"resized": 70}, "has whole weights, base_model.model.lm_head"),
}


def made_by_peft(folder: Path, config: Any, resized: int = 0, **settings: Any) -> torch.Tensor:
    """Make an adapter with values that matter, and its base; return its logits."""
    import peft

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(folder / "base")
    if resized:
        base.resize_token_embeddings(resized)
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=3, **settings))
    for name, parameter in made.named_parameters():
        if "lora_" in name or "trainable_tokens_" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    made.peft_config["default"].base_model_name_or_path = str(folder / "base")
    made.save_pretrained(folder / "adapter")
    with torch.no_grad():
        logits = made.eval()(input_ids=IDS).logits
        with made.disable_adapter():
            assert (made(input_ids=IDS).logits - logits).abs().max() > 1e-3
    return logits


@pytest.mark.parametrize("case", MADE)
def test_an_adapter_of_peft_is_loaded_and_merged_or_refused(case: str, tmp_path: Path) -> None:
    config, settings, wanted = MADE[case]
    expected = made_by_peft(tmp_path, config, **settings)
    source = resolve(str(tmp_path / "adapter"))
    assert source.adapter is not None
    found = adapter_problems(source.adapter, source.config)
    if isinstance(wanted, str):
        assert [wanted in line for line in found] == [True], found
        assert ". Merge it into its base with peft" in found[0]
        return
    assert (source.adapter.lora.targets, found) == (wanted, [])
    for merged in (False, True):
        model = build(source.config, loss=no_loss, attention="eager")
        if not merged:
            add_adapters(model, source.adapter.lora, source.adapter.tokens)
        load_weights(model, source, "cpu")
        (merge_adapters if merged else load_adapters)(model, source.adapter)
        with torch.no_grad():
            logits = model.eval().hf(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FutureWarning)
        logits = adapted(hf, str(tmp_path / "adapter")).eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits, expected)
