"""The architectures of docs/models.md: small models of each, with random weights.

for model in ARCHITECTURES: model.config()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 16,
}
DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 128}
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
STATE = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_expand": 1,
    "mamba_d_ssm": 256,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers' configs, with the settings beside COMMON of a small model."""

    name: str
    kind: str
    """The class of the config, without `Config`."""
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, **more: Any) -> Any:
        """Return a small model's config."""
        values = {**COMMON, **self.settings, **more}
        return getattr(transformers, f"{self.kind}Config")(**values)


ARCHITECTURES = [
    Architecture("Llama 2, 3", "Llama"),
    Architecture("Mistral, Mathstral", "Mistral", {"sliding_window": 64}),
    Architecture("Ministral 3", "Ministral3"),
    Architecture("Mixtral", "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    Architecture("Qwen2, Qwen2.5", "Qwen2"),
    Architecture("Qwen3", "Qwen3"),
    Architecture("Qwen3 MoE", "Qwen3Moe", EXPERTS),
    Architecture("Qwen3-Next", "Qwen3Next", {**SHARED, **DELTA}),
    Architecture("Qwen3.5, 3.6", "Qwen3_5Text", DELTA),
    Architecture("Qwen3.5, 3.6 MoE", "Qwen3_5MoeText", {**SHARED, **DELTA}),
    Architecture("Gemma 2", "Gemma2", WINDOWS),
    Architecture("Gemma 3", "Gemma3Text", WINDOWS),
    Architecture(
        "Gemma 4",
        "Gemma4Text",
        {**WINDOWS, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32},
    ),
    Architecture("GPT-OSS", "GptOss", {**WINDOWS, "num_local_experts": 8}),
    Architecture("OLMo 3", "Olmo3", WINDOWS),
    Architecture("SmolLM3", "SmolLM3"),
    Architecture("Phi-3, Phi-4", "Phi3"),
    Architecture("Granite 3, 4", "Granite", {"logits_scaling": 8.0}),
    Architecture(
        "Granite 4 hybrid",
        "GraniteMoeHybrid",
        {
            **STATE,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "layer_types": ["mamba", "attention"] * 2,
        },
    ),
    Architecture("GLM-4", "Glm4"),
    Architecture("GLM-4 MoE", "Glm4Moe", ROUTED),
    Architecture(
        "GLM-5",
        "GlmMoeDsa",
        {**LATENT, "index_topk": 64, "index_head_dim": 32, "index_n_heads": 4},
    ),
    Architecture("DeepSeek V3", "DeepseekV3", LATENT),
    Architecture("Seed-OSS", "SeedOss"),
    Architecture("EXAONE 4", "Exaone4", WINDOWS),
    Architecture("LFM2", "Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    Architecture("Falcon-H1", "FalconH1", STATE),
    Architecture(
        "Mamba 2",
        "Mamba2",
        {
            "num_heads": 16,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
    Architecture("Dolly v2, Pythia", "GPTNeoX"),
]
