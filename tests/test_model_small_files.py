"""Tokenizers that are exported: transformers 4 and 5 open them, and make the run's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import sentencepiece as llama_2
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers_made import CORPUS, bpe, sentencepiece
from transformers import AutoTokenizer
from transformers4 import facts, facts_of_4

from rayapp.data.tokens import load_tokenizer, save_tokenizer, train_bpe
from rayapp.model.small_files import small_files_of
from rayapp.storage import open_storage


def byte_level(prefix: bool = False) -> Tokenizer:
    rules = Tokenizer.from_str(bpe().backend_tokenizer.to_str())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    rules.add_special_tokens(["<image>", "</s>"])
    return rules


def sentences(model: str = "bpe", pieces: tuple[str, ...] = ()) -> Tokenizer:
    rules = Tokenizer.from_str(sentencepiece("first", model).backend_tokenizer.to_str())
    rules.add_special_tokens(list(pieces))
    return rules


def words() -> Tokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", *letters]
    names += [f"##{letter}" for letter in letters]
    rules = Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    rules.normalizer, rules.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    rules.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rules.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return rules


END = {"eos_token": "<|endoftext|>"}
OF_BERT = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
OF_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TURNS = ["<start_of_turn>", "<end_of_turn>"]
# The tokenizer_class of a base, its model_type, its rules, and more of its settings.
BASES: dict[str, tuple[str, str, Callable[[], Tokenizer], dict[str, Any]]] = {
    "fast": ("PreTrainedTokenizerFast", "llama", byte_level, END | {"chat_template": "{{ 'x' }}"}),
    "named": (
        "PreTrainedTokenizerFast",
        "gpt_neox",
        byte_level,
        END | {"extra_special_tokens": {"image_token": "<image>"}},
    ),
    "llama": ("LlamaTokenizerFast", "llama", sentences, OF_LLAMA),
    "llama, no bos": ("LlamaTokenizer", "llama", sentences, OF_LLAMA | {"add_bos_token": False}),
    "llama, eos": ("LlamaTokenizerFast", "llama", sentences, OF_LLAMA | {"add_eos_token": True}),
    "llama, new": ("LlamaTokenizer", "llama", sentences, OF_LLAMA | {"legacy": False}),
    "llama of bytes": ("LlamaTokenizerFast", "llama", byte_level, END),
    "qwen2": (
        "Qwen2Tokenizer",
        "qwen2",
        byte_level,
        END | {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<image>"]},
    ),
    "gpt2": ("GPT2Tokenizer", "gpt2", lambda: byte_level(True), END | {"add_prefix_space": True}),
    "prefix": ("PreTrainedTokenizerFast", "llama", lambda: byte_level(True), END),
    "neox": ("GPTNeoXTokenizer", "gpt_neox", byte_level, END),
    "gemma": (
        "GemmaTokenizerFast",
        "gemma",
        lambda: sentences(pieces=("<pad>", "<eos>", "<bos>", *TURNS)),
        {"eos_token": "<eos>", "bos_token": "<bos>", "additional_special_tokens": TURNS},
    ),
    "unigram": ("PreTrainedTokenizerFast", "llama", lambda: sentences("unigram"), OF_LLAMA),
    "t5": ("T5Tokenizer", "t5", lambda: sentences("unigram"), {"eos_token": "</s>"}),
    "wordpiece": ("PreTrainedTokenizerFast", "bert", words, OF_BERT),
    "bert": ("BertTokenizer", "bert", words, OF_BERT),
    "trained": ("PreTrainedTokenizerFast", "llama", byte_level, {}),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path, Path]]:
    """Export each tokenizer of BASES, and one that is trained, beside a model and an adapter."""
    found = {}
    for name, (kind, model_type, rules, settings) in BASES.items():
        base, whole, adapter = (tmp_path_factory.mktemp(name) for name in ("base", "to", "to"))
        rules().save(str(base / "tokenizer.json"))
        values = {"tokenizer_class": kind, **settings}
        (base / "tokenizer_config.json").write_text(json.dumps(values))
        for folder in (base, whole):
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        tokenizer = train_bpe(iter(CORPUS), 300) if name == "trained" else load_tokenizer(str(base))
        for file, data in small_files_of(tokenizer, None).items():
            (whole / file).write_bytes(data)
            (adapter / file).write_bytes(data)
        found[name] = facts(tokenizer), whole, adapter
    return found


def test_version_5_opens_them(exported: dict[str, tuple[Any, Path, Path]]) -> None:
    for name, (of_run, *folders) in exported.items():
        for folder in folders:
            assert facts(AutoTokenizer.from_pretrained(folder)) == of_run, name
            written = json.loads((folder / "tokenizer_config.json").read_text())
            assert not {"is_local", "local_files_only", "backend"} & set(written)


@pytest.mark.full
def test_version_4_opens_them(exported: dict[str, tuple[Any, Path, Path]]) -> None:
    """It knows no TokenizersBackend, and takes a list in extra_special_tokens for a mapping."""
    answers = facts_of_4([folder for _, *folders in exported.values() for folder in folders])
    wanted = {name: [of_run, of_run] for name, (of_run, *_) in exported.items()}
    found = zip(answers[::2], answers[1::2], strict=True)
    assert {name: [*both] for name, both in zip(exported, found, strict=True)} == wanted


def test_the_pieces_of_sentencepiece_leave_with_the_model(tmp_path: Path) -> None:
    """Also from the folder in which a run keeps its tokenizer, and with tokens added since.

    llama.cpp's converter reads them, and from tokenizer_config.json all else that it knows.
    """
    base, kept = tmp_path / "base", open_storage(str(tmp_path / "kept"))
    tokenizer = llama_2(base, "bpe")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    save_tokenizer(tokenizer, kept)
    files = small_files_of(load_tokenizer(kept.url), None)
    assert files["tokenizer.model"] == (base / "tokenizer.model").read_bytes()
    told = json.loads(files["tokenizer_config.json"])
    assert told["added_tokens_decoder"][str(len(tokenizer) - 1)]["content"] == "<|im_end|>"
    assert told["add_prefix_space"] and not told["add_bos_token"] and not told["add_eos_token"]
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, data in files.items():
        (exported / name).write_bytes(data)
    assert facts(AutoTokenizer.from_pretrained(exported)) == facts(tokenizer)
