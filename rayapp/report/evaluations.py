"""Read a run's evaluations, its answers to eval.prompts, and the losses of a mixture's sources.

held, sources = read(storage, columns, config, result, num_recent=50)
held[-1]["eval_loss"], sources["a.jsonl"].tokens, sources["a.jsonl"].loss
answers(held), head(held)                           # the table of step and prompt
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from rayapp.observe import metrics
from rayapp.observe import status as statuses
from rayapp.observe.columns import Array
from rayapp.observe.metrics import HeldOut, MetricsLine
from rayapp.observe.records import Evaluated, RunResult, Sections
from rayapp.report.chart import evenly
from rayapp.storage import Storage

OF_EVALUATIONS = (b'"eval_metrics": {', b'"eval_samples": [')  # lines that are parsed as a whole
OF_SOURCES = b'"tokens_by_source": {'
FIGURES = ("step", "eval_loss", "eval_loss_per_byte", "eval_top1", "eval_top5")
MOST_ROWS = 12  # of the table of answers
MOST_OF_PROMPT = 160  # characters
WHITE = "(white space alone)"


@dataclass
class SourceFigures:
    """The figures of one source."""

    recent: deque[tuple[float, int]]
    """Loss and tokens of the last steps that have some of it."""
    tokens: int = 0
    """Loss-bearing tokens that the model was trained on; those of skipped steps are left out."""
    held_out: float | None = None
    """Nats per token of its held-out rows, when last evaluated."""

    @property
    def loss(self) -> float | None:
        """Nats per token over the last steps; None if they have none of it."""
        tokens = sum(count for _, count in self.recent)
        return sum(loss * count for loss, count in self.recent) / tokens if tokens else None


def read(
    storage: Storage,
    columns: Mapping[str, Array],
    config: Sections,
    result: RunResult,
    num_recent: int,
) -> tuple[list[Evaluated], dict[str, SourceFigures]]:
    """Return the evaluations in order of step, and the figures of a mixture's sources by path.

    `result` may be empty. A source's loss is of the last `num_recent` steps. Of several evaluations
    of one step, the result takes precedence over metrics.jsonl, and that over validation.jsonl.

    Raises:
        StorageError: a file cannot be read.
    """
    asked, own = config.get("eval", {}), config.get("train", {}).get("loss")
    mixed = bool(config.get("data", {}).get("mixture"))
    marks = OF_EVALUATIONS if own or asked.get("metrics") or asked.get("prompts") else ()
    known = ~np.isnan(columns["eval_loss"])
    rows = zip(*(columns[name][known].tolist() for name in FIGURES), strict=True)
    names = FIGURES[1:]
    lines = [
        {"step": int(step)}
        | {n: None if np.isnan(x) else x for n, x in zip(names, row, strict=True)}
        for step, *row in rows
    ]
    sources: dict[str, SourceFigures] = defaultdict(lambda: SourceFigures(deque(maxlen=num_recent)))
    whole = list[MetricsLine]()
    for line in _lines(storage, (*marks, OF_SOURCES) if mixed else marks):
        if mixed:
            _count(sources, line)
        if line.get("eval_metrics") or line.get("eval_samples"):
            whole.append(line)
    if mixed:
        _evaluated(sources, result)
    last = [{**result, "step": result["steps"]}] if "steps" in result else []
    every = cast(list[Evaluated], [*statuses.read_validations(storage), *lines, *whole, *last])
    held = {line["step"]: line for line in every if line.get("eval_loss") is not None}
    return [held[step] for step in sorted(held)], dict(sources)


def _lines(storage: Storage, marks: Sequence[bytes]) -> Iterator[MetricsLine]:
    """Yield the lines of metrics.jsonl with one of the marks; nothing is read without marks."""
    for _, data in metrics.blocks(storage) if marks else ():
        for text in data.splitlines():
            line = metrics.parsed(text) if any(mark in text for mark in marks) else None
            if line is not None:
                yield line


def _count(sources: dict[str, SourceFigures], line: MetricsLine) -> None:
    losses = line.get("loss_by_source") or {}
    for path, tokens in (line.get("tokens_by_source") or {}).items():
        sources[path].tokens += 0 if line["skipped"] else tokens
        if (loss := losses.get(path)) is not None:
            sources[path].recent.append((loss, tokens))
    _evaluated(sources, line)


def _evaluated(sources: dict[str, SourceFigures], line: HeldOut) -> None:
    for path, loss in (line.get("eval_loss_by_source") or {}).items():
        sources[path].held_out = loss


def head(held: Sequence[Evaluated]) -> list[str]:
    """Return the head of the table of answers: the step, and each prompt; empty without answers."""
    prompts = (
        prompt if len(prompt) <= MOST_OF_PROMPT else f"{prompt[:MOST_OF_PROMPT]}…"
        for prompt in _prompts(held)
    )
    return ["step", *prompts] if _prompts(held) else []


def answers(held: Sequence[Evaluated]) -> list[list[str]]:
    """Return a row for each of at most MOST_ROWS evaluations: its step, and each prompt's answer.

    Of more, the first, the last and others evenly between them are taken.
    """
    prompts, rows = _prompts(held), []
    for line in evenly([each for each in held if each.get("eval_samples")], MOST_ROWS):
        said = dict(line["eval_samples"])
        rows.append([f"{line['step']:,}", *(shown(said.get(prompt, "")) for prompt in prompts)])
    return rows


def shown(answer: str) -> str:
    """Return an answer without white space at its end, and with one of several empty lines.

    A model that has learned little often repeats white space.

    >>> shown("a\\n \\n\\n\\n  b\\n\\n"), shown("\\n\\n"), shown("")
    ('a\\n\\n  b', '(white space alone)', '')
    """
    text = re.sub(r"\n(?:[^\S\n]*\n)+", "\n\n", answer.rstrip())
    return text or (WHITE if answer else "")


def _prompts(held: Sequence[Evaluated]) -> list[str]:
    """Return the prompts of all evaluations in order."""
    return list(
        dict.fromkeys(prompt for each in held for prompt, _ in each.get("eval_samples") or ())
    )
