"""Runs side by side: the config fields in which they differ, and their results.

differing([one, another])[0]    # ComparisonRow("train.lr", ["0.001", "0.003"])
settings(one)                   # the fields of its config that are not at their defaults
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayapp.config import KINDS, Config
from rayapp.config.fields import IMAGES
from rayapp.config.text import flatten
from rayapp.observe import words
from rayapp.observe.words import UNKNOWN
from rayapp.report.folder import ReportedRun

OWN = ("run.name", "run.storage")  # not compared: they differ between any two runs


@dataclass(frozen=True)
class ComparisonRow:
    """A row of the comparison, one cell per run; `best` are the indices of the best values."""

    label: str
    cells: list[str]
    best: frozenset[int] = frozenset()


def differing(runs: Sequence[ReportedRun]) -> list[ComparisonRow]:
    """Return the config fields that are not the same in all runs."""
    every = [_flat(run.config) for run in runs]
    names = list(dict.fromkeys(name for config in every for name in config))
    rows = []
    for name in names:
        cells = [_shown(config[name]) if name in config else UNKNOWN for config in every]
        if len(set(cells)) > 1 and name not in OWN:
            rows.append(ComparisonRow(name, cells))
    return rows


def settings(run: ReportedRun) -> list[list[str]]:
    """Return the fields of the config that are not at their defaults: field, value, default."""
    kind = KINDS.get(run.task, Config)
    defaults, own = _flat(kind().model_dump(mode="json")), _flat(run.config)
    return [
        [name, _shown(value), _shown(defaults.get(name))]
        for name, value in own.items()
        if _shown(value) != _shown(defaults.get(name))
    ]


def _flat(tree: Mapping[str, Any]) -> dict[str, object]:
    """Return a config as {"section.field": value}; sections without fields are left out."""
    return flatten({name: section for name, section in tree.items() if section != {}})


def _shown(value: Any) -> str:
    """Return a config value as text.

    >>> _shown(None), _shown(True), _shown([1, "a"]), _shown({})
    ('none', 'true', '1, a', '{}')
    """
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(_shown(item) for item in value) or "[]"
    return str(value)


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
