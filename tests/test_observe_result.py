"""Check what is said of a run that failed, and how its time is told apart."""

from __future__ import annotations

import errno
import json
import math
import os
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from rayapp.config import load
from rayapp.driver import command
from rayapp.driver.checks import check_resumable
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
    ending_of,
    memory_kill,
    reason_of,
    tracebacks,
)
from rayapp.observe.columns import Columns
from rayapp.observe.result import RunFailed, best_interval_s, result_of, stored
from rayapp.storage import StorageError, open_storage
from rayapp.storage.base import LOCAL_REASONS
from rayapp.train.checkpoint.marker import CheckpointError

# As Ray 2.60 said it of an actor in a control group of 1.6 GB, whose memory was used up within a
# second: the group's oom_kill was 1 then (2026-11-26).
KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer due to high memory usage, "
    "(2) ray stop --force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or "
    "another unexpected error. If the process was killed by the kernel OOM killer (verifiable by "
    "checking for OOM in dmesg of the OOMing node), consider enabling resource isolation via "
    "--enable-resource-isolation to prevent node deaths by resource contention and significant "
    "loss of progress by uninformed kernel OOM killing."
)
# As Ray 2.60's raylet forms it, where its memory monitor ends a worker.
MONITORED = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node was 1.5GB / "
    "1.6GB.\nRefer to the documentation on how to address the out of memory issue."
)


@pytest.mark.parametrize(
    ("text", "why"),
    [(KILLED, "Linux's OOM killer"), (MONITORED, "the node was low on memory, so Ray ended")],
)
def test_a_worker_that_memory_ended_says_so_and_what_helps(text: str, why: str) -> None:
    error = WorkerGroupError("1 worker failed", {3: RayActorError(error_msg=text)})
    reason = reason_of(error)
    assert reason.startswith("rank 3: the ") and why in reason
    assert "lower train.micro_batch, data.seq_len or data.workers" in reason
    last = {"step": 4, "time": 2.0}
    ending = ending_of(error, last, 1.0)
    assert (ending.kind, ending.cause, ending.final) == (FAILURE, STEP, False)


def test_a_death_explains_the_errors_of_the_ranks_around_it() -> None:
    died = RayActorError(error_msg=KILLED)
    collateral = RuntimeError("Traceback ...\n  all_reduce\nConnection closed by peer")
    error = WorkerGroupError("2 workers failed", {0: collateral, 1: died})
    assert reason_of(error) == f"rank 1: {memory_kill(KILLED)}"
    alone = WorkerGroupError("1 worker failed", {2: collateral})
    assert reason_of(alone) == "rank 2: Connection closed by peer"
    assert reason_of(ValueError("one\ntwo")) == "two"


@pytest.mark.parametrize(
    "follows",
    [
        "RuntimeError: [enforce] Timed out waiting 1800000ms for recv operation to complete",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
        "RuntimeError: Read error [10.0.0.1]:38310: Connection reset by peer",
    ],
)
def test_an_error_explains_those_of_ranks_that_wait_for_its_rank(follows: str) -> None:
    own = RuntimeError("Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory")
    error = WorkerGroupError("3 failed", {n: RuntimeError(follows) for n in (0, 1)} | {2: own})
    assert reason_of(error) == "rank 2: torch.OutOfMemoryError: CUDA out of memory"
    assert list(tracebacks(error)) == ["rank 1", "rank 0", "rank 2"]
    assert tracebacks(error)["rank 2"] == str(own)
    assert tracebacks(ValueError("no rank's")) == {"workers": "no rank's"}


