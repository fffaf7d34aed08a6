"""Check when training is started again, after how long, and when it is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.driver.recovery import (
    FAILURE,
    LONGEST_PAUSE_S,
    LOOP,
    NO_ROOM,
    PREEMPTION,
    RESIZE,
    Ending,
    GiveUp,
    Recovery,
)
from rayapp.order import Order

ORDER = Order.for_steps(100, 4, 2, seed=3, num_steps=50)


def recovery(max_failures: int = 1000, max_preemptions: int | None = None) -> Recovery:
    return Recovery(max_failures, max_preemptions, ORDER)


def failure(step: int) -> Ending:
    return Ending(FAILURE, "rank 1: out of memory", step)


def test_failures_that_make_progress_go_on_at_once_until_the_budget_ends() -> None:
    budget = recovery(max_failures=3)
    assert [budget.after(failure(step)) for step in (4, 9, 10)] == [0.0, 0.0, 0.0]
    with pytest.raises(GiveUp, match=r"out of memory; cluster.max_failures=3 are used up"):
        budget.after(failure(20))


def test_without_a_budget_the_reason_stands_alone() -> None:
    with pytest.raises(GiveUp, match=r"^rank 1: out of memory$"):
        recovery(max_failures=0).after(failure(3))


def test_a_step_that_fails_again_and_again_stops_the_run_and_names_its_rows() -> None:
    budget = recovery()
    assert [budget.after(failure(step)) for step in (41, 41)] == [0.0, 2.0]
    with pytest.raises(GiveUp) as caught:
        budget.after(failure(41))
    rows = ", ".join(str(row) for row in ORDER.rows(41))
    assert f"step 42, on rows {rows} of the prepared data, has failed 3 times" in str(caught.value)
    assert "rank 1: out of memory" in str(caught.value)


def test_a_loop_is_one_also_if_later_attempts_come_less_far() -> None:
    budget = recovery()
    budget.after(failure(41))
    budget.after(failure(30))
    with pytest.raises(GiveUp, match=r"^step 42, "):
        budget.after(failure(35))


def test_a_loop_after_the_last_step_has_no_rows() -> None:
    budget = recovery()
    for _ in range(LOOP - 1):
        budget.after(failure(ORDER.num_steps))
    with pytest.raises(GiveUp, match=r"^what follows the last step has failed 3 times"):
        budget.after(failure(ORDER.num_steps))


def test_what_no_attempt_mends_ends_the_run_at_once_and_blames_no_rows() -> None:
    with pytest.raises(GiveUp, match=r"^the disk is full$"):
        recovery().after(Ending(FAILURE, "the disk is full", 0, final=True))


def test_preemptions_have_a_budget_of_their_own() -> None:
    budget = recovery(max_failures=0, max_preemptions=2)
    taken = Ending(PREEMPTION, "the node of rank 1 is taken away", 7)
    assert [budget.after(taken), budget.after(taken)] == [0.0, 0.0]
    with pytest.raises(GiveUp, match=r"taken away; cluster.max_preemptions=2 are used up"):
        budget.after(taken)


@given(st.lists(st.tuples(st.sampled_from([PREEMPTION, RESIZE, NO_ROOM]), st.integers(0, 50))))
def test_what_is_nobodys_fault_never_ends_a_run(endings: list[tuple[str, int]]) -> None:
    budget = recovery(max_failures=0)
    assert all(budget.after(Ending(kind, "", step)) == 0.0 for kind, step in endings)


@given(st.lists(st.integers(0, 49), min_size=1, max_size=60))
def test_pauses_are_bounded_and_a_run_ends_in_a_loop_only(steps: list[int]) -> None:
    """Model: a run is given up at the LOOPth failure in a row that is past no earlier one."""
    budget, furthest, stuck = recovery(), -1, 0
    for step in steps:
        stuck = 1 if step > furthest else stuck + 1
        furthest = max(furthest, step)
        if stuck == LOOP:
            with pytest.raises(GiveUp):
                budget.after(failure(step))
            return
        pause = budget.after(failure(step))
        assert (pause == 0.0) == (stuck == 1) and pause <= LONGEST_PAUSE_S
