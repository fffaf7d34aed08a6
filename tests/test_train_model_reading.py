"""Models that are read by running their blocks on shapes, against formulas and the real step."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from memory_trace import trace
from support.architectures import ARCHITECTURES, COMMON, Architecture

from rayapp import model
from rayapp.config import Lora, from_dict
from rayapp.planner import UnknownModel, ask, largest_micro_batch
from rayapp.planner.flops import context_within, forward_flops, mean_context
from rayapp.planner.memory import Layout, kept_bytes
from rayapp.planner.shape import UnknownShape, lora_parameters, shape_of
from rayapp.planner.step import block_traffic_bytes
from rayapp.presets import config_of
from rayapp.train.model_reading import read
from rayapp.train.planning import plan

FAMILIES = ["llama3.1-8b", "mathstral-7b", "llama2-70b", "mixtral-8x7b", "qwen3-4b", "dolly-v2-7b"]
BY_KIND = {each.kind: each for each in ARCHITECTURES}


@pytest.mark.parametrize("name", FAMILIES)
def test_reading_agrees_with_the_formulas_of_known_families(name: str) -> None:
    read_, known = (
        read(config_of(name), seq_len=2048, fp32=False, lora=None),
        shape_of(config_of(name)),
    )
    for what in ("parameters", "active_parameters", "root_parameters", "block_parameters"):
        assert getattr(read_, what) == getattr(known, what), what
    assert (read_.layers, read_.tied, read_.experts) == (known.layers, known.tied, known.experts)
    assert lora_parameters(read_, 16) == lora_parameters(known, 16)
    context = mean_context([2048])
    for part, counted in vars(forward_flops(read_, context)).items():
        assert counted == pytest.approx(getattr(forward_flops(known, context), part), rel=1e-9)
    for checkpointing in ("none", "selective", "full"):
        formula = Layout(known, 8, micro_batch=2, seq_len=2048, checkpointing=checkpointing)
        counted = replace(formula, shape=read_)
        assert kept_bytes(counted) == pytest.approx(kept_bytes(formula), rel=1e-3)
        assert counted.peak().total == pytest.approx(formula.peak().total, rel=0.02)
    if name.startswith("llama"):  # the formula of traffic is Llama's, and an estimate for others
        assert block_traffic_bytes(counted) == pytest.approx(block_traffic_bytes(formula), rel=0.05)


def test_adapters_are_counted_as_the_formula_does() -> None:
    lora = Lora(rank=16)
    formula = Layout(shape_of(config_of("qwen3-4b")), 8, 2, 2048, lora_rank=16)
    shape = read(config_of("qwen3-4b"), seq_len=2048, fp32=False, lora=lora)
    counted = replace(formula, shape=shape)
    assert counted.trainable == formula.trainable
    assert kept_bytes(counted) == pytest.approx(kept_bytes(formula), rel=0.01)
    assert counted.peak().total == pytest.approx(formula.peak().total, rel=0.02)


@pytest.mark.full
def test_longer_rows_are_extrapolated() -> None:
    short, long = (
        read(config_of("qwen3-4b"), seq_len=n, fp32=False, lora=None) for n in (64, 8192)
    )
    assert short.measured is not None and long.measured is not None
    assert long.measured.kept == pytest.approx(short.measured.kept, rel=1e-3)
    config = BY_KIND["Gemma2"].config()  # its own attention keeps scores
    own = [read(config, seq_len=n, fp32=True, lora=None).measured for n in (1024, 2048, 4096)]
    kept = [each.kept for each in own if each is not None]
    assert kept[2] - kept[1] == pytest.approx(2 * (kept[1] - kept[0]), rel=0.01)
    assert kept[2] > 1.7 * kept[1]


def test_a_window_bounds_attention() -> None:
    for length in (1, 5, 9):
        seen = [min(position + 1, 3) for position in range(length)]
        assert context_within(mean_context([length]), 3) == pytest.approx(sum(seen) / length)
    shape = read(BY_KIND["Gemma3Text"].config(), seq_len=256, fp32=False, lora=None)
    assert shape.measured is not None
    pairs = 4.0 * 8 * 32  # heads, head size
    assert set(shape.measured.attention) == {(2 * pairs, 64), (2 * pairs, None)}
    context = mean_context([1024])
    found = forward_flops(shape, context).attention
    assert found == pytest.approx(2 * pairs * (context + context_within(context, 64)))


def test_experts_are_counted_whole_and_as_one_token_uses_them() -> None:
    config = BY_KIND["Qwen3Moe"].config()
    shape = read(config, seq_len=256, fp32=False, lora=None)
    expert = 3 * 256 * 128
    assert shape.parameters - shape.active_parameters == 4 * (8 - 2) * expert
    fewer = read(
        BY_KIND["Qwen3Moe"].config(num_experts_per_tok=1), seq_len=256, fp32=False, lora=None
    )
    assert shape.measured is not None and fewer.measured is not None
    assert shape.measured.flops - fewer.measured.flops == 4 * 2 * expert


def test_a_model_with_attention_of_its_own_is_counted_by_two_lengths() -> None:
    config = transformers.GPTJConfig(
        **{**COMMON, "n_embd": 256, "n_layer": 4, "n_head": 8, "rotary_dim": 16}
    )
    shape = read(config, seq_len=512, fp32=False, lora=None)
    assert shape.measured is not None
    ((flops, window),) = shape.measured.attention
    assert window is None and flops == pytest.approx(4 * 4 * 256, rel=0.02)
    weights = sum(each.inputs * each.outputs for each in shape.linears)
    assert shape.measured.flops == pytest.approx(2 * 4 * weights, rel=0.02)


def test_the_indexer_of_glm_5_is_counted_as_attention() -> None:
    """Queries, keys and values by head, and the indexer's scores with their sum over its heads."""
    shape = read(BY_KIND["GlmMoeDsa"].config(), seq_len=512, fp32=False, lora=None)
    heads, of_scores, of_values, index_heads, of_index = 8, 32 + 16, 32, 4, 32
    pair = 2 * heads * (of_scores + of_values) + 2 * index_heads * (of_index + 1)
    assert shape.measured is not None and shape.measured.attention == ((4 * pair, None),)
    assert (shape.experts, shape.active_experts) == (8, 2)


