"""The description of a sweep, and its trials: {name: Trial(values, config)}.

    trials = trials_of(read("sweep.yaml", {"max_hours": "2"}))

The values alone give a trial its name, so that the same sweep finds its trials again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field

from rayapp.config import Config, ConfigError, load, reading
from rayapp.config.fields import (
    NAME_PATTERN,
    OptionalFloat,
    OptionalInt,
    OptionalStr,
    Section,
    Text,
)
from rayapp.config.fields import mapping as mapping_of
from rayapp.config.text import read_yaml, shown
from rayapp.observe.metrics import figure
from rayapp.order import fingerprint

DIGITS = 4  # significant ones of a drawn number; they are in the trial's name
MOST_NAME = 63
FORMS = "a list, {min: 1e-5, max: 1e-2, scale: log} (or linear) or {choice: [a, b]}"


class Sweep(Section):
    """Runs that differ in some fields of their config."""

    ABSENT: ClassVar[Mapping[str, str]] = {}

    name: str = Field(default="sweep", pattern=NAME_PATTERN)
    """Name of the sweep and of the folder that contains its trials."""
    storage: Text = "runs"
    """Folder or s3://bucket/prefix that contains the sweep's folder; every node must reach it."""
    config: Annotated[Text | dict[str, Any], BeforeValidator(mapping_of)]
    """Config of the trials: the path of a YAML file, or its sections."""
    parameters: dict[str, Any] = Field(min_length=1)
    """Values by config field: a list is a grid, all of which is tried; `{min: 1e-5, max: 1e-2,
    scale: log}` and `{choice: [a, b]}` are drawn from."""
    trials: OptionalInt = Field(default=None, ge=1)
    """Number of draws; a grid is tried with each of them."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draws."""
    scheduler: Literal["none", "asha"] = "none"
    """asha: ends trials that are not among the best quarter at an evaluation."""
    metric: str = Field(default="eval_loss", pattern=r"^(eval_loss|task\..+)$")
    """Figure of an evaluation that trials are compared by: eval_loss, or task.NAME of a task of
    eval.tasks."""
    mode: OptionalStr = Field(default=None, pattern="^(min|max)$")
    """The best figure is the min or the max; none: the least loss, the most right answers."""
    max_usd: OptionalFloat = Field(default=None, gt=0)
    """Maximum cost in USD of all trials together; those that are not done then save and stop."""
    max_hours: OptionalFloat = Field(default=None, gt=0)
    """Maximum hours of all trials together: two at a time take two hours in one."""
    concurrency: OptionalInt = Field(default=None, ge=1)
    """Trials at a time; none: as many as there is room for."""

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (fields, problem) for what is wrong between fields that are each legal alone."""
        for field, values in self.parameters.items():
            at = f"parameters.{field}={shown(values)}"
            if field in ("run.name", "run.storage"):
                yield ("parameters",), f"{at} is not available: the sweep sets it. Remove it"
            elif not _is_space(values):
                yield ("parameters",), f"{at} is not valid: it must be values to try. Set {FORMS}"
        drawn = any(isinstance(values, dict) for values in self.parameters.values())
        if drawn != (self.trials is not None):
            why = "parameters are drawn. Set e.g. 8" if drawn else "a grid is tried once. Remove it"
            at = f"trials={shown(self.trials)} is {'missing' if drawn else 'without effect'}"
            yield ("trials", "parameters"), f"{at}: {why}"

    @property
    def task(self) -> str | None:
        """The task whose score is the metric."""
        return self.metric.removeprefix("task.") if self.metric.startswith("task.") else None

    def best(self, config: Config) -> str:
        """Return which figure is the best: min or max."""
        task = config.eval.tasks.get(self.task or "")
        return self.mode or ("max" if task is not None and task.score != "loss" else "min")

    def figure(self, evaluated: Mapping[str, Any]) -> float | None:
        """Return the metric of a line of metrics.jsonl, None if it has none."""
        if self.task is None:
            return figure(evaluated, self.metric)
        return figure(evaluated.get("eval_metrics") or {}, self.task)


@dataclass(frozen=True)
class Trial:
    """A run of a sweep."""

    values: dict[str, Any]
    """By config field."""
    config: Config


def read(sweep: str | Mapping[str, Any], changes: Mapping[str, Any]) -> Sweep:
    """Return a checked sweep: a YAML file or a mapping, with some fields changed.

    Raises:
        ConfigError: with every problem.
    """
    tree, problems = read_yaml(sweep) if isinstance(sweep, str) else (dict(sweep), [])
    if problems:
        raise ConfigError(problems)
    return cast(Sweep, reading.check(cast(Any, Sweep), {**tree, **changes}))


def trials_of(sweep: Sweep) -> dict[str, Trial]:
    """Return the trials by name, in the order in which they start.

    A grid begins with its middle, so that a budget leaves out its ends.

    Raises:
        ConfigError: with every problem of their configs.
    """
    found, problems = dict[str, Trial](), list[str]()
    for values in _drawn(sweep):
        name = name_of(values)
        run = {"run.name": name, "run.storage": f"{sweep.storage.rstrip('/')}/{sweep.name}"}
        try:
            found[name] = Trial(values, load(sweep.config, {**values, **run}, Config))
        except ConfigError as error:
            problems += error.problems
            continue
        asked = found[name].config.eval
        if sweep.task is not None and sweep.task not in asked.tasks:
            why = f"eval.tasks has no such task. Set one of {', '.join(asked.tasks)} or eval_loss"
            problems.append(f"metric={sweep.metric} is unknown: {why}")
        if sweep.scheduler == "asha" and asked.every_steps is None:
            why = "trials are evaluated at their end only. Set eval.every_steps in its config"
            problems.append(f"scheduler=asha is without effect: {why}")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return found


def name_of(values: Mapping[str, Any]) -> str:
    """Return the name of the trial of these values.

    >>> name_of({"train.lr": 0.003, "model.lora": None}), name_of({"train.lr": 1e-5})
    ('lr-0.003_lora-none', 'lr-1e-05')
    """
    short = [field.rpartition(".")[2] for field in values]
    names = short if len({*short}) == len(short) else list(values)
    raw = "_".join(f"{n}-{shown(v)}" for n, v in zip(names, values.values(), strict=True))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", raw)
    if name == raw and len(name) <= MOST_NAME:
        return name
    return f"{name[: MOST_NAME - 9]}-{fingerprint(dict(values))[:8]}"


def _is_space(values: Any) -> bool:
    """Say whether a parameter has one of FORMS."""
    if isinstance(values, list | tuple):
        return len(values) > 0
    if not isinstance(values, dict) or values.keys() == {"choice"}:
        return isinstance(values, dict) and isinstance(values["choice"], list) and values["choice"]
    low, high, scale = values.get("min"), values.get("max"), values.get("scale", "linear")
    numbers = all(type(each) in (int, float) for each in (low, high))
    known = values.keys() <= {"min", "max", "scale"} and scale in ("linear", "log")
    return numbers and known and -1e300 * (scale == "linear") < low < high < 1e300


def _drawn(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield the values of each trial: variants of Ray Tune's search space.

    The first draws are the same for any number of draws.
    """
    from numpy.random import RandomState
    from ray import tune
    from ray.tune.search.variant_generator import generate_variants

    spaces, listed, middle = dict[str, Any](), dict[str, Any](), dict[str, float]()
    for field, given in sweep.parameters.items():
        if isinstance(given, list | tuple) or "choice" in given:
            values = listed[field] = given["choice"] if isinstance(given, dict) else given
            places = list(range(len(values)))  # Tune has its own reading of mappings
            spaces[field] = (tune.choice if isinstance(given, dict) else tune.grid_search)(places)
            middle |= {} if isinstance(given, dict) else {field: (len(values) - 1) / 2}
            continue
        low, high, log = given["min"], given["max"], given.get("scale") == "log"
        whole = isinstance(low, int) and isinstance(high, int)
        draw = getattr(tune, ("log" if log else "") + ("randint" if whole else "uniform"))
        spaces[field] = draw(low, high + whole)
    random = RandomState(sweep.seed)

    def value(field: str, drawn: Any) -> Any:
        if field in listed:
            return listed[field][drawn]
        return float(f"{drawn:.{DIGITS}g}") if isinstance(drawn, float) else int(drawn)

    for _ in range(sweep.trials or 1):
        variants = [spec for _, spec in generate_variants(dict(spaces), random_state=random)]
        for each in sorted(variants, key=lambda v: sum(abs(v[f] - m) for f, m in middle.items())):
            yield {field: value(field, each[field]) for field in spaces}
