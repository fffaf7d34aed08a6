"""Read the figures of each source of a mixture from a run's metrics.jsonl.

figures = read(run, num_recent=50)
figures["a.jsonl"].tokens, figures["a.jsonl"].loss, figures["a.jsonl"].held_out
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rayapp.observe import metrics
from rayapp.observe.metrics import HeldOut
from rayapp.storage import Storage

MARK = b'"tokens_by_source": {'


@dataclass
class SourceFigures:
    """The figures of one source."""

    tokens: int = 0
    """Loss-bearing tokens that the model was trained on; those of skipped steps are left out."""
    held_out: float | None = None
    """Nats per token of its held-out rows, when last evaluated."""
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    """Loss and tokens of the last steps that have some of it."""

    @property
    def loss(self) -> float | None:
        """Nats per token over the last steps; None if they have none of it."""
        tokens = sum(count for _, count in self.recent)
        return sum(loss * count for loss, count in self.recent) / tokens if tokens else None


def read(run: Storage, num_recent: int) -> dict[str, SourceFigures]:
    """Return the figures by path, those of the loss over `num_recent` steps; {} of one source."""
    figures: dict[str, SourceFigures] = {}
    for _, data in metrics.blocks(run):
        for text in data.splitlines():
            line = metrics.parsed(text) if MARK in text else None
            if line is None:
                continue
            losses = line.get("loss_by_source") or {}
            for path, tokens in (line.get("tokens_by_source") or {}).items():
                each = figures.setdefault(path, SourceFigures(recent=deque(maxlen=num_recent)))
                each.tokens += 0 if line["skipped"] else tokens
                loss = losses.get(path)
                if loss is not None:
                    each.recent.append((loss, tokens))
            evaluated(figures, line)
    return figures


def evaluated(figures: dict[str, SourceFigures], held_out: HeldOut) -> None:
    """Set the held-out losses to those of an evaluation, if it has some."""
    for path, loss in (held_out.get("eval_loss_by_source") or {}).items():
        figures.setdefault(path, SourceFigures()).held_out = loss