def test_what_transformers_cannot_build_is_refused() -> None:
    with pytest.raises(UnknownShape, match=r"transformers cannot build the model: .*qwen99"):
        read({"model_type": "qwen99"}, seq_len=8, fp32=False, lora=None)
    with pytest.raises(UnknownShape, match="transformers cannot build the model"):
        read({"model_type": "resnet"}, seq_len=8, fp32=False, lora=None)


def moe_config(**train: Any) -> Any:
    return from_dict(
        {
            "model": {"path": "tiny"},
            "data": {"seq_len": 512},
            "train": {"tokens_per_step": 512 * 64, "max_steps": 10, **train},
            "cluster": {"workers": "8", "instance": "p4d.24xlarge"},
        }
    )


@pytest.mark.full
def test_a_model_without_a_formula_is_planned_as_others_are() -> None:
    values = BY_KIND["Qwen3_5MoeText"].config().to_dict()
    found = plan(moe_config(), model=values)
    assert found.fits and found.cost_usd and found.mfu and found.hours
    assert found.as_dict()["active_parameters"] < found.as_dict()["parameters"]
    assert "no published run of qwen3_5_moe_text was compared: the band is wide" in found.reasons
    assert "with causal-conv1d and flash-linear-attention on GPUs" in found.reasons[-1]
    assert found.rate is not None and found.rate.low == pytest.approx(0.5 * found.rate.value)
    assert largest_micro_batch(found.question) == 8


def test_the_planner_alone_says_that_it_knows_no_formula() -> None:
    values = BY_KIND["Qwen3_5MoeText"].config().to_dict()
    with pytest.raises(UnknownModel, match="model_type=qwen3_5_moe_text is unknown"):
        ask(moe_config(), model=values)


@pytest.mark.drill
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("kind", BY_KIND)
def test_the_plan_is_what_the_real_step_takes(kind: str, checkpointing: str) -> None:
    planned, traced, missed = memory(BY_KIND[kind], checkpointing)
    assert planned == pytest.approx(traced, rel=0.10)
    assert missed == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_experts_are_planned_in_fp32_too(kind: str) -> None:
    planned, traced, missed = memory(BY_KIND[kind], "none", "fp32")
    assert planned == pytest.approx(traced, rel=0.10)
    assert missed == 0


def memory(
    architecture: Architecture, checkpointing: str, precision: str = "bf16"
) -> tuple[float, float, int]:
    """Return the peak bytes planned and of the real step, and the difference of parameters."""
    config, rows, length = architecture.config(), 32, 512
    fp32 = precision == "fp32"
    shape = read(config, seq_len=length, fp32=fp32, lora=None)
    kept: dict[str, Any] = {"checkpointing": checkpointing, "precision": precision}
    layout = Layout(shape, 8, rows, length, on_cpu=True, **kept)
    found = trace(
        config,
        world=8,
        micro_batch=rows,
        seq_len=length,
        activation_checkpointing=checkpointing,
        param_dtype=None if fp32 else torch.bfloat16,
    )
    built = model.num_parameters(model.build(config, loss=model.no_loss, attention="eager"))
    return layout.peak().total, found.peak_bytes, shape.parameters - built


def test_a_reading_is_the_same_whenever_garbage_is_collected() -> None:
    """The address of a freed tensor may be that of the next one."""
    config, before = BY_KIND["GlmMoeDsa"].config(), gc.get_threshold()
    found = []
    try:
        for threshold in (50, 5000):
            gc.set_threshold(threshold, 10, 10)
            found.append(read(config, seq_len=512, fp32=False, lora=None))
    finally:
        gc.set_threshold(*before)
    assert found[0] == found[1]


def test_qwen3_30b_a3b_has_its_published_numbers() -> None:
    values = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    }
    shape = read(values, seq_len=4096, fp32=False, lora=None)
    assert shape.parameters / 1e9 == pytest.approx(30.5, abs=0.05)
    assert shape.active_parameters / 1e9 == pytest.approx(3.3, abs=0.06)


def test_a_model_is_read_once_for_the_questions_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayapp.train import model_reading, planning

    values = BY_KIND["Qwen3_5MoeText"].config().to_dict()
    asked = {"seq_len": 16, "fp32": False, "lora": None}
    before = model_reading.read(values, **asked)
    calls: list[str] = []
    monkeypatch.setattr(
        model_reading, "read", lambda config, **more: calls.append(config["model_type"]) or before
    )
    planning._read.cache_clear()
    assert planning.read(values, **asked) == planning.read(values, **asked) == before
    planning.read(values, **{**asked, "seq_len": 32})
    assert calls == ["qwen3_5_moe_text"] * 2
    planning._read.cache_clear()
