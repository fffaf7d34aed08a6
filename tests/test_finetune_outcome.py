"""Check what is said of a run that failed, and how its time is told apart."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from rayapp.config import Config, load
from rayapp.finetune.outcome import History, best_interval_s, ending_of, reason_of, result_of
from rayapp.finetune.recovery import FAILURE, NO_ROOM, PREEMPTION, RESIZE, Ending
from rayapp.storage import open_storage


def test_a_death_explains_the_errors_of_the_ranks_around_it() -> None:
    died = RayActorError(
        error_msg="The actor is dead because its worker process has died. Worker exit type: "
        "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code "
        "2. End of file. Some common causes include: (1) it was killed by the OOM killer"
    )
    collateral = RuntimeError("Traceback ...\n  all_reduce\nConnection closed by peer")
    error = WorkerGroupError("2 workers failed", {0: collateral, 1: died})
    said = "rank 1: Worker unexpectedly exits with a connection error code 2. End of file"
    assert reason_of(error) == said
    alone = WorkerGroupError("1 worker failed", {2: collateral})
    assert reason_of(alone) == "rank 2: Connection closed by peer"
    assert reason_of(ValueError("one\ntwo")) == "two"


def test_endings_are_told_apart() -> None:
    moved = {"status": "moved", "reason": "2 more workers fit", "notice": False}
    assert ending_of(moved, 7) == Ending(RESIZE, "2 more workers fit", 7)
    assert ending_of(moved | {"notice": True}, 7).kind == PREEMPTION
    info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"a": [1]})
    assert ending_of(PreemptionError(info, True), 7).kind == PREEMPTION
    waited = ControllerError(WorkerGroupStartupTimeoutError(2))
    assert ending_of(waited, 7).kind == NO_ROOM
    assert ending_of(ControllerError(RuntimeError("no")), 7).kind == FAILURE
    taken = RayActorError(error_msg="its node was taken away", preempted=True)
    broken = RuntimeError("Connection closed by peer")
    assert ending_of(WorkerGroupError("2 failed", {0: broken, 1: taken}), 7) == Ending(
        PREEMPTION, "rank 1: its node was taken away", 7
    )
    assert ending_of(WorkerGroupError("1 failed", {0: broken}), 7).kind == FAILURE
    assert ending_of(RayActorError(error_msg="the controller died"), 7).kind == FAILURE


def test_lost_work_and_recovery_are_told_apart_from_the_start(tmp_path: Path) -> None:
    """A command of 100 s: an old run's 2 steps, then 2 kept, 2 lost, a restart, and 4 more."""
    began = time.time() - 100.0
    idle = {"checkpoint_stall_s": 0.0, "eval_s": 0.0, "data_wait_s": 0.0, "tokens": 10, "loss": 1.0}

    def line(step: int, at: float, attempt: int) -> dict[str, object]:
        place = {"step": step, "time": began + at, "attempt": attempt, "step_s": 5.0}
        return idle | place | {"tokens_per_s": 2.0}

    kept = [line(1, -500.0, 1), line(2, -490.0, 1), line(3, 20.0, 2), line(4, 25.0, 2)]
    later = [line(n, 40.0 + 5.0 * n, 3) for n in range(5, 9)]
    history = History(began)
    history.saw([*kept, line(5, 30.0, 2), line(6, 35.0, 2)])
    history.interrupted(Ending(FAILURE, "rank 1 died", 6), workers=2)
    history.saw(kept + later)
    (event,) = history.interruptions()
    assert (event["reason"], event["step"], event["lost_steps"]) == ("rank 1 died", 6, 2)
    assert event["to_first_step_s"] == later[0]["time"] - event["time"]

    run = open_storage(str(tmp_path))
    text = "".join(json.dumps(each) + "\n" for each in kept + later)
    run.write("metrics.jsonl", text.encode())
    summary = {
        "lost": history.lost(),
        "seconds": {"export": 4.0, "evaluation": 1.0},
        "first_step": 4,
        "commit_s": 2.0,
    }
    result = result_of(Config(), run, summary, began, {})
    assert result["lost_steps"] == 2
    shares = {name: round(100 * share) for name, share in result["goodput"].items()}
    # From second 25 to 60: 10 s of lost work, 25 s of recovery; 6 own steps of 5 s.
    assert (shares["lost_work"], shares["recovery"], shares["step"]) == (10, 25, 30)
    assert (shares["export"], shares["evaluation"], shares["start"]) == (4, 1, 30)
    assert result["checkpoint"] == {"stall_s": None, "commit_s": 2.0, "best_every_s": None}


@given(st.floats(1e-3, 60.0), st.floats(1e3, 1e8))
def test_no_other_interval_is_better(stall_s: float, mtbf_s: float) -> None:
    """Oracle: the share of time that stalls take, and half an interval lost at every failure."""

    def waste(every_s: float) -> float:
        return stall_s / (every_s + stall_s) + (every_s + stall_s) / 2.0 / mtbf_s

    best = best_interval_s(stall_s, 0.0, mtbf_s)
    if best > stall_s:  # rarer failures than checkpoints
        assert all(waste(best) <= waste(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_the_best_interval_of_a_run(tmp_path: Path) -> None:
    run, began = open_storage(str(tmp_path)), time.time() - 50.0
    line = {"attempt": 1, "tokens": 1, "tokens_per_s": 1.0, "loss": 1.0, "step_s": 10.0}
    line |= {"eval_s": 0.0, "data_wait_s": 0.0}
    stalls = [0.0, 0.5, 0.0, 2.0, 0.6]
    lines = [
        line | {"step": n, "time": began + 10.0 * n, "checkpoint_stall_s": stall}
        for n, stall in enumerate(stalls, 1)
    ]
    run.write("metrics.jsonl", "".join(json.dumps(each) + "\n" for each in lines).encode())
    config = load(None, {"cluster.workers": "4", "cluster.mtbf_hours": "1000"})
    summary = {"lost": [], "seconds": {}, "commit_s": 3.0}
    found = result_of(config, run, summary, began, {})["checkpoint"]
    assert (found["stall_s"], found["commit_s"]) == (0.6, 3.0)
    assert abs(found["best_every_s"] - math.sqrt(2 * 0.6 * 250 * 3600)) < 1.0
