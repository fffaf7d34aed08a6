"""Show how a run's model was scored on eval.tasks: rows of a table, for a terminal and a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rayapp.observe.records import Estimate, TaskResult

HEAD = ("task", "items", "figure", "before", "after")
SHOWN: tuple[Literal["asked", "before", "after", "wanted"], ...]
SHOWN = ("asked", "before", "after", "wanted")
LOSS = "loss"


def rows(results: Mapping[str, TaskResult]) -> list[list[str]]:
    """Return a row for each task, with the columns of HEAD."""
    return [
        [
            name,
            f"{each['items']:,}",
            "nats/token" if each["score"] == LOSS else f"right ({each['score']})",
            estimated(each["score"], each["before"]),
            estimated(each["score"], each["after"]),
        ]
        for name, each in results.items()
    ]


def answers(results: Mapping[str, TaskResult]) -> list[tuple[str, str, list[list[str]]]]:
    """Return (task, number of items, rows with the columns of SHOWN) of tasks with answers."""
    return [
        (
            name,
            f"{each['items']:,}",
            [[item[what] or "" for what in SHOWN] for item in each["shown"]],
        )
        for name, each in results.items()
        if each.get("shown")
    ]


def estimated(score: str, estimate: Estimate | None) -> str:
    """Format a figure with its interval.

    >>> estimated("json", {"value": 0.9, "low": 0.6, "high": 0.98})
    '90 % (60 to 98)'
    >>> estimated("loss", {"value": 1.25, "low": 1.2, "high": 1.3}), estimated("loss", None)
    ('1.25 (1.20 to 1.30)', '-')
    """
    if estimate is None:
        return "-"
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if score == LOSS:
        return f"{value:.2f} ({low:.2f} to {high:.2f})"
    return f"{value:.0%} ({100 * low:.0f} to {100 * high:.0f})".replace("%", " %")
