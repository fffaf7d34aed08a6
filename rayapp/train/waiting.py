"""Agree between two steps: whether to leave, and whether all ranks have their rows.

batch, leave = next_batch(engine, steps, before)
leave = leave_now(engine)               # CONTINUE, STOP or RESTART, the same on all ranks
"""

from __future__ import annotations

from collections.abc import Iterator

from rayapp.observe.clock import CLOCK, Call
from rayapp.order import StepCounts
from rayapp.train.engine import Batch, Engine
from rayapp.train.step_sync import CONTINUE, Agreement, Totals

WAIT_POLL_S = 1.0


def next_batch(
    engine: Engine, steps: Iterator[Batch], before: Batch | None
) -> tuple[Batch | None, int]:
    """Return the next batch (None at the end) and CONTINUE, or (None, STOP or RESTART).

    Where `engine.may_wait` for it, all ranks ask one another every WAIT_POLL_S seconds whether all
    have their batch, so that none begins a step that another gives up.
    """
    if before is None or not engine.may_wait(before):
        return next(steps, None), CONTINUE
    fetched = Call(CLOCK, lambda: next(steps, None), "next-rows")
    while True:
        missing = not fetched.wait(WAIT_POLL_S)
        if missing:
            engine.phases.begin("waiting for rows that are being prepared")
        totals = ask_all(engine, int(missing)).wait()
        if leave := leave_of(engine, totals):
            return None, leave
        if not totals.counts.weight:
            return fetched.result(), CONTINUE


def leave_of(engine: Engine, totals: Totals) -> int:
    """Return CONTINUE, STOP or RESTART by rank 0 or a node's notice; the same on all ranks."""
    return totals.leave or (engine.poll() if totals.poll else CONTINUE)


def leave_now(engine: Engine) -> int:
    """Agree with all ranks, outside of a step, on CONTINUE, STOP or RESTART."""
    return leave_of(engine, ask_all(engine, 0).wait())


def ask_all(engine: Engine, count: int) -> Agreement:
    """Start to agree, outside of a step, on the sum of `count` and on whether to leave."""
    leave, poll = engine.leave_due(), engine.poll_due()
    return Agreement(StepCounts(count), 0, save=False, leave=leave, poll=poll, group=engine.control)
