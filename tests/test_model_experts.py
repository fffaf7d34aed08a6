"""Experts of a mixture: grouped products, adapters as peft computes them, tokens counted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils import transformers_weight_conversion as conversion
from safetensors.torch import load_file, save_file
from support.architectures import ARCHITECTURES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, JetMoeConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rayapp import model
from rayapp.config import ConfigError, Lora, from_dict
from rayapp.config.lora import BY_EXPERT, opened_by
from rayapp.model import adapter_files
from rayapp.model.activations import checkpoint_activations
from rayapp.model.experts import why_not_grouped
from rayapp.storage import open_storage
from rayapp.train.loss import chunked_cross_entropy

CPU = torch.device("cpu")
CONFIGS = {
    each.kind: partial(each.config, hidden_size=64, vocab_size=128) for each in ARCHITECTURES
}
BOTH = ("down_proj", "gate_up_proj")


def built(config: Any, lora: Lora | None = None, dtype: Any = torch.float32) -> Any:
    loss = partial(chunked_cross_entropy, chunk=64)
    lm = model.build(config, loss=loss, attention="eager", dtype=dtype)
    if lora is not None:
        model.add_adapters(lm, lora)
    return lm


@torch.no_grad()
def with_effect(lm: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return lm


def tokens() -> Tensor:
    return torch.randint(3, 128, (2, 32), generator=torch.Generator().manual_seed(2))


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("adapted", [False, True])
def test_experts_are_computed_by_grouped_products(adapted: bool) -> None:
    lora = Lora(rank=4, target_parameters=BOTH) if adapted else None
    lm = built(CONFIGS["Qwen3Moe"](), lora)
    model.init_weights(lm, 0, CPU)
    assert why_not_grouped(lm.hf, torch.float32, CPU) is None
    with Called() as called:
        lm(tokens(), tokens())
    assert "aten::_grouped_mm" in called.names
    assert "transformers::grouped_mm_fallback" not in called.names
    compiled = why_not_grouped(lm.hf, torch.float32, CPU, compiled=True)
    assert compiled == "compiled blocks have grouped products in bf16 alone"
    alone = built(JetMoeConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=16))
    why = why_not_grouped(alone.hf, torch.float32, CPU)
    assert why == "in transformers' jetmoe each expert is computed alone"
    dense = built(CONFIGS["Qwen3"]())
    assert why_not_grouped(dense.hf, torch.float32, CPU) is None


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss", "Mixtral"])
def test_adapters_of_experts_are_those_of_peft(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ids = CONFIGS[kind](), tokens()
    plain = built(config)
    model.init_weights(plain, 0, CPU)
    model.export(plain, open_storage(str(tmp_path / "base")))
    lora = Lora(rank=4, alpha=6, rslora=True, target_parameters=BOTH)
    lm = built(config, lora)
    model.load_weights(lm, model.resolve(str(tmp_path / "base")), CPU)
    model.init_adapters(lm, 0)
    with_effect(lm)
    folder = open_storage(str(tmp_path / "adapter"))
    model.export_adapters(lm, folder, base=str(tmp_path / "base"))
    with monkeypatch.context() as patch:  # a copy as peft has it in memory, to compare gradients
        patch.setattr(adapter_files, "BY_EXPERT", frozenset())
        stacked = open_storage(str(tmp_path / "stacked"))
        model.export_adapters(lm, stacked, base=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = base(input_ids=ids, use_cache=False).logits
    opened = PeftModel.from_pretrained(base, tmp_path / "stacked", is_trainable=True).eval()
    expected = opened(input_ids=ids, use_cache=False).logits
    found = lm.eval().hf(input_ids=ids, use_cache=False).logits
    assert (expected - before).abs().max() > 0.01, "the adapters have an effect"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    theirs = {name: p for name, p in opened.named_parameters() if p.requires_grad}
    ours = {f"base_model.model.{n}": p for n, p in lm.hf.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys() and any("experts.base_layer.lora_A" in n for n in ours)
    gradients = torch.autograd.grad(expected.square().sum(), list(theirs.values()))
    expected_by_name = dict(zip(theirs, gradients, strict=True))
    for name, mine in zip(
        ours, torch.autograd.grad(found.square().sum(), list(ours.values())), strict=True
    ):
        torch.testing.assert_close(mine, expected_by_name[name], atol=1e-3, rtol=1e-4)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    logits = again(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    source = model.resolve(str(tmp_path / "adapter"))
    assert source.adapter is not None and source.adapter.lora.target_parameters == BOTH
    assert model.adapter_problems(source.adapter, source.config) == []
    trained_on = built(source.config, source.adapter.lora)
    model.load_weights(trained_on, source, CPU)
    model.load_adapters(trained_on, source.adapter)
    merged = built(source.config)
    model.load_weights(merged, source, CPU)
    model.merge_adapters(merged, source.adapter)
    model.export(lm, open_storage(str(tmp_path / "merged")))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for each in (merged.eval().hf, exported, trained_on.eval().hf):
        logits = each(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_config_json_has_the_number_of_experts_as_transformers_4_reads_it(tmp_path: Path) -> None:
    """Version 4 has 128 for a Qwen3 MoE without num_experts, and finds no router of that size."""
    lm = built(CONFIGS["Qwen3Moe"]())
    model.init_weights(lm, 0, CPU)
    model.export(lm, open_storage(str(tmp_path)))
    assert json.loads((tmp_path / "config.json").read_text())["num_experts"] == 8
    assert AutoConfig.from_pretrained(tmp_path).num_experts == 8


def names_in(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Qwen3Next", "Glm4Moe", "DeepseekV3"])
def test_each_projection_of_an_expert_has_a_pair_named_as_in_the_bases_files(
    kind: str, tmp_path: Path
) -> None:
    """vLLM knows experts by the names in the base's files."""
    config = CONFIGS[kind]()
    plain = built(config)
    model.init_weights(plain, 0, CPU)
    model.export(plain, open_storage(str(tmp_path / "base")))
    lm = built(config, Lora(rank=3, targets=("o_proj",), target_parameters=BOTH))
    model.load_weights(lm, model.resolve(str(tmp_path / "base")), CPU)
    model.init_adapters(lm, 0)
    with_effect(lm)
    model.export_adapters(lm, open_storage(str(tmp_path / "adapter")), base=str(tmp_path / "base"))
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    of_experts = {name for name in found if ".experts." in name}
    weights = {n.removesuffix("weight") for n in names_in(tmp_path / "base") if ".experts." in n}
    assert of_experts == {
        f"base_model.model.{name}lora_{factor}.weight" for name in weights for factor in "AB"
    }
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_parameters"] is None
    own = ["w1", "w2", "w3"] if kind == "Mixtral" else ["down_proj", "gate_proj", "up_proj"]
    assert settings["target_modules"] == sorted(["o_proj", *own])
    source = model.resolve(str(tmp_path / "adapter"))
    assert source.adapter is not None
    assert source.adapter.lora == Lora(rank=3, targets=("o_proj",), target_parameters=BOTH)
    assert model.adapter_problems(source.adapter, source.config) == []
    again = built(config, source.adapter.lora)
    model.load_weights(again, source, CPU)
    model.load_adapters(again, source.adapter)
    for name, parameter in lm.hf.named_parameters():
        assert torch.equal(parameter, again.hf.get_parameter(name)), name
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    logits = (
        PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()(input_ids=tokens()).logits
    )
    torch.testing.assert_close(
        logits, lm.eval().hf(input_ids=tokens()).logits, atol=1e-5, rtol=1e-5
    )
    first = next(n for n in found if n.endswith(("w1.lora_A.weight", "gate_proj.lora_A.weight")))
    save_file(found | {first: found[first] + 1}, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(ValueError, match="first factors of its own for each projection"):
        model.load_adapters(again, source.adapter)


def test_one_projection_alone_stays_stacked(tmp_path: Path) -> None:
    """peft 0.21 does not stack gate_proj and up_proj without down_proj."""
    lm = built(CONFIGS["Qwen3Moe"](), Lora(rank=3, target_parameters=("gate_up_proj",)))
    lm.to_empty(device="cpu")
    model.export_adapters(lm, open_storage(str(tmp_path)), base="base")
    assert all("experts.lora_" in name for name in names_in(tmp_path) if "experts" in name)
    assert "set model.lora.target_parameters=down_proj,gate_up_proj" in opened_by(
        "qwen3_moe", ["gate_up_proj"]
    )
    assert opened_by("gpt_oss", BOTH).endswith("experts, and so does vLLM")


def test_the_families_by_expert_are_those_that_peft_stacks_again() -> None:
    kinds = conversion._MODEL_TO_CONVERSION_PATTERN
    wanted = {
        kind
        for kind, pattern in kinds.items()
        if pattern in conversion._MOE_FUSED_TARGETS
        and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and get_checkpoint_conversion_mapping(kind)
    }
    assert wanted == BY_EXPERT


def test_adapters_of_experts_train_in_bf16_at_any_rank() -> None:
    for rank in (3, 8):
        lora = Lora(rank=rank, target_parameters=BOTH)
        lm = built(CONFIGS["Qwen3Moe"](), lora, torch.bfloat16)
        model.init_weights(lm, 0, CPU)
        model.init_adapters(lm, 0)
        objective, _ = with_effect(lm)(tokens(), tokens())
        objective.backward()
        gradients = [p.grad for p in lm.parameters() if p.requires_grad]
        assert all(each is not None and each.isfinite().all() for each in gradients)


def test_targets_that_no_expert_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target_parameters=gate is unknown: .* down_proj, gate_"):
        built(CONFIGS["Qwen3Moe"](), Lora(target_parameters=("gate",)))
    with pytest.raises(ValueError, match=r"no experts with such a parameter. Leave it out"):
        built(CONFIGS["Qwen3"](), Lora(target_parameters=("down_proj",)))
    for more in ({"dora": True}, {"dropout": 0.1}):
        with pytest.raises(ConfigError, match=r"conflict: peft does not support it for adapters"):
            from_dict({"model": {"lora": {"target_parameters": ["down_proj"], **more}}})


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_tokens_are_counted_once_by_expert_without_padding(checkpointing: str) -> None:
    lm = built(CONFIGS["Qwen3Moe"]()).train()
    model.init_weights(lm, 0, CPU)
    checkpoint_activations(lm, checkpointing)
    chosen: list[Tensor] = []
    for layer in lm.hf.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, args, out: chosen.append(out[-1]))
    present = torch.ones(2, 32, dtype=torch.bool)
    present[:, 20:] = False
    with torch.no_grad():
        lm(tokens(), tokens())
    assert lm.routing.take() is None  # an evaluation does not count
    chosen.clear()
    objective, _ = lm(tokens(), tokens(), present=present)
    wanted = [
        torch.bincount(each[present.reshape(-1)].reshape(-1), minlength=8) for each in chosen[:4]
    ]
    objective.backward()
    found = lm.routing.take()
    assert found.sum() == 4 * 2 * present.sum()  # layers, experts of a token
    assert torch.equal(found, torch.stack(wanted)) and lm.routing.take() is None
