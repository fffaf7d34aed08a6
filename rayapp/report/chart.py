"""One chart of a report as plain values: its lines, points and planned figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rayapp.observe import words

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
    summary: str
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
        """Whether there is nothing to draw."""
        return not any(
            value is not None
            for line in self.lines
            for column in line.y.values()
            for value in self.points[line.points][column]
        )

    @property
    def smoothed(self) -> bool:
        """Whether a line of it is smoothed."""
        return any(line.role == SMOOTH for line in self.lines)

    def spec(self) -> dict[str, object]:
        """Return the chart as page.js reads it."""
        return {name: getattr(self, name) for name in DRAWN} | {
            "lines": [vars(line) for line in self.lines],
            "marks": [vars(mark) for mark in self.marks],
        }

    @property
    def head(self) -> list[str]:
        """Return the names of the columns of `rows`."""
        return ["step", *(line.label for line in self._shown)]

    @property
    def rows(self) -> list[list[str]]:
        """Return up to TABLE_ROWS points, evenly spaced, as a table; at held-out steps if any."""
        shown = self._shown
        dots = [line for line in shown if line.role == DOTS]
        steps = sorted({int(step or 0) for line in dots or shown for step in self._steps(line)})
        if not steps:
            return []
        places = sorted({round(p) for p in np.linspace(0, len(steps) - 1, TABLE_ROWS)})
        every = [steps[place] for place in places]
        return [[f"{step:,}", *(self._at(line, step) for line in shown)] for step in every]

    @property
    def _shown(self) -> list[ChartLine]:
        return [line for line in self.lines if line.role != FAINT]

    def _steps(self, line: ChartLine) -> list[float | int | None]:
        return self.points[line.points]["step"]

    def _at(self, line: ChartLine, step: int) -> str:
        """Return a line's value at a step, or at the last one drawn before it, as text.

        Empty: there is none, or the line is dots and has none at this very step.
        """
        steps = np.array(self._steps(line), np.float64)
        place = int(np.searchsorted(steps, step, side="right")) - 1
        if place < 0 or step > steps[-1] or (line.role == DOTS and steps[place] != step):
            return ""
        return words.number(self.points[line.points][next(iter(line.y.values()))][place], 5)
