"""The description of a sweep, and its trials: {name: (values by config field, config)}.

The values alone give a trial its name, so that the same sweep finds its trials again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Field

from rayapp.config import Config, ConfigError, from_dict, load
from rayapp.config.fields import NAME_PATTERN, OptionalFloat, OptionalInt, Section, Text, mapping
from rayapp.config.text import read_yaml, shown
from rayapp.order import fingerprint

Trials: TypeAlias = dict[str, tuple[dict[str, Any], Config]]
FORMS = "Set a list, {min: 1e-5, max: 1e-2, scale: log} or {choice: [a, b]}"


class Sweep(Section):
    """Runs that differ in some fields of their config."""

    ABSENT: ClassVar[Mapping[str, str]] = {}

    name: str = Field(default="sweep", pattern=NAME_PATTERN)
    """Name of the sweep and of the folder that contains its trials."""
    storage: Text = "runs"
    """Folder or s3://bucket/prefix that contains the sweep's folder; every node must reach it."""
    config: Annotated[Text | dict[str, Any], BeforeValidator(mapping)]
    """Config of the trials: the path of a YAML file, or its sections."""
    parameters: dict[str, Any] = Field(min_length=1)
    """Values by config field: a list is a grid, all of which is tried; `{min: 1e-5, max: 1e-2,
    scale: log}` (or linear) and `{choice: [a, b]}` are drawn from."""
    trials: OptionalInt = Field(default=None, ge=1)
    """Number of draws; a grid is tried with each of them."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draws."""
    scheduler: Literal["none", "asha"] = "none"
    """asha: ends trials that are not among the best quarter at an evaluation."""
    metric: str = Field(default="eval_loss", pattern=r"^(eval_loss|task\..+)$")
    """Figure that trials are compared by: eval_loss, or task.NAME for a task of eval.tasks."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether the least or the greatest figure is the best; auto: max for shares of answers."""
    max_usd: OptionalFloat = Field(default=None, gt=0)
    """Maximum cost in USD of all trials together; those that are not done then save and stop."""
    max_hours: OptionalFloat = Field(default=None, gt=0)
    """Maximum hours of all trials together: two at a time take two hours in one."""
    concurrency: OptionalInt = Field(default=None, ge=1)
    """Trials at a time; none: as many as there is room for."""

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (fields, problem) for what is wrong between fields that are each legal alone."""
        for field, given in self.parameters.items():
            at = f"parameters.{field}={shown(given)}"
            if field in ("run.name", "run.storage"):
                yield (("parameters",), f"{at} is not available: the sweep sets it. Remove it")
            elif space_of(given) is None:
                yield (("parameters",), f"{at} is not valid: it names no values to try. {FORMS}")
        drawn = any(isinstance(given, dict) for given in self.parameters.values())
        if drawn != (self.trials is not None):
            why = "missing: parameters are drawn. Set 8" if drawn else "unused: nothing is drawn"
            yield ("trials", "parameters"), f"trials={shown(self.trials)} is {why}"

    @property
    def figure(self) -> str:
        """The metric as rayapp.observe.metrics.held_out_figure names it."""
        return self.metric.removeprefix("task.")

    def best(self, config: Config) -> str:
        """Return which figure is the best: min or max."""
        higher = config.evaluated[self.figure]
        return ("max" if higher else "min") if self.mode == "auto" else self.mode


def read(sweep: str | Mapping[str, Any], changes: Mapping[str, Any]) -> Sweep:
    """Return a checked sweep: a YAML file or a mapping, with some fields changed.

    Raises:
        ConfigError: with every problem.
    """
    tree, problems = read_yaml(sweep) if isinstance(sweep, str) else (sweep, [])
    if problems:
        raise ConfigError(problems)
    return cast(Sweep, from_dict({**tree, **changes}, (), cast(Any, Sweep)))


def trials_of(sweep: Sweep) -> Trials:
    """Return the trials in the order in which they start.

    Raises:
        ConfigError: with every problem of their configs.
    """
    found, problems = Trials(), list[str]()
    for values in _drawn(sweep):
        name = name_of(values)
        run = {"run.name": name, "run.storage": f"{sweep.storage.rstrip('/')}/{sweep.name}"}
        try:
            config = load(sweep.config, {**values, **run}, Config)
        except ConfigError as error:
            problems += error.problems
            continue
        found[name] = values, config
        if sweep.figure not in config.evaluated:
            problems.append(
                f"metric={sweep.metric} is unknown: eval.tasks has no such task. Add it"
            )
        if sweep.scheduler == "asha" and config.eval.every_steps is None:
            why = "trials are evaluated at their end only. Set eval.every_steps in its config"
            problems.append(f"scheduler=asha is without effect: {why}")
    if problems:
        raise ConfigError([*dict.fromkeys(problems)])
    return found


def name_of(values: Mapping[str, Any]) -> str:
    """Return the name of the trial of these values.

    >>> name_of({"train.lr": 0.003, "model.lora": None}), name_of({"train.lr": 1e-5})
    ('lr-0.003_lora-none', 'lr-1e-05')
    """
    short = [field.rpartition(".")[2] for field in values]
    names = short if len({*short}) == len(short) else values
    raw = "_".join(f"{n}-{shown(v)}" for n, v in zip(names, values.values(), strict=True))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", raw)
    same = name == raw and len(name) < 64
    return name if same else f"{name[:54]}-{fingerprint(dict(values))[:8]}"


def space_of(given: Any) -> Any:
    """Return Tune's search space of a parameter: places in a list, or numbers; None: no space."""
    from ray import tune

    match given:
        case [_, *_]:
            return tune.grid_search(list(range(len(given))))
        case {"choice": [_, *_] as values} if len(given) == 1:
            return tune.choice(list(range(len(values))))
        case {"min": int() | float() as low, "max": int() | float() as high, **more}:
            whole = isinstance(low, int) and isinstance(high, int)
            log = more.pop("scale", "linear") == "log"
            if low < high < 1e300 and (low > 0 or not log) and not more:
                draw = ("log" if log else "") + ("randint" if whole else "uniform")
                return getattr(tune, draw)(low, high + whole)
    return None


def _drawn(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield the values of each trial: variants of Tune's search space.

    The first draws are the same for any number of draws. A grid begins with its middle, so that a
    budget leaves out its ends. Drawn numbers have 4 digits, which their trial's name has too.
    """
    from numpy.random import RandomState
    from ray.tune.search.variant_generator import generate_variants

    drawn = {field: v for field, v in sweep.parameters.items() if isinstance(v, dict)}
    grid = {field: v for field, v in sweep.parameters.items() if field not in drawn}
    listed = grid | {field: v["choice"] for field, v in drawn.items() if "choice" in v}
    random = RandomState(sweep.seed)

    def value(field: str, drawn: Any) -> Any:
        number = float(f"{drawn:.4g}") if isinstance(drawn, float) else int(drawn)
        return listed[field][drawn] if field in listed else number

    def from_middle(variant: Mapping[str, Any]) -> float:
        return sum(abs(variant[field] - (len(v) - 1) / 2) for field, v in grid.items())

    for _ in range(sweep.trials or 1):
        spaces = {field: space_of(given) for field, given in sweep.parameters.items()}
        variants = [each for _, each in generate_variants(spaces, random_state=random)]
        for each in sorted(variants, key=from_middle):
            yield {field: value(field, each[field]) for field in sweep.parameters}
