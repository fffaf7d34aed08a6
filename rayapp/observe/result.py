"""Make result.json: the result of a run, or why it failed."""

from __future__ import annotations

import json
import logging
import math
from importlib.metadata import version
from typing import cast

import numpy as np

from rayapp.config import RunConfig
from rayapp.config.fields import unit_of
from rayapp.hardware import GIB, USD_PER_GIB_MONTH, usd_of_checkpoints
from rayapp.observe import metrics, records
from rayapp.observe.columns import ACCOUNTED, Array, Columns
from rayapp.observe.goodput import account, commands
from rayapp.observe.metrics import OWN_LOSS, own_figures
from rayapp.observe.run_folder import CHECKPOINTS, DONE, FAILED, PROFILES, RESULT, DamagedFile
from rayapp.observe.status import planned_step_s, read_result
from rayapp.planner.calibration import calibrate, rest_s
from rayapp.storage import Storage, StorageError

TOLD_BELOW = ("seconds", "stall_s", "commit_s", "group_s")  # they go into start_s and checkpoint
ON_THE_WAY = ("model", "restore", "first_step")  # a worker's phases until its first step is done


logger = logging.getLogger("rayapp.driver")


class RunFailed(RuntimeError):
    """Training ended without a result; the message says why."""


def failed(run: Storage, reason: str) -> RunFailed:
    """Record in result.json why the run failed, and return the error to raise.

    Raises: StorageError: an outage of the storage.
    """
    try:
        line = metrics.last(run)
        failure = {"status": FAILED, "steps": line["step"] if line else 0, "reason": reason}
        if not stays(run, FAILED):
            run.write(RESULT, json.dumps(failure, indent=1).encode())
    except StorageError as error:
        if error.outage:
            raise
        logger.error("%s is not written: %s", RESULT, error)  # must not hide the reason
    return RunFailed(reason)


def stays(run: Storage, status: str) -> bool:
    """Say whether the folder's result is of a run that is done, which one that is not leaves there.

    The first step of a longer run has deleted it.
    """
    try:
        return status != DONE and read_result(run).get("status") == DONE
    except DamagedFile:
        return False


def result_of(
    config: RunConfig,
    run: Storage,
    summary: records.Summary,
    phases: dict[str, float],
    events: list[records.Event],
) -> records.RunResult:
    """Return the content of result.json.

    Counts, goodput, time and cost are sums over all commands of the run; `start_s` is of this
    command. The rates and MFU are means over this command's steps without the first tenth, or over
    all steps of the run if this command did none.
    """
    last = metrics.last(run)
    own = own_figures(last or {})
    unit = unit_of(last or summary)
    steps = Columns.read(run, (*ACCOUNTED, "mfu", unit.many, unit.per_s))
    seconds, stall_s, commit_s = summary["seconds"], summary["stall_s"], summary["commit_s"]
    sums = account(events, steps)
    began = commands(events)[-1][0]["time"]
    steady = np.flatnonzero(steps["time"] >= began)
    steady = steady[len(steady) // 10 :] if len(steady) else np.arange(len(steps))
    busy = (steps["step_s"] - steps["checkpoint_stall_s"] - steps["eval_s"])[steady]
    restart_s = phases | {k: v for k, v in seconds.items() if k in ON_THE_WAY}
    names = (entry.name for entry in run.list())
    profiles = [n.rpartition("/")[2] for n in names if n.startswith(f"{PROFILES}/")]
    values = {
        "run": run.url,
        **{name: value for name, value in summary.items() if name not in TOLD_BELOW},
        unit.many: int(np.nansum(steps[unit.many])),
        "lost_steps": sums.lost_steps,
        "interruptions": sums.interruptions,
        "loss": last["loss"] if last else None,
        **({"own_loss": own.pop(OWN_LOSS)} if OWN_LOSS in own else {}),
        **({"figures": own} if own else {}),
        unit.per_s: _mean(steps[unit.per_s][steady], busy),
        "mfu": _mean(steps["mfu"][steady], busy),
        "goodput": sums.goodput,
        "checkpoint": _checkpoints(config, stall_s, commit_s, sum(restart_s.values())),
        "step_s": step_s(run, steps),
        "start_s": restart_s,
        "wall_s": sums.wall_s,
        "cost_usd": sums.cost_usd,
        "storage": stored(run, steps, config.checkpoint.keep),
        "versions": {name: version(name) for name in ("rayapp", "ray", "torch", "transformers")},
        **({"profiles": profiles} if profiles else {}),
    }
    return cast(records.RunResult, values)  # some names are made of the unit's


def stored(run: Storage, steps: Columns, keep: int) -> records.StoredCost:
    """Return how much is in a run's folder, S3's price of it, and what its checkpoints have cost.

    A checkpoint was made after each step that saving held up. All are taken to be as large as those
    that are there, and to be committed when their step ended.
    """
    sizes = {entry.name: entry.size for entry in run.list()}
    gib = sum(sizes.values()) / GIB
    if run.local_path() is not None:
        return {"gib": gib, "usd_per_month": None, "usd": None}
    kept = {path: size for path, size in sizes.items() if path.startswith(f"{CHECKPOINTS}/")}
    each = sum(kept.values()) / GIB / max(1, len({path.split("/")[1] for path in kept}))
    hours = steps["time"] / 3600
    committed = hours[steps["checkpoint_stall_s"] > 0].tolist()
    until = float(hours[-1]) if len(hours) else 0.0
    usd = usd_of_checkpoints(committed, keep, until, each)
    return {"gib": gib, "usd_per_month": gib * USD_PER_GIB_MONTH, "usd": usd}


def step_s(run: Storage, steps: Columns) -> records.StepSeconds:
    """Return the seconds of a step: as planned, by the first ten steps, and of the later ones."""
    calibration = calibrate(steps)
    return {
        "planned": planned_step_s(run),
        "calibrated": calibration.step_s if calibration else None,
        "measured": rest_s(steps, calibration) if calibration else None,
    }


def _mean(rates: Array, busy_s: Array) -> float | None:
    """Return the mean of rates, weighted by their seconds; None if a rate is not known."""
    if not len(rates) or np.isnan(rates).any() or not busy_s.sum():
        return None
    return float((rates * busy_s).sum() / busy_s.sum())


def best_interval_s(stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the seconds between checkpoints that minimize the cost of stalls and lost steps.

    `mtbf_s` is the mean time between failures. Source: Daly, "A higher order estimate of the
    optimum checkpoint interval" (2006), first order; without `restart_s` it is Young's (1974).

    >>> round(best_interval_s(stall_s=1.0, restart_s=0.0, mtbf_s=5_000.0))
    99
    """
    return max(0.0, math.sqrt(2.0 * stall_s * (mtbf_s + restart_s)) - stall_s)


def _checkpoints(
    config: RunConfig, stall_s: float | None, commit_s: float | None, restart_s: float
) -> records.CheckpointCost:
    """Return the cost of a checkpoint and the best interval between checkpoints, in seconds.

    The interval is at least `commit_s`, as one checkpoint must be committed before the next.
    """
    best_s = None
    if stall_s is not None:
        mtbf_s = config.cluster.mtbf_hours * 3600.0 / config.cluster.max_workers
        best_s = max(commit_s or 0.0, best_interval_s(stall_s, restart_s, mtbf_s))
    return {"stall_s": stall_s, "commit_s": commit_s, "best_every_s": best_s}
