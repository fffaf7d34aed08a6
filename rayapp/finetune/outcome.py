"""What came out of a run: result.json, or why there is none."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

from rayapp import metrics
from rayapp.config import Config
from rayapp.storage import Storage


class RunFailed(RuntimeError):
    """Training ended without a result; the message says why."""


def reason_of(error: Exception) -> str:
    """Return the last line of the first worker's own error."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank in sorted(failures):
        cause = failures[rank]
        cause = getattr(cause, "cause", None) or cause
        return str(cause).strip().splitlines()[-1]
    return str(error).strip().splitlines()[-1]


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
    lost = [step_s for at, step_s in summary.pop("lost") if at >= started]
    lost_s = sum(lost)
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
    return {
        "run": run.url,
        **summary,
        "tokens": sum(line["tokens"] for line in lines),
        "lost_steps": len(lost),
        "loss": lines[-1]["loss"] if lines else None,
        "tokens_per_s": tokens_seen / busy_s if busy_s else None,
        "mfu": None,
        "goodput": goodput,
        "start_s": phases
        | {k: v for k, v in seconds.items() if k in ("model", "restore", "first_step")},
        "wall_s": wall_s,
        "cost_usd": None,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("rayapp", "ray", "torch", "transformers")}
