"""How a run is getting on, from its folder alone: on any machine, whatever became of its cluster.

now = read(open_storage("s3://bucket/runs/demo"))
now.status, now.step, now.num_steps, now.left_s, now.account.cost_usd
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import cast

from rayapp.observe import metrics
from rayapp.observe.goodput import (
    ENDED,
    RESUMED,
    Account,
    DamagedEvents,
    account,
    commands,
    read_events,
)
from rayapp.observe.records import Event, MetricsLine, Plan, RunResult
from rayapp.observe.run_folder import (
    CONFIG,
    EVENTS,
    EXIT_CODES,
    LEASE,
    LEASE_TAKEN_S,
    LIVE,
    LOST,
    PLAN,
    PREPARING,
    RESULT,
    RUNNING,
    STOP,
    STOPPING,
)
from rayapp.storage import Storage

LIVE_S = LEASE_TAKEN_S + 10.0  # of a lease: clocks differ a little
RECENT_STEPS = 50
VANISHED = "its driver has vanished: run the same command again to go on"
REWRITTEN = "Delete the file: the run's next command writes it again"


class NoRun(LookupError):
    """There is no run in this folder; the message names it."""


@dataclass(frozen=True)
class Progress:
    """A run as it is now."""

    status: str
    """preparing, running, stopping; done, stopped, failed; lost: its driver is gone. The last
    three go on with the same command."""
    step: int
    num_steps: int | None
    left_s: float | None
    """Seconds until the last step at the pace of the last ones; None when it does not run."""
    line: MetricsLine | None
    """The last line of metrics.jsonl."""
    account: Account
    reason: str | None
    """Why it failed."""
    updated_s: float | None
    """Unix time of the last sign of life."""
    quiet_s: float | None = None
    """Seconds since its driver has renewed the lease; None: there is none."""

    @property
    def cost_at_end_usd(self) -> float | None:
        """What it will have cost when its last step is done, at the present pace."""
        return cost_at_end_usd(self.account, self.left_s)

    @property
    def live(self) -> bool:
        """Say whether its driver is at work."""
        return self.status in LIVE


def read(run: Storage, lines: list[MetricsLine] | None = None) -> Progress:
    """Look at a run's folder; `lines` are those of metrics.jsonl where the caller has them.

    Raises:
        NoRun: nothing there is a run's.
        Damaged: a file of it is not as a run writes it.
    """
    events = read_events(run)
    lease = run.stat(LEASE)
    if not events and lease is None and not run.exists(CONFIG):
        raise NoRun(f"{run.url} holds no run: there is no {CONFIG} in it")
    lines = metrics.read(run) if lines is None else lines
    now = time.time()
    live = lease is not None and now - lease.modified_s < LIVE_S
    last = commands(events)[-1] if events else []
    status, reason = _status(run, last, live)
    num_steps = _num_steps(run)
    line = lines[-1] if lines else None
    step = line["step"] if line else 0
    signs = [event["time"] for event in last] + ([line["time"]] if line else [])
    return Progress(
        status=status,
        step=step,
        num_steps=num_steps,
        left_s=left_s(lines, num_steps) if status == RUNNING else None,
        line=line,
        account=account(events, lines, now if live else None),
        reason=reason,
        updated_s=max(signs, default=None),
        quiet_s=None if lease is None else now - lease.modified_s,
    )


def cost_at_end_usd(sums: Account, left_s: float | None) -> float | None:
    """Return what a run will have cost, None while price or pace is not known."""
    if sums.cost_usd is None or sums.usd_per_hour is None or left_s is None:
        return None
    return sums.cost_usd + sums.usd_per_hour * left_s / 3600.0


def _status(run: Storage, last: list[Event], live: bool) -> tuple[str, str | None]:
    """Return the status and, of a failure, the reason; `last` are the last command's events."""
    for event in last:
        if event["event"] == ENDED:
            if event["status"] not in EXIT_CODES:
                why = f"the run ended with the unknown status {event['status']!r:.40}"
                raise DamagedEvents(
                    f"{run.url}/{EVENTS}", why, "Delete the file, or upgrade rayapp"
                )
            return event["status"], event["reason"]
    if not live:
        return LOST, VANISHED
    if run.exists(STOP):
        return STOPPING, None
    return (RUNNING if any(e["event"] == RESUMED for e in last) else PREPARING), None


def _num_steps(run: Storage) -> int | None:
    """Return the steps of a run's plan, None where it has none yet."""
    steps = read_plan(run).get("steps")
    if isinstance(steps, bool) or not isinstance(steps, int | None):
        raise DamagedEvents(f"{run.url}/{PLAN}", f"steps={steps!r:.40} is no number", REWRITTEN)
    return steps


def read_plan(run: Storage) -> Plan:
    """Return a run's plan, empty where it has none yet; raises Damaged."""
    return cast(Plan, read_object(run, PLAN))


def read_result(run: Storage) -> RunResult:
    """Return what came out of a run, empty where nothing has; raises Damaged."""
    return cast(RunResult, read_object(run, RESULT))


def planned_step_s(run: Storage) -> float | None:
    """Return the seconds of a step as the run's plan has them; raises Damaged."""
    band = read_plan(run).get("step_s")
    return None if band is None else float(band["value"])


def read_object(run: Storage, name: str) -> dict[str, object]:
    """Return a JSON file of a run's folder, empty where it is not there.

    Raises:
        Damaged: it holds no JSON object.
    """
    try:
        value = json.loads(run.read(name))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise DamagedEvents(f"{run.url}/{name}", f"it is not JSON ({error})", REWRITTEN) from None
    if not isinstance(value, dict):
        raise DamagedEvents(f"{run.url}/{name}", "it holds no JSON object", REWRITTEN)
    return value


def left_s(lines: list[MetricsLine], num_steps: int | None) -> float | None:
    """Return the seconds that are left at the pace of the last steps, None if that is not known."""
    recent = [line["step_s"] for line in lines[-RECENT_STEPS:]]
    if num_steps is None or not recent:
        return None
    return (num_steps - lines[-1]["step"]) * statistics.fmean(recent)
