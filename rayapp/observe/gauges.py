"""Export metrics of a run to Prometheus while it trains, through Ray's metrics agent on each node.

    with Steps("demo", rank=0) as gauges:                    # in a training worker
        gauges.step(line)
    gauges = Driver("demo", num_steps=500, started=...)      # in the driver
    gauges.set(account, ...); gauges.close()
    tell_end("demo", FAILED)                               # at the end of the command

Ray prefixes every name with `ray_`, and counters end in `_total`. To keep the series few, rank 0
alone exports the figures of the run; each rank exports only its own memory and its wait for data.
Values that are None or not finite are not exported (Ray would drop the latter); `bad_steps` counts
steps that are not finite.

Ray shows a gauge for 20 s (two of its intervals) after it was set, so a thread sets each gauge
again every REPEAT_S seconds until `close`. A counter stays as long as the agent of its node; each
process has its own, so sum them by run. A process sends its last counts before it ends. Under
torchrun none of this is used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rayapp.observe.attempts import FAILURE, PREEMPTION, RESIZE
from rayapp.observe.columns import Array
from rayapp.observe.goodput import Account
from rayapp.observe.metrics import FIELDS, OWN, MetricsLine, figure, figures_of
from rayapp.observe.run_folder import FAILED

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge

PREFIX = "rayapp"
REPEAT_S = 1.0
RECENT_STEPS = 32
RANK = "rank"

FIGURE = "figure"  # of a loss, by the tag `name`
# Counted, besides the fields of a step that `records.FIELDS` calls counters.
COUNTED = {
    "skipped_steps": "Steps that left the weights as they were",
    "bad_steps": "Steps whose loss or gradient was not finite",
}
TRAINED_ON = ("tokens", "images", "tokens_by_source")  # not counted where a step is skipped
STEP_S_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
OF_THE_DRIVER = {
    "num_steps": "Steps that the run is to do",
    "last_step_unix_s": "When the last step was done; before the first, when the run was started",
    "checkpoint_step": "Steps done at the newest committed checkpoint",
    "checkpoint_unix_s": "When it was committed; before the first, when the run was started",
    "checkpoint_every_s": "Seconds between checkpoints that were asked for, at the present pace",
    "wall_s": "Seconds that the run's commands have taken",
    "cost_usd": "Cost of the run's machines so far",
    "usd_per_hour": "Cost of the run's machines per hour",
    "cost_at_end_usd": "What it will have cost at the present pace",
    "lost_steps": "Steps that were done in vain",
    "planned_step_s": "Seconds of a step by the plan, stalls left out",
    "calibrated_step_s": "The same by the run's own first ten steps",
}


AT_THE_END = {"failed": "1 where the run has failed, 0 where it is done or was stopped"}


class _Gauges:
    """Gauges of one run; a thread repeats their last values until they are closed."""

    def __init__(self, tags: dict[str, str]) -> None:
        self._tags = tags
        self._gauges: dict[str, Gauge] = {}
        self._values: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="gauges", daemon=True)

    def add(self, texts: Mapping[str, str], *more_tags: str) -> None:
        """Add gauges, given as descriptions by name."""
        from ray.util.metrics import Gauge

        for name, text in texts.items():
            made = Gauge(f"{PREFIX}_{name}", text, (*self._tags, *more_tags))
            self._gauges[name] = made.set_default_tags(self._tags)

    def set(self, values: Mapping[str, float | None], **tags: str) -> None:
        """Set the gauges whose values are known and finite; `tags` add to the run's tags."""
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._values[name, "".join(tags.values())] = value, tags
                self._gauges[name].set(value, tags)
        if not self._thread.is_alive() and not self._closed.is_set():
            self._thread.start()

    def forget(self) -> None:
        """Repeat no value that was set before."""
        self._values.clear()

    def close(self) -> None:
        """Stop repeating the values; Ray drops the gauges within 20 s."""
        self._closed.set()

    def _repeat(self) -> None:
        while not self._closed.wait(REPEAT_S):
            for (name, _), (value, tags) in tuple(self._values.items()):
                self._gauges[name].set(value, tags)


