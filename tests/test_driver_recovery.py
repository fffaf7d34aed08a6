"""Check when training is started again, after how long, and when it is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.driver.recovery import LONGEST_PAUSE_S, LOOP, GiveUp, Recovery
from rayapp.observe.ending import AGAIN, FAILURE, NO_ROOM, PREEMPTION, RESIZE, Ending
from rayapp.order import Order

ORDER = Order.for_steps(100, 4, 2, seed=3, num_steps=50)


def recovery(max_failures: int = 1000, max_preemptions: int | None = None) -> Recovery:
    return Recovery(max_failures, max_preemptions, ORDER)


def failure(step: int, trained: bool = True) -> Ending:
    return Ending(FAILURE, "rank 1: out of memory", step, trained)


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
    assert f"step 42, on rows {rows} of the prepared data, has failed 3 times: " in str(
        caught.value
    )
    assert "rank 1: out of memory" in str(caught.value)


def test_only_the_same_step_is_a_loop() -> None:
    """Failures at several steps are none of one step's rows; the budget counts them."""
    budget = recovery(max_failures=4)
    assert [budget.after(failure(step)) for step in (41, 30, 35, 30)] == [0.0, 2.0, 4.0, 8.0]
    with pytest.raises(GiveUp, match=r"cluster.max_failures=4 are used up"):
        budget.after(failure(20))
    budget = recovery()
    for step in (41, 30, 41, 35):
        budget.after(failure(step))
    with pytest.raises(GiveUp, match=r"^step 42, on rows .* has failed 3 times: "):
        budget.after(failure(41))


def test_a_step_that_was_passed_is_forgotten() -> None:
    budget = recovery()
    for step in (41, 41):
        budget.after(failure(step))
    budget.after(Ending(PREEMPTION, "the node of rank 1 is taken away", 45, True))
    assert budget.after(failure(41)) == 0.0


def test_attempts_that_do_no_step_blame_no_rows() -> None:
    """Ray's temporary folder, a library or the network is at fault before a step is done."""
    budget = recovery()
    assert [budget.after(failure(41, trained=False)) for _ in range(2)] == [0.0, 2.0]
    with pytest.raises(GiveUp) as caught:
        budget.after(failure(41, trained=False))
    assert str(caught.value).startswith("3 attempts have failed before they had done a step: rank")
    assert "rows" not in str(caught.value)


def test_a_fault_of_a_machine_ends_the_run_at_once() -> None:
    ending = Ending(FAILURE, "rank 1: the disk is full", 3, trained=True, final=True)
    with pytest.raises(GiveUp, match=r"^rank 1: the disk is full\. Mend that and run"):
        recovery().after(ending)


def test_to_start_again_for_the_same_reason_has_a_budget() -> None:
    """Each damaged checkpoint is another reason, and a step done makes all of them past."""

    def again(reason: str) -> Ending:
        return Ending(AGAIN, reason, 5, trained=False)

    budget = recovery(max_failures=0)
    pauses = [budget.after(again(f"checkpoint {number} is damaged")) for number in range(9)]
    assert pauses == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[LONGEST_PAUSE_S] * 3]
    budget.after(Ending(RESIZE, "1 more worker fits", 6, trained=True))
    for _ in range(LOOP - 1):
        budget.after(again("the data start at step 5, the checkpoint at 0"))
    with pytest.raises(GiveUp, match=r"at 0\. See that run.storage is one folder for all nodes"):
        budget.after(again("the data start at step 5, the checkpoint at 0"))


def test_a_loop_after_the_last_step_has_no_rows() -> None:
    budget = recovery()
    for _ in range(LOOP - 1):
        budget.after(failure(ORDER.num_steps))
    with pytest.raises(GiveUp, match=r"^what follows the last step has failed 3 times"):
        budget.after(failure(ORDER.num_steps))


def test_preemptions_have_a_budget_of_their_own() -> None:
    budget = recovery(max_failures=0, max_preemptions=2)
    taken = Ending(PREEMPTION, "the node of rank 1 is taken away", 7, True)
    assert [budget.after(taken), budget.after(taken)] == [0.0, 0.0]
    with pytest.raises(GiveUp, match=r"taken away; cluster.max_preemptions=2 are used up"):
        budget.after(taken)


def test_a_preemption_is_no_failure_and_a_failure_no_preemption() -> None:
    budget = recovery(max_failures=1, max_preemptions=2)
    taken = Ending(PREEMPTION, "the node of rank 1 is taken away", 7, True)
    assert [budget.after(each) for each in (taken, failure(8), taken)] == [0.0, 0.0, 0.0]
    with pytest.raises(GiveUp, match="max_failures=1 are used up"):
        budget.after(failure(9))


@given(st.lists(st.tuples(st.sampled_from([PREEMPTION, RESIZE, NO_ROOM]), st.integers(0, 50))))
def test_what_is_nobodys_fault_never_ends_a_run(endings: list[tuple[str, int]]) -> None:
    budget = recovery(max_failures=0)
    assert all(budget.after(Ending(kind, "", step, True)) == 0.0 for kind, step in endings)


@given(st.lists(st.integers(0, 49), min_size=1, max_size=60))
def test_pauses_are_bounded_and_a_run_ends_in_a_loop_only(steps: list[int]) -> None:
    """Model: a run is given up at a step's LOOPth failure since it came past all before."""
    budget, furthest, since = recovery(), -1, list[int]()
    for step in steps:
        since = [step] if step > furthest else [*since, step]
        furthest = max(furthest, step)
        if since.count(step) == LOOP:
            with pytest.raises(GiveUp):
                budget.after(failure(step))
            return
        pause = budget.after(failure(step))
        assert (pause == 0.0) == (len(since) == 1) and pause <= LONGEST_PAUSE_S
