"""Tokenizers of every kind, made here, and what becomes of a record with one."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rayapp.data.messages import SILENT
from rayapp.data.packing import Document
from rayapp.data.rendering import Renderer
from rayapp.data.tokens import SPECIALS, byte_tokenizer, train_bpe

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "hello hello world 12",
    "naïve 日本 café\n\n  x",
] * 4
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(
    lambda text: not any(name in text for name in SPECIALS)
)
drawn = settings(max_examples=200, deadline=None)


@cache
def bpe() -> Any:
    return train_bpe(iter(CORPUS), 400)


@cache
def sentencepiece(prepend: str, model: str) -> Any:
    """Return a tokenizer like those of Llama 2 (BPE) or T5 (Unigram): U+2581 and <0x0A>."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    text = [chr(code) for code in range(33, 127)] + ["▁", "日", "▁hello", "ll", "o", "▁▁"]
    names = ["<unk>", "<s>", "</s>", *pieces, *text]
    if model == "unigram":
        scores = [(name, -100.0 if name in pieces else -2.0 - len(name) % 3) for name in names]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        vocabulary = {name: number for number, name in enumerate(names)}
        tokenizer = Tokenizer(
            models.BPE(vocabulary, [("l", "l")], unk_token="<unk>", byte_fallback=True)
        )
    if prepend == "normalizer":  # as Llama 2 has it
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    strip = 0 if prepend == "never" else 1
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", strip, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def around(single: str) -> Any:
    """Return a byte tokenizer that puts special tokens around a text, like `<s> $A </s>`."""
    tokenizer = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def document(tokenizer: Any, kind: str, value: Any) -> Document:
    made, problem = Renderer(tokenizer, kind).document(value)
    assert problem in (None, SILENT) and made is not None, problem
    assert made.tokens.dtype == np.int32 and made.loss.dtype == np.bool_
    return made


def text_of(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
