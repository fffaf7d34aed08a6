"""The kinds of record: what every part of rayapp that depends on the kind needs to know of each.

    problem_of({"text": 7}, "text")        # why a record is no valid one of its kind, or None
    texts_of(chat, "chat")                 # what a tokenizer is trained on

A standard record has the columns of its kind. `rayapp.data.shapes` makes standard records of other
columns, and `rayapp.data.rendering` makes documents of standard records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rayapp.config.fields import RecordKind
from rayapp.data.messages import SPEAKING, said_by, tools_of

NOT_UNICODE = "has text that is not Unicode (half of a surrogate pair)"
ANSWERS = ("chosen", "rejected")  # the columns of pairs, in the order of their documents
EQUAL = "has equal 'chosen' and 'rejected' answers"
AS_TEXT = re.compile(r"\[\s*\{\s*['\"](role|content)['\"]\s*:")  # as a cell of CSV may hold

Row = Mapping[str, Any]


@dataclass(frozen=True)
class KindOfRecord:
    """What holds for every record of a kind."""

    columns: tuple[str, ...]
    """Columns of a standard record. Their values identify the record."""
    version: int
    """Version of the rows that are made of such records; a part of each fingerprint."""
    problem: Callable[[Row], str | None]
    """Return why a record that has the columns is invalid, or None."""
    messages: Callable[[Row], Sequence[Row]] | None = None
    """Return the messages of a valid record, which a chat template renders. None: every column is
    a text, and no template is used."""
    asks: Callable[[Row], Any] | None = None
    """Of preferences: return what the answers of a record answer. Records that ask the same are all
    trained on, or all held out. None: a record tells no preference."""
    labelled: bool = False
    """Of preferences: a record has one answer, and `label` says whether it is good."""


def problem_of(value: Any, kind: RecordKind) -> str | None:
    """Return why a record is no valid document of this kind, or None; needs no tokenizer."""
    if isinstance(value, str):
        return _problem_of_text(value) if kind == "text" else f"is plain text, not {kind}"
    for name in KINDS[kind].columns:
        if name not in value:
            names = ", ".join(map(repr, sorted(value))) or "none"
            return f"has no column {name!r} (it has {names})"
    return KINDS[kind].problem(value)


def messages_of(value: Row, kind: RecordKind) -> Sequence[Row]:
    """Return the messages of a valid record; none if its kind takes no chat template."""
    messages = KINDS[kind].messages
    return messages(value) if messages else ()


def texts_of(value: Any, kind: RecordKind) -> list[str]:
    """Return the texts of a valid record, on which a tokenizer is trained."""
    if isinstance(value, str):
        return [value]
    if takes_template(kind):
        return [said_by(message) for message in messages_of(value, kind)]
    return [value[name] for name in KINDS[kind].columns]


def are_pairs(kind: str) -> bool:
    """Return whether the documents of a kind come in pairs: the record tells a preference."""
    found = KINDS.get(cast(RecordKind, kind))
    return found is not None and found.asks is not None


def are_labelled(kind: str) -> bool:
    """Return whether a record of a kind has one answer, which is good or bad."""
    found = KINDS.get(cast(RecordKind, kind))
    return found is not None and found.labelled


def takes_template(kind: str) -> bool:
    """Return whether a chat template renders the records of a kind; `auto` is no kind."""
    found = KINDS.get(cast(RecordKind, kind))
    return found is not None and found.messages is not None


def _problem_of_column(record: Row, name: str) -> str | None:
    if not isinstance(record[name], str):
        return f"has a {name!r} that is not text"
    return _problem_of_text(record[name])


def _problem_of_prompt(record: Row) -> str | None:
    for name in ("prompt", "completion"):
        if problem := _problem_of_text_alone(record, name):
            return problem
    return None


def _problem_of_text_alone(record: Row, name: str) -> str | None:
    if isinstance(record[name], str) and AS_TEXT.match(record[name]):
        return f"has a {name!r} that is a list of messages written as text"
    return _problem_of_column(record, name)


def _problem_of_preference(record: Row) -> str | None:
    for name in ("prompt", *ANSWERS):
        if problem := _problem_of_text_alone(record, name):
            return problem
    return _problem_of_answers(*(record[name] for name in ANSWERS))


def _problem_of_answers(chosen: str, rejected: str) -> str | None:
    for name, answer in zip(ANSWERS, (chosen, rejected), strict=True):
        if not answer.strip():
            return f"has an empty {name!r} answer"
    return EQUAL if chosen == rejected else None


def _problem_of_chat_preference(record: Row) -> str | None:
    for name in ANSWERS:
        if problem := _problem_of_chat({**record, "messages": record[name]}):
            return problem.replace("'messages'", repr(name))
        if record[name][-1]["role"] != "assistant":
            return f"has {name!r} messages that do not end with the assistant's"
    if _asked(record) != list(record["rejected"][:-1]):
        return "has 'chosen' and 'rejected' messages that answer different prompts"
    last = [record[name][-1] for name in ANSWERS]
    if any(message.get(name) for message in last for name in SPEAKING):
        return EQUAL if last[0] == last[1] else None
    return _problem_of_answers(*map(said_by, last))


def _problem_of_unpaired(record: Row) -> str | None:
    return _problem_of_prompt(record) or _problem_of_answer(record["completion"])


def _problem_of_chat_unpaired(record: Row) -> str | None:
    if problem := _problem_of_chat(record):
        return problem
    last = record["messages"][-1]
    if last["role"] != "assistant":
        return "has messages that do not end with the assistant's"
    return None if any(map(last.get, SPEAKING)) else _problem_of_answer(said_by(last))


def _problem_of_answer(answer: str) -> str | None:
    return None if answer.strip() else "has an empty answer"


def _asked(record: Row) -> list[Row]:
    return list(record["chosen"][:-1])


def _problem_of_text(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return NOT_UNICODE
    return None


def _problem_of_chat(chat: Mapping[str, Any]) -> str | None:
    messages = chat["messages"]
    if isinstance(messages, str) or not hasattr(messages, "__iter__") or not len(messages):
        return "has 'messages' that are not a list of messages"
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return "has a message without role and content"
        if message.get("weight") not in (None, 0, 1):
            return "has a message with a weight that is neither 0 nor 1"
        if problem := _problem_of_content(message):
            return problem
    try:
        names = [tool.get("function", tool)["name"] for tool in tools_of(chat)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "has 'tools' that are not a list of functions with names"
    if not all(isinstance(name, str) for name in names):
        return "has 'tools' that are not a list of functions with names"
    kwargs = chat.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        return "has 'chat_template_kwargs' that are not an object"
    answers = [message for message in messages if message["role"] == "assistant"]
    if answers and all(message.get("weight") == 0 for message in answers):
        return "has no assistant message with a weight above 0"
    return None if answers else "has no assistant message"


def _problem_of_content(message: Mapping[str, Any]) -> str | None:
    """Return why a message's content or calls are invalid; calls or reasoning may be alone."""
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        return "has 'tool_calls' that are not a list of calls of functions with names"
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and any(message.get(name) for name in SPEAKING):
            return None
        if "content" in message:
            return "has a message whose content is not text"
        return "has a message without role and content"
    if not isinstance(content, str) and not (
        isinstance(content, list) and all(map(_is_text_part, content))
    ):
        return "has a message whose content is not text"
    return _problem_of_text(said_by(message))


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


KINDS: Mapping[RecordKind, KindOfRecord] = {
    "text": KindOfRecord(("text",), 3, lambda record: _problem_of_column(record, "text")),
    "prompt": KindOfRecord(("prompt", "completion"), 3, _problem_of_prompt),
    "chat": KindOfRecord(("messages",), 4, _problem_of_chat, lambda record: record["messages"]),
    "preference": KindOfRecord(
        ("prompt", *ANSWERS), 1, _problem_of_preference, asks=lambda record: record["prompt"]
    ),
    "chat_preference": KindOfRecord(
        ANSWERS,
        1,
        _problem_of_chat_preference,
        lambda record: [*record["chosen"], *record["rejected"]],
        _asked,
    ),
    "unpaired": KindOfRecord(
        ("prompt", "completion"),
        1,
        _problem_of_unpaired,
        asks=lambda record: record["prompt"],
        labelled=True,
    ),
    "chat_unpaired": KindOfRecord(
        ("messages",),
        1,
        _problem_of_chat_unpaired,
        lambda record: record["messages"],
        lambda record: list(record["messages"][:-1]),
        labelled=True,
    ),
}
