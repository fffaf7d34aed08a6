"""The typed description of a run: YAML plus overrides, closed, and checked all at once.

    config = load("configs/tiny_cpu.yaml", train={"lr": 1e-3})

Each section is a frozen pydantic model; the string under a field is its documentation (and its
description in the JSON Schema). A value comes from the defaults, then the YAML file, then the
`--section.field=value` overrides. All problems are collected and raised as one `ConfigError`, whose
lines read `<field>=<value> is <problem>: <why>. <what to set>`. Checks that read files, buckets or
clusters are in the modules that use them.
"""

from __future__ import annotations

from rayapp.config.fields import DATA_LABEL, INSTANCE_LABEL, MARKET_LABEL, Choice, Place
from rayapp.config.language import Config
from rayapp.config.lora import Lora
from rayapp.config.reading import (
    KINDS,
    ConfigError,
    Described,
    combined_problems,
    differences,
    fields,
    from_dict,
    load,
)
from rayapp.config.sections import Origin, Run, RunConfig
from rayapp.config.text import parse_yaml
from rayapp.config.vision import VisionConfig

__all__ = [
    "DATA_LABEL",
    "INSTANCE_LABEL",
    "KINDS",
    "MARKET_LABEL",
    "Choice",
    "Config",
    "ConfigError",
    "Described",
    "Lora",
    "Origin",
    "Place",
    "Run",
    "RunConfig",
    "VisionConfig",
    "combined_problems",
    "differences",
    "fields",
    "from_dict",
    "load",
    "parse_yaml",
]
