"""Counts against what PyTorch counts, the literature's figures, and each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from rayapp import model
from rayapp.config import Lora
from rayapp.model import add_adapters
from rayapp.model.sharding import find_blocks
from rayapp.planner.flops import (
    backward_flops,
    forward_flops,
    mean_context,
    mfu,
    model_flops,
    recomputed_flops,
)
from rayapp.planner.memory import Layout, block_bytes
from rayapp.planner.shape import UnknownShape, lora_parameters, shape_of
from rayapp.presets import config_of
from rayapp.train.loss import chunked_cross_entropy

SMALL = {"num_hidden_layers": 2, "vocab_size": 320}


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_context_is_the_mean_over_tokens(lengths: list[int]) -> None:
    attended = [position + 1 for length in lengths for position in range(length)]
    assert mean_context(lengths) == pytest.approx(sum(attended) / len(attended))
    assert mean_context(lengths) <= mean_context([sum(lengths)])


def meta_model(name: str, tokens: int) -> tuple[model.LanguageModel, torch.Tensor]:
    config = model.resolve(name).config
    for field, value in SMALL.items():
        setattr(config, field, value)
    built = model.build(config, loss=lambda *args, **kwargs: 0, attention="sdpa")
    return built, torch.zeros(1, tokens, dtype=torch.long, device="meta")


@pytest.mark.parametrize("name", ["tiny", "llama3.1-8b", "qwen3-0.6b", "dolly-v2-7b"])
def test_forward_and_backward_flops_are_what_pytorch_counts(name: str) -> None:
    tokens = 64
    config = {**config_of(name), **SMALL, "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_attention_heads": 4, "head_dim": 16}
    config |= {"num_key_value_heads": 2} if "num_key_value_heads" in config else {}
    hf_config = type(model.resolve(name).config).from_dict(config)
    hf = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    forward = forward_flops(shape_of(config), tokens)  # eager attention has no causal shortcut
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        logits = hf(input_ids=ids, use_cache=False).logits
    assert counter.get_total_flops() == pytest.approx(forward.total * tokens, rel=1e-3)
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    backward = backward_flops(forward, frozen=False)
    assert counter.get_total_flops() == pytest.approx(backward.total * tokens, rel=1e-3)


def test_experts_that_are_not_chosen_cost_nothing() -> None:
    config = {**config_of("mixtral-8x7b")}
    two = forward_flops(shape_of(config), 1.0)
    one = forward_flops(shape_of({**config, "num_experts_per_tok": 1}), 1.0)
    expert = 3 * config["hidden_size"] * config["intermediate_size"]
    assert two.linears - one.linears == 2 * 32 * expert


@pytest.mark.parametrize(
    ("name", "targets"), [("tiny", ()), ("tiny", ("q_proj", "v_proj")), ("dolly-v2-7b", ())]
)
def test_lora_counts_two_factors_for_each_linear_module(name: str, targets: tuple[str]) -> None:
    built, _ = meta_model(name, 8)
    expected = sum(
        8 * (module.in_features + module.out_features)
        for block in find_blocks(built.hf)
        for path, module in block.named_modules()
        if isinstance(module, torch.nn.Linear)
        and (not targets or path.rpartition(".")[2] in targets)
    )
    shape = shape_of({**config_of(name), **SMALL})
    assert lora_parameters(shape, 8, targets) == expected
    add_adapters(built, Lora(rank=8, targets=targets, dora=True))
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert lora_parameters(shape, 8, targets, dora=True) == trained


def test_adapters_of_experts_are_counted_for_each_expert() -> None:
    built, _ = meta_model("mixtral-8x7b", 8)
    shape = shape_of({**config_of("mixtral-8x7b"), **SMALL})
    experts = ("down_proj", "gate_up_proj")
    add_adapters(built, Lora(rank=8, target_parameters=experts))
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert lora_parameters(shape, 8, experts=experts) == trained
    both = lora_parameters(shape, 8), lora_parameters(shape, 8, experts=experts, active=True)
    assert 4 * (both[1] - both[0]) == trained - both[0]  # a token is given to 2 of 8
    with pytest.raises(UnknownShape, match=r"target_parameters=q_proj is unknown"):
        lora_parameters(shape, 8, experts=("q_proj",))


def test_an_unknown_target_is_refused() -> None:
    shape = shape_of(config_of("tiny"))
    with pytest.raises(UnknownShape, match=r"targets=qkv is unknown.*q_proj, k_proj"):
        lora_parameters(shape, 8, ("qkv",))


def test_what_no_family_is_known_for_is_refused() -> None:
    with pytest.raises(UnknownShape, match=r"model_type=qwen4 is unknown.*qwen"):
        shape_of({"model_type": "qwen4"})
    with pytest.raises(UnknownShape, match=r"num_attention_heads of a llama is not in it"):
        shape_of({"model_type": "llama", "hidden_size": 8})


def test_published_flops_per_token() -> None:
    """torchtitan counts 57.9 GFLOP a token for 8B at 8k, without the causal mask."""
    shape = shape_of(config_of("llama3.1-8b"))
    forward = forward_flops(shape, 8192)
    assert 3 * forward.total / 1e9 == pytest.approx(57.9, abs=0.05)
    # AutoModel's LoRA figure, 402 TFLOP/s at 12,473 tokens/s: 32.2 GFLOP a token.
    assert model_flops(shape, mean_context([4096]), 16) / 1e9 == pytest.approx(32.2, rel=0.05)


def test_checkpointing_adds_less_than_a_forward_and_keeping_all_adds_nothing() -> None:
    shape = shape_of(config_of("llama3.1-8b"))
    forward = forward_flops(shape, 2048.0)
    full = recomputed_flops(shape, forward, "full")
    assert 0.6 * forward.linears < full.linears < forward.linears  # down_proj is not run again
    assert recomputed_flops(shape, forward, "selective").total == 0
    assert recomputed_flops(shape, forward, "none").total == 0


def test_mfu_is_a_share_of_the_peak() -> None:
    assert mfu(100.0, 1e9, gpus=2, peak_flops=1e11) == pytest.approx(0.5)
    assert mfu(100.0, 1e9, gpus=2, peak_flops=None) is None


@pytest.mark.parametrize("name", ["tiny", "llama3.2-1b", "qwen3-0.6b", "dolly-v2-7b"])
def test_compiled_blocks_keep_what_the_compiler_decides(name: str) -> None:
    """The partition of forward and backward that inductor asks for, of one block in bf16."""
    tokens, config = 96, model.resolve(name).config
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = 1, 80, True
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    lm = model.build(
        config, loss=chunked_cross_entropy, attention="sdpa", dtype=torch.bfloat16
    ).to_empty(device="cpu")
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    kept: list[torch.Tensor] = []

    def partition(*args: object, **kwargs: object) -> tuple[object, object]:
        forward, backward = min_cut_rematerialization_partition(*args, **kwargs)
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        kept.extend(node.meta["val"] for node in output.args[0][1:] if hasattr(node, "meta"))
        return forward, backward

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    (block,) = find_blocks(lm.hf)
    block.forward = torch.compile(block.forward, backend=backend)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    lm(ids, ids)
    tables = (1, tokens, rotated(config))  # of the rotary embedding: all blocks share them
    of_tokens = [each for each in kept if tokens in each.shape and each.shape != tables]
    # On CPUs the result of attention is kept in its own layout and in that of the next matrix.
    heads = config.num_attention_heads * head_size(config)
    expected = block_bytes(Layout(shape_of(config_of(name)), 1, 1, tokens, compiled=True))
    total = sum(t.numel() * t.element_size() for t in of_tokens) / tokens
    assert total - 2 * heads == pytest.approx(expected, rel=2e-3)


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotated(config: PretrainedConfig) -> int:
    """Return how many dimensions of a head are rotated."""
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return int(head_size(config) * share)
