"""The settings of what a model is scored on, and of what its figures must reach."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field

from rayapp.config.code import CODE_PATTERN
from rayapp.config.fields import Section, Text, comma_list, mapping

SCORES = ("exact", "normalised", "number", "json", "regex", "choice", "loss", "base")
LOSSES = ("loss", "base")  # in nats per token, better if lower


class EvalTask(Section):
    path: Text
    """Prompts or chats, read like `data.path`; the last answer of each record is the reference."""
    score: Text = Field(default="exact", pattern=f"^({'|'.join(SCORES)})$|{CODE_PATTERN}")
    """When an answer is right. exact: the same text as the reference. normalised: the same words.
    number: the same last number. json: an equal value. regex: the answer contains a match of the
    reference, a pattern. choice: nothing is generated; of the record's `choices`, or else of all
    references, the model finds the reference likeliest. loss: nothing is generated; the score is
    the loss of the references. base: the loss of what the base answers before the first step.
    `mypackage.module:function`: it returns whether (answer, reference)
    is right."""
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

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
CONDITION = re.compile(
    r"(?P<name>[A-Za-z_][\w./-]*) *(?P<comparison><=|>=|<|>) *"
    r"((?P<base>base)( *(?P<sign>[+-]) *(?P<step>[\d.]+))?|(?P<number>-?[\d.]+))"
)


@dataclass(frozen=True)
class Condition:
    """A condition of `eval.gate`."""

    text: str
    name: str
    """The figure: `eval_loss`, a task or a function of eval.metrics."""
    comparison: str
    base: bool
    """Whether `number` is added to the figure before the first step."""
    number: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `dates >= 0.9` or `eval_loss <= base + 0.1`; raise ValueError for any other text."""
        found = CONDITION.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} must be a figure, <=, >=, < or >, and a number or `base + number`"
            )
        number = float(found["number"] or (found["sign"] or "") + (found["step"] or "0"))
        return cls(text, found["name"], found["comparison"], bool(found["base"]), number)

    def limit(self, before: float | None) -> float | None:
        """Return the number to compare with; None if the figure before the first step is needed."""
        if not self.base:
            return self.number
        return None if before is None else before + self.number

    def met(self, value: float | None, before: float | None) -> bool:
        """Compare a figure; one that is not known meets no condition.

        >>> Condition.parse("general <= base + 0.1").met(2.0, 1.95)
        True
        """
        limit = self.limit(before)
        if value is None or limit is None:
            return False
        return COMPARISONS[self.comparison](value, limit)


def _condition(text: str) -> str:
    return Condition.parse(text).text


Gate = Annotated[
    tuple[Annotated[str, AfterValidator(_condition)], ...], BeforeValidator(comma_list)
]
