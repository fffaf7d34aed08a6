"""The plan of a run that is about to start.

found = forecast(config, shape, steps=1000)      # None: this architecture has no formula
if problem := planner.misfit(found): raise ConfigError([problem])
"""

from __future__ import annotations

from typing import Any

from rayapp import planner
from rayapp.config import Config
from rayapp.planner.formulas import UnknownShape, shape_of


def forecast(
    config: Config, shape: Any, steps: int | None = None, **machine: Any
) -> planner.Answer | None:
    """Plan a run whose model's shape is known (a transformers config).

    `machine` is what is known of one that cluster.instance does not name: see `planner.ask`.

    Raises:
        ConfigError: the instance is unknown, or cannot compute in this precision.
    """
    values = shape.to_dict()
    try:
        shape_of(values)
    except UnknownShape:
        return None
    return planner.plan(config, steps=steps, model=values, **machine)
