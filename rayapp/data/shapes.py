"""The shapes of records: the columns that tell them, and how each becomes text, prompt or chat.

    shape = shape_of({"question": "2 + 2?", "answer": "4"})      # .kind == "chat"
    value = standard({"question": "2 + 2?", "answer": "4"}, "chat")["messages"]

The standard records are {"text"}, {"prompt", "completion"}, {"messages"}, and of a chosen and a
rejected answer {"prompt", "chosen", "rejected"} as texts, {"chosen", "rejected"} as messages.
docs/data.md has one row of each shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rayapp.config.fields import DataKind, RecordKind
from rayapp.data import sources
from rayapp.data.kinds import ANSWERS
from rayapp.data.messages import FIELDS

Row = Mapping[str, Any]

OF_CHATS = ("tools", "chat_template_kwargs")
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}{given}\n\n### Response:\n"
)
PAIRED = ", paired with an input that provides further context"
TRUTH = {"true": 1.0, "false": 0.0}  # values of JSON, and cells of CSV
LARGEST = float(np.finfo(np.float32).max)  # rows carry numbers as float32


class ShapeError(ValueError):
    """The record is no valid one of its shape; the message says what it has."""


@dataclass(frozen=True)
class RecordShape:
    """A known set of columns."""

    name: str
    kind: RecordKind
    """What data.kind=auto makes of it."""
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    """Other columns that are used."""
    to: Mapping[RecordKind, Callable[[Row], Row]] = field(default_factory=dict)
    """Conversions by kind; none for a standard record."""
    lists: bool = False
    """The columns hold lists of messages."""

    def fits(self, row: Row) -> bool:
        """Return whether a row has these columns, with lists where they must be.

        A `label` that is neither true nor false is some other column of the user's.
        """
        if not all(name in row for name in self.needs):
            return False
        if "label" in self.needs and str(row["label"]).lower() not in TRUTH:
            return False
        return not self.lists or all(isinstance(row[name], list) for name in self.needs[:2])


def _text(row: Row, name: str, needed: bool = False) -> str:
    """Return a column's text; nothing is an empty text, unless it is needed.

    Raises:
        ShapeError: it is something else.
    """
    value = row.get(name)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        raise ShapeError(f"has a {name!r} that is {'null' if value is None else 'not text'}")
    return value


def _chat(row: Row, messages: list[Any]) -> Row:
    """Return a chat, with the system's message that a row has in a column."""
    if system := _text(row, "system"):
        messages = [{"role": "system", "content": system}, *messages]
    return {"messages": messages} | {name: row[name] for name in OF_CHATS if row.get(name)}


def _of_sharegpt(row: Row) -> Row:
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ShapeError("has 'conversations' that are not a list of turns")
    return _chat(row, [turn if turn.get("role") else _turn(turn) for turn in turns])


def _turn(turn: Row) -> Row:
    """Return a turn of ShareGPT's as a message; its other fields stay."""
    role, value = turn.get("from"), turn.get("value")
    if not isinstance(role, str) or role not in ROLES:
        raise ShapeError(f"has a turn from {role!r}, which is none of {', '.join(ROLES)}")
    message = {name: item for name, item in turn.items() if name not in ("from", "value")}
    if role != "function_call":
        return {"role": ROLES[role], "content": value, **message}
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ShapeError("has a 'function_call' that is not JSON") from error
    calls = calls if isinstance(calls, list) else [calls]
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": calls, **message}


def _of_alpaca(row: Row) -> Row:
    history = row.get("history") or []
    try:
        before = [turn for question, answer in history for turn in _pair(question, answer)]
    except (TypeError, ValueError) as error:
        raise ShapeError("has a 'history' that is not a list of pairs") from error
    question = "\n".join(
        filter(None, (_text(row, "instruction", needed=True), _text(row, "input")))
    )
    return _chat(row, [*before, *_pair(question, _text(row, "output", needed=True))])


def _prompt_of_alpaca(row: Row) -> Row:
    if row.get("history") or row.get("system"):
        raise ShapeError("has a 'history' or 'system', which only a chat can have")
    given = _text(row, "input")
    prompt = ALPACA.format(
        paired=PAIRED if given else "",
        instruction=_text(row, "instruction", needed=True),
        given=f"\n\n### Input:\n{given}" if given else "",
    )
    return {"prompt": prompt, "completion": _text(row, "output", needed=True)}


def _of_questions(row: Row) -> Row:
    return _chat(row, _pair(_text(row, "question", needed=True), _text(row, "answer", needed=True)))


def _prompt_of_questions(row: Row) -> Row:
    if row.get("system"):
        raise ShapeError("has a 'system', which only a chat can have")
    prompt = f"Question: {_text(row, 'question', needed=True)}\nAnswer: "
    return {"prompt": prompt, "completion": _text(row, "answer", needed=True)}


