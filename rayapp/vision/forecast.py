"""The plan of a run that is about to start.

found = forecast(config, shape, classes=1000)    # None: this architecture has no formula
if problem := planner.misfit(found): raise ConfigError([problem])
"""

from __future__ import annotations

from typing import Any

from rayapp import planner
from rayapp.config import VisionConfig
from rayapp.planner.formulas import UnknownShape
from rayapp.planner.image_shape import image_shape_of


def forecast(
    config: VisionConfig, shape: Any, classes: int | None = None, **known: Any
) -> planner.Answer | None:
    """Plan a run whose model's shape is known (a transformers config).

    `classes` is what the data have, `known` what else is known by now: see `planner.ask_images`.

    Raises:
        ConfigError: the instance is unknown, or cannot compute in this precision.
    """
    values = shape.to_dict()
    if classes is not None:
        values["num_labels"] = classes
    try:
        image_shape_of(values, config.data.size)
    except UnknownShape:
        return None
    return planner.plan(config, model=values, **known)
