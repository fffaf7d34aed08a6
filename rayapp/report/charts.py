"""The charts of a report: their points, lines and planned figures.

charts = charts_of([run])      # or of several runs
charts[0].spec()               # what page.js draws
charts[0].rows                 # the same as a table, for those who do not see it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rayapp.config.fields import IMAGES
from rayapp.observe import words
from rayapp.observe.columns import OF_A_STEP, Array
from rayapp.observe.figures import label
from rayapp.observe.metrics import FIELDS
from rayapp.observe.records import band_of
from rayapp.report.chart import (
    AREA,
    BUCKETS,
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
    means,
    plain,
    thin,
)
from rayapp.report.comparison import groups
from rayapp.report.folder import ReportedRun

LOSSES = {
    "token": {TOKEN: "loss", BYTE: "loss_per_byte"},
    "image": {TOKEN: "loss"},
    "pair": {TOKEN: "loss"},
}
PHASES = {name: f"peak_{name}_gib" for name in ("forward", "backward", "optimizer")}
TOPS = ("eval_top1", "eval_top5")


def charts_of(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Return the charts of one or several runs, overlaid, that have something to draw.

    Losses are drawn together only of runs that are comparable.
    """
    charts: list[Chart] = []
    every, alone = groups(runs), len(runs) == 1
    losses = " and ".join(sorted({run.own_loss for run in runs} - {""}))
    # What the losses of all runs tell besides (see `metrics.own_figures`).
    own = [n for n in runs[0].columns if n not in FIELDS and all(n in run.columns for run in runs)]
    for group in every:
        for chart in _of_losses(runs, group.places):
            id, title = f"{chart.id}-{group.name}", f"{chart.title}, group {group.name}"
            charts.append(replace(chart, id=id, title=title) if len(every) > 1 else chart)
    gradient = _overlaid(runs, "gradient", "Gradient norm", "grad_norm", log=True)
    clip = runs[0].config.get("train", {}).get("grad_clip")
    if alone and isinstance(clip, int | float):
        count = f"{int((runs[0].columns['grad_norm'] > clip).sum()):,} of {runs[0].num_lines:,}"
        marks = [Mark("train.grad_clip", clip, clip, clip)]
        gradient = replace(gradient, marks=marks, note=f"In {count} steps it was clipped.")
    memory = _overlaid(runs, "memory", "Memory of rank 0", "peak_gib", "GiB", zero=True, exact=True)
    name, each_s = runs[0].unit.per_s, f"{runs[0].unit.many}/s"
    throughput = _overlaid(runs, "throughput", "Throughput", name, each_s, zero=True)
    throughput.marks.extend(_planned(runs[0], name) if alone else [])
    charts += [
        _overlaid(runs, "own-loss", f"train.loss, {losses}", "own_loss"),
        *(_overlaid(runs, f"figure-{name}", name, name) for name in own),
        *([_step_time(runs[0])] if alone else []),
        throughput,
        _memory(runs[0]) if alone else memory,
        gradient,
        _overlaid(runs, "rate", "Learning rate", "lr", zero=True, exact=True),
    ]
    # Wide charts first; of an odd number of others, the last is wide too.
    drawn = sorted((chart for chart in charts if not chart.empty), key=lambda chart: not chart.wide)
    if sum(not chart.wide for chart in drawn) % 2:
        drawn[-1] = replace(drawn[-1], wide=True)
    return drawn


# ---- Points and lines -------------------------------------------------------------------------


def _across(run: ReportedRun) -> dict[str, Array]:
    """Return what can be drawn across: the x axis."""
    return {"step": run.columns["step"], run.unit.many: run.counted, "seconds": run.seconds}


def _points(run: ReportedRun, columns: Mapping[str, Array], buckets: int = BUCKETS) -> Points:
    kept = thin(list(columns.values()), buckets)
    return {name: plain(values[kept]) for name, values in {**_across(run), **columns}.items()}


