"""Decide, after an attempt has ended early, whether and when to start the next one.

    recovery = Recovery(max_failures=3, max_preemptions=None, order=order)
    pause_s = recovery.after(Ending(FAILURE, "rank 1: out of memory", step=41, trained=True))

Preemptions have a budget of their own, as they are not the run's fault; resizes and a lack of room
use up no budget. LOOP failures at the same step end the run whatever is left of the budgets, since
each attempt meets the same rows with the same weights. So do LOOP attempts that fail before their
first step, or that start again for the same reason; their message names no rows.
"""

from __future__ import annotations

from collections import Counter

from rayapp.observe.ending import AGAIN, NO_ROOM, PREEMPTION, RESIZE, Ending
from rayapp.order import Order

LOOP = 3  # endings of the same kind before the run gets further than ever before
LONGEST_PAUSE_S = 60.0
SHOWN_ROWS = 8


class GiveUp(RuntimeError):
    """Training must not be started again; the message says why."""


class Recovery:
    """What one command has used up of its budgets for failures and preemptions."""

    def __init__(self, max_failures: int, max_preemptions: int | None, order: Order) -> None:
        self.max_failures, self.max_preemptions = max_failures, max_preemptions
        self.order = order
        self._failures = self._preemptions = 0
        self._alike: Counter[int | str] = Counter()  # endings since the run last got further
        self._furthest = -1

    def after(self, ending: Ending) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            GiveUp: a budget is used up, attempts end alike again and again, or another one is no
                use.
        """
        if ending.trained and ending.step > self._furthest:
            self._furthest = ending.step
            self._alike.clear()
        if ending.kind in (RESIZE, NO_ROOM):
            return 0.0
        if ending.kind == AGAIN:
            return self._pause_s(ending, ending.reason)
        if ending.kind == PREEMPTION:
            self._preemptions += 1
            if self.max_preemptions is not None and self._preemptions > self.max_preemptions:
                raise GiveUp(
                    f"{ending.reason}; cluster.max_preemptions={self.max_preemptions} are used up"
                )
            return 0.0
        if ending.final:
            raise GiveUp(f"{ending.reason}. Mend that and run the same command")
        self._failures += 1
        pause_s = self._pause_s(ending, ending.step if ending.trained else "before a step")
        if self._failures > self.max_failures:
            used = f"; cluster.max_failures={self.max_failures} are used up"
            raise GiveUp(ending.reason + (used if self.max_failures else ""))
        return pause_s

    def _pause_s(self, ending: Ending, what: int | str) -> float:
        self._alike[what] += 1
        if self._alike[what] >= LOOP:
            raise GiveUp(self._loop(ending))
        tried = self._alike.total() - 1
        return min(LONGEST_PAUSE_S, 2.0**tried) if tried else 0.0

    def _loop(self, ending: Ending) -> str:
        """Return the message of a run whose attempts end in the same way each time."""
        if ending.kind == AGAIN:
            return (
                f"{LOOP} attempts have started again for the same reason: {ending.reason}. See "
                "that run.storage is one folder for all nodes, and run the same command"
            )
        if not ending.trained:
            where = f"{LOOP} attempts have failed before they had done a step"
        elif ending.step < self.order.num_steps:
            rows = [str(row) for row in self.order.rows(ending.step) if row >= 0]
            shown = ", ".join(rows[:SHOWN_ROWS]) + (" ..." if len(rows) > SHOWN_ROWS else "")
            where = (
                f"step {ending.step + 1}, on rows {shown} of the prepared data, has failed {LOOP} "
                "times"
            )
        else:
            where = f"what follows the last step has failed {LOOP} times"
        return (
            f"{where}: {ending.reason}. Nothing that was committed is lost: mend the cause and run "
            "the same command"
        )
