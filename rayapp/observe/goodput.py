"""Account for a run's time and cost over all its commands, from events.jsonl and metrics.jsonl.

    account = account(read_events(run), Columns.read(run), now=time.time())
    account.goodput["step"], account.cost_usd

The driver writes events.jsonl, one JSON object a line (see rayapp.observe.records.Event).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from rayapp.observe import run_folder
from rayapp.observe.activity import WAITING_FOR_ROOM
from rayapp.observe.columns import OF_A_STEP, Array, Columns
from rayapp.observe.records import Event, Interruption
from rayapp.observe.run_folder import EVENTS, DamagedFile
from rayapp.storage import Storage

STARTED = "started"  # a command began
PHASE = "phase"  # it is in a phase that lasts, e.g. waits for room
WORKERS = "workers"  # an attempt begins
RESUMED = "resumed"  # its first step is done
INTERRUPTED = "interrupted"  # it ended early
ENDED = "ended"  # the command ended

# The fields of each event without which it is damaged.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    STARTED: ("seen_until",),
    PHASE: ("phase",),
    WORKERS: (),
    RESUMED: ("first_step_s", "lost_steps", "lost_s"),
    INTERRUPTED: ("kind", "reason", "step", "workers", "trained_until"),
    ENDED: ("status", "reason", "seconds"),
}

# Kinds of a TimeSpan.
START, WAITING, TRAIN, RECOVERY, END = "start", "waiting", "train", "recovery", "end"
IDLE = (START, WAITING, RECOVERY, "lost_work")  # causes of time outside of kept steps


class TimeSpan(NamedTuple):
    """A time in which a command did one kind of thing, in Unix seconds."""

    kind: str
    """START, WAITING (for room), TRAIN, RECOVERY or END."""
    start: float
    end: float
    workers: int
    """0 before the first attempt of the command."""


@dataclass(frozen=True)
class Account:
    """The sums over all commands of a run; the time between commands is not counted."""

    wall_s: float
    goodput: dict[str, float]
    """Fractions of wall_s by cause; they sum to 1 and none is negative."""
    cost_usd: float | None
    """None if the price of a machine is not known."""
    usd_per_hour: float | None
    """Of all machines at the last event that has a price; None if not known."""
    lost_steps: int
    """Steps that were done and then lost, as no checkpoint held them."""
    interruptions: list[Interruption]

    def cost_after(self, left_s: float | None) -> float | None:
        """Return the cost in `left_s` more seconds, None if price or pace is not known."""
        if self.cost_usd is None or self.usd_per_hour is None or left_s is None:
            return None
        return self.cost_usd + self.usd_per_hour * left_s / 3600.0


def read_events(run: Storage) -> list[Event]:
    """Return a run's events, an empty list without a file; an incomplete last line is ignored.

    Raises: DamagedFile: a line is no event.
    """
    fix = "Delete the file: the run goes on from its checkpoint, without its history"
    events = run_folder.read_lines(run, EVENTS, _event, fix)
    if events and events[0]["event"] != STARTED:
        why = f"line 1: event={events[0]['event']!r:.40}: the first event must be {STARTED}"
        raise DamagedFile(f"{run.url}/{EVENTS}", why, fix)
    return events


def _event(line: bytes) -> Event:
    event: Event = run_folder.parsed(line, Event)
    if event["event"] not in REQUIRED:
        raise ValueError(f"event={event['event']!r:.40}: it is unknown")
    if missing := [name for name in REQUIRED[event["event"]] if name not in event]:
        raise ValueError(f"{missing[0]} is missing")
    return event


def account(events: Sequence[Event], steps: Columns, now: float | None = None) -> Account:
    """Add up a run's time, cost and interruptions.

    `now` (Unix seconds) is given if the last command still runs. `steps` are the kept ones.
    """
    seconds = dict.fromkeys((*IDLE, "evaluation", "export"), 0.0)
    for command, until in with_ends(events, steps["time"], now):
        for cause, value in _idle_s(command, until, steps["time"]).items():
            seconds[cause] += value
    wall_s, cost_usd = spent(events, steps["time"], now)
    rates = [event["usd_per_hour"] for event in events if "usd_per_hour" in event]
    return Account(
        wall_s,
        goodput(steps, wall_s, seconds),
        cost_usd if events else None,
        rates[-1] if rates else None,
        sum(event["lost_steps"] for event in events if event["event"] == RESUMED),
        interruptions(events),
    )


def spent(events: Sequence[Event], times: Array, now: float | None) -> tuple[float, float | None]:
    """Return the seconds and USD of all commands; USD is None if a price is not known.

    `times` are the Unix seconds of the kept steps.
    """
    wall_s, cost_usd = 0.0, 0.0
    for command, until in with_ends(events, times, now):
        wall_s += until - command[0]["time"]
        price = _cost_usd(command, until)
        cost_usd = math.nan if price is None else cost_usd + price
    return wall_s, None if math.isnan(cost_usd) else cost_usd


def with_ends(
    events: Sequence[Event], times: Array, now: float | None
) -> list[tuple[list[Event], float]]:
    """Return each command's events and the Unix time at which it ended."""
    every = commands(events)
    following = [*(command[0] for command in every[1:]), None]
    each = zip(every, following, strict=False)
    return [(command, _end_of(command, follows, times, now)) for command, follows in each]


