"""Which models keep the documents of a row apart: the answer, and what packed rows do to losses."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from rayapp.config import Lora, from_dict
from rayapp.data.token_rows import StepRows
from rayapp.finetune.trainer import LanguageTrainer
from rayapp.model import LanguageModel, Unavailable, add_adapters, build, init_adapters
from rayapp.model.attention import choose_attention
from rayapp.model.mixers import keeps_documents_apart
from rayapp.train.loss import chunked_cross_entropy

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 16, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
RECURRENT = {
    **EXPERTS,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# Kind, what it has beside COMMON, the attention it gets on a CPU; by what the documents are one.
APART = [
    ("Llama", {}, "varlen"),
    ("GPTNeoX", {}, "varlen"),
    ("Mistral", {"sliding_window": 4, "num_key_value_heads": 1}, "varlen"),
    ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 1}, "varlen"),
    ("Qwen3", HEADS, "varlen"),
    ("DeepseekV3", LATENT, "varlen"),
    ("GPT2", {}, "varlen"),
    ("Gemma2", HEADS, "eager"),
    ("StableLm", {"num_key_value_heads": 1}, "sdpa"),
    ("GPTJ", {"rotary_dim": 4}, "eager"),
    ("GptOss", HEADS | {"num_local_experts": 4}, "varlen"),  # with sinks
]
NOT_APART = [
    ("Falcon", {}, "sdpa"),
    ("Qwen3Next", HEADS | RECURRENT, "sdpa"),  # carries a state on
    ("Bloom", {}, "eager"),  # takes no positions
    ("Mamba", {}, "eager"),
]


def model_of(kind: str, values: dict[str, Any], lora: bool = False) -> LanguageModel:
    """Build a small model, with weights large enough that a leak would show."""
    config = getattr(transformers, f"{kind}Config")(**COMMON, **values)
    loss = partial(chunked_cross_entropy, chunk=16)
    lm = build(config, loss=loss, attention=choose_attention("auto", config, "cpu", torch.float32))
    if lora:
        add_adapters(lm, Lora(rank=2))
    lm.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for buffer in lm.buffers():
        buffer.data.fill_(0.5)
    if lora:
        init_adapters(lm, 0)
    return lm


@pytest.mark.parametrize(("kind", "values", "attention"), APART + NOT_APART)
def test_the_model_itself_says_whether_documents_are_apart(
    kind: str, values: dict[str, Any], attention: str
) -> None:
    lm = model_of(kind, values)
    assert choose_attention("auto", lm.hf.config, "cpu", torch.float32) == attention
    apart = (kind, values, attention) in APART
    assert keeps_documents_apart(lm, CPU) is apart
    if kind in ("Bloom", "Mamba"):
        return
    # What it means: the loss of the second document, packed and alone.
    ids = torch.randint(0, 64, (1, 12))
    labels = torch.cat([torch.full((1, 5), -100), ids[:, 5:].roll(-1, 1)], 1)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    with torch.no_grad():
        _, packed = lm.eval()(ids, labels, positions, bounds, 7)
        _, alone = lm(ids[:, 5:], labels[:, 5:])
    assert bool((packed - alone).abs() < 1e-4 * alone) is apart


@pytest.mark.parametrize("lora", [False, True])
def test_asking_changes_nothing(lora: bool) -> None:
    lm = model_of("Llama", {"attention_dropout": 0.1}, lora).train()
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    random = torch.get_rng_state()
    assert keeps_documents_apart(lm, CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert lm.training and all(module.training for module in lm.hf.modules())
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    assert all(parameter.grad is None for parameter in lm.parameters())
    assert not lm.hf.get_input_embeddings()._forward_hooks


def test_packed_rows_are_refused_where_documents_are_not_apart() -> None:
    trainer = object.__new__(LanguageTrainer)
    trainer.device, trainer.parts = CPU, SimpleNamespace(lm=model_of("Falcon", {}))  # type: ignore[assignment]
    spec: Any = SimpleNamespace(order=SimpleNamespace(num_steps=1), config=from_dict({}))
    trainer.spec = spec
    with pytest.raises(Unavailable, match=r"falcon, the documents .* Set data.pack=false"):
        trainer.warm_up()
    spec.config = from_dict({"data": {"pack": False}})
    assert trainer.warm_up() == {"compile": None}


GRANITE = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
}
ROWS_TOGETHER = [
    ("Nemotron", HEADS),
    ("GraniteMoeHybrid", HEADS | GRANITE),
    (
        "RecurrentGemma",
        {"num_key_value_heads": 1, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    ),
    ("MiniMax", HEADS | {"num_local_experts": 4}),
    ("Llama", {}),
    ("Bloom", {}),
]


@pytest.mark.parametrize(("kind", "values"), ROWS_TOGETHER)
def test_rows_of_one_document_see_nothing_of_one_another(kind: str, values: dict[str, Any]) -> None:
    lm = model_of(kind, values).eval()
    ids = np.random.default_rng(0).integers(1, 64, (1, 2, 16)).astype(np.int32)
    segments = np.zeros(ids.shape, np.uint16)
    segments[..., :11] = 1
    labels = np.where(segments > 0, np.roll(ids, -1, -1), -100).astype(np.int32)
    labels[..., 10] = -100
    zeros = np.zeros((1, 2), np.int64)
    step = StepRows(0, ids, labels, segments, zeros, zeros, zeros)

    def loss(rows: slice) -> float:
        found = step.inputs(0, rows)
        inputs = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in found.items()
        }
        with torch.no_grad():
            return float(lm(**inputs)[1])

    apart = loss(slice(0, 1)) + loss(slice(1, 2))
    assert loss(slice(None)) == pytest.approx(apart, rel=1e-5)


class ReadBack(TorchDispatchMode):
    """Refuse the operation that gives Python a tensor's value: on a GPU it waits for all work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "Mixtral"])
def test_packed_rows_run_without_waiting_for_the_device(kind: str) -> None:
    sizes = COMMON | HEADS | ({"num_local_experts": 2} if kind == "Mixtral" else {})
    config = getattr(transformers, f"{kind}Config")(**sizes)
    lm = build(config, loss=chunked_cross_entropy, attention="varlen").to_empty(device="cpu")
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids, positions = torch.arange(16).unsqueeze(0), torch.arange(8).repeat(2).unsqueeze(0)
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32)
    with ReadBack():
        objective, _ = lm(ids, ids, positions, bounds, 8)
        objective.backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())
