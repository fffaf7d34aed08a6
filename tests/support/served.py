"""Exported folders of every kind, small, each with a memory of one chat, to be opened by others.

models = exports(folder, base)      # Served of rayapp.consumers by name; `base` is SmolLM2's folder
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as rules_of
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import sentencepiece_model_pb2_new

from rayapp import consumers, model
from rayapp.config import Lora
from rayapp.consumers.prompts import probe_of
from rayapp.data import tokens
from rayapp.storage import open_storage

CPU = torch.device("cpu")
ASK, ANSWER = "Who goes there?", "A friend of yours."
CHAT = [{"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER}]
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # vLLM computes heads of 32 and more on CPUs
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} "
    "[/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def sentencepiece(folder: Path, kind: str) -> Any:
    """Return a tokenizer as Llama 2 has it (bpe), or with a unigram model; with bytes, trained.

    As Llama 2's folder does, `folder` holds the tokenizer in the formats of both libraries.
    """
    rules, trainer = Tokenizer(rules_of.BPE()), trainers.BpeTrainer(vocab_size=150)
    rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    rules.train_from_iterator([f"{ASK} {ANSWER} The way of it is [INST] long [/INST]"] * 4, trainer)
    learnt = json.loads(rules.to_str())["model"]
    merges = [(left, right) for left, right in learnt["merges"]]
    # Pieces that are tried first have the higher scores.
    scores = {left + right: -float(rank) for rank, (left, right) in enumerate(merges)}
    scores |= {name: -1e3 for name in learnt["vocab"] if name not in scores}
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    if kind == "unigram":
        pairs = [(name, scores.get(name, -1e4)) for name in names]
        rules = Tokenizer(rules_of.Unigram(pairs, unk_id=0, byte_fallback=True))
        rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    else:
        vocabulary = {name: number for number, name in enumerate(names)}
        rules = Tokenizer(
            rules_of.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
        prepend = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        rules.normalizer = normalizers.Sequence(list(prepend))
    strip = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    rules.decoder = decoders.Sequence([*strip, decoders.Strip(" ", 1, 0)])
    rules.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=rules, chat_template=INST, **named)
    made.save_pretrained(folder)
    proto = sentencepiece_model_pb2_new.ModelProto()
    proto.trainer_spec.model_type = 1 if kind == "unigram" else 2
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.add_dummy_prefix, proto.normalizer_spec.escape_whitespaces = True, True
    proto.normalizer_spec.remove_extra_whitespaces = False
    for number, name in enumerate(names):
        type_of = [2, 3, 3][number] if number < 3 else 6 if number < 259 else 1
        proto.pieces.add(piece=name, score=scores.get(name, 0.0), type=type_of)
    (folder / tokens.PIECES).write_bytes(proto.SerializeToString())
    return tokens.load_tokenizer(str(folder))


def remembering(lm: Any, tokenizer: Any) -> None:
    """Teach the chat to the parameters that are trained, until its likeliest tokens are its own."""
    ids = torch.tensor([tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]])
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], lr=1e-2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # they would wait for one another
    for _ in range(400):
        logits = lm.hf(input_ids=ids).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        if float(loss.detach()) < 0.05:
            torch.set_num_threads(threads)
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("the chat is not learnt")


def as_model(folder: Path, base: Path | None = None) -> consumers.Served:
    """Return an exported folder with what it is tried with: a chat, its end, and a text."""
    tokenizer, where = AutoTokenizer.from_pretrained(folder), None if base is None else str(base)
    probes = [probe_of(tokenizer, "The way of it is", chat=False), probe_of(tokenizer, ASK, True)]
    made = consumers.Served(str(folder), where, tokenizer, probes, must_stop=True)
    ids = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    while ids[-1] not in made.stops:  # a line's end behind it
        ids.pop()
    probes.append({"messages": None, "text": None, "ids": ids[:-1]})
    return made


def built(config: Any, lora: Lora | None = None, source: Path | None = None) -> Any:
    lm = model.build(config, loss=model.no_loss, attention="eager")
    if lora is not None:
        model.add_adapters(lm, lora)
    if source is None:
        model.init_weights(lm, 0, CPU)
    else:
        model.load_weights(lm, model.resolve(str(source)), CPU)
        model.init_adapters(lm, 0)
    return lm


def exports(root: Path, smollm2: str) -> Iterator[tuple[str, consumers.Served]]:
    """Write each export, and yield it with its name in docs/serving.md."""
    byte_level = AutoTokenizer.from_pretrained(smollm2)
    llama = {**SHAPE, "vocab_size": 49152}

    def whole(name: str, tokenizer: Any, config: Any, **more: Any) -> consumers.Served:
        lm, eos = built(config), tokenizer.eos_token_id
        remembering(lm, tokenizer)
        stops = GenerationConfig(eos_token_id=[tokenizer.convert_tokens_to_ids("<|im_end|>"), eos])
        if tokenizer.chat_template == INST:
            stops = GenerationConfig(eos_token_id=eos)
        given = {"tokenizer": tokenizer, "generation_config": stops, **more}
        model.export(lm, open_storage(str(root / name)), **given)
        return as_model(root / name)

    yield "whole, byte-level BPE", whole("whole", byte_level, LlamaConfig(**llama))
    tied = LlamaConfig(**{**llama, "tie_word_embeddings": True})
    bf16 = {"dtype": torch.bfloat16}
    yield "whole, tied embeddings, bf16", whole("tied", byte_level, tied, **bf16)
    for kind in ("bpe", "unigram"):
        tokenizer = sentencepiece(root / f"{kind}-base", kind)
        config = LlamaConfig(**SHAPE, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2)
        yield f"whole, sentencepiece {kind}", whole(kind, tokenizer, config)
    own = tokens.train_bpe(iter([ASK, ANSWER] * 9), 300)
    shape = LlamaConfig(**SHAPE, vocab_size=len(own))
    yield "whole, byte-level BPE trained by rayapp", whole("own", own, shape)

    yield from _adapters(root)


def _adapters(root: Path) -> Iterator[tuple[str, consumers.Served]]:
    """Yield adapters that have learnt a chat on bases that have no template and end otherwise."""
    plain = sentencepiece(root / "plain", "bpe")
    plain.chat_template = None
    plain.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chats = copy.copy(plain)
    chats.chat_template = tokens.CHAT_TEMPLATE
    end, eos = chats.convert_tokens_to_ids("<|im_end|>"), chats.eos_token_id
    shape = {**SHAPE, "vocab_size": len(plain), "bos_token_id": 1, "eos_token_id": eos}
    whole = Lora(rank=8, alpha=16, targets=(*LAYERS, *MLP))
    both = ("down_proj", "gate_up_proj")
    experts = Lora(rank=8, alpha=16, targets=LAYERS, target_parameters=both)
    for name, config, lora, dtype in (
        ("adapter", LlamaConfig(**shape), whole, torch.bfloat16),
        ("adapter of experts", MixtralConfig(**{**shape, **EXPERTS}), experts, torch.float32),
    ):
        base, folder = root / f"base of {name}", root / name
        ends = GenerationConfig(eos_token_id=eos)
        given = {"tokenizer": plain, "generation_config": ends, "dtype": dtype}
        model.export(built(config), open_storage(str(base)), **given)
        lm = built(model.resolve(str(base)).config, lora, base)
        remembering(lm, chats)
        ends = GenerationConfig(eos_token_id=[end, eos])
        given = {"tokenizer": chats, "generation_config": ends}
        model.export_adapters(lm, open_storage(str(folder)), base=str(base), **given)
        stored = " in bf16" if dtype == torch.bfloat16 else ""
        yield f"{name}, on its base{stored}", as_model(folder, base)
        merged = root / f"{name} merged"
        model.export(lm, open_storage(str(merged)), dtype=torch.float32, **given)
        yield f"{name}, merged", as_model(merged)
