"""One chart of a report as plain values, and how a run's steps become curves that a page can hold.

    kept = thin([columns["loss"]], buckets=600)
    means({"loss": columns["loss"]}, {"step": columns["step"]}, buckets=600)

A long run is drawn as the lowest and the highest point of each bucket of steps, which keeps spikes,
with the means of the buckets, smoothed: by page/curve.js as the reader chooses, by `svg` for a
notebook and a model card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from rayapp.observe import words
from rayapp.observe.columns import Array

BUCKETS = 600  # about one for each 2 pixels of a wide screen
SMOOTH_SHARE = 0.02  # width of the smoothing window, as a share of the steps
TABLE_ROWS = 12
DRAWN = ("id", "title", "axis", "zero", "log", "points", "top")
TOKEN, BYTE = "token", "byte"  # what a loss is per
FAINT, SMOOTH, LINE, DOTS, AREA = "faint", "smooth", "line", "dots", "area"

Points: TypeAlias = dict[str, list[float | int | None]]
"""{column: values}."""


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart; `points` is a key of `Chart.points`, `color` and `dash` are indices."""

    label: str
    points: str
    y: dict[str, str]
    """Column for each unit of the y axis; a single one is drawn whichever unit is chosen."""
    color: int
    role: str = LINE
    """FAINT (every step), SMOOTH (means, which the page smooths), LINE, DOTS (held-out figures), or
    AREA (on top of the areas before it).
    """
    dash: int = 0
    run: int = 0
    """The index of its run."""
    recent: dict[str, float | None] = field(default_factory=dict)
    """For each unit, the mean of the last steps, which the legend shows at rest."""


@dataclass(frozen=True)
class Mark:
    """A planned value, drawn as a horizontal line, with the band that it may lie in."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Chart:
    """One chart of the page."""

    id: str
    title: str
    unit: str
    axis: dict[str, str]
    """The title of the y axis, for each unit of it."""
    lines: list[ChartLine]
    points: dict[str, Points]
    """{ChartLine.points: {column: values}}; columns are step, tokens or images, seconds, and y."""
    marks: list[Mark] = field(default_factory=list)
    zero: bool = False
    """Whether the y axis begins at 0."""
    log: bool = False
    """Whether the y axis can be made logarithmic."""
    wide: bool = False
    """Whether the chart takes the whole width of the page."""
    top: float | None = None
    """Where the y axis ends while all steps are shown; None: above the highest value."""
    note: str = ""

    @property
    def empty(self) -> bool:
        columns = (
            self.points[line.points][name] for line in self.lines for name in line.y.values()
        )
        return all(value is None for column in columns for value in column)

    def spec(self) -> dict[str, object]:
        """Return the chart as page.js reads it."""
        return {name: getattr(self, name) for name in DRAWN} | {
            "lines": [vars(line) for line in self.lines],
            "marks": [vars(mark) for mark in self.marks],
        }

    @property
    def head(self) -> list[str]:
        """Return the names of the columns of `rows`."""
        return ["step", *(line.label for line in self.lines if line.role != FAINT)]

    @property
    def rows(self) -> list[list[str]]:
        """Return up to TABLE_ROWS points, evenly spaced, as a table; at held-out steps if any."""
        shown = [line for line in self.lines if line.role != FAINT]
        dots = [line for line in shown if line.role == DOTS]
        every = {
            int(step or 0) for each in dots or shown for step in self.points[each.points]["step"]
        }
        steps = evenly(sorted(every), TABLE_ROWS)
        return [[f"{step:,}", *(self._at(line, step) for line in shown)] for step in steps]

    def _at(self, line: ChartLine, step: int) -> str:
        """Return a line's value at a step, or at the last one drawn before it, as text.

        Empty: there is none, or the line is dots and has none at this very step.
        """
        table = self.points[line.points]
        steps = np.array(table["step"], np.float64)
        values = np.array(table[next(iter(line.y.values()))], np.float64)
        place = int(np.searchsorted(steps, step, side="right")) - 1
        if place < 0 or step > steps[-1] or (line.role == DOTS and steps[place] != step):
            return ""
        value = float((smooth(values) if line.role == SMOOTH else values)[place])
        return words.number(None if np.isnan(value) else value, 5)


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items: the first, the last and others evenly between them.

    >>> evenly("abcdefg", 3), evenly("ab", 3)
    (['a', 'd', 'g'], ['a', 'b'])
    """
    places = np.linspace(0, len(items) - 1, min(len(items), most)).round().astype(int)
    return [items[place] for place in places.tolist()]


