"""The charts of held-out figures other than the loss: accuracy, and the user's own metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayapp.config.fields import IMAGES
from rayapp.observe import words
from rayapp.report.chart import DOTS, TOKEN, Chart, ChartLine, Points
from rayapp.report.curves import plain
from rayapp.report.folder import ReportedRun

HELD_COLUMNS = {
    "token": {"loss": "eval_loss", "per_byte": "eval_loss_per_byte"},
    "image": {"loss": "eval_loss", "top1": "eval_top1", "top5": "eval_top5"},
}


def held_charts(runs: Sequence[ReportedRun], places: Sequence[int]) -> list[Chart]:
    """Return the charts of the runs at `places`: accuracy, of images, and those of eval.metrics."""
    accuracy = [_accuracy(runs, places)] if runs[0].unit is IMAGES else []
    names = dict.fromkeys(
        name for place in places for held in runs[place].held for name in held.metrics
    )
    return [*accuracy, *(_own_metric(runs, places, *each) for each in enumerate(names))]


def _accuracy(runs: Sequence[ReportedRun], places: Sequence[int]) -> Chart:
    """Return the chart of top-1 and top-5 accuracy on held-out images."""
    alone = len(runs) == 1
    every = {f"{place}": held_points(runs[place]) for place in places}
    lines = [
        ChartLine(
            ("" if alone else f"{runs[place].name} ") + f"{name[:3]}-{name[3:]}",
            f"{place}",
            {TOKEN: f"eval_{name}"},
            number if alone else place,
            DOTS,
            dash=number,
            run=place,
        )
        for place in places
        for number, name in enumerate(("top1", "top5"))
    ]
    last = [runs[place].held[-1].top1 for place in places if runs[place].held]
    summary = f"top-1 at last {', '.join(map(words.share, last)) or words.UNKNOWN}"
    axis = {TOKEN: "share of images, 0-1"}
    return Chart("accuracy", "Held-out accuracy", "", axis, lines, every, summary, zero=True)


def _own_metric(
    runs: Sequence[ReportedRun], places: Sequence[int], number: int, name: str
) -> Chart:
    """Return the chart of one of the user's own metrics."""
    lines = [
        ChartLine(
            "held out" if len(runs) == 1 else runs[place].name,
            f"{place}",
            {TOKEN: "value"},
            place,
            DOTS,
            run=place,
        )
        for place in places
    ]
    return Chart(
        f"metric-{number}",
        name,
        "",
        {TOKEN: name},
        lines,
        {f"{place}": _metric_points(runs[place], name) for place in places},
        f"{name} of the held-out data, a function of eval.metrics or train.loss",
        note="A function of eval.metrics, or train.loss, on the held-out data.",
    )


def held_points(run: ReportedRun) -> Points:
    """Return the held-out figures, with the counts and seconds of their steps."""
    columns = _held_places(run)
    for name, column in HELD_COLUMNS[run.unit.one].items():
        columns[column] = plain(np.array([getattr(held, name) for held in run.held], np.float64))
    return columns


def _metric_points(run: ReportedRun, name: str) -> Points:
    values = [held.metrics.get(name) for held in run.held]
    return {**_held_places(run), "value": plain(np.array(values, np.float64))}


def _held_places(run: ReportedRun) -> Points:
    steps = np.array([held.step for held in run.held], np.float64)
    columns: Points = {"step": plain(steps)}
    places = np.searchsorted(run.columns["step"], steps, side="right") - 1
    for name, values in ((run.unit.many, run.counted), ("seconds", run.seconds)):
        known = [values[place] if place >= 0 else 0.0 for place in places]
        columns[name] = plain(np.array(known, np.float64))
    return columns
