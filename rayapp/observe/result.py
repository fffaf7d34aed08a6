"""What came out of a run: result.json, or why there is none."""

from __future__ import annotations

import json
import math
import operator
from typing import Any

from rayapp.config import RunConfig
from rayapp.config.units import unit_of
from rayapp.observe import metrics
from rayapp.observe.goodput import Event, account, commands
from rayapp.observe.run_folder import FAILED, PLAN, RESULT
from rayapp.planner.calibration import calibrate, rest_s
from rayapp.storage import Storage

ON_THE_WAY = ("model", "restore", "first_step")  # to a worker's first step, after the phases before


class RunFailed(RuntimeError):
    """Training ended without a result; the message says why."""


def failed(run: Storage, reason: str) -> RunFailed:
    """Record in result.json why the run failed, and return the error to raise."""
    lines = metrics.read(run)
    failure = {"status": FAILED, "steps": lines[-1]["step"] if lines else 0, "reason": reason}
    run.write(RESULT, json.dumps(failure, indent=1).encode())
    return RunFailed(reason)


def result_of(
    config: RunConfig,
    run: Storage,
    summary: dict[str, Any],
    phases: dict[str, float],
    events: list[Event],
) -> dict[str, Any]:
    """Return what result.json holds: sums over all commands of the run, `start_s` of this one."""
    lines = metrics.read(run)
    seconds, stall_s, commit_s = (summary.pop(each) for each in ("seconds", "stall_s", "commit_s"))
    sums = account(events, lines)
    began = commands(events)[-1][0]["time"]
    steady = [line for line in lines if line["time"] >= began]
    steady = steady[len(steady) // 10 :] or lines
    busy = [line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"] for line in steady]
    restart_s = phases | {k: v for k, v in seconds.items() if k in ON_THE_WAY}
    unit = unit_of(lines[-1] if lines else summary)
    return {
        "run": run.url,
        **summary,
        unit.many: sum(line[unit.many] for line in lines),
        "lost_steps": sums.lost_steps,
        "interruptions": sums.interruptions,
        "loss": lines[-1]["loss"] if lines else None,
        unit.per_s: _mean([line[unit.per_s] for line in steady], busy),
        "mfu": _mean([line["mfu"] for line in steady], busy),
        "goodput": sums.goodput,
        "checkpoint": _checkpoints(config, stall_s, commit_s, sum(restart_s.values())),
        "step_s": step_s(run, lines),
        "start_s": restart_s,
        "wall_s": sums.wall_s,
        "cost_usd": sums.cost_usd,
        "versions": _versions(),
    }


def step_s(run: Storage, lines: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the seconds of a step: as planned, as the first ten foretold, and of the rest."""
    # A run that is stopped while its data are prepared has no plan yet.
    plan = json.loads(run.read(PLAN)) if run.exists(PLAN) else {}
    found = calibrate(lines)
    return {
        "planned": (plan.get("step_s") or {}).get("value"),
        "calibrated": found.step_s if found else None,
        "measured": rest_s(lines, found) if found else None,
    }


def _mean(rates: list[float | None], busy_s: list[float]) -> float | None:
    """Return the mean of what is per second, over the seconds; None where one is not known."""
    if not rates or None in rates or not sum(busy_s):
        return None
    return sum(map(operator.mul, rates, busy_s)) / sum(busy_s)


def best_interval_s(stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the seconds between checkpoints at which stalls and lost steps cost the least.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval" (2006), first order;
    without `restart_s` it is Young's (1974).

    >>> round(best_interval_s(stall_s=1.0, restart_s=0.0, mtbf_s=5_000.0))
    99
    """
    return max(0.0, math.sqrt(2.0 * stall_s * (mtbf_s + restart_s)) - stall_s)


def _checkpoints(
    config: RunConfig, stall_s: float | None, commit_s: float | None, restart_s: float
) -> dict[str, float | None]:
    """Return what a checkpoint has cost, and how often one is best made; in seconds."""
    best_s = None
    if stall_s is not None:
        mtbf_s = config.cluster.mtbf_hours * 3600.0 / config.cluster.max_workers
        best_s = max(commit_s or 0.0, best_interval_s(stall_s, restart_s, mtbf_s))
    return {"stall_s": stall_s, "commit_s": commit_s, "best_every_s": best_s}


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("rayapp", "ray", "torch", "transformers")}