def thin(columns: Sequence[Array], buckets: int = BUCKETS) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the indices to draw: in each bucket, where each column is lowest and highest.

    The first and the last index are always among them; at up to 2 x `buckets` values, all are.

    >>> thin([np.array([3.0, 1.0, 2.0, 9.0, 4.0, 4.0, 5.0, 5.0])], buckets=2).tolist()
    [0, 1, 3, 4, 6, 7]
    """
    count = len(columns[0])
    if count <= 2 * buckets:
        return np.arange(count)
    kept = {0, count - 1}
    edges = np.linspace(0, count, buckets + 1).astype(int)
    for column in columns:
        for start, end in pairwise(edges):
            part = column[start:end]
            if not np.isnan(part).all():
                kept |= {int(start + np.nanargmin(part)), int(start + np.nanargmax(part))}
    return np.array(sorted(kept), np.intp)


def means(
    averaged: Mapping[str, Array], placed: Mapping[str, Array], buckets: int = BUCKETS
) -> dict[str, Array]:
    """Return the mean of each bucket of the columns `averaged`, and of `placed` the middle value.

    At up to 2 x `buckets` values each is a bucket. A bucket without a known value is NaN.

    >>> loss, step = np.array([1.0, np.nan, 3.0, 4.0, 6.0, np.nan]), np.arange(6.0)
    >>> {name: each.tolist() for name, each in means({"loss": loss}, {"step": step}, 2).items()}
    {'step': [1.0, 4.0], 'loss': [2.0, 5.0]}
    """
    count = len(next(iter(averaged.values())))
    if count <= 2 * buckets:
        return {**placed, **averaged}
    edges = np.linspace(0, count, buckets + 1).astype(int)
    middles = (edges[:-1] + edges[1:] - 1) // 2
    found = {name: column[middles] for name, column in placed.items()}
    for name, column in averaged.items():
        known = ~np.isnan(column)
        sums = np.add.reduceat(np.where(known, column, 0.0), edges[:-1])
        with np.errstate(invalid="ignore"):
            found[name] = sums / np.add.reduceat(known.astype(np.float64), edges[:-1])
    return found


def window_of(count: int) -> int:
    """Return the width of the smoothing window for so many steps; it is odd.

    >>> [window_of(count) for count in (1, 30, 150, 10_000)]
    [1, 1, 5, 201]
    """
    return 2 * round(count * SMOOTH_SHARE / 2) + 1


def smooth(values: Array, window: int | None = None) -> Array:
    """Return the mean of the window around each value; the window is cut at the ends, NaN skipped.

    >>> smooth(np.array([1.0, np.nan, 5.0, 3.0]), window=3).tolist()
    [1.0, 3.0, 4.0, 4.0]
    """
    half = (window or window_of(len(values))) // 2
    known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(values))
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def plain(values: Array) -> list[float | int | None]:
    """Return values for JSON: 6 significant digits, whole numbers as int, None if not finite.

    >>> plain(np.array([1.23456789, 3.0, np.nan]))
    [1.23457, 3, None]
    """
    return [
        None if not np.isfinite(value) else int(value) if value % 1 == 0 else float(f"{value:.6g}")
        for value in values.tolist()
    ]


# ---- Without a script -------------------------------------------------------------------------

WIDTH, HEIGHT = 420, 140
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 22, 18  # margins
SVG_BUCKETS = 120
DOTS_SHOWN = 30
COLORS = ("#0072b2", "#d55e00")  # distinguishable by any colour vision (Okabe and Ito, 2008)


def svg(label: str, series: Mapping[str, tuple[Array, Array]]) -> str:
    """Return curves over steps as an SVG with axes and dots, whose tooltips tell values.

    `series` are steps and values by name. Of many points the smoothed means are a line, with single
    steps faintly below it. Empty if no value is known.
    """
    known: dict[str, tuple[Array, Array]] = {}
    for name, (steps, values) in series.items():
        there = ~np.isnan(values)
        if there.any():
            known[name] = (steps[there], values[there])
    if not known:
        return ""
    first, last = min(s[0] for s, _ in known.values()), max(s[-1] for s, _ in known.values())
    low, high = min(v.min() for _, v in known.values()), max(v.max() for _, v in known.values())

    def placed(steps: Array, values: Array) -> list[tuple[float, float]]:
        x = LEFT + (steps - first) * (WIDTH - LEFT - RIGHT) / max(1.0, last - first)
        y = HEIGHT - BOTTOM - (values - low) * (HEIGHT - TOP - BOTTOM) / ((high - low) or 1.0)
        return list(zip(x.tolist(), y.tolist(), strict=True))

    def line(places: list[tuple[float, float]], color: str, opacity: float) -> str:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = f'fill="none" stroke="{color}" stroke-width="1.5" opacity="{opacity}"'
        return f'<polyline {style} points="{points}"/>'

    parts = []
    for name, color in zip(series, COLORS, strict=False):
        if name not in known:
            continue
        steps, values = known[name]
        kept = thin([values], SVG_BUCKETS)
        parts.append(line(placed(steps[kept], values[kept]), color, 0.3))
        steps, values = means({"y": values}, {"x": steps}, SVG_BUCKETS).values()
        places = placed(steps, values := smooth(values))
        parts.append(line(places, color, 1.0))
        shown = evenly(list(zip(steps, values, places, strict=True)), DOTS_SHOWN)
        parts += (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}">'
            f"<title>step {step:,.0f}: {escape(name)} {value:.5g}</title></circle>"
            for step, value, (x, y) in shown
        )
    texts = (
        (4, 13, "start", label),
        (LEFT - 4, TOP + 4, "end", words.amount(high)),
        (LEFT - 4, HEIGHT - BOTTOM, "end", words.amount(low)),
        (LEFT, HEIGHT - 4, "start", f"step {first:,.0f}"),
        (WIDTH - 4, HEIGHT - 4, "end", f"{last:,.0f}"),
    )
    parts += [
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        for x, y, anchor, text in texts
    ]
    edge = f"M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - 4}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="11" fill="currentColor" '
        f'font-family="sans-serif" aria-label="{escape(label)} from {low:.4g} to {high:.4g}">'
        f'<path d="{edge}" fill="none" stroke="currentColor" opacity=".4"/>{"".join(parts)}</svg>'
    )
