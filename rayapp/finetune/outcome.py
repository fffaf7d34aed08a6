"""What came out of a run: result.json, or why there is none."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from ray.exceptions import RayActorError

from rayapp import metrics
from rayapp.config import Config
from rayapp.finetune.recovery import FAILURE, NO_ROOM, PREEMPTION, RESIZE, Ending
from rayapp.storage import Storage


class RunFailed(RuntimeError):
    """Training ended without a result; the message says why."""


class History:
    """What the driver has seen of a run: every line there ever was, and each interruption."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._seen: dict[tuple[int, int], dict[str, Any]] = {}
        self._kept: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []

    def saw(self, lines: list[dict[str, Any]]) -> None:
        """Take the lines of metrics.jsonl as an attempt has left them."""
        self._kept = [line for line in lines if line["time"] >= self._started]
        self._seen |= {(line["attempt"], line["step"]): line for line in self._kept}

    def interrupted(self, ending: Ending, workers: int) -> None:
        """Note that an attempt has just ended early."""
        event = {"time": time.time(), "workers": workers, **asdict(ending)}
        self._events.append(event | {"attempt": max((a for a, _ in self._seen), default=0)})

    def lost(self) -> list[dict[str, Any]]:
        """Return the lines of steps that were done and then thrown away."""
        kept = {(line["attempt"], line["step"]) for line in self._kept}
        return [line for key, line in self._seen.items() if key not in kept]

    def interruptions(self) -> list[dict[str, Any]]:
        """Return each interruption, with the steps that it lost and the seconds to a new one."""
        found = []
        for event in self._events:
            later = [line for key, line in self._seen.items() if key[0] > event["attempt"]]
            first = min(later, key=lambda line: line["time"], default=None)
            facts = {"lost_steps": None, "to_first_step_s": None}
            if first is not None:
                facts["lost_steps"] = event["step"] - first["step"] + 1
                facts["to_first_step_s"] = first["time"] - event["time"]
            found.append({k: v for k, v in event.items() if k != "attempt"} | facts)
        return found


def ending_of(ended: dict[str, Any] | Exception, step: int) -> Ending:
    """Tell a node that is taken away from a failure, and both from workers that had no room.

    `ended` is rank 0's summary of workers that move, or the error of an attempt.
    """
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2.api.exceptions import PreemptionError

    if isinstance(ended, dict):
        return Ending(PREEMPTION if ended["notice"] else RESIZE, ended["reason"], step)
    if isinstance(getattr(ended, "controller_failure", None), WorkerGroupStartupTimeoutError):
        return Ending(NO_ROOM, "the cluster has no room for the workers yet", step)
    taken = isinstance(ended, PreemptionError) or any(
        getattr(cause, "preempted", False) for cause in _deaths(ended).values()
    )
    return Ending(PREEMPTION if taken else FAILURE, reason_of(ended), step)


def reason_of(error: Exception) -> str:
    """Say which worker failed, and why; a death explains the errors of the ranks around it."""
    deaths = _deaths(error)
    if not deaths:
        return _last_line(error)
    ranks = [rank for rank in sorted(deaths) if isinstance(deaths[rank], RayActorError)]
    rank = min(ranks or deaths)
    return f"rank {rank}: {_last_line(deaths[rank])}"


def causes(error: Exception) -> list[BaseException]:
    """Return what ended the workers; the error itself where it was none of them."""
    return list(_deaths(error).values()) or [error]


def _deaths(error: Exception) -> dict[int, BaseException]:
    """Return what ended each worker, by rank."""
    failures = getattr(error, "worker_failures", None) or {}
    return {rank: getattr(failures[rank], "cause", None) or failures[rank] for rank in failures}


def _last_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()[-1].split(" Some common causes include")[0]
    return text.rpartition("Worker exit detail: ")[2].rstrip(".")


