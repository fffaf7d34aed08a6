"""Several runs side by side: the config fields in which they differ, and their results.

differing([one, another])[0]    # ComparisonRow("train.lr", ["0.001", "0.003"])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayapp.config.fields import IMAGES
from rayapp.observe import words
from rayapp.observe.words import UNKNOWN
from rayapp.report.folder import ReportedRun
from rayapp.report.tables import flat, shown

OWN = ("run.name", "run.storage")  # not compared: they differ between any two runs


@dataclass(frozen=True)
class ComparisonRow:
    """A row of the comparison, one cell per run; `best` are the indices of the best values."""

    label: str
    cells: list[str]
    best: frozenset[int] = frozenset()


def differing(runs: Sequence[ReportedRun]) -> list[ComparisonRow]:
    """Return the config fields that are not the same in all runs."""
    every = [flat(run.config) for run in runs]
    names = list(dict.fromkeys(name for one in every for name in one))
    rows = []
    for name in names:
        cells = [shown(one[name]) if name in one else UNKNOWN for one in every]
        if len(set(cells)) > 1 and name not in OWN:
            rows.append(ComparisonRow(name, cells))
    return rows


def results(runs: Sequence[ReportedRun]) -> list[ComparisonRow]:
    """Return the results of several runs, one row per figure."""
    unit = runs[0].unit
    counted = [float(run.counted[-1]) if run.num_lines else None for run in runs]
    per_byte = ("held-out loss per byte", [_held(run, "per_byte") for run in runs], _loss, min)
    top1 = ("top-1", [_held(run, "top1") for run in runs], words.share, max)
    columns: list[tuple[str, list[Any], Any, Any]] = [
        ("status", [run.status for run in runs], str, None),
        ("parameters", [run.plan.get("parameters") for run in runs], words.amount, None),
        ("steps", [run.step for run in runs], lambda value: words.number(value, 12), None),
        (unit.many, counted, words.amount, None),
        ("held-out loss", [_held(run, "loss") for run in runs], _loss, min),
        top1 if unit is IMAGES else per_byte,
        ("training loss", [run.last("loss") for run in runs], _loss, min),
        (f"{unit.many}/s", [run.rate(unit.per_s) for run in runs], words.amount, max),
        (
            f"{unit.many}/s per worker",
            [run.rate(unit.per_s_per_gpu) for run in runs],
            words.amount,
            max,
        ),
        ("MFU", [run.rate("mfu") for run in runs], words.share, max),
        ("peak memory, GiB", [run.highest("peak_gib") for run in runs], words.number, min),
        ("goodput", [(run.goodput or {}).get("step") for run in runs], words.share, max),
        ("wall time", [run.wall_s for run in runs], words.duration, None),
        ("cost", [run.cost_usd for run in runs], words.dollars, None),
        ("interruptions", [len(run.interruptions) for run in runs], str, None),
        ("steps done in vain", [run.lost_steps for run in runs], words.number, None),
    ]
    return [
        ComparisonRow(label, [write(value) for value in values], _best(values, prefer))
        for label, values, write, prefer in columns
    ]


def _held(run: ReportedRun, name: str) -> float | None:
    return getattr(run.held[-1], name) if run.held else None


def _loss(value: float | None) -> str:
    return words.fixed(value, 4)


def _best(values: Sequence[float | None], prefer: Any) -> frozenset[int]:
    """Return the indices of the best value; none if all are equal or no value counts as better."""
    known = [value for value in values if value is not None]
    if prefer is None or len(known) < 2 or len(set(known)) == 1:
        return frozenset()
    return frozenset(place for place, value in enumerate(values) if value == prefer(known))