def _held_points(run: ReportedRun, columns: Mapping[str, Array]) -> Points:
    """Return the points of held-out figures, by column: one value for each evaluation."""
    steps = run.held_values("step")
    places = np.searchsorted(run.columns["step"], steps, side="right")
    across = {
        name: np.concatenate([[0.0], values])[places] for name, values in _across(run).items()
    }
    return {name: plain(each) for name, each in {**across, "step": steps, **columns}.items()}


def _smoothed(
    run: ReportedRun, place: int, names: dict[str, str], label: str, faint: str
) -> tuple[list[ChartLine], dict[str, Points]]:
    """Return columns, {unit: name}, as a faint line of each step and a smoothed one over it."""
    columns = {name: run.columns[name] for name in names.values()}
    recent = {unit: run.recent(name) for unit, name in names.items()}
    lines = [
        ChartLine(faint, f"{place}", names, place, FAINT, run=place),
        ChartLine(label, f"{place}-mean", names, place, SMOOTH, place, place, recent),
    ]
    averages = {name: plain(each) for name, each in means(columns, _across(run)).items()}
    return lines, {f"{place}": _points(run, columns), f"{place}-mean": averages}


def _planned(run: ReportedRun, name: str) -> list[Mark]:
    """Return the mark of a figure in plan.json; empty if it was not planned."""
    band = band_of(run.plan, name)
    return [Mark("plan", band["value"], band["low"], band["high"])] if band else []


def _overlaid(
    runs: Sequence[ReportedRun],
    id: str,
    title: str,
    column: str,
    unit: str = "",
    *,
    zero: bool = False,
    log: bool = False,
    exact: bool = False,
) -> Chart:
    """Return a chart with one line per run: smoothed, or with `exact` each step as it is."""
    every, lines = dict[str, Points](), list[ChartLine]()
    alone, what = len(runs) == 1, title.lower()
    for place, run in enumerate(runs):
        named = what if alone else run.name
        if exact:
            own = [ChartLine(named, f"{place}", {TOKEN: column}, place, dash=place, run=place)]
            drawn = {f"{place}": _points(run, {column: run.columns[column]})}
        else:
            faint = "each step" if alone else ""
            own, drawn = _smoothed(run, place, {TOKEN: column}, named, faint)
        lines += own
        every |= drawn
    axis = {TOKEN: f"{what}, {unit}" if unit else what}
    return Chart(id, title, unit, axis, lines, every, zero=zero, log=log)


# ---- Each chart -------------------------------------------------------------------------------


def _of_losses(runs: Sequence[ReportedRun], places: Sequence[int]) -> list[Chart]:
    """Return the charts of the runs at `places` that a comparison of unlike data must not mix.

    These are the loss, the accuracy on images, and a chart of each of the user's own metrics.
    """
    own = dict.fromkeys(
        name for at in places for line in runs[at].held for name in line.get("eval_metrics") or ()
    )
    charts = [_loss(runs, places)]
    if runs[0].unit is IMAGES:
        columns, axis = {name: label(name) for name in TOPS}, "share of images, 0-1"
        charts.append(_held(runs, places, "accuracy", "Held-out accuracy", axis, columns))
    for number, name in enumerate(own):
        chart = _held(runs, places, f"metric-{number}", name, name, {"value": name})
        note = "A task of eval.tasks; or a figure of eval.metrics or of the loss, on held-out data."
        charts.append(replace(chart, note=note))
    return charts


def _held(
    runs: Sequence[ReportedRun],
    places: Sequence[int],
    id: str,
    title: str,
    axis: str,
    columns: Mapping[str, str],
) -> Chart:
    """Return a chart of the accuracy, or of the user's own metric, `columns` by their labels."""
    every, lines, alone, own = {}, [], len(runs) == 1, "value" in columns
    for at in places:
        run = runs[at]
        values = {name: run.held_values(columns[name] if own else name) for name in columns}
        every[f"{at}"] = _held_points(run, values)
        for number, (name, what) in enumerate(columns.items()):
            parts = [*([] if alone else [run.name]), *([] if own else [what])]
            named, color = " ".join(parts) or "held out", number if alone else at
            lines.append(ChartLine(named, f"{at}", {TOKEN: name}, color, DOTS, number, at))
    return Chart(id, title, "", {TOKEN: axis}, lines, every, zero=not own)