def _of_turns(row: Row) -> Row:
    """Join a prompt and a completion of messages; the answers in the prompt bear no loss."""
    if not all(isinstance(turn, Mapping) for turn in [*row["prompt"], *row["completion"]]):
        raise ShapeError("has a message without role and content")
    prompt = [
        {**turn, "weight": 0} if turn.get("role") == "assistant" else turn for turn in row["prompt"]
    ]
    if not any(turn.get("role") == "assistant" for turn in row["completion"]):
        raise ShapeError("has a 'completion' without an assistant message")
    return _chat(row, [*prompt, *row["completion"]])


def _answer_of_turns(row: Row) -> Row:
    return {**_of_turns(row), "label": row["label"]}


def _answer_of_question(row: Row) -> Row:
    texts = (_text(row, name, needed=True) for name in ("prompt", "completion"))
    return {**_chat(row, _pair(*texts)), "label": row["label"]}


def _pair_of_turns(row: Row) -> Row:
    """Put the prompt, messages or a text, before the two answers, unless these repeat it."""
    prompt = row.get("prompt") or []
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    made = {}
    for name in ANSWERS:
        turns = row[name]
        if not all(isinstance(turn, Mapping) for turn in [*prompt, *turns]):
            raise ShapeError("has a message without role and content")
        begins = bool(turns) and turns[0].get("role") == "assistant"
        made[name] = _chat(row, [*prompt, *turns] if begins else list(turns))
    return _of_pairs(made)


def _of_pairs(made: Mapping[str, Row]) -> Row:
    more = {name: value for name, value in made["chosen"].items() if name != "messages"}
    return {name: made[name]["messages"] for name in ANSWERS} | more


def _pair_of_questions(row: Row) -> Row:
    question = _text(row, "question" if "question" in row else "prompt", needed=True)
    return _of_pairs(
        {name: _chat(row, _pair(question, _text(row, name, needed=True))) for name in ANSWERS}
    )


def _without_system(row: Row) -> Row:
    if row.get("system"):
        kind = "chat_unpaired" if "label" in row else "chat_preference"
        raise ShapeError(f"has a 'system': only a chat has one. Set data.kind={kind}")
    return row


def _pair_of_texts(row: Row) -> Row:
    """Take what both texts begin with, up to a space or line end, as the prompt of both."""
    chosen, rejected = (_text(row, name, needed=True) for name in ANSWERS)
    least = min(len(chosen), len(rejected))
    same = next((i for i in range(least) if chosen[i] != rejected[i]), least)
    size = max(chosen.rfind(" ", 0, same), chosen.rfind("\n", 0, same) + 1, 0)
    return {"prompt": chosen[:size], "chosen": chosen[size:], "rejected": rejected[size:]}


def _pair_of_scored(row: Row) -> Row:
    """Take the answers with the highest and the lowest score."""
    answers = row["completions"]
    if not isinstance(answers, list) or not all(isinstance(each, Mapping) for each in answers):
        raise ShapeError("has 'completions' that are not a list of answers with scores")
    scored = []
    for each in answers:
        name = next((name for name in ("overall_score", "score") if name in each), "score")
        if (score := _number(each.get(name))) is None:
            raise ShapeError(f"has an answer without a {name!r}")
        scored.append((score, _text(each, "response", needed=True)))
    if len({score for score, _ in scored}) < 2:
        raise ShapeError("has no two answers with different scores")
    (_, chosen), (_, rejected) = (pick(scored, key=lambda each: each[0]) for pick in (max, min))
    question = _text(row, "instruction", needed=True)
    return _pair_of_questions({**row, "question": question, "chosen": chosen, "rejected": rejected})


def _pair(question: Any, answer: Any) -> list[Row]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


SHAPES = (
    RecordShape(
        "pairs of chats",
        "chat_preference",
        ANSWERS,
        ("prompt", "system", *OF_CHATS),
        {"chat_preference": _pair_of_turns},
        True,
    ),
    RecordShape(
        "pairs",
        "preference",
        ("prompt", *ANSWERS),
        ("system",),
        {"preference": _without_system, "chat_preference": _pair_of_questions},
    ),
    RecordShape(
        "pairs of answers",
        "chat_preference",
        ("question", *ANSWERS),
        ("system",),
        {"chat_preference": _pair_of_questions},
    ),
    RecordShape("pairs of texts", "preference", ANSWERS, (), {"preference": _pair_of_texts}),
    RecordShape(
        "scored answers",
        "chat_preference",
        ("instruction", "completions"),
        ("system",),
        {"chat_preference": _pair_of_scored},
    ),
    RecordShape(
        "labelled chats",
        "chat_unpaired",
        ("prompt", "completion", "label"),
        (*OF_CHATS, "system"),
        {"chat_unpaired": _answer_of_turns},
        True,
    ),
    RecordShape(
        "labelled answers",
        "unpaired",
        ("prompt", "completion", "label"),
        ("system",),
        {"unpaired": _without_system, "chat_unpaired": _answer_of_question},
    ),
    RecordShape("labelled messages", "chat_unpaired", ("messages", "label"), OF_CHATS),
    RecordShape("messages", "chat", ("messages",), OF_CHATS),
    RecordShape(
        "turns", "chat", ("prompt", "completion"), (*OF_CHATS, "system"), {"chat": _of_turns}, True
    ),
    RecordShape("prompt", "prompt", ("prompt", "completion")),
    RecordShape("text", "text", ("text",)),
    RecordShape(
        "ShareGPT", "chat", ("conversations",), (*OF_CHATS, "system"), {"chat": _of_sharegpt}
    ),
    RecordShape(
        "Alpaca",
        "chat",
        ("instruction", "output"),
        ("input", "history", "system", *OF_CHATS),
        {"chat": _of_alpaca, "prompt": _prompt_of_alpaca},
    ),
    RecordShape(
        "questions",
        "chat",
        ("question", "answer"),
        ("system", *OF_CHATS),
        {"chat": _of_questions, "prompt": _prompt_of_questions},
    ),
)
NAMES = tuple(dict.fromkeys(name for shape in SHAPES for name in (*shape.needs, *shape.may)))


