"""The items of eval.tasks: what is asked, the wanted answer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.tasks import EvalTask
from rayapp.data.rendering import Renderer
from rayapp.data.task_items import items_of, read_records
from rayapp.data.tokens import byte_tokenizer

CHAT = {
    "messages": [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
}
SIX = {"role": "assistant", "content": "six"}
PROMPT = {"prompt": "2 + 2 =", "completion": " 4"}


def written(folder: Path, *records: Any) -> EvalTask:
    path = folder / "items.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return EvalTask(path=str(path))


@pytest.mark.parametrize(
    ("record", "asked", "wanted", "prompt", "answer"),
    [
        (PROMPT, "2 + 2 =", " 4", "2 + 2 =", " 4<|endoftext|>"),
        (
            CHAT,
            "three",
            "four",
            "<|im_start|>system\nCount.<|im_end|><|im_start|>user\none<|im_end|>"
            "<|im_start|>assistant\ntwo<|im_end|><|im_start|>user\nthree<|im_end|>"
            "<|im_start|>assistant\n",
            "four<|im_end|>",
        ),
    ],
)
def test_an_item_is_the_last_answer_behind_what_is_trained_to_come_before_it(
    record: Any, asked: str, wanted: str, prompt: str, answer: str, tmp_path: Path
) -> None:
    found, problems = read_records("t", written(tmp_path, record, record))
    assert found is not None and not problems
    tokenizer = byte_tokenizer()
    task, problems = items_of(found, Renderer(tokenizer, found.kind))
    assert task is not None and not problems and len(task.items) == 2
    item = task.items[1]
    assert (item.asked, item.wanted) == (asked, wanted)
    assert tokenizer.decode(item.prompt) == prompt
    assert tokenizer.decode(item.answer) == answer


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([{"text": "a"}], "without answers: its records are texts"),
        ([CHAT, {"messages": CHAT["messages"][:-1]}], "does not end with an answer"),
        ([PROMPT, {"prompt": "a", "completion": 4}], "unusable in 1 of"),
        ([], "empty"),
    ],
)
def test_records_without_an_answer_are_refused(
    records: list[Any], problem: str, tmp_path: Path
) -> None:
    task = written(tmp_path, *records)
    found, problems = read_records("t", task)
    assert found is None and problem in problems[0]
    assert problems[0].startswith(f"eval.tasks.t.path={task.path}")


def test_a_path_without_a_file_is_told_as_the_tasks(tmp_path: Path) -> None:
    found, problems = read_records("t", EvalTask(path=str(tmp_path / "none.jsonl")))
    assert found is None and problems[0].startswith("eval.tasks.t.path=")


def test_an_answer_without_loss_is_refused(tmp_path: Path) -> None:
    silent = {"messages": [CHAT["messages"][1], {**CHAT["messages"][2], "weight": 0}]}
    found, problems = read_records("t", written(tmp_path, silent, CHAT))
    assert found is None and "unusable in 1 of" in problems[0]


def test_choices_are_the_records_own_or_all_references(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    own = {**PROMPT, "choices": [" 5", " 4", " 22"]}
    for records, texts in (
        ([own, own], [" 5", " 4", " 22"]),
        ([PROMPT, {**PROMPT, "completion": " 7"}], [" 4", " 7"]),
        ([CHAT, {"messages": [*CHAT["messages"][:-1], SIX]}], ["four", "six"]),
    ):
        task = written(tmp_path, *records).model_copy(update={"score": "choice"})
        found, problems = read_records("t", task)
        assert found is not None and not problems
        made, problems = items_of(found, Renderer(tokenizer, found.kind))
        assert made is not None and not problems
        for item in made.items:
            assert [choice.wanted for choice in item.choices] == texts
            assert {choice.prompt for choice in item.choices} == {item.prompt}
            mine = next(choice for choice in item.choices if choice.wanted == item.wanted)
            assert mine.answer == item.answer


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([PROMPT, PROMPT], "has 1 answers to choose from, not 2 to 64"),
        ([{**PROMPT, "choices": [" 5", " 6"]}], "reference that is none of its choices"),
    ],
)
def test_choices_that_are_none_are_refused(
    records: list[Any], problem: str, tmp_path: Path
) -> None:
    task = written(tmp_path, *records).model_copy(update={"score": "choice"})
    found, problems = read_records("t", task)
    assert found is None and problem in problems[0]


def test_the_loss_of_texts_is_that_of_all_their_tokens(tmp_path: Path) -> None:
    task = written(tmp_path, {"text": "abc"}).model_copy(update={"score": "loss"})
    found, _ = read_records("t", task)
    assert found is not None
    made, _ = items_of(found, Renderer(byte_tokenizer(), found.kind))
    assert made is not None and byte_tokenizer().decode(made.items[0].answer) == "abc<|endoftext|>"
    assert made.items[0].prompt == ()
