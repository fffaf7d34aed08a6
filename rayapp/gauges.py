"""What a run tells Prometheus while it trains, by way of Ray's metrics agent on each node.

    told = Steps("demo", rank=0)            # in a training worker, after each step
    told.step(record)
    Driver("demo", num_steps=500).set(...)  # in the driver, every few seconds

Ray prefixes every name with `ray_`, and counters end in `_total`. There are few series: of a step's
record rank 0 tells what is the run's, each rank only its own memory and how long it waited. What is
None is not told, nor what is not finite, which Ray would drop: `bad_steps` counts such steps. A
gauge is shown until its process is gone for some 20 s, a counter for as long as its node's agent
lives, each process's beside those of the processes before it: sum them by run. A process that ends
sends its last values first. Under torchrun none of this is used.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayapp.accounts import Account
    from rayapp.metrics import StepRecord

PREFIX = "rayapp"

# Fields of a StepRecord that rank 0 tells as they are.
OF_A_STEP = {
    "step": "Optimizer steps done",
    "epoch": "Epochs done",
    "loss": "Nats per loss-bearing token of the last step",
    "loss_per_byte": "Nats per UTF-8 byte of the last step",
    "eval_loss": "Nats per token of the held-out data, when last evaluated",
    "eval_loss_per_byte": "Nats per UTF-8 byte of the held-out data, when last evaluated",
    "grad_norm": "Gradient norm before clipping",
    "lr": "Learning rate",
    "tokens_per_s": "Input tokens per second of all workers",
    "tokens_per_s_per_gpu": "Input tokens per second and worker",
    "mfu": "Model FLOP/s over the hardware's peak, 0-1",
    "workers": "Training workers",
    "attempt": "How many times the run has started its workers",
}
OF_A_RANK = {"peak_gib": "Most memory that the rank has held so far"}
COUNTED = {
    "tokens": "Loss-bearing tokens trained on",
    "skipped_steps": "Steps that left the weights as they were",
    "bad_steps": "Steps whose loss or gradient was not finite",
    "checkpoint_stall_s": "Seconds that steps were held up by saving",
    "eval_s": "Seconds of held-out evaluations",
}
COUNTED_BY_RANK = {"data_wait_s": "Seconds that the rank has waited for its rows"}
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
    "lost_steps": "Steps that were done in vain",
}


class Steps:
    """Tell of each step, on every rank."""

    def __init__(self, run: str, rank: int) -> None:
        from ray.util.metrics import Histogram

        tags = {"run": run}
        own = tags | {"rank": str(rank)}
        self._rank = _gauges(OF_A_RANK, own)
        self._rank_counts = _counters(COUNTED_BY_RANK, own)
        self._run: dict[str, Any] = {}
        self._counts: dict[str, Any] = {}
        if rank == 0:
            self._run, self._counts = _gauges(OF_A_STEP, tags), _counters(COUNTED, tags)
            self._step_s = Histogram(
                f"{PREFIX}_step_s",
                "Wall time of a step, waiting and saving included",
                boundaries=list(STEP_S_BOUNDS),
                tag_keys=tuple(tags),
            ).set_default_tags(tags)

    def step(self, record: StepRecord) -> None:
        """Tell of a step that was done."""
        _set(self._rank, {"peak_gib": record.peak_gib})
        _add(self._rank_counts, {"data_wait_s": record.data_wait_s})
        if not self._run:
            return
        _set(self._run, {name: getattr(record, name) for name in self._run})
        bad = not (math.isfinite(record.loss) and math.isfinite(record.grad_norm))
        _add(
            self._counts,
            {
                "tokens": record.tokens,
                "skipped_steps": int(record.skipped),
                "bad_steps": int(bad),
                "checkpoint_stall_s": record.checkpoint_stall_s,
                "eval_s": record.eval_s,
            },
        )
        self._step_s.observe(record.step_s)

    def bad_step(self) -> None:
        """Tell of a step whose loss ends the run, so that it gets no record."""
        _add(self._counts, {"bad_steps": 1})


class Driver:
    """Tell what only the driver knows: it outlives the workers."""

    def __init__(self, run: str, num_steps: int, started: float) -> None:
        from ray.util.metrics import Gauge

        tags = {"run": run}
        self._gauges = _gauges(OF_THE_DRIVER, tags)
        self._goodput = Gauge(
            f"{PREFIX}_goodput", "Share of wall_s by cause, 0-1", ("run", "cause")
        ).set_default_tags(tags)
        self._interruptions = Gauge(
            f"{PREFIX}_interruptions", "Attempts that ended early, by kind", ("run", "kind")
        ).set_default_tags(tags)
        self._num_steps, self._started = num_steps, started

    def set(
        self,
        account: Account,
        last_step_s: float | None,
        checkpoint: tuple[int, float] | None,
        checkpoint_every_s: float | None,
    ) -> None:
        """Tell how the run stands; `checkpoint` is the newest one's step and its Unix time."""
        step, committed_s = checkpoint or (None, self._started)
        _set(
            self._gauges,
            {
                "num_steps": self._num_steps,
                # A run that goes on after a day must not look as if it had hung for a day.
                "last_step_unix_s": max(last_step_s or 0.0, self._started),
                "checkpoint_step": step,
                "checkpoint_unix_s": max(committed_s, self._started),
                "checkpoint_every_s": checkpoint_every_s,
                "wall_s": account.wall_s,
                "cost_usd": account.cost_usd,
                "usd_per_hour": account.usd_per_hour,
                "lost_steps": account.lost_steps,
            },
        )
        for cause, share in account.goodput.items():
            self._goodput.set(share, {"cause": cause})
        kinds = [each["kind"] for each in account.interruptions]
        for kind in ("failure", "preemption", "resize"):
            self._interruptions.set(kinds.count(kind), {"kind": kind})


class Pace:
    """How often checkpoints are due, in seconds: by time, by steps, or by what comes first."""

    def __init__(self, every_s: float | None, every_steps: int | None) -> None:
        self._every_s, self._every_steps = every_s, every_steps
        self._step_s: deque[float] = deque(maxlen=32)

    def saw(self, step_s: float) -> None:
        """Take the seconds of a step."""
        self._step_s.append(step_s)

    def checkpoint_every_s(self) -> float | None:
        """Return the seconds, None while it is not known how long a step takes."""
        found = [] if self._every_s is None else [self._every_s]
        if self._every_steps is not None and self._step_s:
            found.append(self._every_steps * statistics.median(self._step_s))
        return min(found, default=None)


def _gauges(texts: Mapping[str, str], tags: dict[str, str]) -> dict[str, Any]:
    from ray.util.metrics import Gauge

    return {
        name: Gauge(f"{PREFIX}_{name}", text, tuple(tags)).set_default_tags(tags)
        for name, text in texts.items()
    }


def _counters(texts: Mapping[str, str], tags: dict[str, str]) -> dict[str, Any]:
    from ray.util.metrics import Counter

    return {
        name: Counter(f"{PREFIX}_{name}", text, tuple(tags)).set_default_tags(tags)
        for name, text in texts.items()
    }


def _set(gauges: dict[str, Any], values: Mapping[str, float | None]) -> None:
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            gauges[name].set(value)


def _add(counters: dict[str, Any], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if value > 0 and name in counters:  # Ray's counters take no 0
            counters[name].inc(value)