def failed(run: Storage, reason: str) -> RunFailed:
    """Record in result.json why the run failed, and return the error to raise."""
    lines = metrics.read(run)
    failure = {"status": "failed", "steps": lines[-1]["step"] if lines else 0, "reason": reason}
    run.write("result.json", json.dumps(failure, indent=1).encode())
    return RunFailed(reason)


def result_of(
    config: Config, run: Storage, summary: dict[str, Any], started: float, phases: dict[str, float]
) -> dict[str, Any]:
    """Return what result.json holds; `started` is when this command began, in Unix seconds."""
    lines = metrics.read(run)
    wall_s = time.time() - started
    own = [line for line in lines if line["time"] >= started]
    seconds = summary.pop("seconds")
    lost = summary.pop("lost")
    lost_s = sum(line["step_s"] for line in lost)
    # From the last step that an attempt kept to the first of the next: steps that were lost, and
    # what it took to go on.
    gaps_s = sum(
        max(0.0, after["time"] - after["step_s"] - before["time"])
        for before, after in pairwise(own)
        if before["attempt"] != after["attempt"]
    )
    recovery_s = max(0.0, gaps_s - lost_s)
    start_s = (
        wall_s
        - sum(line["step_s"] for line in own)
        - sum(seconds.get(phase, 0.0) for phase in ("evaluation", "sample", "export"))
        - lost_s
        - recovery_s
    )
    known = {
        "start": start_s,
        "export": seconds.get("export", 0.0) + seconds.get("sample", 0.0),
        "lost_work": lost_s,
        "recovery": recovery_s,
    }
    goodput = metrics.goodput(own, wall_s, known)
    goodput["evaluation"] += seconds.get("evaluation", 0.0) / wall_s
    goodput["other"] = max(0.0, goodput["other"] - seconds.get("evaluation", 0.0) / wall_s)
    steady = own[len(own) // 10 :] or own
    busy_s = sum(line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"] for line in steady)
    tokens_seen = sum(
        line["tokens_per_s"] * (line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"])
        for line in steady
    )
    checkpoint = _checkpoints(config, own, summary.pop("commit_s"), start_s)
    return {
        "run": run.url,
        **summary,
        "tokens": sum(line["tokens"] for line in lines),
        "lost_steps": len(lost),
        "loss": lines[-1]["loss"] if lines else None,
        "tokens_per_s": tokens_seen / busy_s if busy_s else None,
        "mfu": None,
        "goodput": goodput,
        "checkpoint": checkpoint,
        "start_s": phases
        | {k: v for k, v in seconds.items() if k in ("model", "restore", "first_step")},
        "wall_s": wall_s,
        "cost_usd": None,
        "versions": _versions(),
    }


def best_interval_s(stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the seconds between checkpoints at which stalls and lost steps cost the least.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval" (2006), first order;
    without `restart_s` it is Young's (1974).

    >>> round(best_interval_s(stall_s=1.0, restart_s=0.0, mtbf_s=5_000.0))
    99
    """
    return max(0.0, math.sqrt(2.0 * stall_s * (mtbf_s + restart_s)) - stall_s)


def _checkpoints(
    config: Config, lines: list[dict[str, Any]], commit_s: float | None, restart_s: float
) -> dict[str, float | None]:
    """Return what checkpoints have cost, and how often they are best made; in seconds."""
    stalls = [line["checkpoint_stall_s"] for line in lines if line["checkpoint_stall_s"] > 0]
    if not stalls:
        return {"stall_s": None, "commit_s": commit_s, "best_every_s": None}
    stall_s = statistics.median(stalls)
    mtbf_s = config.cluster.mtbf_hours * 3600.0 / config.cluster.max_workers
    best_s = max(commit_s or 0.0, best_interval_s(stall_s, restart_s, mtbf_s))
    return {"stall_s": stall_s, "commit_s": commit_s, "best_every_s": best_s}


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("rayapp", "ray", "torch", "transformers")}
