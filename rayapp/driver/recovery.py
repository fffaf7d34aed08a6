"""Decide, after an attempt has ended early, whether and when to start the next one.

| ending | the run is given up |
|---|---|
| a step fails, a machine is lost | after `cluster.max_failures` of each within the window |
| the network or the storage fails | after OUTAGES, or max_failures if that is more |
| the same step fails again, with the same rows | at the LOOPth time, whatever is left |
| an error before the first step, a start again | at the LOOPth time with the same reason |
| a resize without a step since the last one | at the RESIZESth time |
| a preemption | after `cluster.max_preemptions` |
| a full disk, a missing permission | at once |
| no room | never |

The window is `cluster.failure_window_s`: what is older no longer counts. Pauses double from 2 s to
LONGEST_PAUSE_S with each failure, until the run gets further than ever before. With
`cluster.max_failures=0` no failure is repeated.
"""

from __future__ import annotations

import re
from collections import Counter

from rayapp.config.sections import Cluster
from rayapp.observe import attempts
from rayapp.observe.attempts import Ending
from rayapp.observe.clock import CLOCK, Clock
from rayapp.order import Order

LOOP = 3  # endings of the same kind before the run gets further than ever before
RESIZES = 10  # in a row without a step
OUTAGES = 8  # with their pauses they last about three minutes, besides what each start takes
LONGEST_PAUSE_S = 60.0
SHOWN_ROWS = 8


class GiveUp(RuntimeError):
    """Training must not be started again; the message says why."""


class Recovery:
    """What one command has used up of its budgets for failures and preemptions."""

    def __init__(self, cluster: Cluster, order: Order, clock: Clock = CLOCK) -> None:
        self._cluster, self._order, self._clock = cluster, order, clock
        self._failed_at: dict[str, list[float]] = {}  # by cause
        self._preemptions = self._pauses = 0
        self._alike: Counter[int | str] = Counter()  # endings since the run last got further
        self._furthest = -1
        self._first: Ending | None = None  # failure since the run last got further

    def after(self, ending: Ending) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            GiveUp: a budget is used up, attempts end alike again and again, or another one is no
                use. The message ends with the first failure since the run last got further, if
                that was of another kind than the last.
        """
        if ending.trained and ending.step > self._furthest:
            self._furthest, self._pauses, self._first = ending.step, 0, None
            self._alike.clear()
        if ending.kind == attempts.FAILURE and self._first is None:
            self._first = ending
        try:
            return self._pause_s(ending)
        except GiveUp as error:
            first = self._first
            if first is None or _form(first.reason) == _form(ending.reason):
                raise
            began = f"The first failure was after step {first.step}: {first.reason}"
            raise GiveUp(f"{error}. {began}") from None

    def _pause_s(self, ending: Ending) -> float:
        if ending.kind == attempts.NO_ROOM:
            return 0.0
        if ending.kind == attempts.PREEMPTION:
            self._preemptions += 1
            most = self._cluster.max_preemptions
            if most is not None and self._preemptions > most:
                raise GiveUp(f"{ending.reason}; cluster.max_preemptions={most} are used up")
            return 0.0
        if ending.kind == attempts.RESIZE:
            self._count(ending, "resize", RESIZES)
        elif ending.kind == attempts.AGAIN:
            self._count(ending, ending.reason, LOOP)
        elif ending.final:
            raise GiveUp(f"{ending.reason}. Mend that and run the same command")
        else:
            self._after_failure(ending)
        self._pauses += 1
        return min(LONGEST_PAUSE_S, 2.0 ** (self._pauses - 1)) if self._pauses > 1 else 0.0

    def _after_failure(self, ending: Ending) -> None:
        cause, now, window_s = ending.cause, self._clock.monotonic(), self._cluster.failure_window_s
        times = [at for at in self._failed_at.get(cause, []) if now - at < window_s]
        self._failed_at[cause] = [*times, now]
        if self._cluster.max_failures == 0:
            raise GiveUp(ending.reason)
        if cause == attempts.STEP:
            self._count(ending, ending.step, LOOP)
        elif cause == attempts.START:
            self._count(ending, f"start: {ending.reason}", LOOP)
        patient = cause in (attempts.NETWORK, attempts.STORAGE)
        most = max(OUTAGES, self._cluster.max_failures) if patient else self._cluster.max_failures
        if len(times) + 1 > most:
            used = f"cluster.max_failures={most} are used up"
            used = f"that is {most + 1} times" if patient else used
            window = f"within cluster.failure_window_s={window_s:.0f}"
            raise GiveUp(f"{ending.reason}; {used} {window}")

    def _count(self, ending: Ending, what: int | str, most: int) -> None:
        self._alike[what] += 1
        if self._alike[what] >= most:
            raise GiveUp(self._loop(ending, most))

    def _loop(self, ending: Ending, times: int) -> str:
        if ending.kind in (attempts.AGAIN, attempts.RESIZE):
            return (
                f"{times} attempts have started again without a step in between: {ending.reason}. "
                "See that run.storage is one folder for all nodes, and run the same command"
            )
        if ending.cause == attempts.START:
            where = f"{times} attempts have failed alike before they had done a step"
        elif ending.step < self._order.num_steps:
            rows = [str(row) for row in self._order.rows(ending.step) if row >= 0]
            shown = ", ".join(rows[:SHOWN_ROWS]) + (" ..." if len(rows) > SHOWN_ROWS else "")
            where = f"step {ending.step + 1}, on rows {shown} of the prepared data, has failed "
            where += f"{times} times"
        else:
            where = f"what follows the last step has failed {times} times"
        return (
            f"{where}: {ending.reason}. Nothing that was committed is lost: mend the cause and run "
            "the same command"
        )


def _form(reason: str) -> str:
    """Return a reason without its numbers: ranks, processes and addresses differ each time."""
    return re.sub(r"0x[0-9a-f]+|[0-9]+", "0", reason)
