"""Runs side by side: the config fields in which they differ, and their results.

differing([one, another])[0]    # ComparisonRow("train.lr", ["0.001", "0.003"])
settings(one)                   # the fields of its config that are not at their defaults
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

from rayapp.config import KINDS, Config
from rayapp.config.fields import IMAGES, Unit
from rayapp.config.lora import Lora
from rayapp.config.text import flatten, shown
from rayapp.observe.figures import label, text
from rayapp.observe.words import UNKNOWN
from rayapp.order import fingerprint
from rayapp.report.folder import ReportedRun

# The parts of a fingerprint (rayapp.data.recipe) that decide which texts or images are held out.
OF_DATA = (
    *("files", "eval_files", "eval_fraction", "format", "kind", "columns", "version", "weights"),
    *("chat_template", "special_tokens", "reasoning"),
)
TOKENIZER = "tokenizer"
# Not compared: they differ between any two runs; model.lora.rank says whether there are adapters.
OWN = ("run.name", "run.storage", "model.lora")
OF_LORA = flatten({"model": {"lora": Lora().model_dump(mode="json", exclude={"rank"})}})
# Figures that are compared within groups of runs with the same data and tokenizer.
OF_GROUPS = ("eval_loss", "eval_loss_per_byte", "eval_top1", "training loss")


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
    rows = []
    for name in dict.fromkeys(name for config in every for name in config):
        meant = [config.get(name, OF_LORA.get(name, UNKNOWN)) for config in every]
        if name not in OWN and any(value != meant[0] for value in meant):
            rows.append(ComparisonRow(name, [shown(each.get(name, UNKNOWN)) for each in every]))
    return rows


def settings(run: ReportedRun) -> list[list[str]]:
    """Return the fields of the config that are not at their defaults: field, value, default."""
    defaults = OF_LORA | _flat(KINDS.get(run.task, Config)().model_dump(mode="json"))
    return [
        [name, shown(value), shown(defaults.get(name))]
        for name, value in _flat(run.config).items()
        if value != defaults.get(name)
    ]


def _flat(tree: Mapping[str, Any]) -> dict[str, object]:
    """Return a config as {"section.field": value}; sections without fields are left out."""
    return flatten({name: section for name, section in tree.items() if section != {}})


def results(runs: Sequence[ReportedRun]) -> list[ComparisonRow]:
    """Return the results of several runs, one row per figure that is known of one of them."""
    every, whole = groups(runs), [range(len(runs))]
    rows = []
    if len(every) > 1:
        named = {place: group.name for group in every for place in group.places}
        names = [named[place] for place in range(len(runs))]
        rows.append(ComparisonRow("group", names, values=names))
    for name, value, better, write in _figures(runs[0].unit):
        values = [value(run) for run in runs]
        if any(value is not None for value in values):
            among = [group.places for group in every] if name in OF_GROUPS else whole
            best = _best(values, better, among)
            cells = [(write or partial(text, name))(value) for value in values]
            rows.append(ComparisonRow(label(name), cells, best, values))
    return rows


def _figures(unit: Unit) -> list[tuple[str, Callable[[ReportedRun], Any], Any, Any]]:
    """Return name, value, which value is better, and the format if not observe.figures has it."""
    accuracy = ("eval_top1", max) if unit is IMAGES else ("eval_loss_per_byte", min)
    return [
        ("status", attrgetter("status"), None, str),
        ("eval_loss", methodcaller("held_figure", "eval_loss"), min, None),
        (accuracy[0], methodcaller("held_figure", accuracy[0]), accuracy[1], None),
        ("training loss", methodcaller("recent", "loss"), min, partial(text, "loss")),
        ("own_loss", methodcaller("recent", "own_loss"), None, None),
        ("step", attrgetter("step"), None, None),
        (unit.many, lambda run: float(run.counted[-1]) if run.num_lines else None, None, None),
        (unit.per_s, methodcaller("rate", unit.per_s), max, None),
        (unit.per_s_per_gpu, methodcaller("rate", unit.per_s_per_gpu), max, None),
        ("mfu", methodcaller("rate", "mfu"), max, None),
        ("peak_gib", methodcaller("highest", "peak_gib"), min, None),
        ("goodput", lambda run: run.account.goodput.get("step"), max, None),
        ("wall_s", attrgetter("wall_s"), None, None),
        ("cost_usd", attrgetter("account.cost_usd"), None, None),
        ("parameters", lambda run: run.plan.get("parameters"), None, None),
        ("interruptions", lambda run: len(run.account.interruptions), None, str),
        ("lost_steps", attrgetter("account.lost_steps"), None, None),
        ("git commit", lambda run: run.started.get("commit"), None, lambda name: name or UNKNOWN),
    ]


def _best(
    values: Sequence[float | None], better: Any, among: Sequence[Sequence[int]]
) -> frozenset[int]:
    """Return the indices of the best value of each group.

    A group has none if all are equal, or no value counts as better.
    """
    best = set[int]()
    for places in among if better else ():
        known = {place: value for place in places if (value := values[place]) is not None}
        if len(set(known.values())) > 1:
            first = better(known.values())
            best |= {place for place, value in known.items() if value == first}
    return frozenset(best)