def commands(events: Sequence[Event]) -> list[list[Event]]:
    """Return the events grouped by command; the first event of each command is `started`."""
    attempts: list[list[Event]] = []
    for event in events:
        if event["event"] == STARTED:
            attempts.append([])
        attempts[-1].append(event)
    return attempts


def goodput(steps: Columns, wall_s: float, known_s: dict[str, float]) -> dict[str, float]:
    """Return fractions of wall time by cause; they sum to 1 and none is negative.

    `known_s` holds seconds measured elsewhere (start, export, lost_work, recovery ...); the time
    that nothing accounts for is `other`.
    """
    columns = {**OF_A_STEP, "step": "step_s"}
    seconds = {cause: math.fsum(np.nan_to_num(steps[name])) for cause, name in columns.items()}
    seconds["step"] -= math.fsum(seconds[cause] for cause in OF_A_STEP)
    for cause, value in known_s.items():
        seconds[cause] = seconds.get(cause, 0.0) + max(0.0, value)
    seconds = {cause: max(0.0, value) for cause, value in seconds.items()}
    accounted_s = math.fsum(seconds.values())
    wall_s = max(wall_s, accounted_s, 1e-9)
    seconds["other"] = wall_s - accounted_s
    return {cause: value / wall_s for cause, value in seconds.items()}


def interruptions(events: Sequence[Event]) -> list[Interruption]:
    """Return each interruption with the steps that it lost and the seconds to the next step done.

    Both are None if the same command has done no step since.
    """
    stalls = []
    for command in commands(events):
        for index, event in enumerate(command):
            if event["event"] != INTERRUPTED:
                continue
            later = [other for other in command[index:] if other["event"] == RESUMED]
            own = ("time", "kind", "reason", "step", "workers")
            told: Any = {name: value for name, value in event.items() if name in own}
            told["lost_steps"] = event["step"] - later[0]["step"] if later else None
            told["to_first_step_s"] = later[0]["time"] - event["time"] if later else None
            stalls.append(cast(Interruption, told))
    return stalls


def _end_of(command: list[Event], follows: Event | None, times: Array, now: float | None) -> float:
    """Return the Unix time at which a command ended, or its last sign of life if it was killed.

    `follows` is the `started` event of the next command. If there is none and `now` is given, the
    command still runs, and the result is `now`.
    """
    for event in command:
        if event["event"] == ENDED:
            return float(event["time"])
    if follows is None and now is not None:
        return max(now, command[-1]["time"])
    limit = math.inf if follows is None else follows["time"]
    own = times[(times >= command[0]["time"]) & (times < limit)]
    signs = [float(own.max())] if len(own) else []
    seen_until = None if follows is None else follows["seen_until"]
    if seen_until is not None and seen_until >= command[0]["time"]:
        signs.append(seen_until)
    return float(max([*signs, command[-1]["time"]]))


def spans(command: list[Event], until: float, times: Array) -> list[TimeSpan]:
    """Return what a command did, without gaps, from its start to `until`.

    `times` are the Unix seconds of the kept steps.
    """
    found: list[TimeSpan] = []
    kind, since, workers = START, command[0]["time"], 0
    before = START  # what a wait interrupts; it ends with the next event that is no phase

    def begin(following: str, at: float) -> None:
        nonlocal kind, since
        if at > since:
            found.append(TimeSpan(kind, since, at, workers))
        kind, since = following, max(since, at)

    for event in command:
        if kind == WAITING and event["event"] != PHASE:
            begin(before, event["time"])
        if event["event"] == PHASE and event["phase"] == WAITING_FOR_ROOM and kind != WAITING:
            before = kind
            begin(WAITING, event["time"])
        elif event["event"] == WORKERS:
            workers = event.get("workers", 0)
        elif event["event"] == RESUMED:
            begin(TRAIN, event["time"] - event["first_step_s"])
        elif event["event"] == INTERRUPTED and kind == TRAIN:
            begin(RECOVERY, event["trained_until"] or event["time"])
        elif event["event"] == ENDED:
            inside = times[(times > since) & (times <= event["time"])]
            trained_until = inside[-1] if len(inside) else since
            known_s = sum(event["seconds"].values())
            begin(END, float(trained_until) if kind == TRAIN else until - known_s)
    begin(END, until)
    return found


def _idle_s(command: list[Event], until: float, times: Array) -> dict[str, float]:
    """Return the seconds, by cause, that no kept step of a command accounts for."""
    seconds = dict.fromkeys(IDLE, 0.0)
    for kind, start, end, _ in spans(command, until, times):
        if kind in IDLE:
            seconds[kind] += end - start
    for event in command:
        if event["event"] == RESUMED:
            seconds["lost_work"] += event["lost_s"]
        elif event["event"] == ENDED:
            known = event["seconds"]
            seconds["evaluation"] = known.get("evaluation", 0.0)
            seconds["export"] = known.get("export", 0.0) + known.get("sample", 0.0)
    return seconds


def _cost_usd(command: list[Event], until: float) -> float | None:
    """Return the cost of a command's machines until its end, None if a price is not known."""
    priced = [event for event in command if "usd_per_hour" in event]
    ends = [*(event["time"] for event in priced[1:]), until]
    total = 0.0
    for event, end in zip(priced, ends, strict=True):
        if event["usd_per_hour"] is None:
            return None
        total += event["usd_per_hour"] * max(0.0, end - event["time"]) / 3600.0
    return total