def shape_of(row: Row, kind: DataKind = "auto") -> RecordShape | None:
    """Return the first shape that a row has and that makes a record of a kind, or None."""
    for shape in SHAPES:
        possible = kind in ("auto", shape.kind) or kind in shape.to
        if possible and shape.fits(row):
            return shape
    return None


def kind_of(row: Row) -> RecordKind | None:
    """Return the kind that `auto` makes of a row, or None if its shape is not known."""
    shape = shape_of(row)
    return None if shape is None else shape.kind


def standard(row: Any, kind: RecordKind) -> Any:
    """Return a row as the standard record of a kind; a row of unknown shape stays as it is.

    Raises:
        ShapeError: it is no valid row of its shape.
    """
    if isinstance(row, str) or not isinstance(row, Mapping):
        return row
    shape = shape_of(row, kind)
    return row if shape is None or not shape.to else shape.to[kind](row)


def renamed(row: Any, columns: Mapping[str, str]) -> Any:
    """Return a row with the columns that data.columns names in place of the user's.

    >>> renamed({"q": "2 + 2?", "a": "4"}, {"prompt": "q", "completion": "a"})
    {'prompt': '2 + 2?', 'completion': '4'}
    """
    if not columns or not isinstance(row, Mapping):
        return row
    taken = set(columns.values())
    rest = {name: value for name, value in row.items() if name not in taken | columns.keys()}
    return {**{name: row[own] for name, own in columns.items() if own in row}, **rest}


def number_in(row: Any, name: str) -> float:
    """Return the number that a row has in a column; text of a number, as in CSV, is one.

    Raises:
        ShapeError: the row has no such column, or no finite number there.
    """
    if isinstance(row, str) or name not in row:
        has = "is text" if isinstance(row, str) else f"has {', '.join(map(repr, sorted(row)))}"
        raise ShapeError(
            f"has no column {name!r}, which a parameter of train.loss names (it {has})"
        )
    if (number := _number(row[name])) is None:
        raise ShapeError(f"has a {name!r} that is not a finite number, which train.loss needs")
    return number


def _number(value: Any) -> float | None:
    """Return a finite number that float32 holds, also of text; None for all else."""
    try:
        number = float(TRUTH.get(str(value).lower(), value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def unused(row: Any, kind: RecordKind) -> tuple[str, ...]:
    """Return the columns of a row that nothing is made of; those without a value do not count."""
    shape = None if isinstance(row, str) else shape_of(row, kind)
    return () if shape is None else _others(row, (*shape.needs, *shape.may))


def unused_fields(messages: Sequence[Row]) -> tuple[str, ...]:
    """Return `messages.NAME` for each field of valid messages that only a template may read."""
    each = (name for message in messages for name in _others(message, FIELDS))
    return tuple(f"messages.{name}" for name in each)


def _others(row: Row, known: Collection[str]) -> tuple[str, ...]:
    found = (name for name, value in row.items() if name not in known and value is not None)
    return tuple(map(sources.printable, found))


def standardised(
    record: sources.Record, kind: RecordKind, columns: Mapping[str, str], names: Sequence[str] = ()
) -> sources.Record:
    """Return a record with the standard value of a kind, or with why there is none.

    It also has the numbers in the columns `names`, by the names that the user's file has.
    """
    if record.problem is not None:
        return record
    try:
        value = standard(renamed(record.value, columns), kind)
        values = tuple(number_in(record.value, name) for name in names)
    except ShapeError as error:
        return replace(record, problem=str(error))
    unchanged = value is record.value and not values
    return record if unchanged else replace(record, value=value, values=values)


def read_records(
    source: sources.DataSource,
    piece: sources.Piece,
    kind: RecordKind,
    columns: Mapping[str, str],
    names: Sequence[str] = (),
) -> Iterator[sources.Record]:
    """Yield the records of a piece in order, as `standardised`."""
    records = sources.read_piece(source, piece)
    return (standardised(record, kind, columns, names) for record in records)
