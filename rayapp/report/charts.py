"""The charts of a report: their points, lines, planned figures, and a summary in words.

charts = of_run(run)           # or of_runs([one, another])
charts[0].spec()               # what page.js draws
charts[0].rows                 # the same as a table, for those who do not see it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayapp.observe import words
from rayapp.observe.columns import Array
from rayapp.observe.records import band_of
from rayapp.report.chart import (
    AREA,
    BYTE,
    DOTS,
    FAINT,
    LINE,
    SMOOTH,
    TOKEN,
    Chart,
    ChartLine,
    Mark,
    Points,
)
from rayapp.report.comparison import groups
from rayapp.report.curves import BUCKETS, means, plain, thin
from rayapp.report.folder import ReportedRun
from rayapp.report.held_charts import held_charts, held_points

LOSSES = {"token": {TOKEN: "loss", BYTE: "loss_per_byte"}, "image": {TOKEN: "loss"}}
LOSS_AXES = {
    "token": {TOKEN: "loss, nats per token", BYTE: "loss, nats per byte"},
    "image": {TOKEN: "loss, nats per image"},
}
PHASES = {name: f"peak_{name}_gib" for name in ("forward", "backward", "optimizer")}
STALLS = {
    "data wait": "data_wait_s",
    "checkpoint stall": "checkpoint_stall_s",
    "evaluation": "eval_s",
}


def of_run(run: ReportedRun) -> list[Chart]:
    """Return the charts of one run that have something to draw."""
    charts = [
        _loss([run], [0]),
        _own_loss([run]),
        *held_charts([run], [0]),
        _step_time(run),
        _throughput([run]),
        _memory(run),
        _gradient([run]),
        _rate([run]),
    ]
    return _laid_out(charts)


def of_runs(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Return the charts of several runs, overlaid; losses only of runs that are comparable."""
    charts = []
    every = groups(runs)
    for group in every:
        of_group = [_loss(runs, group.places), *held_charts(runs, group.places)]
        if len(every) > 1:
            of_group = [
                replace(
                    chart, id=f"{chart.id}-{group.name}", title=f"{chart.title}, group {group.name}"
                )
                for chart in of_group
            ]
        charts += of_group
    memory = _overlaid(runs, "memory", "Memory of rank 0", "GiB", "peak_gib", zero=True)
    charts.append(_own_loss(runs))
    return _laid_out([*charts, _throughput(runs), memory, _gradient(runs), _rate(runs)])


def _laid_out(charts: Sequence[Chart]) -> list[Chart]:
    """Return the charts that are not empty, wide ones first; of an odd number of others, the last
    is wide too.
    """
    drawn = sorted((chart for chart in charts if not chart.empty), key=lambda chart: not chart.wide)
    if sum(not chart.wide for chart in drawn) % 2:
        drawn[-1] = replace(drawn[-1], wide=True)
    return drawn


def points(run: ReportedRun, columns: dict[str, Array], buckets: int = BUCKETS) -> Points:
    """Return the points to draw of some columns, with their steps, counts and seconds."""
    indices = thin(list(columns.values()), buckets)
    drawn = {**_places(run), **columns}
    return {name: plain(values[indices]) for name, values in drawn.items()}


def mean_points(run: ReportedRun, columns: dict[str, Array]) -> Points:
    """Return the points that the page smooths: means of some columns, with their places."""
    places = _places(run)
    averaged, placed = means(list(columns.values()), list(places.values()))
    named = zip([*places, *columns], [*placed, *averaged], strict=True)
    return {name: plain(values) for name, values in named}


def _places(run: ReportedRun) -> dict[str, Array]:
    """Return what can be drawn across: the x axis."""
    return {"step": run.columns["step"], run.unit.many: run.counted, "seconds": run.seconds}


def _smoothed(
    run: ReportedRun, place: int, names: dict[str, str], label: str, faint: str
) -> tuple[list[ChartLine], dict[str, Points]]:
    """Return columns, {unit: name}, as a faint line of each step and a smoothed one over it."""
    columns = {name: run.columns[name] for name in names.values()}
    lines = [
        ChartLine(faint, f"{place}", names, place, FAINT, run=place),
        ChartLine(label, f"{place}-mean", names, place, SMOOTH, dash=place, run=place),
    ]
    return lines, {f"{place}": points(run, columns), f"{place}-mean": mean_points(run, columns)}


def _loss(runs: Sequence[ReportedRun], places: Sequence[int]) -> Chart:
    """Return the chart of the losses of the runs at `places`."""
    every: dict[str, Points] = {}
    lines: list[ChartLine] = []
    alone, unit = len(runs) == 1, runs[0].unit.one
    for place in places:
        run = runs[place]
        label = "" if alone else f"{run.name} "
        own, drawn = _smoothed(
            run, place, LOSSES[unit], f"{label}train", "each step" if alone else ""
        )
        every |= drawn | {f"{place}-held": held_points(run)}
        lines += own
        if run.held:
            y = {key: f"eval_{name}" for key, name in LOSSES[unit].items()}
            color = place + 1 if alone else place
            lines.append(ChartLine(f"{label}held out", f"{place}-held", y, color, DOTS, run=place))
    summary = "; ".join(_trend(runs[place], "loss", "training loss", alone) for place in places)
    if alone and runs[0].held:
        summary += f"; held-out loss {words.fixed(runs[0].held[-1].loss, 4)}"
    return Chart(
        "loss",
        "Loss",
        "",
        LOSS_AXES[unit],
        lines,
        every,
        summary,
        log=True,
        wide=True,
        note=_loss_note(runs[0]) if alone else "",
    )


