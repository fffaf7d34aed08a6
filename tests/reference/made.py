"""Small models, tokenizers and data for the comparison, made by transformers and tokenizers."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenizers_made import sentencepiece
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()

VOCABULARY = 384
SOURCES = ("json/decoder", "random", "bisect", "heapq", "textwrap", "shlex", "csv", "queue")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "head_dim": 16,
    "sliding_window": None,
    # GPT-2 has names of its own.
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 48, "router_aux_loss_coef": 0.05}
GRANITE = {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
GEMMA = {"sliding_window": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0}
QWEN2_MOE = {"use_sliding_window": True, "shared_expert_intermediate_size": 48}
QWEN2_MOE |= {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {  # by name: model_type, and what differs from SIZES
    "llama": {"kind": "llama"},
    "llama_tied": {"kind": "llama", "tie_word_embeddings": True},
    "llama_fp16": {"kind": "llama", "dtype": torch.float16},
    "mistral": {"kind": "mistral", "sliding_window": 16},
    "neox": {"kind": "gpt_neox"},
    "gpt2": {"kind": "gpt2"},
    "mixtral": {"kind": "mixtral", **EXPERTS},
    "qwen3": {"kind": "qwen3", "tie_word_embeddings": True},
    "phi3": {"kind": "phi3"},
    "cohere": {"kind": "cohere", "logit_scale": 0.25},
    "granite": {"kind": "granite", **GRANITE, "attention_multiplier": 0.1},
    "gemma2": {"kind": "gemma2", **GEMMA},
    "smollm3": {"kind": "smollm3", "no_rope_layers": [1, 0]},
    "nemotron": {"kind": "nemotron"},
    "qwen2_moe": {"kind": "qwen2_moe", **EXPERTS, "sliding_window": 16, **QWEN2_MOE},
    "olmo3": {"kind": "olmo3", "sliding_window": 16},
    "starcoder2": {"kind": "starcoder2", "residual_dropout": 0.0, "embedding_dropout": 0.0},
}
# Of further families: experts, latent attention, recurrences, all as small as they can be.
SWEPT: dict[str, Any] = {
    **EXPERTS,
    **dict.fromkeys(("n_routed_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads", "sliding_window_pattern"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "mup_base"), 1),
    "first_k_dense_replace": 1,
    **dict.fromkeys(("dropout", "activation_dropout", "layerdrop", "embedding_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "num_kv_shared_layers": 0,
    "residual_dropout": 0.0,
    **dict.fromkeys(("sliding_window", "window_size", "local_attention"), 16),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_head_dim", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("query_pre_attn_scalar", "attention_window_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "mamba_dt_rank"), 8),
    **dict.fromkeys(("d_model", "word_embed_proj_dim", "index_topk"), 64),
    **dict.fromkeys(("n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    "q_lora_rank": 32,
    "lru_width": 64,
    "mamba_expand": 2,
    "shared_expert_intermediate_size": 48,
    "ffn_dim": 96,
    "mamba_d_ssm": 128,
    "vocab_size_per_layer_input": VOCABULARY,
    "final_logit_softcapping": 5.0,
    "logit_scale": 0.3,
    "logits_scaling": 3.0,
    "max_seq_len": 256,
}


def make_model(name: str, root: Path, tokenizer: Any) -> Path:
    """Write a model of MODELS, or of any model_type, with drawn weights, and a tokenizer."""
    folder = root / "models" / name
    if folder.exists():
        return folder
    fields = dict(MODELS.get(name, {"kind": name, **SWEPT}))
    kind, dtype = fields.pop("kind"), fields.pop("dtype", torch.float32)
    known = AutoConfig.for_model(kind).to_dict()
    wanted = {key: value for key, value in (SIZES | fields).items() if key in known}
    if "qk_rope_head_dim" in known:  # attention by a latent has head sizes of its own
        wanted.pop("head_dim", None)
        wanted["num_key_value_heads"] = 4
    if layers := wanted.get("layer_types") or known.get("layer_types"):  # each type twice
        wanted["layer_types"] = list(dict.fromkeys(layers)) * 2
        wanted["num_hidden_layers"] = len(wanted["layer_types"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **wanted)).float()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too are off their first values
            large = parameter.ndim > 1
            parameter.mul_(2.0) if large else parameter.add_(torch.randn_like(parameter) * 0.05)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    # transformers sets the row of the padding token to 0 when it opens some models
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bpe() -> Any:
    """Train a byte-level BPE of 384 tokens, which puts <s> before a text, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
        "'<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


def unigram() -> Any:
    """Return a tokenizer like T5's of sentencepiece, which puts <s> before a text."""
    made = sentencepiece("always", "unigram")
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def _sources() -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    return [(library / f"{name}.py").read_text() for name in SOURCES]


def make_data(root: Path) -> dict[str, Path]:
    """Write texts, prompts and chats cut from the standard library; return the files by kind."""
    draw, texts = random.Random(1), _sources()

    def piece(low: int, high: int) -> str:
        text, size = draw.choice(texts), int(low * (high / low) ** draw.random())
        start = draw.randrange(max(1, len(text) - size))
        return text[start : start + size]

    def chat() -> dict[str, Any]:
        first = [{"role": "system", "content": piece(4, 30)}] if draw.random() < 0.5 else []
        turns = [("user", piece(4, 40)), ("assistant", piece(4, 80))] * draw.randint(1, 2)
        return {"messages": first + [{"role": role, "content": text} for role, text in turns]}

    def chat_pair() -> dict[str, Any]:
        asked = chat()["messages"][:-1]
        answers = {"chosen": piece(4, 60), "rejected": piece(4, 60) + "."}
        return {
            name: [*asked, {"role": "assistant", "content": text}] for name, text in answers.items()
        }

    records: dict[str, Callable[[], dict[str, Any]]] = {
        "text": lambda: {"text": piece(8, 500)},
        "prompt": lambda: {"prompt": piece(4, 80), "completion": piece(4, 120)},
        "chat": chat,
        "pairs": lambda: {
            "prompt": piece(4, 80),
            "chosen": piece(4, 60),
            "rejected": piece(4, 60) + ".",
        },
        "chat_pairs": chat_pair,
        "answers": lambda: {
            "prompt": piece(4, 80),
            "completion": piece(4, 60),
            "label": draw.random() < 0.6,
        },
        "chat_answers": lambda: {
            "prompt": chat()["messages"][:-1],
            "completion": [{"role": "assistant", "content": piece(4, 60)}],
            "label": draw.random() < 0.6,
        },
    }
    files = {}
    for kind, record in records.items():
        files[kind] = root / f"{kind}.jsonl"
        files[kind].write_text("".join(json.dumps(record()) + "\n" for _ in range(200)))
    return files