class Steps:
    """Export the metrics of each step; every rank has one."""

    def __init__(self, run: str, rank: int) -> None:
        from ray.util.metrics import Histogram

        tags = {"run": run}
        self._first, self._rank = rank == 0, str(rank)
        self._gauges = _Gauges(tags)
        self._counts: dict[str, Counter] = {}
        for name, shown in {**FIELDS, FIGURE: OWN}.items():
            if not self._first and shown.tag != RANK:
                continue
            more = (shown.tag,) if shown.tag else ()
            if shown.live == "gauge":
                self._gauges.add({name: shown.text}, *more)
            elif shown.live == "counter":
                self._counts |= _counters({name: shown.text}, tags, *more)
        if self._first:
            self._counts |= _counters(COUNTED, tags)
            self._step_s = Histogram(
                f"{PREFIX}_step_s",
                "Wall time of a step, waiting and saving included",
                boundaries=list(STEP_S_BOUNDS),
                tag_keys=tuple(tags),
            ).set_default_tags(tags)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._gauges.close()

    def step(self, line: MetricsLine) -> None:
        """Export the figures of a step."""
        for field, key, value in figures_of(line):
            shown = FIELDS.get(field, OWN)
            if not self._first and shown.tag != RANK:
                continue
            tag = self._rank if shown.tag == RANK else key or field
            tags, name = {shown.tag: tag} if shown.tag else {}, field if field in FIELDS else FIGURE
            if shown.live == "gauge":
                self._gauges.set({name: value}, **tags)
            elif shown.live == "counter" and not (line["skipped"] and field in TRAINED_ON):
                self._count(name, value, **tags)
        if not self._first:
            return
        self._count("skipped_steps", int(line["skipped"]))
        self._step_s.observe(line["step_s"])
        if figure(line, "loss") is None or figure(line, "grad_norm") is None:
            self.bad_step()

    def bad_step(self) -> None:
        """Count a step that is not finite on rank 0; the worker calls it for one that ends a run.

        That step has no line.
        """
        if self._first:
            self._count("bad_steps", 1)

    def _count(self, name: str, value: float, **tags: str) -> None:
        if value > 0:  # Ray's counters take no 0
            self._counts[name].inc(value, tags)


class Driver:
    """Export what only the driver knows, which outlives the workers."""

    def __init__(self, run: str, num_steps: int, started: float) -> None:
        self._gauges = _Gauges({"run": run})
        self._gauges.add(OF_THE_DRIVER)
        self._gauges.add({"goodput": "Share of wall_s by cause, 0-1"}, "cause")
        self._gauges.add({"interruptions": "Attempts that ended early, by kind"}, "kind")
        self._num_steps, self._started = num_steps, started
        self.close = self._gauges.close

    def set(
        self,
        account: Account,
        last_step_s: float | None,
        checkpoint: tuple[int, float] | None,
        **more: float | None,
    ) -> None:
        """Export the state of the run.

        `last_step_s` is the Unix time of the last step; `checkpoint` is the newest one's (step,
        Unix time of the commit). `more` holds further values of OF_THE_DRIVER, by name.
        """
        step, committed_s = checkpoint or (None, self._started)
        self._gauges.set(
            {
                "num_steps": self._num_steps,
                # A run that is resumed after a day must not look as if it had hung for a day.
                "last_step_unix_s": max(last_step_s or 0.0, self._started),
                "checkpoint_step": step,
                "checkpoint_unix_s": max(committed_s, self._started),
                "wall_s": account.wall_s,
                "cost_usd": account.cost_usd,
                "usd_per_hour": account.usd_per_hour,
                "lost_steps": account.lost_steps,
                **more,
            }
        )
        for cause, share in account.goodput.items():
            self._gauges.set({"goodput": share}, cause=cause)
        kinds = [each["kind"] for each in account.interruptions]
        for kind in (FAILURE, PREEMPTION, RESIZE):
            self._gauges.set({"interruptions": kinds.count(kind)}, kind=kind)


class PhaseGauge:
    """Export what the run does, and for how long; the driver has it from its start to its end."""

    def __init__(self, run: str) -> None:
        self._gauges = _Gauges({"run": run})
        text = "Seconds that the run has been in its present phase (tokenising, waiting, training)"
        self._gauges.add({"phase_s": text}, "phase")
        self.close = self._gauges.close

    def set(self, phase: str, seconds: float) -> None:
        """Export the present phase alone; Ray drops that of an earlier one within 20 s."""
        self._gauges.forget()
        self._gauges.set({"phase_s": seconds}, phase=phase)


def tell_end(run: str, status: str) -> None:
    """Export whether a run failed.

    Ray shows the value for 20 s, even if the process ends at once, which is longer than the
    interval of scrapes. A driver that is killed exports no end.
    """
    gauges = _Gauges({"run": run})
    gauges.add(AT_THE_END)
    gauges.set({"failed": float(status == FAILED)})
    gauges.close()


def checkpoint_every_s(
    every_s: float | None, every_steps: int | None, step_s: Array
) -> float | None:
    """Return the seconds between checkpoints at the pace of the last RECENT_STEPS steps.

    They are due by time or by steps, whichever comes first. None: it is not known yet.
    """
    recent = np.nan_to_num(step_s[-RECENT_STEPS:])
    by_steps = every_steps * float(np.median(recent)) if every_steps and len(recent) else None
    return min((each for each in (every_s, by_steps) if each is not None), default=None)


def _counters(
    texts: Mapping[str, str], tags: dict[str, str], *more_tags: str
) -> dict[str, Counter]:
    from ray.util.metrics import Counter

    return {
        name: Counter(f"{PREFIX}_{name}", text, (*tags, *more_tags)).set_default_tags(tags)
        for name, text in texts.items()
    }
