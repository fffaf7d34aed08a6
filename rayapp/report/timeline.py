"""A run's time as segments: start, training, recovery, end; the time between commands is left out.

for one in segments(run): one.kind, one.start_s, one.end_s
"""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.observe import words
from rayapp.observe.goodput import ENDED, INTERRUPTED, PHASE, RESUMED, STARTED, WORKERS
from rayapp.report.folder import ReportedRun

START, TRAIN, RECOVERY, END = "start", "train", "recovery", "end"


@dataclass(frozen=True)
class Segment:
    """A stretch of time of one kind, in seconds since the run began, pauses not counted."""

    kind: str
    start_s: float
    end_s: float
    workers: int | None
    text: str


@dataclass(frozen=True)
class Moment:
    """An interruption, or a pause between two commands, at `at_s` on the same axis."""

    kind: str
    at_s: float
    text: str


def segments(run: ReportedRun) -> list[Segment]:
    """Return a run's segments in order; without events, one of training for each attempt."""
    if not run.events:
        return _attempts(run)
    segments: list[Segment] = []
    kind, since, workers = START, run.events[0]["time"], None

    def until(time: float, following: str, rest: float | None = None) -> None:
        nonlocal kind, since
        start, end = (float(each) for each in run.active_s([since, time]))
        if end - start > 0:
            text = _text(kind, workers, end - start) + _phases(run, since, time)
            segments.append(Segment(kind, start, end, workers, text))
        kind, since = following, time if rest is None else rest

    for event in run.events:
        if event["event"] == STARTED:
            if event is not run.events[0]:
                until(_last_sign(run, since, event["time"]), START, event["time"])
            workers = None
        elif event["event"] == WORKERS:
            workers = event.get("workers")
        elif event["event"] == RESUMED:
            until(max(since, event["time"] - event["first_step_s"]), TRAIN)
        elif event["event"] == INTERRUPTED:
            if kind == TRAIN:
                until(event["trained_until"] or event["time"], RECOVERY)
        elif event["event"] == ENDED and kind == TRAIN:
            until(_last_sign(run, since, event["time"]), END)
            until(event["time"], END)
        elif event["event"] == ENDED:
            until(event["time"], END)
    if run.events[-1]["event"] != ENDED:
        last = float(run.columns["time"][-1]) if run.num_lines else since
        until(max(last, run.events[-1]["time"]), END)
    return segments


def moments(run: ReportedRun) -> list[Moment]:
    """Return the interruptions and the pauses between commands, in order of time."""
    moments = []
    for one in run.interruptions:
        at_s = float(run.active_s([one["time"]])[0])
        moments.append(Moment(one["kind"], at_s, f"{one['kind']} at step {one['step']:,}"))
    for pause in run.pauses:
        idle = words.duration(pause.end - pause.start)
        at_s = float(run.active_s([pause.start])[0])
        moments.append(Moment("pause", at_s, f"nothing ran for {idle}"))
    return sorted(moments, key=lambda one: one.at_s)


def _last_sign(run: ReportedRun, since: float, before: float) -> float:
    """Return the time of the last step after `since` and up to `before`, else `since`."""
    times = run.columns["time"]
    inside = times[(times > since) & (times <= before)]
    return float(inside[-1]) if len(inside) else since


def _attempts(run: ReportedRun) -> list[Segment]:
    attempts, segments = run.columns["attempt"], []
    for attempt in sorted(set(attempts.tolist())):
        own = attempts == attempt
        first, last = own.argmax(), len(own) - 1 - own[::-1].argmax()
        start_s = float(run.seconds[first] - (run.columns["step_s"][first] or 0.0))
        end_s = float(run.seconds[last])
        workers = int(run.columns["workers"][last])
        text = _text(TRAIN, workers, end_s - start_s)
        segments.append(Segment(TRAIN, max(0.0, start_s), end_s, workers, text))
    return segments


def _phases(run: ReportedRun, since: float, until: float) -> str:
    """Name the phases that began in a stretch of Unix time, with the time that each took."""
    inside = [e for e in run.events if e["event"] == PHASE and since <= e["time"] < until]
    ends = [event["time"] for event in inside[1:]] + [until] * bool(inside)
    took = [
        f"{event['phase']} {words.duration(end - event['time'])}"
        for event, end in zip(inside, ends, strict=True)
    ]
    return f" ({', '.join(took)})" if took else ""


def _text(kind: str, workers: int | None, seconds: float) -> str:
    what = {
        START: "start: cluster, data, model",
        TRAIN: "training",
        RECOVERY: "recovery",
        END: "evaluation, samples, export",
    }[kind]
    on = f" on {workers} workers" if kind == TRAIN and workers else ""
    return f"{what}{on}, {words.duration(seconds)}"
