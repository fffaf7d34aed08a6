"""Read a run's evaluations: its held-out figures and its answers to eval.prompts, by step.

held = read(storage, columns, config, result)
answers(held), head(held)                           # the table of step and prompt
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayapp.observe import metrics
from rayapp.observe import status as statuses
from rayapp.observe.columns import Array
from rayapp.observe.metrics import MetricsLine, Sample
from rayapp.observe.records import Evaluated, RunResult, Sections, Validation
from rayapp.storage import Storage

MARKS = b'"eval_metrics": {', b'"eval_samples": ['  # of the lines that are parsed as a whole
FIGURES = ("step", "eval_loss", "eval_loss_per_byte", "eval_top1", "eval_top5")
MOST_ROWS = 12  # of the table of answers
MOST_OF_PROMPT = 160  # characters
WHITE = "(white space alone)"


@dataclass(frozen=True)
class Held:
    """Held-out figures after a step: loss in nats per token or image; top-1 and top-5 as 0-1."""

    step: int
    loss: float
    per_byte: float | None = None
    """Nats per UTF-8 byte, of a language model."""
    top1: float | None = None
    top5: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    """The user's own (eval.metrics), by name."""
    samples: Sequence[Sample] = ()
    """The prompts and the likeliest tokens after each."""


def read(
    storage: Storage, columns: Mapping[str, Array], config: Sections, result: RunResult
) -> list[Held]:
    """Return the evaluations of a run's folder in order of step; `result` may be empty.

    Raises:
        StorageError: it cannot be read.
    """
    asked, own = config.get("eval", {}), config.get("train", {}).get("loss")
    more = own or asked.get("metrics") or asked.get("prompts")
    whole = _whole_lines(storage) if more else {}
    return held_out(_evaluated(columns, whole), statuses.read_validations(storage), result)


def held_out(
    lines: Sequence[Evaluated], validations: Sequence[Validation], result: RunResult
) -> list[Held]:
    """Return the held-out figures in order of step.

    Of several for one step, the result's take precedence over those of training (`lines`), and
    these over those of checkpoints (`validations`).
    """
    by_step: dict[int, Held] = {}
    last = (result.get("steps"), result)
    for step, line in (*((each.get("step"), each) for each in (*validations, *lines)), last):
        loss = line.get("eval_loss")
        if step is not None and loss is not None:
            shares = line.get("eval_top1"), line.get("eval_top5")
            own, samples = line.get("eval_metrics") or {}, line.get("eval_samples") or ()
            by_step[step] = Held(step, loss, line.get("eval_loss_per_byte"), *shares, own, samples)
    return [by_step[step] for step in sorted(by_step)]


def head(held: Sequence[Held]) -> list[str]:
    """Return the head of the table of answers: the step, and each prompt; empty without answers."""
    shown = (
        prompt if len(prompt) <= MOST_OF_PROMPT else f"{prompt[:MOST_OF_PROMPT]}…"
        for prompt in _prompts(held)
    )
    return ["step", *shown] if _prompts(held) else []


def answers(held: Sequence[Held]) -> list[list[str]]:
    """Return a row for each of at most MOST_ROWS evaluations: its step, and each prompt's answer.

    Of more, the first, the last and others evenly between them are taken.
    """
    rows = [each for each in held if each.samples]
    kept = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).round().astype(int))
    prompts = _prompts(held)
    return [
        [f"{rows[k].step:,}", *(shown(dict(rows[k].samples).get(prompt, "")) for prompt in prompts)]
        for k in kept.tolist()
    ]


def shown(answer: str) -> str:
    """Return an answer without white space at its end, and with one of several empty lines.

    A model that has learned little often repeats white space.

    >>> shown("a\\n \\n\\n\\n  b\\n\\n"), shown("\\n\\n"), shown("")
    ('a\\n\\n  b', '(white space alone)', '')
    """
    text = re.sub(r"\n(?:[^\S\n]*\n)+", "\n\n", answer.rstrip())
    return text or (WHITE if answer else "")


def _prompts(held: Sequence[Held]) -> list[str]:
    """Return the prompts of all evaluations in order."""
    return list(dict.fromkeys(prompt for each in held for prompt, _ in each.samples))


def _whole_lines(storage: Storage) -> dict[int, MetricsLine]:
    """Return by step the lines of metrics.jsonl that have own metrics or answers."""
    lines = {}
    for _, data in metrics.blocks(storage):
        for text in data.splitlines():
            line = metrics.parsed(text) if any(mark in text for mark in MARKS) else None
            if line is not None:
                lines[line["step"]] = line
    return lines


def _evaluated(columns: Mapping[str, Array], whole: Mapping[int, MetricsLine]) -> list[Evaluated]:
    """Return the evaluations that training has written to metrics.jsonl."""
    known = ~np.isnan(columns["eval_loss"])
    rows = zip(*(columns[name][known].tolist() for name in FIGURES), strict=True)
    evaluations = []
    for step, loss, *others in rows:
        per_byte, top1, top5 = (None if np.isnan(value) else value for value in others)
        line = whole.get(int(step))
        evaluations.append(
            Evaluated(
                step=int(step),
                eval_loss=loss,
                eval_loss_per_byte=per_byte,
                eval_top1=top1,
                eval_top5=top5,
                eval_metrics=line.get("eval_metrics") if line else None,
                eval_samples=line.get("eval_samples") if line else None,
            )
        )
    return evaluations
