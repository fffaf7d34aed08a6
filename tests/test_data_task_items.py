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
