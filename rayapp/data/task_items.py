"""Read the items of eval.tasks, and make tokens of what is asked and of the wanted answers.

records, problems = read_records("dates", config.eval.tasks["dates"])
task, problems = items_of(records, Renderer(tokenizer, records.kind))
task.items[0].wanted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np

from rayapp.config.fields import RecordKind
from rayapp.config.tasks import EvalTask
from rayapp.data import first_records, shapes, sources
from rayapp.data.kinds import are_pairs, messages_of, problem_of
from rayapp.data.messages import said_by
from rayapp.data.packing import Document
from rayapp.data.prepared import reasons
from rayapp.data.rendering import Renderer
from rayapp.storage import StorageError

MOST_CHOICES = 64


@dataclass(frozen=True)
class TaskRecords:
    """The standard records of a task, prompts or chats, each with its place in a file."""

    name: str
    task: EvalTask
    kind: RecordKind
    records: tuple[tuple[str, Mapping[str, Any]], ...]
    choices: tuple[tuple[str, ...], ...]
    """Of each record, the answers to choose from; empty unless the task's score is choice."""


@dataclass(frozen=True)
class Item:
    """One question, as a reader and as the model sees it."""

    asked: str
    """The prompt, or the last message before the answer."""
    wanted: str
    prompt: tuple[int, ...]
    """Tokens: what the model reads before it answers."""
    answer: tuple[int, ...]
    """Tokens of the wanted answer."""
    choices: tuple[Item, ...] = ()
    """The item with each of the answers to choose from; where the task's score is choice."""


@dataclass(frozen=True)
class TaskItems:
    """A task with its items."""

    name: str
    task: EvalTask
    items: tuple[Item, ...]


def read_records(name: str, task: EvalTask) -> tuple[TaskRecords | None, list[str]]:
    """Return a task's records, or None and what is wrong with them."""
    field = f"eval.tasks.{name}.path"
    try:
        source = sources.find(task.path, "auto")
        found = first_records.inspect(task.path, source, "auto", 0.0)
        if found.problems:
            return None, [line.replace("data.path=", f"{field}=", 1) for line in found.problems]
        raw = [each for piece in _pieces(source) for each in sources.read_piece(source, piece)]
        every = [shapes.standardised(each, found.kind, {}) for each in raw]
    except (sources.SourceError, StorageError) as error:
        text = str(error)
        text = text if text.startswith("data.path=") else f"data.path={task.path}: {text}"
        return None, [text.replace("data.path=", f"{field}=", 1)]
    if are_pairs(found.kind):
        return None, [
            f"{field}={task.path} holds preferences, and a task has one right answer. Give "
            "prompts with completions, or chats; held-out preferences are evaluated without a task"
        ]
    if found.kind == "text" and task.score != "loss":
        return None, [
            f"{field}={task.path} is without answers: its records are texts. Give prompts with "
            "completions, or chats, or set score: loss"
        ]
    places = [sources.place_of(source, record.file, record.place) for record in every]
    problems = [record.problem or _problem_of(record.value, found.kind) for record in every]
    if wrong := _unusable(f"{field}={task.path}", places, problems):
        return None, wrong
    values = [{"text": each.value} if isinstance(each.value, str) else each.value for each in every]
    choices: list[tuple[str, ...]] = [()] * len(every)
    if task.score == "choice":
        wanted = [asked_and_wanted(value, found.kind)[1] for value in values]
        own = [_choices_of(record.value) for record in raw]
        choices = [each or tuple(dict.fromkeys(wanted)) for each in own]
        lacks = [_lacks(*each) for each in zip(wanted, choices, strict=True)]
        if wrong := _unusable(f"{field}={task.path}", places, lacks):
            return None, wrong
    records = tuple(zip(places, values, strict=True))
    return TaskRecords(name, task, found.kind, records, tuple(choices)), []


