"""New tokens from the config to what is exported: a base without control tokens learns ChatML.

test_reference.py compares the training with peft's own rows, step by step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from reference import product
from test_finetune_ends import tokenizer_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
)

from rayapp.config import Config, ConfigError, load
from rayapp.finetune.check import check
from rayapp.generation import generate
from rayapp.model import build, no_loss
from rayapp.model.new_tokens import rows_problem
from rayapp.train.planning import plan

NEW = ["<|im_start|>", "<|im_end|>"]
ANSWERS = {"ping": "pong", "day": "night", "up": "down"}
FIELDS: dict[str, Any] = {
    "data.chat_template": "chatml",
    "data.eval_fraction": 0.0,
    "data.seq_len": 64,
    "train.tokens_per_step": 512,
    "train.micro_batch": 2,
    "train.precision": "fp32",
    "train.max_steps": 150,
    "train.warmup_steps": 10,
    "train.lr": 5e-3,
}


def base(root: Path, *, tied: bool = True) -> dict[str, Any]:
    """Write a drawn model whose tokenizer has no control tokens, and chats; return the fields."""
    tokenizer = tokenizer_of("<eos>")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 0}
    sizes |= {"initializer_range": 0.2}  # the frozen head gives logits of any size
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=tied, **sizes)
    LlamaForCausalLM(config).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in ANSWERS.items()
    ]
    lines = (json.dumps({"messages": chat}) + "\n" for chat in chats * 20)
    (root / "chats.jsonl").write_text("".join(lines))
    return FIELDS | {"model.path": str(root / "base"), "data.path": str(root / "chats.jsonl")}


def answer(model: Any, folder: Path, asked: str) -> list[int]:
    """Return what a model of transformers or peft adds to a chat, by the folder's settings."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": asked}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    settings = GenerationConfig.from_pretrained(folder, max_new_tokens=16, do_sample=False)
    out = model.eval().generate(**ids, generation_config=settings)
    return list(out[0, ids["input_ids"].shape[1] :].tolist())


@pytest.mark.full
@pytest.mark.parametrize("lora", [None, {"rank": 16}, {"rank": 16, "merge": True}])
def test_a_base_learns_chatml_and_stops_after_its_answer(
    lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    fields = base(tmp_path) | {"model.new_tokens": NEW} | ({"model.lora": lora} if lora else {})
    done = product.run([product.Run("chatml", fields, ((2, None),))], tmp_path)["chatml"]
    folder, adapter = done.folder / "model", lora == {"rank": 16}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start, end = tokenizer.convert_tokens_to_ids(NEW)
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"][::2] == [start, end]
    assert "<|im_start|>" in tokenizer.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [end, 0]
    opener = AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    model = opener.from_pretrained(folder)
    assert done.summary["export_check"]["difference"] < 1e-5
    for asked, said in ANSWERS.items():
        assert answer(model, folder, asked) == [*tokenizer(said)["input_ids"], end]
        assert "".join(generate(str(done.folder), asked, temperature=0, chat=True)) == said
    if not adapter:
        return
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["trainable_token_indices"] == {"model.embed_tokens": [start, end]}
    further = {"model.path": str(folder), "train.max_steps": 2}
    del fields["model.new_tokens"], fields["model.lora"]
    ways: dict[str, dict[str, Any]] = {"on": {}, "merged": {"model.adapter": "merge"}}
    ways["more"] = ways["merged"] | {"model.new_tokens": "<|tool|>"}
    runs = [product.Run(name, fields | further | way) for name, way in ways.items()]
    on, merged, more = product.run(runs, tmp_path).values()
    assert on.config["model"]["new_tokens"] == NEW
    first = on.metrics[0]["loss"]
    assert first == pytest.approx(merged.metrics[0]["loss"], abs=1e-6) and first < 0.1
    assert AutoConfig.from_pretrained(more.folder / "model").vocab_size == len(tokenizer) + 1


def problems(fields: dict[str, Any], root: Path) -> list[str]:
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in fields.items()}
    texts |= {"run.storage": str(root / "runs"), "run.name": "wrong"}
    with pytest.raises(ConfigError) as caught:
        check(load(None, texts, Config), 2, 0)
    return caught.value.problems


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model.new_tokens": ["<eos>", "<a>"]}, "the tokenizer has <eos> (0). Leave out what is"),
        ({"model.new_tokens": ["<a>", ""]}, "is not valid: it contains an empty token. Set dist"),
        ({"model.new_tokens": ["<a>", "<a>"]}, "is not valid: it contains a token twice. Set dist"),
        (
            {"model.new_tokens": ["<a>"], "model.path": "tiny"},
            "is in conflict: the tokenizer is made for this run",
        ),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (found,) = problems(base(tmp_path) | fields, tmp_path)
    assert found.startswith("model.new_tokens=") and problem in found


def test_rows_beside_adapters_are_refused_where_peft_computes_another_head() -> None:
    phi = build(PhiConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64), loss=no_loss).hf
    assert rows_problem(phi, merge=True) is None
    assert "the head's bias. Set model.lora.merge=true" in str(rows_problem(phi, merge=False))


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_the_rows_and_says_what_opens_them(tied: bool, tmp_path: Path) -> None:
    fields = base(tmp_path, tied=tied) | {"model.lora": "{rank: 2}"}
    without, among = (
        plan(load(None, fields | {"model.new_tokens": new}, Config)) for new in ("[]", "[a, b]")
    )
    rows = 2 * 64 * (1 if tied else 2)
    layouts = [without.question.layout, among.question.layout]
    assert layouts[1].trainable - layouts[0].trainable == rows  # type: ignore[union-attr]
    assert layouts[1].shape.vocabulary == layouts[0].shape.vocabulary + 2  # type: ignore[union-attr]
    sizes = [each.checkpoint_bytes() for each in layouts]  # type: ignore[arg-type]
    assert sizes[1] - sizes[0] == 12 * rows
    assert any("vLLM does not: set model.lora.merge=true" in why for why in among.reasons)