def _loss(runs: Sequence[ReportedRun], places: Sequence[int]) -> Chart:
    every, lines = dict[str, Points](), list[ChartLine]()
    alone, unit = len(runs) == 1, runs[0].unit.divisor or runs[0].unit.one
    held = {key: f"eval_{name}" for key, name in LOSSES[unit].items()}
    for at in places:
        run = runs[at]
        name = "" if alone else f"{run.name} "
        named, faint = f"{name}training loss", "each step" if alone else ""
        own, drawn = _smoothed(run, at, LOSSES[unit], named, faint)
        columns = {column: run.held_values(column) for column in held.values()}
        every |= drawn | {f"{at}-held": _held_points(run, columns)}
        lines += own
        if run.held:
            color = at + 1 if alone else at
            lines.append(ChartLine(f"{name}held out", f"{at}-held", held, color, DOTS, run=at))
    axis = {key: f"loss, nats per {key if unit == 'token' else unit}" for key in LOSSES[unit]}
    note = _loss_note(runs[0]) if alone else ""
    return Chart("loss", "Loss", "", axis, lines, every, log=True, wide=True, note=note)


def _loss_note(run: ReportedRun) -> str:
    """Say how many steps are not finite or were skipped, and why held-out loss may be lower."""
    parts = []
    recent = run.recent("loss")
    if run.held and recent is not None and (run.held[-1]["eval_loss"] or 0.0) < recent:
        parts.append(
            "Held-out loss is measured with the newest weights and without dropout; the training "
            "loss is a mean over earlier steps, so it can be higher."
        )
    if missing := int(np.isnan(run.columns["loss"]).sum()):
        parts.append(f"{missing:,} steps have a loss that is not finite.")
    if skipped := int(np.nansum(run.columns["skipped"])):
        parts.append(f"{skipped:,} steps were skipped: the weights stayed as they were.")
    return " ".join(parts)


def _memory(run: ReportedRun) -> Chart:
    marks = _planned(run, "peak_gib")
    if capacity := run.plan.get("capacity_gib"):
        marks.append(Mark("a GPU has", capacity, capacity, capacity))
    lines = [
        ChartLine(phase, "0", {TOKEN: name}, place, LINE, dash=place)
        for place, (phase, name) in enumerate(PHASES.items())
    ]
    columns = {name: run.columns[name] for name in PHASES.values()}
    every, axis = {"0": _points(run, columns, BUCKETS // 2)}, {TOKEN: "memory of rank 0, GiB"}
    return Chart("memory", "Memory by phase", "GiB", axis, lines, every, marks, zero=True)


def _step_time(run: ReportedRun) -> Chart:
    """Return the chart of a step's parts, stacked: each second of a step is in one of them."""
    stalls = {
        name.replace("_", " "): np.nan_to_num(run.columns[column])
        for name, column in OF_A_STEP.items()
    }
    whole = np.nan_to_num(run.columns["step_s"])
    rest = np.maximum(whole - sum(stalls.values(), np.zeros_like(whole)), 0.0)
    columns = {"computing": rest, **stalls}
    lines = [
        ChartLine(name, "0", {TOKEN: name}, place, AREA)
        for place, name in enumerate(columns)
        if name == "computing" or columns[name].any()
    ]
    every, title = {"0": _points(run, columns, BUCKETS // 2)}, "Time of a step, by what took it"
    marks, axis = _planned(run, "step_s"), {TOKEN: "time of a step, s"}
    top, note, first = None, "", np.diff(run.columns["attempt"], prepend=0.0) != 0
    if not first.all() and whole[first].max() > 2 * whole[~first].max():
        top, longest = float(whole[~first].max()), words.duration(float(whole[first].max()))
        note = f"The first step of an attempt, {longest} at most, goes beyond the top of the chart."
    chart = Chart("step-time", title, "s", axis, lines, every, marks, top=top, note=note)
    return replace(chart, zero=True, wide=True)
