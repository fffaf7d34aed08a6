"""The charts of a report: their points, lines, marks, and a summary in words.

charts = of_run(run)           # or of_runs([one, another])
charts[0].spec()               # what page.js draws
charts[0].rows                 # the same as a table, for those who do not see it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rayapp.config.fields import IMAGES
from rayapp.observe import words
from rayapp.observe.columns import Array
from rayapp.observe.records import band_of
from rayapp.report.curves import BUCKETS, plain, smooth, thin, window_of
from rayapp.report.folder import ReportedRun

TABLE_ROWS = 12
DRAWN = ("id", "title", "unit", "zero", "log", "wide", "points")
TOKEN, BYTE = "token", "byte"
LOSSES = {"token": {TOKEN: "loss", BYTE: "loss_per_byte"}, "image": {TOKEN: "loss"}}
HELD_COLUMNS = {
    "token": {"loss": "eval_loss", "per_byte": "eval_loss_per_byte"},
    "image": {"loss": "eval_loss", "top1": "eval_top1", "top5": "eval_top5"},
}
PHASES = {name: f"peak_{name}_gib" for name in ("forward", "backward", "optimizer")}
TIMES = {
    "whole step": "step_s",
    "data wait": "data_wait_s",
    "checkpoint stall": "checkpoint_stall_s",
    "evaluation": "eval_s",
}

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
    role: str = "line"
    """line, faint (every step, behind a smoothed line) or dots (held-out losses)."""
    dash: int = 0


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

    def spec(self) -> dict[str, object]:
        """Return the chart as page.js reads it."""
        return {name: getattr(self, name) for name in DRAWN} | {
            "lines": [vars(line) for line in self.lines],
            "marks": [vars(mark) for mark in self.marks],
        }

    @property
    def head(self) -> list[str]:
        """Return the names of the columns of `rows`."""
        return ["step", *(line.label for line in self.lines if line.role != "faint")]

    @property
    def rows(self) -> list[list[str]]:
        """Return up to TABLE_ROWS points, evenly spaced, as a table; at held-out steps if any."""
        shown = [line for line in self.lines if line.role != "faint"]
        dots = [line for line in shown if line.role == "dots"]
        steps = sorted({int(step or 0) for line in dots or shown for step in self._steps(line)})
        if not steps:
            return []
        places = sorted({round(p) for p in np.linspace(0, len(steps) - 1, TABLE_ROWS)})
        every = [steps[place] for place in places]
        return [[f"{step:,}", *(self._at(line, step) for line in shown)] for step in every]

    def _steps(self, line: ChartLine) -> list[float | int | None]:
        return self.points[line.points]["step"]

    def _at(self, line: ChartLine, step: int) -> str:
        """Return a line's value at a step, or at the last one drawn before it, as text.

        Empty: there is none, or the line is dots and has none at this very step.
        """
        steps = np.array(self._steps(line), np.float64)
        place = int(np.searchsorted(steps, step, side="right")) - 1
        if place < 0 or step > steps[-1] or (line.role == "dots" and steps[place] != step):
            return ""
        return words.number(self.points[line.points][next(iter(line.y.values()))][place], 5)


def of_run(run: ReportedRun) -> list[Chart]:
    """Return the charts of one run."""
    return [
        _loss([run]),
        *([_accuracy([run])] if run.unit is IMAGES else []),
        _throughput([run]),
        _memory(run),
        _step_time(run),
        _gradient([run]),
        _rate([run]),
    ]


def of_runs(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Return the charts of several runs, overlaid."""
    memory = _overlaid(runs, "memory", "Memory of rank 0", "GiB", "peak_gib", zero=True)
    accuracy = [_accuracy(runs)] if runs[0].unit is IMAGES else []
    return [_loss(runs), *accuracy, _throughput(runs), memory, _gradient(runs), _rate(runs)]


def points(
    run: ReportedRun,
    columns: dict[str, Array],
    smoothed: Sequence[str] = (),
    buckets: int = BUCKETS,
) -> Points:
    """Return the points to draw of some columns, with their steps, counts and seconds.

    A column named in `smoothed` is also returned smoothed, as NAME_smooth.
    """
    indices = thin(list(columns.values()), buckets)
    axes = {"step": run.columns["step"], run.unit.many: run.counted, "seconds": run.seconds}
    drawn = {**axes, **columns}
    drawn |= {f"{name}_smooth": smooth(columns[name]) for name in smoothed}
    return {name: plain(values[indices]) for name, values in drawn.items()}


