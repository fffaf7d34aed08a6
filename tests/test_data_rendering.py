"""Check what documents are made of records, and which of their tokens bear loss."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from reference.made import bpe as chat_bpe
from tokenizers import Tokenizer
from tokenizers_made import TEXTS, around, bpe, document, drawn, sentencepiece, text_of
from transformers import PreTrainedTokenizerFast

from rayapp.data import rendering, shapes, sources
from rayapp.data.kinds import problem_of
from rayapp.data.packing import crossed
from rayapp.data.rendering import Renderer


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


LINES = "".join(f"line {n} of a text,\n  with a blank before:\n\n{n}\n" for n in range(40))


@pytest.mark.parametrize("single", ["$A", "<s> $A </s>"])
def test_a_long_text_is_encoded_in_parts_and_has_the_tokens_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, single: str
) -> None:
    tokenizer = bpe() if single == "$A" else around(single)
    text = {"text": LINES}
    prompt = {"prompt": LINES, "completion": LINES[:70]}
    whole = [document(tokenizer, "text", text), document(tokenizer, "prompt", prompt)]
    monkeypatch.setattr(rendering, "MAX_ENCODED", 100)
    seen = []
    encode = Renderer._encode_whole
    monkeypatch.setattr(
        Renderer, "_encode_whole", lambda self, texts: (seen.append(texts), encode(self, texts))[1]
    )
    made = [document(tokenizer, "text", text), document(tokenizer, "prompt", prompt)]
    assert len(seen) > 20 and max(len("".join(texts)) for texts in seen) <= 100
    for one, other in zip(made, whole, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.loss.tolist() == other.loss.tolist()
        assert one.num_bytes.tolist() == other.num_bytes.tolist()


@pytest.mark.parametrize("prepend", ["never", "first", "always"])
@drawn
@given(text=TEXTS.map(lambda text: text.replace("▁", "_") * 9))
def test_parts_of_any_text_lose_nothing(prepend: str, text: str) -> None:
    """Also a line that is longer than a part, and tokenizers that put a space first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "MAX_ENCODED", 7)
        patch.setattr(rendering, "CUT_REACH", 4)
        parts = list(rendering.parts_of(text))
        assert "".join(parts) == text and max(map(len, parts)) <= 7
        tokenizer = sentencepiece(prepend, "bpe")
        made = document(tokenizer, "text", text)
        assert made.num_bytes.sum() == len(text.encode())
        if prepend != "never":
            plain = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert made.tokens[: len(plain)].tolist() == plain


def test_words_and_lines_stay_whole_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "FEW_ENCODED", 100)
    monkeypatch.setattr(rendering, "CUT_REACH", 30)
    for text, ends, begins in ((LINES, "\n", ""), (LINES.replace("\n", "  and "), "", " ")):
        first, *rest = pieces = list(rendering.pieces_of([text], rendering.PIECE_ENDS))
        assert "".join(pieces) == text and len(pieces) > 12 and max(map(len, pieces)) <= 130
        assert all(piece.endswith(ends) for piece in [first, *rest[:-1]])
        assert all(piece.startswith(begins) for piece in rest)
    assert list(rendering.pieces_of(["x" * 1000], rendering.PIECE_ENDS)) == ["x" * 1000]


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("x", "chat", "is plain text, not chat"),
        ({"b": 1, "a": 2}, "text", "has no column 'text' (it has 'a', 'b')"),
        ({}, "chat", "has no column 'messages' (it has none)"),
        ({"text": 3}, "text", "has a 'text' that is not text"),
        ({"prompt": "x", "completion": None}, "prompt", "has a 'completion' that is not text"),
        (
            {"prompt": "[{'role': 'user', 'content': 'x'}]", "completion": "y"},
            "prompt",
            "has a 'prompt' that is a list of messages written as text",
        ),
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
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "chat",
            "has a message whose content is not text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}]},
            "chat",
            "has 'tool_calls' that are not a list of calls of functions with names",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x"}], "tools": "[1"},
            "chat",
            "has 'tools' that are not a list of functions with names",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x"}], "chat_template_kwargs": "x"},
            "chat",
            "has 'chat_template_kwargs' that are not an object",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]},
            "chat",
            "has a message with a weight that is neither 0 nor 1",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 0}]},
            "chat",
            "has no assistant message with a weight above 0",
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


# ---- Pairs of answers --------------------------------------------------------------------------


