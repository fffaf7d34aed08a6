"""Predict whether a run fits, how long it takes and what it costs, before paying for a machine.

    found = plan(rayapp.load("configs/llama3_8b_sft.yaml"))
    found.fits, found.peak_gib, found.hours, found.cost_usd        # each with a band
    cheapest(found.question, deadline_hours=24).question.instance.name

No torch, no network, well under a second.
"""

from __future__ import annotations

from typing import Any

from rayapp.config import Config, ConfigError, VisionConfig
from rayapp.config.lora import NEW_TOKENS, opened_by
from rayapp.planner.advice import (
    Suggestion,
    cheapest,
    largest_micro_batch,
    scaling,
    size_problem,
    suggestions,
    with_auto,
    with_micro_batch,
)
from rayapp.planner.answer import Answer, Band, answer
from rayapp.planner.question import Question, UnknownModel, ask, counts_of
from rayapp.planner.shape import Shape
from rayapp.planner.trained import random_weights, with_adapters_lora

__all__ = [
    "Answer",
    "Band",
    "Question",
    "Suggestion",
    "UnknownModel",
    "answer",
    "as_dict",
    "ask",
    "cheapest",
    "counts_of",
    "largest_micro_batch",
    "plan",
    "random_weights",
    "scaling",
    "size_problem",
    "suggestions",
    "with_adapters_lora",
    "with_micro_batch",
]


def plan(config: Config | VisionConfig, **more: Any) -> Answer:
    """Plan a run; `more` goes to `ask`: region, usd_per_hour, steps, model, read.

    Raises:
        ConfigError: the config cannot be planned; with every problem.
    """
    try:
        if isinstance(config, VisionConfig):
            return answer(ask(config, **more))
        question = ask(config, **more)
        train, auto = config.train, config.parallel.strategy == "auto"
        given = {"compiled": train.compile is None, "size": train.micro_batch is None}
        question = with_auto(question, strategy=auto, **given)
        planned, lora = answer(question), config.model.lora
        shape = question.layout.shape
        if isinstance(shape, Shape) and shape.measured and shape.measured.kernel_packages:
            named = " and ".join(shape.measured.kernel_packages)
            planned.reasons.append(
                f"layers without attention: planned as PyTorch's reference code runs them; with "
                f"{named} on GPUs they take less time and memory"
            )
        if lora is not None and lora.target_parameters and not lora.merge:
            kind = question.layout.shape.model_type
            planned.reasons.append(opened_by(kind, lora.target_parameters))
        if lora is not None and config.model.new_tokens and not lora.merge:
            planned.reasons.append(NEW_TOKENS)
        return planned
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([str(error)]) from error


def as_dict(
    planned: Answer, others: list[Suggestion], table: list[Answer], best: Answer | None
) -> dict[str, object]:
    """Return what `plan --json` prints: the plan, suggestions, scaling, and cheapest machines."""
    return {
        **planned.as_dict(),
        "suggestions": [each.as_dict() for each in others],
        "scaling": [each.as_dict() for each in table],
        "cheapest": None if best is None else best.as_dict(),
    }
