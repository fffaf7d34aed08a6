"""The plan of a run that is about to start: refuse what cannot fit, and write down the rest.

found = forecast(config, shape, steps=1000)      # None: this architecture has no formula
if problem := misfit(found): raise ConfigError([problem])
"""

from __future__ import annotations

from typing import Any

from rayapp import planner
from rayapp.config import Config
from rayapp.formulas import UnknownShape, shape_of


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


def misfit(found: planner.Answer | None) -> str | None:
    """Say why a run cannot fit, and what would; None if it may."""
    if found is None or found.fits is not False:
        return None
    question = found.question
    assert question.instance is not None and found.capacity_gib is not None
    others = planner.suggestions(question, most=2)
    what = " or ".join(one.change for one in others) or "a larger cluster.instance"
    return (
        f"cluster.instance={question.instance.name} is too small: the plan is "
        f"{found.peak_gib.value:.1f} GiB of "
        f"{found.capacity_gib:.1f} on each of {question.workers} workers. Set {what}, or start it "
        "all the same with cluster.ignore_plan=true"
    )