def said(tokenizer: Any, record: rendering.Document) -> list[tuple[str, str]]:
    """Return the text of each document that bears no loss, and the text that bears loss."""
    found = []
    for each in record:
        tokens = [each.tokens[~each.loss].tolist(), each.tokens[each.loss].tolist()]
        found.append((tokenizer.decode(tokens[0]), tokenizer.decode(tokens[1])))
    return found


def test_a_pair_is_two_documents_of_which_the_answers_bear_loss() -> None:
    tokenizer = chat_bpe()
    pair = {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}
    document, note = Renderer(tokenizer, "preference").document(pair)
    assert document is not None and note is None
    assert said(tokenizer, document) == [("<s>2 + 2 = ", "4</s>"), ("<s>2 + 2 = ", "5</s>")]
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = [*before, {"role": "user", "content": "c"}]
    chats = {
        name: [*asked, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")
    }
    document, _ = Renderer(tokenizer, "chat_preference").document(chats)
    assert document is not None
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert [(a.rstrip("\n"), b) for a, b in said(tokenizer, document)] == [
        (prompt.rstrip("\n"), f"{name}<|im_end|>") for name in ("chosen", "rejected")
    ]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has equal 'chosen' and 'rejected'"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "has an empty 'chosen' answer"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "has a 'rejected' that is not text"),
        ({"prompt": "[{'role': 'u'}]", "chosen": "b", "rejected": "c"}, "list of messages written"),
    ],
)
def test_pairs_without_two_answers_are_refused(record: Any, problem: str) -> None:
    document, why = Renderer(chat_bpe(), "preference").document(record)
    assert document is None and why is not None and problem in why


def test_a_labelled_answer_is_crossed_with_the_one_before() -> None:
    tokenizer = chat_bpe()
    records = [{"prompt": f"{n} + 0 = ", "completion": f"{n}"} for n in range(2)]
    made = Renderer(tokenizer, "unpaired").documents(records)
    first, second = (document for document, _ in made)
    assert first is not None and second is not None
    assert said(tokenizer, crossed(second, first)) == [("<s>1 + 0 = ", "0</s>")]
    assert problem_of({**records[0], "completion": " "}, "unpaired") == "has an empty answer"
    asked = {"role": "user", "content": "a"}
    for messages, problem in (
        ([asked], "has no assistant message"),
        ([asked, {"role": "assistant", "content": " "}], "has an empty answer"),
        ([{"role": "assistant", "content": "b"}, asked], "do not end with the assistant's"),
    ):
        assert problem in str(problem_of({"messages": messages}, "chat_unpaired"))


@pytest.mark.parametrize(
    ("label", "kind"),
    [(True, "unpaired"), (False, "unpaired"), ("False", "unpaired"), (3, "prompt")],
)
def test_a_label_says_whether_an_answer_is_good(label: Any, kind: str) -> None:
    row = {"prompt": "a", "completion": "b", "label": label}
    assert shapes.kind_of(row) == kind
    if kind == "unpaired":
        record = sources.Record("a.jsonl", 0, row)
        (value,) = shapes.standardised(record, "unpaired", {}, ("label",)).values
        assert value == (label is True)


def test_chats_of_a_pair_ask_the_same() -> None:
    user, other = ({"role": "user", "content": text} for text in "ab")
    answers = [{"role": "assistant", "content": text} for text in "cd"]
    for pair, problem in (
        ({"chosen": [user, answers[0]], "rejected": [other, answers[1]]}, "different prompts"),
        ({"chosen": [user, answers[0]], "rejected": [user]}, "no assistant message"),
        ({"chosen": [user, answers[0], other], "rejected": [user, answers[1]]}, "do not end with"),
        ({"chosen": [user, answers[0]], "rejected": [user, answers[0]]}, "has equal"),
    ):
        assert problem in str(problem_of(pair, "chat_preference"))


def test_pairs_that_ask_the_same_are_held_out_together() -> None:
    for kind, one in (
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (
            "chat_preference",
            {
                name: [{"role": "user", "content": "a"}, {"content": name}]
                for name in ("chosen", "rejected")
            },
        ),
    ):
        other = {**one, "rejected": [{"role": "user", "content": "a"}, {"content": "x"}]}
        assert rendering.content_of(one, kind) == rendering.content_of(other, kind)  # type: ignore[arg-type]