def _loss_note(run: ReportedRun) -> str:
    """Say how many steps are not finite or were skipped, and why held-out loss may be lower."""
    parts = []
    recent = run.recent("loss")
    if run.held and recent is not None and run.held[-1].loss < recent:
        parts.append(
            "Held-out loss is measured with the newest weights and without dropout; the training "
            "loss is a mean over earlier steps, so it can be higher."
        )
    missing = int(np.isnan(run.columns["loss"]).sum())
    if missing:
        parts.append(f"{missing:,} steps have a loss that is not finite.")
    skipped = int(np.nansum(run.columns["skipped"]))
    if skipped:
        parts.append(f"{skipped:,} steps were skipped: the weights stayed as they were.")
    return " ".join(parts)


def _throughput(runs: Sequence[ReportedRun]) -> Chart:
    unit = runs[0].unit
    chart = _overlaid(runs, "throughput", "Throughput", f"{unit.many}/s", unit.per_s, zero=True)
    if len(runs) == 1:
        chart.marks.extend(_planned(runs[0], unit.per_s))
    return chart


def _memory(run: ReportedRun) -> Chart:
    marks = _planned(run, "peak_gib")
    capacity = run.plan.get("capacity_gib")
    if capacity:
        marks.append(Mark("a GPU has", capacity, capacity, capacity))
    highest = words.number(run.highest("peak_gib"))
    summary = f"Most memory that rank 0 held in each phase of a step; {highest} GiB at most"
    columns = {name: run.columns[name] for name in PHASES.values()}
    lines = [
        ChartLine(label, "0", {TOKEN: name}, place, LINE, dash=place)
        for place, (label, name) in enumerate(PHASES.items())
    ]
    every = {"0": points(run, columns, BUCKETS // 2)}
    axis = {TOKEN: "memory of rank 0, GiB"}
    return Chart("memory", "Memory by phase", "GiB", axis, lines, every, summary, marks, zero=True)


def _step_time(run: ReportedRun) -> Chart:
    """Return the chart of a step's parts, stacked: each second of a step is in one of them."""
    stalls = {label: np.nan_to_num(run.columns[name]) for label, name in STALLS.items()}
    whole = np.nan_to_num(run.columns["step_s"])
    rest = np.maximum(whole - sum(stalls.values(), np.zeros_like(whole)), 0.0)
    columns = {"computing": rest, **stalls}
    lines = [
        ChartLine(label, "0", {TOKEN: label}, place, AREA)
        for place, label in enumerate(columns)
        if label == "computing" or columns[label].any()
    ]
    total_s = float(whole.sum())
    shares = [f"{label} {words.share(float(s.sum()) / total_s)}" for label, s in stalls.items()
              if total_s and s.any()]  # fmt: skip
    summary = f"Seconds of each step: {', '.join(shares) or 'nothing but the step itself'}"
    top, note = _first_steps(run, whole)
    return Chart(
        "step-time",
        "Time of a step, by what took it",
        "s",
        {TOKEN: "time of a step, s"},
        lines,
        {"0": points(run, columns, BUCKETS // 2)},
        summary,
        _planned(run, "step_s"),
        zero=True,
        wide=True,
        top=top,
        note=note,
    )


def _first_steps(run: ReportedRun, whole: Array) -> tuple[float | None, str]:
    """Return the longest step but for the first of each attempt, and a note if those are longer."""
    first = np.concatenate([[True], np.diff(run.columns["attempt"]) != 0])[: len(whole)]
    if first.all() or whole[first].max() <= 2 * whole[~first].max():
        return None, ""
    longest = f"{words.duration(float(whole[first].max()))}"
    text = f"The first step of an attempt, {longest} at most, goes beyond the top of the chart."
    return float(whole[~first].max()), text


def _own_loss(runs: Sequence[ReportedRun]) -> Chart:
    """Return the chart of train.loss, which is empty if no run has one."""
    names = {run.own_loss for run in runs} - {""}
    return _overlaid(runs, "own-loss", f"train.loss, {' and '.join(sorted(names))}", "", "own_loss")


def _gradient(runs: Sequence[ReportedRun]) -> Chart:
    return _overlaid(runs, "gradient", "Gradient norm", "", "grad_norm", log=True)


def _rate(runs: Sequence[ReportedRun]) -> Chart:
    return _overlaid(runs, "rate", "Learning rate", "", "lr", zero=True, exact=True)


def _overlaid(
    runs: Sequence[ReportedRun],
    id: str,
    title: str,
    unit: str,
    column: str,
    *,
    zero: bool = False,
    log: bool = False,
    exact: bool = False,
) -> Chart:
    """Return a chart with one smoothed line per run; with `exact` or of `peak_gib`, unsmoothed."""
    every, lines = {}, []
    alone = len(runs) == 1
    for place, run in enumerate(runs):
        label = title.lower() if alone else run.name
        if exact or column == "peak_gib":
            every[f"{place}"] = points(run, {column: run.columns[column]})
            y = {TOKEN: column}
            lines.append(ChartLine(label, f"{place}", y, place, LINE, dash=place, run=place))
            continue
        own, drawn = _smoothed(run, place, {TOKEN: column}, label, "each step" if alone else "")
        lines += own
        every |= drawn
    summary = "; ".join(_trend(run, column, title.lower(), alone) for run in runs)
    axis = {TOKEN: f"{title.lower()}, {unit}" if unit and unit not in title else title.lower()}
    return Chart(id, title, unit, axis, lines, every, summary, zero=zero, log=log)


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