def test_a_run_that_has_lost_its_checkpoints_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that no one can use ends the command; nothing is written."""
    run = open_storage(str(tmp_path))
    check_resumable(run)
    run.write("config.yaml", load().to_yaml().encode())
    run.write("metrics.jsonl", b'{"step": 3}\n')
    run.write("checkpoints/step-00000003/__0_0.distcp", b"half")
    check_resumable(run)
    run.write("checkpoints/step-00000003/COMMITTED", b"{")
    before = [(entry.name, entry.etag) for entry in run.list()]
    monkeypatch.setattr(command, "connected", lambda *options: nullcontext())
    monkeypatch.setattr(command, "uses_gpus", lambda config: False)
    ready = command.CheckedRun(load(), run)
    kind = command.Kind(lambda *here: ready, lambda ready, gpus: ready, prepare=None)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"step-00000003: COMMITTED is damaged.*from a copy"):
        kind.run(load())
    assert [(entry.name, entry.etag) for entry in run.list()] == before


LINES = [{"step": 6, "time": 99.0}, {"step": 7, "time": 101.0}]


def test_endings_are_told_apart() -> None:
    moved = {"status": "moved", "reason": "2 more workers fit", "notice": False}
    assert ending_of(moved, LINES[-1], 100.0) == Ending(RESIZE, "2 more workers fit", 7, True)
    assert ending_of(moved | {"notice": True}, LINES[-1], 100.0).kind == PREEMPTION
    again = moved | {"again": True, "reason": "other data"}
    assert ending_of(again, LINES[-1], 102.0) == Ending(AGAIN, "other data", 7, False)
    info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"a": [1]})
    assert ending_of(PreemptionError(info, True), LINES[-1], 100.0).kind == PREEMPTION
    waited = ControllerError(WorkerGroupStartupTimeoutError(2))
    assert ending_of(waited, None, 100.0).kind == NO_ROOM
    assert ending_of(ControllerError(RuntimeError("no")), None, 1.0) == Ending(
        FAILURE, "no", 0, False, cause=START
    )
    lost = ControllerError(RuntimeError("The actor died because its node has died"))
    assert ending_of(lost, LINES[-1], 100.0).cause == NODE
    unfound = ControllerError(RuntimeError("DistNetworkError: Connection refused"))
    assert ending_of(unfound, None, 1.0).cause == NETWORK
    assert ending_of(unfound, LINES[-1], 100.0).cause == STEP
    silent = StorageError("read", "s3://b/x", "no answer")
    assert ending_of(WorkerGroupError("1 failed", {0: silent}), None, 1.0).cause == STORAGE
    unsaved = CheckpointError("3 checkpoints in a row could not be saved in s3://b: no answer")
    assert ending_of(WorkerGroupError("1 failed", {0: unsaved}), LINES[-1], 100.0).cause == STORAGE
    taken = RayActorError(error_msg="its node was taken away", preempted=True)
    broken = RuntimeError("Connection closed by peer")
    assert ending_of(
        WorkerGroupError("2 failed", {0: broken, 1: taken}), LINES[-1], 100.0
    ) == Ending(PREEMPTION, "rank 1: its node was taken away", 7, True)
    assert ending_of(WorkerGroupError("1 failed", {0: broken}), LINES[-1], 100.0) == Ending(
        FAILURE, "rank 0: Connection closed by peer", 7, True
    )
    assert ending_of(RayActorError(error_msg="the controller died"), None, 1.0).kind == FAILURE


@pytest.mark.parametrize(
    "cause",
    [
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/x"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/ray/x"),
        StorageError("write", "/runs/x", *LOCAL_REASONS[errno.ENOSPC]),
        CheckpointError("3 checkpoints in a row could not be saved in /runs/x: the disk is full"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_a_fault_of_a_machine_is_final_and_its_own_reason(cause: Exception) -> None:
    """Also where the ranks around it fail first, and as Ray hands it on: by its traceback."""
    try:
        raise cause
    except Exception as error:
        handed_on = UserExceptionWithTraceback(error, traceback.format_exc())
    broken = RuntimeError("Connection closed by peer")
    said = ending_of(WorkerGroupError("2 failed", {0: broken, 1: handed_on}), LINES[-1], 100.0)
    assert said.final and said.kind == FAILURE and said.reason.startswith("rank 1: ")
    assert str(cause).rstrip(".") in said.reason
    assert not ending_of(WorkerGroupError("1 failed", {0: broken}), LINES[-1], 100.0).final


@given(st.floats(1e-3, 60.0), st.floats(1e3, 1e8))
def test_no_other_interval_is_better(stall_s: float, mtbf_s: float) -> None:
    """Oracle: the share of time that stalls take, and half an interval lost at every failure."""

    def waste(every_s: float) -> float:
        return stall_s / (every_s + stall_s) + (every_s + stall_s) / 2.0 / mtbf_s

    best = best_interval_s(stall_s, 0.0, mtbf_s)
    if best > stall_s:  # rarer failures than checkpoints
        assert all(waste(best) <= waste(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_what_a_run_came_to(tmp_path: Path) -> None:
    """Rates are means over the seconds of the last command's steps, stalls and evaluation out."""
    run, began = open_storage(str(tmp_path)), time.time() - 50.0
    line = {"attempt": 1, "tokens": 1, "mfu": 0.5, "loss": 1.0, "step_s": 10.0}
    line |= {"eval_s": 0.0, "data_wait_s": 0.0, "workers": 4}
    stalls = [9.0, 0.0, 0.5, 0.0, 2.0, 0.6]
    rates = [1000.0, 4.0, 1.0, 1.0, 1.0, 1.0]
    lines = [
        line
        | {"step": n, "time": began + 10 * n, "checkpoint_stall_s": stall, "tokens_per_s": rate}
        for n, (stall, rate) in enumerate(zip(stalls, rates, strict=True), 0)
    ]
    lines[0]["time"] -= 100.0
    run.write("metrics.jsonl", "".join(json.dumps(each) + "\n" for each in lines).encode())
    run.write("plan.json", b'{"step_s": {"value": 9.0, "low": 8.0, "high": 10.0}}')
    config = load(None, {"cluster.workers": "4", "cluster.mtbf_hours": "1000"})
    events = [
        {"event": "started", "time": began, "seen_until": None, "usd_per_hour": None},
        {"event": "ended", "time": began + 50.0, "seconds": {"export": 1.0}},
    ]
    seconds = {"export": 1.0, "first_step": 2.0}
    summary = {"seconds": seconds, "stall_s": 0.6, "commit_s": 3.0, "steps": 5}
    result = result_of(config, run, summary, {"data": 1.0}, events)
    assert result["tokens_per_s"] == pytest.approx((4 * 10 + 9.5 + 10 + 8 + 9.4) / 46.9)
    assert (result["mfu"], result["tokens"], result["steps"]) == (pytest.approx(0.5), 6, 5)
    assert result["wall_s"] == pytest.approx(50.0) and result["cost_usd"] is None
    assert result["step_s"] == {"planned": 9.0, "calibrated": None, "measured": None}
    assert result["start_s"] == {"data": 1.0, "first_step": 2.0}
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert result["storage"] == {"gib": size / 2**30, "usd_per_month": None, "usd": None}
    found = result["checkpoint"]
    assert (found["stall_s"], found["commit_s"]) == (0.6, 3.0)
    assert abs(found["best_every_s"] - math.sqrt(2 * 0.6 * 250 * 3600)) < 1.0


def test_what_s3_keeps_has_a_price(s3_bucket: str) -> None:
    """An hour a step, saved after steps 1, 3 and 5 of 6, of which one is kept."""
    run = open_storage(f"s3://{s3_bucket}/runs/one")
    stalls = [0.5, 0.0, 0.5, 0.0, 0.5, 0.0]
    steps = Columns.of(
        {"step": n, "time": 3600.0 * n, "checkpoint_stall_s": stall}  # type: ignore[misc]
        for n, stall in enumerate(stalls, 1)
    )
    run.write("checkpoints/step-5/shard", b"0" * 2**20)
    run.write("metrics.jsonl", b"1" * 2**20)
    open_storage(f"s3://{s3_bucket}/runs/other").write("shard", b"0" * 2**20)
    kept = stored(run, steps, keep=1)
    assert kept["gib"] == pytest.approx(2 / 1024)
    assert kept["usd_per_month"] == pytest.approx(0.023 * 2 / 1024)
    # Two were replaced after two hours and deleted a day later, the third is an hour old.
    assert kept["usd"] == pytest.approx(0.023 * (26 + 26 + 1) / 1024 / 730)
