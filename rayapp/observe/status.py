"""Read the status of a run from its folder alone: on any machine, with or without its cluster.

now = read(open_storage("s3://bucket/runs/demo"))
now.status, now.step, now.num_steps, now.left_s, now.account.cost_usd
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import yaml
from pydantic import ValidationError
from typing_extensions import TypedDict

from rayapp.config import parse_yaml
from rayapp.config.fields import unit_of
from rayapp.observe import run_folder
from rayapp.observe.activity import STARTING_WORKERS, WAITING_FOR_ROOM, Activity, read_activity
from rayapp.observe.columns import Columns
from rayapp.observe.goodput import ENDED, RESUMED, STARTED, Account, account, commands, read_events
from rayapp.observe.metrics import HeldOut, MetricsLine, evaluated
from rayapp.observe.records import Asked, Event, Plan, RunResult, Sections, Validation
from rayapp.observe.run_folder import (
    ASKED,
    CONFIG,
    EVENTS,
    EXIT_CODES,
    LEASE,
    LEASE_TAKEN_S,
    LIVE,
    LOST,
    METRICS,
    PLAN,
    PREPARING,
    RESULT,
    RUN_ID,
    RUNNING,
    STOP,
    STOPPED,
    STOPPING,
    VALIDATIONS,
    WAITING,
    DamagedFile,
    Number,
)
from rayapp.storage import Storage

LIVE_S = LEASE_TAKEN_S + 10.0  # a lease that is older has no driver; clocks may differ by 10 s
RECENT_STEPS = 50
VANISHED = "its driver has vanished: run the same command again to go on"

SUMMED = ("wall_s", "goodput", "cost_usd", "lost_steps", "interruptions")  # of an Account


class NoRun(LookupError):
    """The folder holds no run; the message names the folder."""


# What is read of Sections without the rules of rayapp.config, by section.
class ModelFields(TypedDict, total=False):
    lora: dict[str, object] | None


class ClusterFields(TypedDict, total=False):
    instance: str | list[str] | None


class DataFields(TypedDict, total=False):
    path: str
    mixture: dict[str, Number] | None


class ReadSections(TypedDict, total=False):
    task: str | None
    run: dict[str, object]
    model: ModelFields
    data: DataFields
    train: dict[str, object]
    eval: dict[str, object]
    checkpoint: dict[str, object]
    cluster: ClusterFields


@dataclass(frozen=True)
class Progress:
    """The current state of a run."""

    status: str
    """preparing, waiting (for room), running or stopping while a driver works on it; else done,
    rejected (by eval.gate), stopped, failed, or lost (its driver is gone). The same command resumes
    the last three."""
    step: int
    num_steps: int | None
    left_s: float | None
    """Seconds until the last step at the pace of the recent ones; None unless it is running."""
    line: MetricsLine | None
    """The last line of metrics.jsonl."""
    account: Account
    reason: str | None
    """Why it failed."""
    updated_s: float | None
    """Unix time of the last event or step."""
    started_s: float | None = None
    """Unix time at which its first command began."""
    held_out: HeldOut = field(default_factory=HeldOut)
    """Figures of the exported model, or else the loss of the last evaluation."""
    quiet_s: float | None = None
    """Seconds since the driver renewed the lease; None if there is no lease."""
    user: str | None = None
    """Who began the last command."""
    commit: str | None = None
    """Of the git checkout in which it was typed, with `+` if that had changes."""
    activity: Activity | None = None
    """What it does, while a driver works on it."""

    @property
    def cost_at_end_usd(self) -> float | None:
        """The cost when the last step is done, at the present pace; None if it is not known."""
        return self.account.cost_after(self.left_s)

    @property
    def live(self) -> bool:
        """Whether a driver works on the run."""
        return self.status in LIVE


def read(run: Storage, steps: Columns | None = None) -> Progress:
    """Read a run's folder; `steps` are those of metrics.jsonl, if the caller has them already.

    Raises:
        NoRun: nothing there is a run's.
        DamagedFile: a file of it is not as a run writes it.
    """
    events = read_events(run)
    lease = run.stat(LEASE)
    if not events and lease is None and not left_by_a_run(run):
        raise NoRun(f"{run.url} holds no run: nothing in it is what a run writes")
    steps = Columns.read(run) if steps is None else steps
    now = time.time()
    live = lease is not None and now - lease.modified_s < LIVE_S
    last = commands(events)[-1] if events else []
    activity = read_activity(run) if live else None
    if activity is not None and last and activity.began < last[0]["time"]:
        activity = None  # of an earlier command
    line = steps.last
    if activity is not None and activity.phase == STARTING_WORKERS and line is not None:
        activity = activity if line["time"] < activity.began else None  # they take steps already
    status, reason = _status(run, last, live, activity)
    num_steps = read_plan(run).get("steps")
    step = line["step"] if line else 0
    signs = [event["time"] for event in last] + ([line["time"]] if line else [])
    return Progress(
        status=status,
        step=step,
        num_steps=num_steps,
        left_s=left_s(steps, num_steps) if status == RUNNING else None,
        line=line,
        account=account(events, steps, now if live else None),
        reason=reason,
        updated_s=max(signs, default=None),
        held_out=evaluated(steps.held[-1]) if steps.held else {},
        quiet_s=None if lease is None else now - lease.modified_s,
        **_started_by(events),
        activity=activity if status in LIVE else None,
    )


def is_run(run: Storage) -> bool:
    """Return whether a folder has what only a run writes: its id, or events that begin a run."""
    with suppress(FileNotFoundError):
        if re.fullmatch(rb"[0-9a-f]{32}\s*", run.read(RUN_ID)):
            return True
    with suppress(FileNotFoundError, ValueError):
        first = run.read(EVENTS).partition(b"\n")[0]
        return run_folder.parsed(first, Event)["event"] == STARTED
    return False


def left_by_a_run(run: Storage) -> bool:
    """Return whether a folder has a run's files; a config.yaml alone may be another program's."""
    if any(map(run.exists, (EVENTS, LEASE, RUN_ID))):
        return True
    return run.exists(CONFIG) and any(map(run.exists, (PLAN, METRICS, RESULT)))


def until_exit(status: str) -> str:
    """Return the status of a run whose command is alive, though its folder may say that it ended.

    The command writes the report then; or it is taken for lost and waits for its storage.
    """
    if status in LIVE:
        return status
    return STOPPING if status == STOPPED else RUNNING


def summary(run: Storage) -> Progress:
    """Read what a list of runs shows; of a run that is done or stopped, two small files say it.

    `line` then has only the fields that result.json has too.

    Raises:
        NoRun: nothing there is a run's.
        DamagedFile: a file of it is not as a run writes it.
    """
    events = read_events(run)
    last = events[-1] if events else None
    result = read_result(run) if last is not None and last["event"] == ENDED else None
    if last is None or not result or result.get("status") != last["status"]:
        return read(run)
    if not result.keys() >= {"steps", *SUMMED}:  # of a run that failed
        return read(run)
    unit = unit_of(result)
    names = ("loss", "own_loss", "mfu", unit.per_s)
    line = {"step": result["steps"]} | {name: result.get(name) for name in names}
    line |= result.get("figures", {})
    rates = [event["usd_per_hour"] for event in events if "usd_per_hour" in event]
    sums: dict[str, Any] = {name: value for name, value in result.items() if name in SUMMED}
    return Progress(
        status=result["status"],
        step=result["steps"],
        num_steps=read_plan(run).get("steps") if result["status"] == STOPPED else result["steps"],
        left_s=None,
        line=cast(MetricsLine, line),
        account=Account(usd_per_hour=rates[-1] if rates else None, **sums),
        reason=last["reason"],
        updated_s=last["time"],
        held_out=evaluated(result),
        **_started_by(events),
    )


def _started_by(events: list[Event]) -> dict[str, Any]:
    """Return who began the last command of a run, and from which commit."""
    last: Mapping[str, Any] = commands(events)[-1][0] if events else {}
    began = events[0]["time"] if events else None
    return {"started_s": began} | {name: last.get(name) for name in ("user", "commit")}


def _status(
    run: Storage, last: list[Event], live: bool, activity: Activity | None
) -> tuple[str, str | None]:
    """Return the status and, if failed or lost, the reason, by the events of the last command."""
    for event in last:
        if event["event"] == ENDED:
            if event["status"] not in EXIT_CODES:
                why = f"the run ended with the unknown status {event['status']!r:.40}"
                raise DamagedFile(f"{run.url}/{EVENTS}", why, "Delete the file, or upgrade rayapp")
            return event["status"], event["reason"]
    if not live:
        return LOST, VANISHED
    if run.exists(STOP):
        return STOPPING, None
    if activity is not None and activity.phase == WAITING_FOR_ROOM:
        return WAITING, None
    return (RUNNING if any(e["event"] == RESUMED for e in last) else PREPARING), None


def read_asked(run: Storage) -> Asked | None:
    """Return what a command that has not done a step asks of a run; raises DamagedFile."""
    return run_folder.read(run, ASKED, Asked, "Delete the file, and run the same command again")


def read_plan(run: Storage) -> Plan:
    """Return a run's plan, empty if there is none yet; raises DamagedFile."""
    return run_folder.read(run, PLAN, Plan) or {}