def _loss(runs: Sequence[ReportedRun]) -> Chart:
    every: dict[str, Points] = {}
    lines: list[ChartLine] = []
    alone = len(runs) == 1
    for place, run in enumerate(runs):
        color, label = place, "" if alone else f"{run.name} "
        both = {name: run.columns[name] for name in LOSSES[run.unit.one].values()}
        every[f"{place}"] = points(run, both, smoothed=list(both))
        every[f"{place}-held"] = _held_points(run)
        raw = LOSSES[run.unit.one]
        smooth_y = {unit: f"{name}_smooth" for unit, name in raw.items()}
        if alone:
            lines.append(ChartLine("each step", f"{place}", raw, color, "faint"))
        lines.append(ChartLine(f"{label}train", f"{place}", smooth_y, color, dash=place))
        if run.held:
            y = {unit: f"eval_{name}" for unit, name in raw.items()}
            color += 1 if alone else 0
            lines.append(ChartLine(f"{label}held out", f"{place}-held", y, color, "dots"))
    title = "Loss" if alone else "Loss, smoothed"
    summary = "; ".join(_trend(run, "loss", "training loss", alone) for run in runs)
    if alone and runs[0].held:
        summary += f"; held-out loss {words.fixed(runs[0].held[-1].loss, 4)}"
    note = _loss_note(runs, alone)
    return Chart("loss", title, "nats", lines, every, summary, log=True, wide=True, note=note)


def _accuracy(runs: Sequence[ReportedRun]) -> Chart:
    """Return the chart of top-1 and top-5 accuracy on held-out images."""
    every, lines = {}, []
    for place, run in enumerate(runs):
        every[f"{place}"] = _held_points(run)
        label = "" if len(runs) == 1 else f"{run.name} "
        for number, name in enumerate(("top1", "top5")):
            y, shown = {TOKEN: f"eval_{name}"}, f"{label}{name[:3]}-{name[3:]}"
            lines.append(ChartLine(shown, f"{place}", y, 2 * place + number, dash=number))
    last = [run.held[-1].top1 for run in runs if run.held]
    summary = f"top-1 at last {', '.join(map(words.share, last)) or words.UNKNOWN}"
    return Chart("accuracy", "Held-out accuracy", "share, 0-1", lines, every, summary, zero=True)


def _held_points(run: ReportedRun) -> Points:
    """Return the held-out figures, with the counts and seconds of their steps."""
    steps = np.array([held.step for held in run.held], np.float64)
    columns: Points = {"step": plain(steps)}
    places = np.searchsorted(run.columns["step"], steps, side="right") - 1
    for name, values in ((run.unit.many, run.counted), ("seconds", run.seconds)):
        known = [values[place] if place >= 0 else 0.0 for place in places]
        columns[name] = plain(np.array(known, np.float64))
    for name, column in HELD_COLUMNS[run.unit.one].items():
        columns[column] = plain(np.array([getattr(held, name) for held in run.held], np.float64))
    return columns


def _loss_note(runs: Sequence[ReportedRun], alone: bool) -> str:
    """Say how wide the smoothing is, and how many steps are not finite or were skipped."""
    parts = []
    if alone and runs[0].num_lines:
        run = runs[0]
        if (window := window_of(run.num_lines)) > 1:
            parts.append(f"The strong line is the mean of the {window} steps around each.")
        missing = int(np.isnan(run.columns["loss"]).sum())
        if missing:
            parts.append(f"{missing:,} steps have a loss that is not finite.")
        skipped = int(np.nansum(run.columns["skipped"]))
        if skipped:
            parts.append(f"{skipped:,} steps were skipped: the weights stayed as they were.")
    return " ".join(parts)


