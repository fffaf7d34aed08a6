"""The answer: does it fit, how long, what does it cost; each figure with the band it may lie in.

    answer(question).as_dict()                # what plan.json and `plan --json` hold

A band is what the figures of published runs were off by (docs/plan.md), not a guarantee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rayapp.formulas import mfu, model_flops
from rayapp.formulas.memory import Peak, checkpoint_bytes, peak_memory, with_slack
from rayapp.planner.question import Question
from rayapp.planner.step import PINNED, StepTime, step_time

GIB = 2**30
# GPUs whose published training runs the model was compared with, and how far off speed may be:
# the 90th percentile of docs/plan.md's rows; others have no such rows.
COMPARED = ("A100-40GB", "A100-80GB", "H100", "H200")
SPEED_BAND, SPEED_BAND_OTHERS = 0.15, 0.50
MEMORY_BAND = 0.08
# S3's share of a node's network, and its most.
S3_SHARE, S3_BYTES_PER_S = 0.3, 5e9
# From a failure to the next new step: measured with a small model (README), plus its reading back.
RECOVERY_S = 30.0
START_S = 120.0


@dataclass(frozen=True)
class Band:
    """A figure and what it may be instead."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Band:
        """Scale all three."""
        return Band(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self, factor: float = 1.0) -> Band:
        """Return factor over each: a fast run is a short one."""
        return Band(factor / self.value, factor / self.high, factor / self.low)

    def as_dict(self) -> dict[str, float]:
        """Return plain values, 6 digits of each."""
        return {name: float(f"{value:.6g}") for name, value in vars(self).items()}


@dataclass(frozen=True)
class Saving:
    """What checkpoints cost."""

    size_gib: float
    stall_s: float
    upload_s: float
    every_s: float
    """The interval that costs least: Daly's formula, and no shorter than an upload."""


@dataclass(frozen=True)
class Answer:
    """What a plan says."""

    question: Question
    fits: bool | None
    peak: Peak
    peak_gib: Band
    capacity_gib: float | None
    step: StepTime | None = None
    step_s: Band | None = None
    tokens_per_s: Band | None = None
    mfu: Band | None = None
    hours: Band | None = None
    cost_usd: Band | None = None
    usd_per_1m_tokens: Band | None = None
    saving: Saving | None = None
    goodput: float | None = None
    reasons: list[str] = field(default_factory=list)
    """What is not known and why, what is tight."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: the keys of plan.json."""
        question = self.question
        per_gpu = None if self.tokens_per_s is None else self.tokens_per_s.times(1 / self.workers)
        bands = {
            "peak_gib": self.peak_gib,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": per_gpu,
            "mfu": self.mfu,
            "hours": self.hours,
            "cost_usd": self.cost_usd,
            "usd_per_1m_tokens": self.usd_per_1m_tokens,
        }
        one = question.instance
        return {
            "fits": self.fits,
            **{name: None if band is None else band.as_dict() for name, band in bands.items()},
            "peak_terms_gib": {
                name: round(size / GIB, 3) for name, size in self.peak.terms.items()
            },
            "peak_phase": self.peak.phase,
            "capacity_gib": self.capacity_gib,
            "step_terms_s": None if self.step is None else vars(self.step),
            "parameters": question.layout.shape.parameters,
            "trainable_parameters": question.layout.trainable,
            "workers": self.workers,
            "nodes": question.nodes,
            "instance": None if one is None else one.name,
            "usd_per_hour": question.usd_per_hour,
            "region": question.region,
            "steps": question.steps,
            "tokens_per_step": question.tokens_per_step,
            "checkpoint": None if self.saving is None else vars(self.saving),
            "goodput": self.goodput,
            "reasons": self.reasons,
        }

    @property
    def workers(self) -> int:
        """Workers that train."""
        return self.question.workers


