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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayapp.observe.attempts import FAILURE, PREEMPTION, RESIZE
from rayapp.observe.columns import Array
from rayapp.observe.goodput import Account
from rayapp.observe.metrics import FIELDS, OWN, MetricsLine, figure, figures_of
from rayapp.observe.run_folder import FAILED

PREFIX = "rayapp"
REPEAT_S = 1.0
RECENT_STEPS = 32
RANK = "rank"

FIGURE = "figure"  # of a loss, by the tag `name`
TRAINED_ON = ("tokens", "images", "tokens_by_source")  # not counted where a step is skipped
STEP_S_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
TEXTS = {
    **{name: shown.text for name, shown in FIELDS.items()},
    FIGURE: OWN.text,
    "skipped_steps": "Steps that left the weights as they were",
    "bad_steps": "Steps whose loss or gradient was not finite",
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
    "goodput": "Share of wall_s by cause, 0-1",
    "interruptions": "Attempts that ended early, by kind",
    "phase_s": "Seconds that the run has been in its present phase (tokenising, waiting, training)",
    "failed": "1 where the run has failed, 0 where it is done or was stopped",
}


class Exported:
    """Gauges and counters of one run, made at their first value; a thread repeats the gauges."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._made: dict[str, Any] = {}
        self._values: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="gauges", daemon=True)

    def _metric(self, kind: type[Any], name: str, tags: Mapping[str, str], **more: Any) -> Any:
        if name not in self._made:
            made = kind(f"{PREFIX}_{name}", TEXTS[name], tag_keys=("run", *tags), **more)
            self._made[name] = made.set_default_tags({"run": self._run})
        return self._made[name]

    def set(self, values: Mapping[str, float | None], **tags: str) -> None:
        """Set the gauges whose values are known and finite; `tags` add to the run's tag."""
        from ray.util.metrics import Gauge

        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._values[name, "".join(tags.values())] = value, tags
                self._metric(Gauge, name, tags).set(value, tags)
        if not self._thread.is_alive() and not self._closed.is_set():
            self._thread.start()

    def count(self, name: str, value: float, **tags: str) -> None:
        """Add to a counter; Ray's take no 0."""
        from ray.util.metrics import Counter

        if value > 0:
            self._metric(Counter, name, tags).inc(value, tags)

    def observe(self, name: str, value: float, bounds: Sequence[float]) -> None:
        """Add to a histogram with these upper bounds."""
        from ray.util.metrics import Histogram

        self._metric(Histogram, name, {}, boundaries=list(bounds)).observe(value)

    def set_alone(self, values: Mapping[str, float | None], **tags: str) -> None:
        """Set gauges, and repeat no others; Ray drops those within 20 s."""
        self._values.clear()
        self.set(values, **tags)

    def close(self) -> None:
        """Stop repeating the values; Ray drops the gauges within 20 s."""
        self._closed.set()

    def _repeat(self) -> None:
        while not self._closed.wait(REPEAT_S):
            for (name, _), (value, tags) in tuple(self._values.items()):
                self._made[name].set(value, tags)


class Steps:
    """Export the metrics of each step; every rank has one."""

    def __init__(self, run: str, rank: int) -> None:
        self._first, self._rank, self._exported = rank == 0, str(rank), Exported(run)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._exported.close()

    def step(self, line: MetricsLine) -> None:
        for field, key, value in figures_of(line):
            shown = FIELDS.get(field, OWN)
            if not self._first and shown.tag != RANK:
                continue
            tag = self._rank if shown.tag == RANK else key or field
            tags, name = {shown.tag: tag} if shown.tag else {}, field if field in FIELDS else FIGURE
            if shown.live == "gauge":
                self._exported.set({name: value}, **tags)
            elif shown.live == "counter" and not (line["skipped"] and field in TRAINED_ON):
                self._exported.count(name, value, **tags)
        if not self._first:
            return
        self._exported.count("skipped_steps", int(line["skipped"]))
        self._exported.observe("step_s", line["step_s"], STEP_S_BOUNDS)
        if figure(line, "loss") is None or figure(line, "grad_norm") is None:
            self.bad_step()

    def bad_step(self) -> None:
        """Count a step that is not finite on rank 0; the worker calls it for one that ends a run.

        That step has no line.
        """
        if self._first:
            self._exported.count("bad_steps", 1)


class Driver:
    """Export what only the driver knows, which outlives the workers."""

    def __init__(self, run: str, num_steps: int, started: float) -> None:
        self._gauges = Exported(run)
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
        Unix time of the commit). `more` holds further values by name.
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


def tell_end(run: str, status: str) -> None:
    """Export whether a run failed.

    Ray shows the value for 20 s, even if the process ends at once, which is longer than the
    interval of scrapes. A driver that is killed exports no end.
    """
    gauges = Exported(run)
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
