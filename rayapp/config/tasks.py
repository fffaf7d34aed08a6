"""The settings of a task on which a model is scored."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rayapp.config.fields import Section, Text, mapping

Score = Literal["exact", "normalised", "number", "json", "regex", "loss"]


class EvalTask(Section):
    path: Text
    """Records as of `data.path`, prompts or chats; the last answer of each is the wanted one."""
    score: Score = "exact"
    """What makes an answer right. exact: the same text; normalised: the same words; number: the
    same last number; json: an equal value; regex: it holds the pattern that the wanted answer is.
    loss: no answer is generated, and the figure is the loss of the wanted answers."""
    max_tokens: int = Field(default=256, ge=1, le=65_536)
    """Most tokens of an answer."""


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
