"""Check which shape a record has, and what is made of each."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from rayapp.config.fields import RecordKind
from rayapp.data import shapes
from rayapp.data.kinds import KINDS, problem_of
from rayapp.data.shapes import (
    ShapeError,
    kind_of,
    renamed,
    shape_of,
    standard,
    standardised,
    unused,
    unused_fields,
)
from rayapp.data.sources import Record

USER, ASSISTANT = ({"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."})
SYSTEM = {"role": "system", "content": "Be brief."}
PAIR = {"messages": [USER, ASSISTANT]}
CALL = {"name": "weather", "arguments": {"in": "Rome"}}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"text": "a"}, "text", {"text": "a"}),
        ({"prompt": "Q", "completion": "A"}, "prompt", {"prompt": "Q", "completion": "A"}),
        (PAIR, "chat", PAIR),
        (
            {"prompt": [SYSTEM, USER, ASSISTANT, USER], "completion": [ASSISTANT], "tools": TOOLS},
            "chat",
            {
                "messages": [SYSTEM, USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT],
                "tools": TOOLS,
            },
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Q?"},
                    {"from": "gpt", "value": "A.", "weight": 1},
                ],
                "system": "Be brief.",
                "tools": json.dumps(TOOLS),
            },
            "chat",
            {
                "messages": [SYSTEM, USER, {**ASSISTANT, "weight": 1}],
                "tools": json.dumps(TOOLS),
            },
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Q?"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "sun"},
                    {"from": "gpt", "value": "A."},
                ]
            },
            "chat",
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"type": "function", "function": CALL}],
                    },
                    {"role": "tool", "content": "sun"},
                    ASSISTANT,
                ]
            },
        ),
        ({"conversations": [USER, ASSISTANT]}, "chat", PAIR),
        ({"instruction": "Q?", "input": "", "output": "A."}, "chat", PAIR),
        (
            {"instruction": "Add", "input": "2 2", "output": "A.", "history": [["Q?", "A."]]},
            "chat",
            {"messages": [USER, ASSISTANT, {"role": "user", "content": "Add\n2 2"}, ASSISTANT]},
        ),
        ({"instruction": "Q?", "output": "A.", "input": None}, "chat", PAIR),
        ({"question": "Q?", "answer": "A."}, "chat", PAIR),
        (
            {"question": "Q?", "answer": "A.", "system": "Be brief."},
            "chat",
            {"messages": [SYSTEM, USER, ASSISTANT]},
        ),
    ],
)
def test_each_shape_becomes_its_kind(row: Any, kind: str, expected: Any) -> None:
    assert kind_of(row) == kind
    made = standard(row, kind)
    assert made == expected and problem_of(made, kind) is None
    assert not unused({**row, "empty": None}, kind) and unused({**row, "id": 7}, kind) == ("id",)


def test_a_standard_record_is_passed_on_as_it_is() -> None:
    for row in ({"text": "a", "id": 1}, {"prompt": "Q", "completion": "A"}, {**PAIR, "tools": []}):
        assert standard(row, str(kind_of(row))) is row
    assert standard("words", "text") == "words"


def test_the_first_of_several_shapes_is_taken() -> None:
    assert kind_of({"messages": [], "text": ""}) == "chat"
    assert kind_of({"prompt": "", "completion": "", "id": 1}) == "prompt"
    assert kind_of({"text": ""}) == "text" and kind_of({"prompt": ""}) is None
    alpaca = {"instruction": "Q", "input": "", "output": "A", "text": "all of it"}
    assert kind_of(alpaca) == "text", "as Stanford's file was read before"
    assert unused(alpaca, "text") == ("instruction", "input", "output")
    shape = shape_of(alpaca, "chat")
    assert shape is not None and shape.name == "Alpaca"


def test_prompts_of_alpaca_are_stanfords() -> None:
    row = {"instruction": "Add.", "input": "2 2", "output": "4"}
    assert standard(row, "prompt") == {
        "prompt": "Below is an instruction that describes a task, paired with an input that "
        "provides further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n",
        "completion": "4",
    }
    assert standard({**row, "input": ""}, "prompt")["prompt"] == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nAdd.\n\n### Response:\n"
    )
    asked = standard({"question": "2 + 2?", "answer": "4"}, "prompt")
    assert asked == {"prompt": "Question: 2 + 2?\nAnswer: ", "completion": "4"}


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ({"conversations": "x"}, "chat", "has 'conversations' that are not a list of turns"),
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            "chat",
            "has a turn from 'alien', which is none of human, user, gpt,",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "{"}]},
            "chat",
            "has a 'function_call' that is not JSON",
        ),
        ({"instruction": "x", "output": 3}, "chat", "has a 'output' that is not text"),
        ({"instruction": "x", "output": None}, "chat", "has a 'output' that is null"),
        ({"instruction": None, "output": "y"}, "chat", "has a 'instruction' that is null"),
        ({"instruction": "x", "output": None}, "prompt", "has a 'output' that is null"),
        ({"question": "x", "answer": None}, "chat", "has a 'answer' that is null"),
        ({"question": None, "answer": "y"}, "chat", "has a 'question' that is null"),
        ({"question": "x", "answer": None}, "prompt", "has a 'answer' that is null"),
        (
            {"instruction": "x", "output": "y", "history": ["a"]},
            "chat",
            "has a 'history' that is not a list of pairs",
        ),
        (
            {"instruction": "x", "output": "y", "history": [["a", "b"]]},
            "prompt",
            "has a 'history' or 'system', which only a chat can have",
        ),
        (
            {"prompt": [USER], "completion": [USER]},
            "chat",
            "has a 'completion' without an assistant message",
        ),
        ({"prompt": ["x"], "completion": [USER]}, "chat", "has a message without role and content"),
    ],
)
def test_what_is_no_valid_row_of_its_shape_is_named(row: Any, kind: str, words: str) -> None:
    with pytest.raises(ShapeError) as caught:
        standard(row, kind)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": None}, "text"),
        ({"prompt": None, "completion": "A"}, "prompt"),
        ({"prompt": "Q", "completion": None}, "prompt"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "chat"),
        ({"messages": [{"role": "user", "content": None}, ASSISTANT]}, "chat"),
        ({"prompt": [USER], "completion": [{"role": "assistant", "content": None}]}, "chat"),
        ({"conversations": [USER, {"from": "gpt", "value": None}]}, "chat"),
        ({"instruction": "Q", "output": "A", "history": [["Q", None]]}, "chat"),
    ],
)
def test_null_is_no_text(row: Any, kind: str) -> None:
    """Of the other shapes it is refused before."""
    assert problem_of(standard(row, kind), kind)


def test_each_kind_has_the_shape_of_its_standard_records() -> None:
    assert tuple(KINDS) == get_args(RecordKind)
    of_kinds = {(shape.kind, shape.needs) for shape in shapes.SHAPES}
    for kind, each in KINDS.items():
        assert (kind, each.columns + ("label",) * each.labelled) in of_kinds


def test_fields_of_messages_that_nothing_is_made_of_are_named() -> None:
    answer = {**ASSISTANT, "refusal": None, "toolCalls": [], "name": "x", "text": "\ud83d"}
    messages = [{**USER, "weight": 1, "\ud83d": 1}, answer]
    assert unused_fields(messages) == (
        "messages.\\ud83d",
        "messages.toolCalls",
        "messages.text",
    )
    turns = {"conversations": [{"from": "gpt", "value": "A", "html": "<p>"}]}
    assert unused_fields(standard(turns, "chat")["messages"]) == ("messages.html",)


NUMBERS: dict[str, tuple[Any, float | str]] = {
    "whole": (7, 7.0),
    "below 0": (-0.1, -0.1),
    "text, as in CSV": (" 1e-3", 1e-3),
    "the largest": (3.4028234663852886e38, 3.4028234663852886e38),
    "too large": (3.5e38, "'r' that is not a finite number"),
    "much too large": (10**400, "'r' that is not a finite number"),
    "nan": (float("nan"), "'r' that is not a finite number"),
    "infinite": ("-inf", "'r' that is not a finite number"),
    "null": (None, "'r' that is not a finite number"),
    "true": (True, 1.0),
    "false, as in CSV": ("False", 0.0),
    "words": ("much", "'r' that is not a finite number"),
    "a list": ([1.0], "'r' that is not a finite number"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_a_column_of_a_loss_holds_finite_numbers(case: str) -> None:
    value, expected = NUMBERS[case]
    record = Record("a.jsonl", 0, {"question": "Q?", "answer": "A.", "r": value})
    made = standardised(record, "chat", {}, ("r",))
    if isinstance(expected, float):
        assert (made.values, made.problem) == ((expected,), None) and "messages" in made.value
    else:
        assert made.problem == f"has a {expected}, which train.loss needs"


@pytest.mark.parametrize(("value", "has"), [("a text", "is text"), ({"text": "a"}, "has 'text'")])
def test_a_record_without_the_column_of_a_loss_is_named(value: Any, has: str) -> None:
    made = standardised(Record("a", 0, value), "text", {}, ("r",))
    assert made.problem == f"has no column 'r', which a parameter of train.loss names (it {has})"


def test_columns_are_renamed_and_the_users_own_win() -> None:
    row = {"q": "Q?", "a": "A.", "question": "another", "id": 1}
    made = renamed(row, {"question": "q", "answer": "a"})
    assert made == {"question": "Q?", "answer": "A.", "id": 1}
    swapped = renamed(
        {"prompt": "A", "completion": "Q"}, {"prompt": "completion", "completion": "prompt"}
    )
    assert swapped == {"prompt": "Q", "completion": "A"}
    assert renamed(row, {}) is row and renamed("text", {"text": "x"}) == "text"
    assert set(shapes.NAMES) >= {"question", "answer", "tools", "input", "system"}