def items_of(found: TaskRecords, renderer: Renderer) -> tuple[TaskItems | None, list[str]]:
    """Return a task with its items, or None and which records cannot be rendered."""
    made = renderer.documents([record for _, record in found.records])
    problems = [
        note if document is None else None if document.loss.any() else "has no answer to learn"
        for document, note in made
    ]
    field = f"eval.tasks.{found.name}.path={found.task.path}"
    if wrong := _unusable(field, [place for place, _ in found.records], problems):
        return None, wrong
    items = [
        _item(record, found.kind, document)
        for (_, record), (document, _) in zip(found.records, made, strict=True)
        if document is not None
    ]
    for place, texts in enumerate(found.choices):
        others = [answered(found.records[place][1], found.kind, text) for text in texts]
        documents = [document for document, _ in renderer.documents(others) if document is not None]
        each = zip(others, documents, strict=True)
        choices = tuple(_item(record, found.kind, document) for record, document in each)
        items[place] = replace(items[place], choices=choices)
    return TaskItems(found.name, found.task, tuple(items)), []


def standard_records(
    source: sources.DataSource, kind: RecordKind, columns: Mapping[str, str]
) -> Iterator[sources.Record]:
    """Yield all records of a source as standard ones of a kind."""
    for piece in _pieces(source):
        yield from shapes.read_records(source, piece, kind, columns)


def _pieces(source: sources.DataSource) -> Iterator[sources.Piece]:
    return (piece for unit in sources.units(source, 0.0) for piece in unit.pieces)


def _choices_of(value: Any) -> tuple[str, ...]:
    """Return the texts in the column `choices` of a record as it is in the file."""
    choices = value.get("choices") if isinstance(value, Mapping) else None
    return tuple(map(str, choices)) if isinstance(choices, list | tuple) else ()


def _lacks(wanted: str, choices: Sequence[str]) -> str | None:
    if not 2 <= len(choices) <= MOST_CHOICES:
        return f"has {len(choices)} answers to choose from, not 2 to {MOST_CHOICES}"
    return None if wanted in choices else "has a reference that is none of its choices"


def questions_of(record: Mapping[str, Any], kind: RecordKind) -> Iterator[tuple[str, ...]]:
    """Yield the texts before each answer of a valid record, without the system's."""
    if kind == "prompt":
        yield (str(record["prompt"]).strip(),)
    said: tuple[str, ...] = ()
    for message in messages_of(record, kind):
        if message["role"] == "assistant":
            yield said
        if message["role"] != "system":
            said = (*said, said_by(message).strip())


def _unusable(what: str, places: list[str], problems: list[str | None]) -> list[str]:
    wrong = [(place, why) for place, why in zip(places, problems, strict=True) if why]
    if not wrong:
        return []
    found = reasons(Counter(why for _, why in wrong), wrong)
    return [f"{what} is unusable in {len(wrong)} of {len(places)} records: {found}. Correct them"]


def _problem_of(value: Any, kind: RecordKind) -> str | None:
    if problem := problem_of(value, kind):
        return problem
    if any(message["role"] != "assistant" for message in messages_of(value, kind)[-1:]):
        return "does not end with an answer of the assistant"
    return None


def _item(record: Mapping[str, Any], kind: RecordKind, document: Document) -> Item:
    """Make an item of a record; the answer is the last run of tokens that bear loss."""
    last = int(np.flatnonzero(document.loss)[-1])
    first = last - int(np.argmin(np.append(document.loss[:last][::-1], False)))
    tokens = document.tokens.tolist()
    asked, wanted = asked_and_wanted(record, kind)
    return Item(asked, wanted, tuple(tokens[:first]), tuple(tokens[first : last + 1]))


def asked_and_wanted(record: Mapping[str, Any], kind: RecordKind) -> tuple[str, str]:
    """Return the prompt or the last message before the answer, and the answer, of an item."""
    match kind:
        case "text":
            return "", record["text"]
        case "prompt":
            return record["prompt"], record["completion"]
        case "chat":
            *before, answer = record["messages"]
            return said_by(before[-1]) if before else "", said_by(answer)
        case "preference" | "chat_preference" | "unpaired" | "chat_unpaired":
            raise AssertionError("read_records refuses pairs")
    assert_never(kind)


def answered(record: Mapping[str, Any], kind: RecordKind, text: str) -> Mapping[str, Any]:
    """Return a prompt or a chat with another answer."""
    if kind == "prompt":
        return {**record, "completion": text}
    *before, answer = record["messages"]
    return {**record, "messages": [*before, {**answer, "content": text}]}
