"""The typed description of a run: YAML plus overrides, closed, and checked all at once.

    config = load("configs/tiny_cpu.yaml", train={"lr": 1e-3})

Each section is a frozen pydantic model; the string under a field is its documentation (and its
description in the JSON Schema). A value comes from the defaults, then the YAML file, then the
`--section.field=value` overrides. All problems are collected and raised as one `ConfigError`, whose
lines read `<field>=<value> is <problem>: <why>. <what to set>`. Checks that read files, buckets or
clusters are in the modules that use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from rayapp.config import reading
from rayapp.config.choices import DATA_LABEL, INSTANCE_LABEL, MARKET_LABEL, Choice, Place
from rayapp.config.language import Config, Data, LanguageEval, Model, Parallel, Train
from rayapp.config.lora import Lora
from rayapp.config.reading import ConfigError, Described, combined_problems, differences
from rayapp.config.sections import Checkpoint, Cluster, Origin, Run, RunConfig
from rayapp.config.text import parse_yaml, read_yaml, shown
from rayapp.config.vision import (
    ImageDataConfig,
    ImageModel,
    ImageParallel,
    ImageTrain,
    RandAugment,
    VisionConfig,
)

__all__ = [
    "DATA_LABEL",
    "INSTANCE_LABEL",
    "KINDS",
    "MARKET_LABEL",
    "Checkpoint",
    "Choice",
    "Cluster",
    "Config",
    "ConfigError",
    "Data",
    "Described",
    "ImageDataConfig",
    "ImageModel",
    "ImageParallel",
    "ImageTrain",
    "LanguageEval",
    "Lora",
    "Model",
    "Origin",
    "Parallel",
    "Place",
    "RandAugment",
    "Run",
    "RunConfig",
    "Train",
    "VisionConfig",
    "combined_problems",
    "differences",
    "fields",
    "from_dict",
    "load",
    "parse_yaml",
]


KINDS: dict[Any, type[RunConfig]] = {None: Config, "vision": VisionConfig}  # by `task`


def load(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    kind: type[Described] | None = None,
    **sections: Mapping[str, Any],
) -> Described:
    """Return a checked config: a YAML file, a config or a mapping of sections, with changes.

    None is the defaults. `overrides` names fields, `{"train.lr": 1e-3}`; `sections` gives some
    fields of a section, `train={"lr": 1e-3}`. `kind` is the class to make, by default that of
    `task`.

    Raises:
        ConfigError: with every problem of the file, the changes and their combination.
    """
    tree, problems, changes = dict[str, Any](), list[str](), dict[str, Any]()
    if isinstance(config, RunConfig):
        changes |= config.to_overrides()
    elif isinstance(config, Mapping):
        tree = deepcopy(dict(config))
    elif isinstance(config, str | Path):
        tree, problems = read_yaml(str(config))
    elif config is not None:
        problems.append(
            f"config of type {type(config).__name__} is not valid: a Config, the path of a YAML "
            "file or a mapping of sections is expected. Name sections: run={'name': 'demo'}"
        )
    for name, value in {**(overrides or {}), **sections}.items():
        if isinstance(value, Mapping) and "." not in name:
            changes |= {f"{name}.{field}": each for field, each in value.items()}
        else:
            changes[name] = value
    for field, value in changes.items():
        reading.put(tree, field, value, problems)
    return from_dict(tree, problems, kind)


def from_dict(
    tree: Mapping[str, Any], problems: Iterable[str] = (), kind: type[Described] | None = None
) -> Described:
    """Make a config of a nested mapping of sections and fields.

    `problems` are those found before; they are raised together with new ones.

    Raises:
        ConfigError: with every problem.
    """
    task = tree.get("task")
    named = KINDS.get(task) if isinstance(task, str | None) else None
    if named is None:
        known = ", ".join(name for name in KINDS if name)
        what = f"Set task to one of {known}, or remove it for a language model"
        line = f"task={shown(task)} is unknown: it names the kind of model to train. {what}"
        raise ConfigError([*problems, line])
    if kind is not None and task is not None and named is not kind:
        line = f"task={task} is for another command: this command runs {kind.MODULE}. "
        raise ConfigError([*problems, f"{line}Run python -m {named.MODULE}"])
    return reading.check(kind or cast(type[Described], named), tree, problems)


def fields(kind: type[RunConfig] = Config) -> dict[str, str]:
    """Return every `section.field` with its documentation."""
    return reading.fields(kind)
