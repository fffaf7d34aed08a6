"""Check when training is started again, after how long, and when it is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.config.sections import Cluster
from rayapp.driver.recovery import LONGEST_PAUSE_S, LOOP, OUTAGES, RESIZES, GiveUp, Recovery
from rayapp.observe.attempts import (
    AGAIN,
    FAILURE,
    NETWORK,
    NO_ROOM,
    NODE,
    PREEMPTION,
    RESIZE,
    START,
    STEP,
    STORAGE,
    Ending,
)
from rayapp.observe.clock import Clock
from rayapp.order import Order

ORDER = Order.for_steps(100, 4, 2, seed=3, num_steps=50)


class Hands(Clock):
    """A clock that a test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def recovery(
    max_failures: int = 1000, max_preemptions: int | None = None, clock: Clock | None = None
) -> Recovery:
    cluster = Cluster(max_failures=max_failures, max_preemptions=max_preemptions)
    return Recovery(cluster, ORDER, clock or Clock())


def failure(step: int, trained: bool = True, cause: str = STEP) -> Ending:
    return Ending(FAILURE, "rank 1: out of memory", step, trained, cause=cause)


def test_failures_that_make_progress_go_on_at_once_until_the_budget_ends() -> None:
    budget = recovery(max_failures=3)
    assert [budget.after(failure(step)) for step in (4, 9, 10)] == [0.0, 0.0, 0.0]
    with pytest.raises(GiveUp, match=r"out of memory; cluster.max_failures=3 are used up within "):
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
    """Ray's temporary folder or a library is at fault before a step is done."""
    budget = recovery()
    assert [budget.after(failure(41, False, START)) for _ in range(2)] == [0.0, 2.0]
    with pytest.raises(GiveUp) as caught:
        budget.after(failure(41, False, START))
    assert str(caught.value).startswith(
        "3 attempts have failed alike before they had done a step: rank"
    )
    assert "rows" not in str(caught.value)


@pytest.mark.parametrize("cause", [NETWORK, STORAGE])
def test_an_outage_is_waited_out_for_minutes(cause: str) -> None:
    """A minute without DNS or S3 at the start must not end a run of days."""
    budget = recovery(max_failures=3)
    pauses = [budget.after(failure(41, False, cause)) for _ in range(OUTAGES)]
    assert pauses == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert sum(pauses) > 180.0
    with pytest.raises(GiveUp, match=r"out of memory; that is 9 times within"):
        budget.after(failure(41, False, cause))


def test_kinds_of_failures_have_budgets_of_their_own() -> None:
    budget = recovery(max_failures=2)
    for step, cause in enumerate((STEP, NODE, STEP, NODE, STORAGE, STORAGE, STORAGE)):
        budget.after(failure(step, True, cause))
    with pytest.raises(GiveUp, match=r"max_failures=2 are used up"):
        budget.after(failure(20, True, NODE))


def test_machines_that_are_lost_in_the_same_step_blame_no_rows() -> None:
    budget = recovery(max_failures=5)
    for _ in range(5):
        budget.after(failure(41, True, NODE))
    with pytest.raises(GiveUp, match=r"^rank 1: out of memory; cluster.max_failures=5"):
        budget.after(failure(41, True, NODE))


def test_a_failure_older_than_the_window_no_longer_counts() -> None:
    """A run of 30 days may fail more than three times."""
    clock = Hands()
    budget = recovery(max_failures=3, clock=clock)
    for day in range(30):
        clock.now = day * 86_400.0
        assert budget.after(failure(day)) == 0.0
    for step in (30, 31):
        budget.after(failure(step))
    with pytest.raises(GiveUp, match=r"within cluster.failure_window_s=21600"):
        budget.after(failure(32))


def test_resizes_without_a_step_end() -> None:
    budget = recovery()
    resize = Ending(RESIZE, "1 more worker fits", 5, trained=False)
    pauses = [budget.after(resize) for _ in range(RESIZES - 1)]
    assert pauses[:3] == [0.0, 2.0, 4.0]
    with pytest.raises(GiveUp, match=r"10 attempts have started again without a step"):
        budget.after(resize)


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


@given(st.lists(st.tuples(st.sampled_from([PREEMPTION, NO_ROOM]), st.integers(0, 50))))
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


def test_the_first_failure_is_named_where_the_last_is_another() -> None:
    """An error that attempts after it only follow, as ranks that find no peers."""
    budget = recovery(max_failures=2)
    budget.after(failure(9))
    budget.after(Ending(FAILURE, "rank 3: CUDA error: an illegal memory access", 20, True))
    budget.after(Ending(FAILURE, "rank 0: no peer at 10.0.0.7", 20, False, cause=START))
    budget.after(Ending(FAILURE, "rank 1: no peer at 10.0.0.9", 20, False, cause=START))
    with pytest.raises(GiveUp) as caught:
        budget.after(Ending(FAILURE, "rank 1: no peer at 10.0.0.8", 20, False, cause=START))
    assert str(caught.value).endswith(
        "The first failure was after step 20: rank 3: CUDA error: an illegal memory access"
    )
    budget = recovery(max_failures=1)
    budget.after(failure(9))
    with pytest.raises(GiveUp) as caught:
        budget.after(failure(12))
    assert "The first failure" not in str(caught.value)
