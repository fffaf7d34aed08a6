"""Format figures and errors for people; a value that is not known is "n/a".

There are two formats for a time: `clock` for progress and lines that a program prints, `duration`
for pages.

>>> duration(3723.0), amount(123_456_789.0), share(0.9449)
('1 h 2 min', '123.5M', '94.5 %')
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from rich import filesize

from rayapp.config.tasks import LOSSES
from rayapp.observe.metrics import held_out_figure
from rayapp.observe.records import Estimate, RunResult, TaskResult

UNKNOWN = "n/a"
BARS = "▁▂▃▄▅▆▇█"  # from low to high
# Of a task of eval.tasks: the columns of its row, and those of an item with answers.
TASK_HEAD = ("task", "items", "figure", "before", "after; difference")
TASK_SHOWN: tuple[Literal["asked", "before", "after", "wanted"], ...]
TASK_SHOWN = ("asked", "before", "after", "wanted")
number_of_bytes = partial(filesize.decimal, precision=2)  # "1.54 MB"
SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k"))


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with so many significant digits.

    >>> number(1234.5678), number(0.000012345), number(2.0), number(None)
    ('1,235', '1.234e-05', '2', 'n/a')
    """
    if value is None:
        return UNKNOWN
    if value == int(value) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def formed(value: float | None, form: str, unit: str = "") -> str:
    """Format a number by a format specification, and append a unit.

    >>> formed(1.5, ".2f", " GiB"), formed(None, ".2f", " GiB")
    ('1.50 GiB', 'n/a')
    """
    return UNKNOWN if value is None else f"{value:{form}}{unit}"


def amount(value: float | None) -> str:
    """Format a large count in short: with all digits below ten thousand, then as k, M, B or T.

    >>> amount(9999), amount(1.5e9), amount(17808.5)
    ('9,999', '1.5B', '17.81k')
    """
    if value is None:
        return UNKNOWN
    for scale, letter in SCALES:
        if abs(value) >= scale:
            return f"{value / (1e3 if letter == 'k' else scale):.4g}{letter}"
    return number(value)


def share(value: float | None) -> str:
    """Format a ratio as a percentage.

    >>> share(0.0004), share(0.0), share(0.0384), share(0.618), share(1.0)
    ('< 0.1 %', '0 %', '3.8 %', '61.8 %', '100 %')
    """
    if value is None:
        return UNKNOWN
    if 0 < value < 0.001:
        return "< 0.1 %"
    return f"{100 * value:.{2 if value < 0.1 else 3}g} %"


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss, or m:ss below an hour.

    >>> clock(3725.0), clock(59.6)
    ('1:02:05', '1:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float | None) -> str:
    """Format seconds in at most two units.

    >>> duration(0.0123), duration(5.04), duration(65.0), duration(200_000.0)
    ('12 ms', '5 s', '1 min 5 s', '2 d 7 h')
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 1.0:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 10.0:
        return f"{seconds:.2g} s"
    parts, rest = list[str](), round(seconds)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        whole, rest = divmod(rest, size)
        if whole or parts:
            parts.append(f"{whole} {unit}" if whole else "")
    return " ".join(part for part in parts[:2] if part)


def dollars(value: float | None) -> str:
    """Format a cost in US dollars.

    >>> dollars(0.0042), dollars(12.3), dollars(4567.8), dollars(None)
    ('< $0.01', '$12.30', '$4,568', 'n/a')
    """
    if value is None:
        return UNKNOWN
    if value >= 1000:
        return f"${value:,.0f}"
    return "< $0.01" if 0 < value < 0.01 else f"${value:.2f}"


def moment(unix_s: float | None) -> str:
    """Format a Unix time as date and time in UTC.

    >>> moment(0.0)
    '1970-01-01 00:00 UTC'
    """
    if not unix_s and unix_s != 0.0:
        return UNKNOWN
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or the error's type if it has none.

    >>> last_line(OSError("first\\nlast")), last_line(TimeoutError())
    ('last', 'TimeoutError')
    """
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def task_rows(results: Mapping[str, TaskResult]) -> list[list[str]]:
    """Return a row for each task, with the columns of TASK_HEAD; a difference is on a new line."""
    return [
        [
            name,
            f"{each['items']:,}",
            "nats/token" if each["score"] in LOSSES else f"right ({each['score']})",
            _estimated(each["score"], each["before"]),
            _estimated(each["score"], each["after"])
            + (f"\n{_estimated(each['score'], change, '+', ' points')}" if change else ""),
        ]
        for name, each in results.items()
        for change in [each.get("difference")]
    ]


def task_answers(results: Mapping[str, TaskResult]) -> list[tuple[str, str, list[list[str]]]]:
    """Return (task, number of items, rows with the columns of TASK_SHOWN) of tasks with answers."""
    return [
        (
            name,
            f"{each['items']:,}",
            [[item[what] or "" for what in TASK_SHOWN] for item in each["shown"]],
        )
        for name, each in results.items()
        if each.get("shown")
    ]


def verdicts(result: RunResult) -> list[str]:
    """Return lines about the best evaluation and the conditions of eval.gate.

    >>> verdicts({"gate": [{"condition": "a >= 0.9", "value": 0.85, "limit": 0.9, "met": False}]})
    ['gate   a >= 0.9: it is 0.85, not met']
    """
    lines, best = list[str](), result.get("best")
    if best is not None:
        value = number(held_out_figure(best["held_out"], best["figure"]))
        at, of = f"{best['step']:,}", f"{result['steps']:,}"
        later = f", better than the {best['since']} evaluations after it" if best["since"] else ""
        lines.append(f"best   {best['figure']} {value} at step {at} of {of}{later}; it is exported")
    for each in result.get("gate", ()):
        limit = f" (base: {number(each['limit'])})" if "base" in each["condition"] else ""
        met = "met" if each["met"] else "not met"
        lines.append(f"gate   {each['condition']}{limit}: it is {number(each['value'])}, {met}")
    return lines


def _estimated(score: str, estimate: Estimate | None, sign: str = "", percent: str = " %") -> str:
    """Format a figure with its interval.

    >>> _estimated("json", {"value": 0.9, "low": 0.6, "high": 0.98})
    '90 % (60 to 98)'
    >>> _estimated("json", {"value": 0.02, "low": -0.05, "high": 0.09}, "+", " points")
    '+2 points (-5 to 9)'
    >>> _estimated("loss", {"value": 1.25, "low": 1.2, "high": 1.3}), _estimated("loss", None)
    ('1.25 (1.20 to 1.30)', '-')
    """
    if estimate is None:
        return "-"
    scale, digits, unit = (1, "z.2f", "") if score in LOSSES else (100, "z.0f", percent)
    value, low, high = (scale * estimate[name] for name in ("value", "low", "high"))
    return f"{value:{sign}{digits}}{unit} ({low:{digits}} to {high:{digits}})"
