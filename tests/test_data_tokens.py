"""Check tokenizers, the bytes that tokens stand for, and which tokens of a document bear loss."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rayapp.data import tokens
from rayapp.data.tokens import Renderer, byte_tokenizer, problem_of, token_bytes, train_bpe
from rayapp.packing import Document
from rayapp.storage import open_storage

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "hello hello world 12",
    "naïve 日本 café\n\n  x",
] * 4
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(
    lambda text: not any(name in text for name in tokens.SPECIALS)
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
    assert problem is None and made is not None, problem
    assert made.tokens.dtype == np.int32 and made.loss.dtype == np.bool_
    return made


def text_of(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


# ---- Tokenizers --------------------------------------------------------------------------------


@drawn
@given(TEXTS)
@example("")
@example(" \r\n\t\x00 \U0001f600é日本 ")
def test_bpe_and_bytes_come_back_whole(text: str) -> None:
    for tokenizer in (bpe(), byte_tokenizer()):
        ids = tokenizer(text)["input_ids"]
        assert text_of(tokenizer, ids) == text
        assert token_bytes(tokenizer)[ids].sum() == len(text.encode())
    assert len(byte_tokenizer()(text)["input_ids"]) == len(text.encode())


def test_a_trained_tokenizer_has_the_size_asked_and_is_always_the_same() -> None:
    assert len(byte_tokenizer()) == 259 and 259 < len(bpe()) <= 400
    again = train_bpe(iter(CORPUS), 400)
    assert tokens.tokenizer_digest(again) == tokens.tokenizer_digest(bpe())
    assert tokens.tokenizer_digest(train_bpe(iter(CORPUS), 300)) != tokens.tokenizer_digest(bpe())


@pytest.mark.parametrize("model", ["bpe", "unigram"])
@pytest.mark.parametrize("prepend", ["never", "first", "always", "normalizer"])
@drawn
@given(text=TEXTS)
@example(text=" hello")
@example(text="hello  日 é\n")
def test_bytes_of_sentencepiece_documents(prepend: str, model: str, text: str) -> None:
    """The space that the tokenizer puts first is no byte of the text."""
    made = document(sentencepiece(prepend, model), "text", text.replace("▁", "_"))
    assert made.num_bytes.sum() == len(text.replace("▁", "_").encode())


def test_bytes_of_added_special_and_long_tokens() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    tokenizer.add_tokens(["<think>", "日本語", "=" * 300])
    tokenizer.add_special_tokens(["<|eot_id|>"])  # special, but nobody's bos, eos or pad
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    table = token_bytes(wrapped)
    names = ["<think>", "日本語", "=" * 300, "<|eot_id|>", "<|endoftext|>", "<|im_end|>"]
    assert [int(table[wrapped.convert_tokens_to_ids(n)]) for n in names] == [7, 9, 300, 0, 0, 0]


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_saved_and_loaded_tokenizers_have_one_digest(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root = str(tmp_path) if kind == "local" else f"s3://{request.getfixturevalue('s3_bucket')}"
    made = {
        "bytes": byte_tokenizer(),
        "bpe": bpe(),
        "around": around("<s> $A </s>"),
        "sentencepiece": sentencepiece("first", "unigram"),
    }
    for name, tokenizer in made.items():
        storage = open_storage(f"{root}/{name}")
        tokens.save_tokenizer(tokenizer, storage)
        storage.write("model.safetensors", b"weights are not tokenizers")
        loaded = tokens.load_tokenizer(storage.url)
        assert tokens.tokenizer_digest(loaded) == tokens.tokenizer_digest(tokenizer), name
        assert loaded("a b")["input_ids"] == tokenizer("a b")["input_ids"]
        assert loaded.chat_template == tokenizer.chat_template
    assert len({tokens.tokenizer_digest(tokenizer) for tokenizer in made.values()}) == len(made)


def test_what_was_saved_is_loaded_without_torch(tmp_path: Path) -> None:
    """Every process that prepares data loads it, and has no other use of torch."""
    tokens.save_tokenizer(bpe(), open_storage(str(tmp_path)))
    code = (
        "import sys; from rayapp.data import tokens; tokens.load_tokenizer(sys.argv[1])('a');"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_the_digest_is_of_rules_and_not_of_what_was_done_before() -> None:
    tokenizer = around("<s> $A")
    tokenizer.pad_token = "</s>"
    before = tokens.tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["padding"] is not None
    assert tokens.tokenizer_digest(tokenizer) == before
    tokenizer.chat_template = "other"
    assert tokens.tokenizer_digest(tokenizer) != before


# ---- text and prompt ---------------------------------------------------------------------------


@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("text", ["hello", "ends itself</s>", "twice</s></s>", "<s>begins itself"])
def test_one_begin_and_one_end(single: str, text: str) -> None:
    tokenizer = around(single)
    bos = "<s>" if single.startswith("<s>") and not text.startswith("<s>") else ""
    whole = bos + text.replace("</s>", "") + "</s>"
    made = document(tokenizer, "text", text)
    assert text_of(tokenizer, made.tokens) == whole and made.loss[1:].all()
    assert made.num_bytes.sum() == len(text.replace("</s>", "").replace("<s>", ""))

    value = {"prompt": "Q", "completion": text.replace("<s>", "")}
    made = document(tokenizer, "prompt", value)
    answer = value["completion"].replace("</s>", "") + "</s>"
    assert text_of(tokenizer, made.tokens) == ("<s>" if "<s>" in single else "") + "Q" + answer
    assert text_of(tokenizer, made.tokens[made.loss]) == answer


def test_an_empty_text_is_no_document() -> None:
    for tokenizer in (bpe(), around("<s> $A </s>")):
        assert len(document(tokenizer, "text", "").tokens) == 0
        assert len(document(tokenizer, "text", {"text": ""}).tokens) == 0
        assert len(document(tokenizer, "prompt", {"prompt": "", "completion": ""}).tokens) == 0


def test_a_tokenizer_without_an_end_adds_none() -> None:
    tokenizer = around("<s> $A")
    tokenizer.eos_token = None
    assert text_of(tokenizer, document(tokenizer, "text", "hi").tokens) == "<s>hi"


@drawn
@given(prompt=TEXTS, completion=TEXTS.filter(bool))
def test_prompts_bear_no_loss_and_completions_do(prompt: str, completion: str) -> None:
    made = document(bpe(), "prompt", {"prompt": prompt, "completion": completion})
    assert text_of(bpe(), made.tokens[made.loss]) == completion + "<|endoftext|>"
    assert text_of(bpe(), made.tokens[~made.loss]) == prompt
    assert made.num_bytes[made.loss].sum() == len(completion.encode())


@pytest.mark.parametrize("padding", [None, {"length": 64}])
def test_many_at_once_are_each_as_alone(padding: dict[str, int] | None) -> None:
    """A tokenizer.json that asks for padding or truncation changes no document."""
    rules = json.loads(around("<s> $A").backend_tokenizer.to_str())
    tokenizer = Tokenizer.from_str(json.dumps(rules))
    if padding:
        tokenizer.enable_padding(**padding)
        tokenizer.enable_truncation(8)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    renderer = Renderer(wrapped, "text")
    values = ["a" * 30, 7, "", {"text": "bc"}, {"words": "no"}, "d" * 3]
    together = renderer.documents([{} if value == 7 else value for value in values])
    lengths = [None if made is None else len(made.tokens) for made, _ in together]
    assert lengths == [32, None, 0, 4, None, 5]
    for value, (made, problem) in zip(values, together, strict=True):
        alone, why = renderer.document({} if value == 7 else value)
        assert why == problem and (made is None) == (alone is None)
        if made is not None and alone is not None:
            assert made.tokens.tolist() == alone.tokens.tolist()


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("x", "chat", "is plain text, not chat"),
        ({"b": 1, "a": 2}, "text", "has no column 'text' (it has 'a', 'b')"),
        ({}, "chat", "has no column 'messages' (it has none)"),
        ({"text": 3}, "text", "has a 'text' that is not text"),
        ({"prompt": "x", "completion": None}, "prompt", "has a 'completion' that is not text"),
        (
            {"text": "half \ud83d"},
            "text",
            "has text that is not Unicode (half of a surrogate pair)",
        ),
        ({"messages": "hi"}, "chat", "has 'messages' that are not a list of messages"),
        ({"messages": []}, "chat", "has 'messages' that are not a list of messages"),
        ({"messages": None}, "chat", "has 'messages' that are not a list of messages"),
        ({"messages": [{"from": "x"}]}, "chat", "has a message without role and content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "chat", "has no assistant message"),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            "chat",
            "has a message whose content is not text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "\udc00"}]},
            "chat",
            "has text that is not Unicode (half of a surrogate pair)",
        ),
    ],
)
def test_problems_are_named(value: Any, kind: str, words: str) -> None:
    assert problem_of(value, kind) == words
    assert Renderer(bpe(), kind).document(value) == (None, words)


def test_the_kind_follows_from_the_columns() -> None:
    assert tokens.kind_of({"messages": [], "text": ""}) == "chat"
    assert tokens.kind_of({"prompt": "", "completion": "", "id": 1}) == "prompt"
    assert tokens.kind_of({"text": ""}) == "text" and tokens.kind_of({"prompt": ""}) is None
