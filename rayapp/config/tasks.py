"""The settings of a task on which a model is scored."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rayapp.config.fields import Section, Text, mapping

Score = Literal["exact", "normalised", "number", "json", "regex", "loss"]


class EvalTask(Section):
    path: Text
    """Prompts or chats, read like `data.path`; the last answer of each record is the reference."""
    score: Score = "exact"
    """When an answer is right. exact: the same text as the reference. normalised: the same words.
    number: the same last number. json: an equal value. regex: the answer contains a match of the
    reference, a pattern. loss: nothing is generated; the score is the loss of the references."""
    max_tokens: int = Field(default=256, ge=1, le=65_536)
    """Maximum number of tokens of an answer."""


def _as_task(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _names(value: Any) -> Any:
    if isinstance(value, dict):
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][\w.-]{0,62}", str(name)):
                raise ValueError(f"{name!r} must be a name of letters, digits, _, . and -")
    return value


Tasks = Annotated[
    dict[str, Annotated[EvalTask, BeforeValidator(_as_task)]],
    BeforeValidator(_names),
    BeforeValidator(mapping),
]
