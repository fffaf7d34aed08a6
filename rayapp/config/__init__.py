"""The typed description of a run: YAML plus overrides, closed, and checked all at once.

    config = load("configs/tiny_cpu.yaml", {"train.lr": "1e-3"})

Each section is a frozen pydantic model; the string under a field is its documentation (and its
description in the JSON Schema). A value comes from the defaults, then the YAML file, then the
`--section.field=value` overrides. What is wrong is collected, never one at a time, and raised as
one `ConfigError` whose lines read `<field>=<value> is <problem>: <why>. <what to set>`.
Whatever needs a look at the outside (files, buckets, clusters) is checked by the module concerned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rayapp.config import reading
from rayapp.config.language import Config, Data, Eval, Lora, Model, Parallel, Train
from rayapp.config.reading import ConfigError, combined_problems, differences
from rayapp.config.sections import Checkpoint, Cluster, Run, RunConfig
from rayapp.config.text import parse_yaml, read_yaml

__all__ = [
    "Checkpoint",
    "Cluster",
    "Config",
    "ConfigError",
    "Data",
    "Eval",
    "Lora",
    "Model",
    "Parallel",
    "Run",
    "RunConfig",
    "Train",
    "combined_problems",
    "differences",
    "fields",
    "from_dict",
    "load",
    "parse_yaml",
]


def load(path: str | None = None, overrides: Mapping[str, str] | None = None) -> Config:
    """Read a YAML file (or only the defaults) and `section.field` overrides into a checked Config.

    Raises:
        ConfigError: with every problem of the file, the overrides and their combination.
    """
    tree, problems = ({}, []) if path is None else read_yaml(path)
    for field, value in (overrides or {}).items():
        reading.put(tree, field, value, problems)
    return from_dict(tree, problems)


def from_dict(tree: Mapping[str, Any], problems: Iterable[str] = ()) -> Config:
    """Check a nested mapping of sections and fields; `problems` are reported with what is found.

    Raises:
        ConfigError: with every problem.
    """
    return reading.check(Config, tree, problems)


def fields(kind: type[RunConfig] = Config) -> dict[str, str]:
    """Return every `section.field` with its documentation."""
    return reading.fields(kind)