def _throughput(runs: Sequence[ReportedRun]) -> Chart:
    unit = runs[0].unit
    label = f"{unit.many}/s"
    chart = _overlaid(runs, "throughput", "Throughput", label, unit.per_s, zero=True)
    if len(runs) > 1:
        return chart
    first = chart.lines[0]
    faint = ChartLine("each step", first.points, {TOKEN: unit.per_s}, 0, "faint")
    chart.lines.insert(0, faint)
    chart.marks.extend(_planned(runs[0], unit.per_s))
    return chart


def _memory(run: ReportedRun) -> Chart:
    marks = _planned(run, "peak_gib")
    capacity = run.plan.get("capacity_gib")
    if capacity:
        marks.append(Mark("a GPU has", capacity, capacity, capacity))
    highest = words.number(run.highest("peak_gib"))
    summary = f"Most memory that rank 0 held in each phase of a step; {highest} GiB at most"
    lines, every = _side_by_side(run, PHASES)
    return Chart("memory", "Memory by phase", "GiB", lines, every, summary, marks, zero=True)


def _step_time(run: ReportedRun) -> Chart:
    lines, every = _side_by_side(run, TIMES)
    totals_s = {label: float(np.nansum(run.columns[name])) for label, name in TIMES.items()}
    step_s = totals_s.pop("whole step")
    shares = [f"{label} {words.share(s / step_s)}" for label, s in totals_s.items() if s and step_s]
    summary = f"Seconds of each step: {', '.join(shares) or 'nothing but the step itself'}"
    return Chart(
        "step-time",
        "Time of a step, and what held it up",
        "s",
        lines,
        every,
        summary,
        _planned(run, "step_s"),
        zero=True,
        log=True,
        wide=True,
    )


def _side_by_side(
    run: ReportedRun, names: dict[str, str]
) -> tuple[list[ChartLine], dict[str, Points]]:
    """Return a line for each column of one run, named {label: column}, and their points."""
    lines = [
        ChartLine(label, "0", {TOKEN: name}, place, dash=place)
        for place, (label, name) in enumerate(names.items())
    ]
    columns = {name: run.columns[name] for name in names.values()}
    return lines, {"0": points(run, columns, buckets=BUCKETS // 2)}


def _gradient(runs: Sequence[ReportedRun]) -> Chart:
    return _overlaid(runs, "gradient", "Gradient norm", "", "grad_norm", log=True)


def _rate(runs: Sequence[ReportedRun]) -> Chart:
    return _overlaid(runs, "rate", "Learning rate", "", "lr", zero=True, smoothed=False)


def _overlaid(
    runs: Sequence[ReportedRun],
    id: str,
    title: str,
    unit: str,
    column: str,
    *,
    zero: bool = False,
    log: bool = False,
    smoothed: bool = True,
) -> Chart:
    """Return a chart with one line per run; `peak_gib`, whose values are exact, is not smoothed."""
    smoothed = smoothed and column != "peak_gib"
    every, lines = {}, []
    for place, run in enumerate(runs):
        own = {column: run.columns[column]}
        every[f"{place}"] = points(run, own, smoothed=list(own) if smoothed else ())
        label = run.name if len(runs) > 1 else title.lower()
        y = {TOKEN: f"{column}_smooth" if smoothed else column}
        lines.append(ChartLine(label, f"{place}", y, place, dash=place))
    alone = len(runs) == 1
    summary = "; ".join(_trend(run, column, title.lower(), alone) for run in runs)
    return Chart(id, title, unit, lines, every, summary, zero=zero, log=log)


def _planned(run: ReportedRun, name: str) -> list[Mark]:
    """Return the mark of a figure in plan.json; empty if it was not planned."""
    band = band_of(run.plan, name)
    return [Mark("plan", band["value"], band["low"], band["high"])] if band else []


def _trend(run: ReportedRun, column: str, what: str, alone: bool) -> str:
    """Say a column's first and last value, and at which steps."""
    values = run.columns[column]
    known = np.flatnonzero(~np.isnan(values))
    name = "" if alone else f"{run.name}: "
    if not len(known):
        return f"{name}{what} {words.UNKNOWN}"
    first, last = known[0], known[-1]
    steps = run.columns["step"]
    return (
        f"{name}{what} from {words.number(float(values[first]))} at step {steps[first]:,.0f} "
        f"to {words.number(float(values[last]))} at step {steps[last]:,.0f}"
    )