def read_result(run: Storage) -> RunResult:
    """Return a run's result, empty if there is none yet; raises DamagedFile."""
    result = run_folder.read(run, RESULT, RunResult)
    if result is not None and "steps" not in result:
        raise DamagedFile(f"{run.url}/{RESULT}", "steps is missing")
    return result or cast(RunResult, {})


def read_sections(run: Storage) -> Sections | None:
    """Return a run's config as plain values, unchecked; None if there is no config.yaml yet.

    Raises: DamagedFile: the file holds no sections.
    """
    fix = "Restore it, or set another run.name"
    try:
        tree: Any = parse_yaml(run.read(CONFIG).decode())
        run_folder.schema(ReadSections).validate_python(tree, strict=True)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DamagedFile(f"{run.url}/{CONFIG}", run_folder.reason_of(error), fix) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DamagedFile(f"{run.url}/{CONFIG}", " ".join(str(error).split()), fix) from None
    return cast(Sections, tree)


def read_validations(run: Storage) -> list[Validation]:
    """Return the lines of a run's validation.jsonl, [] if there is none; raises DamagedFile."""
    line_of = partial(run_folder.parsed, kind=Validation)
    return run_folder.read_lines(run, VALIDATIONS, line_of, "Delete the line")


def planned_step_s(run: Storage) -> float | None:
    """Return the seconds of a step in the run's plan, None if not known; raises DamagedFile."""
    band = read_plan(run).get("step_s")
    return None if band is None else band["value"]


def left_s(steps: Columns, num_steps: int | None) -> float | None:
    """Return the seconds left at the mean pace of the last RECENT_STEPS steps; None: not known."""
    recent = steps["step_s"][-RECENT_STEPS:]
    if num_steps is None or steps.last is None or np.isnan(recent).all():
        return None
    return max(0, num_steps - steps.last["step"]) * max(0.0, float(np.nanmean(recent)))
