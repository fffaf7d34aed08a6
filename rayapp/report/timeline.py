"""A run's time and money: its spans, the plan against what was measured, and interruptions.

for one in spans(run): one.kind, one.start_s, one.end_s     # start, train, recovery, end

The time between two commands is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.observe import words
from rayapp.observe.figures import label, text
from rayapp.observe.goodput import END, PHASE, RECOVERY, START, TRAIN, WAITING, with_ends
from rayapp.observe.goodput import spans as spans_of
from rayapp.observe.records import band_of
from rayapp.observe.run_folder import DONE
from rayapp.report.folder import ReportedRun
from rayapp.report.tables import TableBar

KINDS = {
    START: "start: cluster, data, model",
    WAITING: "waiting for room",
    TRAIN: "training",
    RECOVERY: "recovery",
    END: "evaluation, samples, export",
}
CAUSES = {
    "step": "steps that count",
    "data_wait": "waiting for data",
    "checkpoint_stall": "checkpoint stalls",
    "evaluation": "evaluation",
    "start": "start",
    "waiting": "waiting for room",
    "recovery": "recovery",
    "lost_work": "steps done in vain",
    "export": "samples and export",
    "other": "other",
}


@dataclass(frozen=True)
class RunSpan:
    """A span of time of one kind, in seconds since the run began, pauses not counted."""

    kind: str
    start_s: float
    end_s: float
    text: str

    @property
    def row(self) -> list[str]:
        """Its text, beginning and end, for a table."""
        return [self.text, words.duration(self.start_s), words.duration(self.end_s)]


def spans(run: ReportedRun) -> list[RunSpan]:
    """Return a run's spans in order; none without events."""
    found = []
    for command, until in with_ends(run.events, run.columns["time"], None):
        for kind, start, end, workers in spans_of(command, until, run.columns["time"]):
            start_s, end_s = (float(each) for each in run.active_s([start, end]))
            on = f" on {workers} workers" if kind == TRAIN and workers else ""
            took = words.duration(end_s - start_s)
            what = f"{KINDS[kind]}{on}, {took}{_phases(run, start, end)}"
            found.append(RunSpan(kind, start_s, end_s, what))
    return found


def moments(run: ReportedRun) -> list[RunSpan]:
    """Return the interruptions and the pauses between commands, in order, as spans of no length."""
    found = []
    for one in run.account.interruptions:
        at_s = float(run.active_s(one["time"]))
        found.append(RunSpan(one["kind"], at_s, at_s, f"{one['kind']} at step {one['step']:,}"))
    for start, end in run.pauses:
        idle = f"nothing ran for {words.duration(end - start)}"
        at_s = float(run.active_s(start))
        found.append(RunSpan("pause", at_s, at_s, idle))
    return sorted(found, key=lambda one: one.start_s)


def _phases(run: ReportedRun, since: float, until: float) -> str:
    """Name the phases that began in a span of Unix time, with the time that each took."""
    inside = [e for e in run.events if e["event"] == PHASE and since <= e["time"] < until]
    ends = [event["time"] for event in inside[1:]] + [until] * bool(inside)
    took = [
        f"{event['phase']} {words.duration(end - event['time'])}"
        for event, end in zip(inside, ends, strict=True)
    ]
    return f" ({', '.join(took)})" if took else ""


def planned(run: ReportedRun) -> list[list[str]]:
    """Return planned against measured figures: name, plan, measured, ratio, verdict, band.

    What was neither planned nor measured is left out.
    """
    unit, ended = run.unit, run.status == DONE
    measured = {
        "peak_gib": run.highest("peak_gib"),
        "step_s": float(run.busy_s.mean()) if len(run.busy_s) else None,
        unit.per_s: run.rate(unit.per_s),
        unit.per_s_per_gpu: run.rate(unit.per_s_per_gpu),
        "mfu": run.rate("mfu"),
        "hours": run.wall_s / 3600.0 if run.wall_s and ended else None,
        "cost_usd": run.account.cost_usd if ended else None,
    }
    rows = []
    for name, value in measured.items():
        band = band_of(run.plan, name)
        found = "" if value is None else text(name, value)
        if band is None:
            rows += [] if value is None else [[label(name), "", found, "", "", ""]]
            continue
        ratio, verdict, low, high = "", "", band["low"], band["high"]
        if value is not None:
            ratio = f"{value / band['value']:.2f}" if band["value"] else ""
            verdict = "below" if value < low else "above" if value > high else "within"
        width = " to ".join(text(name, end).split()[0] for end in (low, high))
        rows.append([label(name), text(name, band["value"]), found, ratio, verdict, width])
    # The step time: predicted from the first ten steps, and measured after them.
    seconds = run.result.get("step_s")
    if seconds and seconds["calibrated"] and seconds["measured"] is not None:
        both = [seconds["calibrated"], seconds["measured"]]
        name = f"{label('step_s')}, predicted by its first ten"
        rows.append([name, *(text("step_s", s) for s in both), f"{both[1] / both[0]:.2f}", "", ""])
    return rows


def goodput(run: ReportedRun) -> list[TableBar]:
    """Return the share of each cause that took time, with its duration and cost."""
    known = {cause: value for cause, value in run.account.goodput.items() if value}
    usd, wall_s = run.account.cost_usd, run.wall_s or 0.0
    return [
        TableBar(
            CAUSES.get(cause, cause),
            value,
            value / max(known.values()),
            [words.share(value), words.duration(value * wall_s)]
            + ([] if usd is None else [words.dollars(value * usd)]),
            cause,
        )
        for cause in dict.fromkeys([*CAUSES, *known])
        if (value := known.get(cause))
    ]


def interruptions(run: ReportedRun) -> list[list[str]]:
    """Return each interruption: time, kind, reason, step, lost steps, time to the next step."""
    return [
        [
            words.moment(each["time"]),
            each["kind"],
            str(each["reason"]),
            f"{each['step']:,}",
            words.number(each["lost_steps"], 12),
            words.duration(each["to_first_step_s"]),
        ]
        for each in run.account.interruptions
    ]