def answer(question: Question) -> Answer:
    """Compute everything that the question's facts allow; what is unknown is None, with a reason.

    Raises:
        ValueError: the GPU cannot compute in this precision.
    """
    reasons: list[str] = []
    peak = with_slack(peak_memory(question.layout), cuda=not question.layout.on_cpu)
    size = peak.total / GIB
    peak_gib = Band(size, size * (1 - MEMORY_BAND), size * (1 + MEMORY_BAND))
    capacity = _capacity_gib(question)
    fits = None if capacity is None else peak_gib.value <= capacity
    if capacity is not None and fits and peak_gib.high > capacity:
        reasons.append(
            f"memory is tight: {peak_gib.value:.1f} GiB of {capacity:.1f}, and {peak_gib.high:.1f} "
            "is within the band"
        )
    if question.job is None:
        reasons.append(_no_time(question))
        return Answer(question, fits, peak, peak_gib, capacity, reasons=reasons)
    job, machine = question.job, question.job.machine
    time = step_time(job)
    width = SPEED_BAND if machine.gpu.name in COMPARED else SPEED_BAND_OTHERS
    if width == SPEED_BAND_OTHERS:
        reasons.append(f"no published run on {machine.gpu.name} was compared: the band is wide")
    tokens = question.tokens_per_step
    rate = tokens / time.total_s
    tokens_per_s = Band(rate, rate * (1 - width), rate * (1 + width))
    layout = question.layout
    needed = model_flops(layout.shape, job.context, layout.lora_rank, layout.lora_targets)
    peak_flops = machine.gpu.flops.get(layout.precision)
    share = mfu(1.0, needed, gpus=question.workers, peak_flops=peak_flops)
    saving = _saving(question)
    goodput = _goodput(question, saving)
    hours = cost = usd = None
    if question.steps is None:
        reasons.append(
            "hours and cost are unknown: the number of steps is. Set train.max_steps, or plan the "
            "folder of a run whose data are prepared"
        )
    else:
        busy = tokens_per_s.inverse(question.steps * tokens / 3600 / goodput)
        hours = Band(*(value + START_S / 3600 for value in (busy.value, busy.low, busy.high)))
    if question.usd_per_hour is None:
        name = question.instance.name if question.instance else "the instance"
        reasons.append(
            f"cost is unknown: {name} has no known price in {question.region}. "
            "Give --usd_per_hour of one instance"
        )
    else:
        all_nodes = question.usd_per_hour * question.nodes
        usd = tokens_per_s.inverse(all_nodes / 3600 * 1e6 / goodput)
        cost = None if hours is None else hours.times(all_nodes)
    return Answer(
        question,
        fits,
        peak,
        peak_gib,
        capacity,
        step=time,
        step_s=tokens_per_s.inverse(tokens),
        tokens_per_s=tokens_per_s,
        mfu=None if share is None else tokens_per_s.times(share),
        hours=hours,
        cost_usd=cost,
        usd_per_1m_tokens=usd,
        saving=saving,
        goodput=goodput,
        reasons=reasons,
    )


def _no_time(question: Question) -> str:
    if question.instance is None:
        return "time and cost are unknown: no instance is named. Set cluster.instance"
    return f"time and cost are unknown: {question.instance.name} has no GPU"


def _capacity_gib(question: Question) -> float | None:
    """Return what a worker may hold; None where the machine is not known."""
    one = question.instance
    if one is None:
        return question.capacity_gib
    if one.gpu is None:
        return one.memory_gib / (question.workers / question.nodes)
    return one.gpu.memory_gib


def _saving(question: Question) -> Saving:
    assert question.job is not None
    machine, layout = question.job.machine, question.layout
    size = checkpoint_bytes(layout)
    copies = machine.ranks if layout.shards == 1 else layout.shards
    stall = size / copies / (PINNED * machine.gpu.pcie_bytes_per_s)
    network = min(S3_SHARE * machine.network_bits_per_s / 8, S3_BYTES_PER_S) * machine.nodes
    upload = size / network
    mtbf_s = 3600 * question.mtbf_hours / question.workers
    daly = math.sqrt(2 * stall * mtbf_s) - stall
    return Saving(size / GIB, stall, upload, max(daly, upload, stall))


def _goodput(question: Question, saving: Saving) -> float:
    """Return the share of time, 0-1, in steps that count, at the assumed rate of failures."""
    mtbf_s = 3600 * question.mtbf_hours / question.workers
    lost = saving.every_s / 2 + RECOVERY_S + saving.upload_s
    return max(0.01, 1 - saving.stall_s / saving.every_s - lost / mtbf_s)
