"""Runs side by side: the config fields in which they differ, and their results.

differing([one, another])[0]    # ComparisonRow("train.lr", ["0.001", "0.003"])
settings(one)                   # the fields of its config that are not at their defaults
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rayapp.config import KINDS, Config
from rayapp.config.fields import IMAGES
from rayapp.config.text import flatten
from rayapp.observe import words
from rayapp.observe.goodput import STARTED
from rayapp.observe.records import EventFields
from rayapp.observe.words import UNKNOWN
from rayapp.order import fingerprint
from rayapp.report.folder import ReportedRun

# The parts of a fingerprint (rayapp.data.recipe) that decide which texts or images are held out.
OF_DATA = (
    *("files", "eval_files", "eval_fraction", "format", "kind", "columns", "version", "weights"),
    *("chat_template", "special_tokens", "reasoning"),
)
TOKENIZER = "tokenizer"
OWN = ("run.name", "run.storage")  # not compared: they differ between any two runs


@dataclass(frozen=True)
class ComparisonRow:
    """A figure of each run: one cell per run; `best` are the indices of the best values."""

    label: str
    cells: list[str]
    best: frozenset[int] = frozenset()
    values: Sequence[float | str | None] = ()
    """What the cells are sorted by."""


@dataclass(frozen=True)
class ComparableRuns:
    """Runs whose losses are comparable: same data, same tokenizer."""

    name: str
    places: list[int]
    """Indices of its runs."""
    data: str
    tokenizer: str
    """Digests; empty if a plan has none."""


def groups(runs: Sequence[ReportedRun]) -> list[ComparableRuns]:
    """Return the groups of comparable runs, named A, B and so on, in the order of the runs.

    A run without a plan is in a group of its own.
    """
    places: dict[tuple[str, ...], list[int]] = {}
    for place, run in enumerate(runs):
        key = digests(run) if run.plan.get("fingerprint") else ("", "", str(place))
        places.setdefault(key, []).append(place)
    return [
        ComparableRuns(f"{number + 1}" if number > 25 else chr(ord("A") + number), own, *key[:2])
        for number, (key, own) in enumerate(places.items())
    ]


def digests(run: ReportedRun) -> tuple[str, str]:
    """Return digests of a run's data and of its tokenizer; an older plan has one for both."""
    plan = run.plan
    parts = plan.get("parts") or {}
    if not parts:
        return plan.get("fingerprint", ""), plan.get("fingerprint", "")
    data = {name: value for name, value in parts.items() if name.split()[-1] in OF_DATA}
    tokenizers = {str(value) for name, value in parts.items() if name.split()[-1] == TOKENIZER}
    return fingerprint(data), " ".join(sorted(tokenizers))


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
    """Return the results of several runs, one row per figure that is known of one of them."""
    every = groups(runs)
    rows = [
        ComparisonRow(label, [write(value) for value in values], _best(values, prefer, of), values)
        for label, values, write, prefer, of in _figures(runs, every)
        if any(value is not None for value in values)
    ]
    if len(every) > 1:
        named = {place: group.name for group in every for place in group.places}
        names = [named[place] for place in range(len(runs))]
        rows.insert(0, ComparisonRow("group", names, values=names))
    return rows


def _figures(
    runs: Sequence[ReportedRun], every: Sequence[ComparableRuns]
) -> list[tuple[str, list[Any], Any, Any, Sequence[ComparableRuns]]]:
    """Return label, values, their format, which is better, and the groups to be compared within."""
    unit, whole = runs[0].unit, [ComparableRuns("", list(range(len(runs))), "", "")]
    counted = [float(run.counted[-1]) if run.num_lines else None for run in runs]
    many = f"loss-bearing {unit.many}" if unit is not IMAGES else unit.many
    per_byte = ("held-out loss per byte", [_held(run, "per_byte") for run in runs], _loss, min)
    top1 = ("top-1", [_held(run, "top1") for run in runs], words.share, max)
    per_gpu = [run.rate(unit.per_s_per_gpu) for run in runs]
    commits = [started(run).get("commit") for run in runs]
    return [
        ("status", [run.status for run in runs], str, None, whole),
        ("held-out loss", [_held(run, "loss") for run in runs], _loss, min, every),
        (*(top1 if unit is IMAGES else per_byte), every),
        ("training loss", [run.recent("loss") for run in runs], _loss, min, every),
        ("train.loss", [run.recent("own_loss") for run in runs], _loss, None, whole),
        ("steps", [run.step for run in runs], _whole, None, whole),
        (many, counted, words.amount, None, whole),
        (f"{unit.many}/s", [run.rate(unit.per_s) for run in runs], words.amount, max, whole),
        (f"{unit.many}/s per worker", per_gpu, words.amount, max, whole),
        ("MFU", [run.rate("mfu") for run in runs], words.share, max, whole),
        ("memory, GiB", [run.highest("peak_gib") for run in runs], words.number, min, whole),
        ("goodput", [(run.goodput or {}).get("step") for run in runs], words.share, max, whole),
        ("time", [run.wall_s for run in runs], words.duration, None, whole),
        ("cost", [run.cost_usd for run in runs], words.dollars, None, whole),
        ("parameters", [run.plan.get("parameters") for run in runs], words.amount, None, whole),
        ("interruptions", [len(run.interruptions) for run in runs], str, None, whole),
        ("lost steps", [run.lost_steps for run in runs], _whole, None, whole),
        ("git commit", commits, lambda value: value or UNKNOWN, None, whole),
    ]


def started(run: ReportedRun) -> EventFields:
    """Return the fields of the newest event of a start with its command; empty if there is none."""
    starts = [event for event in run.events if event["event"] == STARTED and event.get("command")]
    return starts[-1] if starts else cast(EventFields, {})


def _whole(value: float | None) -> str:
    return words.number(value, 12)


def _held(run: ReportedRun, name: str) -> float | None:
    return getattr(run.held[-1], name) if run.held else None


def _loss(value: float | None) -> str:
    return words.fixed(value, 4)


def _best(
    values: Sequence[float | None], prefer: Any, every: Sequence[ComparableRuns]
) -> frozenset[int]:
    """Return the indices of the best value of each group.

    A group has none if all are equal, or no value counts as better.
    """
    best = set()
    for group in every:
        known = {place: value for place in group.places if (value := values[place]) is not None}
        if prefer is not None and len(set(known.values())) > 1:
            first = prefer(known.values())
            best |= {place for place, value in known.items() if value == first}
    return frozenset(best)
