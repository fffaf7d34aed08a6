"""After training has ended early: whether to start it again, when, and when to give up.

    recovery = Recovery(max_failures=3, max_preemptions=None, order=order)
    pause_s = recovery.after(Ending(FAILURE, "rank 1: out of memory", step=41))

A node that is taken away is nobody's fault and has a budget of its own; missing room costs nothing
but time. A step that fails again and again stops the run, whatever the budgets: the same rows meet
the same weights each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.order import Order

FAILURE, PREEMPTION, RESIZE, NO_ROOM = "failure", "preemption", "resize", "no room"

LOOP = 3  # failures in a row with no step done between them
LONGEST_PAUSE_S = 60.0
SHOWN_ROWS = 8


class GiveUp(RuntimeError):
    """Training is not started again; the message says why."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended before the run was done or asked to stop."""

    kind: str
    """FAILURE, PREEMPTION, RESIZE or NO_ROOM."""
    reason: str
    step: int
    """Steps done when it ended, kept or not."""
    final: bool = False
    """Whether another attempt would meet the same, whatever the rows."""


class Recovery:
    """The budgets of one command."""

    def __init__(self, max_failures: int, max_preemptions: int | None, order: Order) -> None:
        self.max_failures, self.max_preemptions = max_failures, max_preemptions
        self.order = order
        self._failures = self._preemptions = 0
        self._stuck, self._furthest = 0, -1

    def after(self, ending: Ending) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            GiveUp: the cause stays, a budget is used up, or the same step fails again and again.
        """
        if ending.final:
            raise GiveUp(ending.reason)
        if ending.kind in (RESIZE, NO_ROOM):
            return 0.0
        if ending.kind == PREEMPTION:
            self._preemptions += 1
            if self.max_preemptions is not None and self._preemptions > self.max_preemptions:
                raise GiveUp(
                    f"{ending.reason}; cluster.max_preemptions={self.max_preemptions} are used up"
                )
            return 0.0
        self._failures += 1
        self._stuck = self._stuck + 1 if ending.step <= self._furthest else 1
        self._furthest = max(self._furthest, ending.step)
        if self._stuck >= LOOP:
            raise GiveUp(self._loop(ending))
        if self._failures > self.max_failures:
            used = f"; cluster.max_failures={self.max_failures} are used up"
            raise GiveUp(ending.reason + (used if self.max_failures else ""))
        return 0.0 if self._stuck == 1 else min(LONGEST_PAUSE_S, 2.0 ** (self._stuck - 1))

    def _loop(self, ending: Ending) -> str:
        step = self._furthest
        if step < self.order.num_steps:
            rows = [str(row) for row in self.order.rows(step) if row >= 0]
            shown = ", ".join(rows[:SHOWN_ROWS]) + (" ..." if len(rows) > SHOWN_ROWS else "")
            where = f"step {step + 1}, on rows {shown} of the prepared data,"
        else:
            where = "what follows the last step"
        return (
            f"{where} has failed {self._stuck} times in a row: {ending.reason}. Nothing that was "
            "committed is lost: mend the cause and run the same command"
        )
