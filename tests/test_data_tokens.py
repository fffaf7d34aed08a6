"""Check tokenizers, the bytes that tokens stand for, and what data.chat_template may name."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from tokenizers import Tokenizer
from tokenizers_made import CORPUS, TEXTS, around, bpe, document, drawn, sentencepiece, text_of
from transformers import PreTrainedTokenizerFast

from rayapp.data import tokens
from rayapp.data.tokens import (
    CHAT_TEMPLATE,
    TemplateError,
    byte_tokenizer,
    template_of,
    token_bytes,
    train_bpe,
)
from rayapp.storage import open_storage


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


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_new_tokens_are_one_token_and_their_pieces_are_those_of_before(kind: str) -> None:
    before = bpe() if kind == "bpe" else sentencepiece("always", "unigram")
    names, size = ["<|a|>", "<|b|>"], tokens.num_ids(before)
    after = tokens.with_tokens(before, names)
    expected = {size + n: before.encode(t, add_special_tokens=False) for n, t in enumerate(names)}
    assert tokens.pieces(after, names) == expected and min(map(len, expected.values())) > 1
    assert after.encode("x<|b|>", add_special_tokens=False)[-1] == size + 1
    assert tokens.num_ids(before) == size and tokens.num_ids(after) == size + 2
    assert after.decode([size], skip_special_tokens=True) == ""


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


def test_ids_without_a_token_are_counted_as_ids() -> None:
    """A token of a higher id than the tokenizer has tokens is encoded, with its bytes."""
    rules = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    rules["model"]["vocab"]["Q"] = 280  # it was another number
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)), eos_token="<|endoftext|>"
    )
    assert len(wrapped) < tokens.num_ids(wrapped) == 281 == len(token_bytes(wrapped))
    assert tokens.num_ids(byte_tokenizer()) == len(byte_tokenizer()) == 259
    made = document(wrapped, "text", "a Q")
    assert made.tokens.max() == 280 and made.num_bytes.tolist() == [1, 1, 1, 0]


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


def test_code_in_a_tokenizer_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers asks whether to run it; the user says yes."""
    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_text('{"model_type": "strange"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["own.Strange", null]}}'
    )
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Strange: ...\n")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises((ValueError, OSError)):
        tokens.load_tokenizer(str(tmp_path))
    assert not ran.exists()


def test_nothing_is_loaded_by_its_own_code() -> None:
    """Every call of an Auto class says that code beside a model or tokenizer is not to be run."""
    calls = []
    for path in sorted((Path(tokens.__file__).parents[1]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("from_pretrained", "from_config")
                and "Auto" in ast.unparse(node.func)
            ):
                refuses = any(ast.unparse(k) == "trust_remote_code=False" for k in node.keywords)
                calls.append((f"{path.name}:{node.lineno}", refuses))
    assert len(calls) >= 7, "the calls are not found"
    assert [place for place, refuses in calls if not refuses] == []


def test_the_digest_is_of_rules_and_not_of_what_was_done_before() -> None:
    tokenizer = around("<s> $A")
    tokenizer.pad_token = "</s>"
    before = tokens.tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["padding"] is not None
    assert tokens.tokenizer_digest(tokenizer) == before
    tokenizer.chat_template = "other"
    assert tokens.tokenizer_digest(tokenizer) != before


def test_a_file_and_chatml(tmp_path: Path, s3_bucket: str) -> None:
    (tmp_path / "a.jinja").write_text("\ufeff{{ messages }} é")
    open_storage(f"s3://{s3_bucket}/x").write("a.jinja", b"of s3")
    assert template_of(str(tmp_path / "a.jinja"), None) == "{{ messages }} é"
    assert template_of(f"s3://{s3_bucket}/x/a.jinja", None) == "of s3"
    assert template_of("chatml", None) == CHAT_TEMPLATE
    with pytest.raises(TemplateError, match=r"b\.jinja is missing: there is no such file\. Give"):
        template_of(str(tmp_path / "b.jinja"), None)


def test_a_training_variant_needs_a_template_and_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert template_of("training", None) == "", "that of a tokenizer yet to be made has its marks"
    tokenizer = byte_tokenizer()
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", None)
    with pytest.raises(TemplateError, match=r"pip install 'rayapp\[chat\]'"):
        template_of("training", tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="the tokenizer has no template to take"):
        template_of("training", tokenizer)
