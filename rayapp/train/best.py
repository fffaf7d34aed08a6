"""Judge a run by its evaluations: which one is the best, when it has enough, and its gate.

best = BestSoFar("eval_loss", higher=False, patience=3)
best.take(step, held_out)             # after each evaluation; True: no earlier one is as good
best.enough                           # `patience` evaluations in a row were not
judged(config.eval.conditions, held_out, before)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rayapp.config.tasks import Condition
from rayapp.observe.metrics import HeldOut, held_out_figure
from rayapp.observe.records import Best, Judged


@dataclass
class BestSoFar:
    """The best evaluation by a figure; all ranks have the same figures, and so the same best."""

    figure: str | None
    """None: no evaluation is the best."""
    higher: bool = False
    """Whether a higher figure is better."""
    patience: int | None = None
    """Evaluations in a row without a new best after which the run ends."""
    best: Best | None = None

    def take(self, step: int, held_out: HeldOut) -> bool:
        """Note the figures of an evaluation; return whether they are the best so far."""
        if self.figure is None:
            return False
        value = held_out_figure(held_out, self.figure)
        if value is not None and (self.best is None or self._beats(value)):
            kept: HeldOut = {**held_out, "eval_samples": None}
            self.best = {"figure": self.figure, "step": step, "held_out": kept, "since": 0}
            return True
        if self.best is not None:
            self.best = {**self.best, "since": self.best["since"] + 1}
        return False

    def _beats(self, value: float) -> bool:
        assert self.figure is not None and self.best is not None
        least = held_out_figure(self.best["held_out"], self.figure)
        return least is None or (value > least if self.higher else value < least)

    def resume(self, best: Best | None) -> None:
        """Go on from a checkpoint's best evaluation, if it is one by the same figure."""
        self.best = best if best is not None and best["figure"] == self.figure else None

    @property
    def enough(self) -> bool:
        """Whether the run ends before its last step."""
        return self.best is not None and is_enough(self.best, self.patience)


def is_enough(best: Best, patience: int | None) -> bool:
    """Say whether eval.patience ends a run with this best evaluation."""
    return patience is not None and best["since"] >= patience


def judged(conditions: Iterable[Condition], held_out: HeldOut, before: HeldOut) -> list[Judged]:
    """Compare an evaluation with the conditions of eval.gate; `before` is of the base."""
    found = list[Judged]()
    for each in conditions:
        value, base = (held_out_figure(figures, each.name) for figures in (held_out, before))
        limit, met = each.limit(base), each.met(value, base)
        found.append({"condition": each.text, "value": value, "limit": limit, "met": met})
    return found
