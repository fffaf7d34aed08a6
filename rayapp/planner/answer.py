"""Answer a planning question: does it fit, how long does it take, what does it cost, with bands.

A band is the relative error against published runs (docs/plan.md), not a guarantee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, cast

from typing_extensions import TypedDict

from rayapp.config.fields import TOKENS
from rayapp.hardware import GIB, USD_PER_GIB_MONTH, usd_of_checkpoints
from rayapp.planner.flops import mfu
from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.image_step import feeding_problem, image_step_time
from rayapp.planner.memory import Peak, with_slack
from rayapp.planner.question import Question
from rayapp.planner.shape import Shape
from rayapp.planner.step import step_time
from rayapp.planner.times import PINNED, StepTime, Workload

# GPUs that have published runs in docs/plan.md, and half-widths of bands as fractions. 0.15 for
# speed is the 90th percentile of those rows' errors; 0.50, for other GPUs, is an estimate.
COMPARED = ("A100-40GB", "A100-80GB", "H100", "H200")
SPEED_BAND, SPEED_BAND_OTHERS = 0.15, 0.50
MEMORY_BAND = 0.08  # the largest error of memory in those rows
# The same for images: 0.20 for speed, where the 38 rows are off by 17 % at worst; A100-40GB has no
# rows of its own. 0.15 for memory is an estimate: no run on a GPU was compared.
IMAGES_COMPARED = ("V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB")
IMAGES_SPEED_BAND, IMAGES_MEMORY_BAND = 0.20, 0.15
PROCESS_BAND = 0.20  # of memory without a GPU: six runs of 2026-11-24 (docs/plan.md)
# Fraction of a node's network that uploads to S3 reach, and their maximum in bytes/s per node.
# Estimates.
S3_SHARE, S3_BYTES_PER_S = 0.3, 5e9
# Seconds from a failure to the next new step with a small model (README: 15 to 41 s by fault with
# bench/faults.py, 2026-11-23). _goodput adds the time to read a large checkpoint back.
RECOVERY_S = 30.0
# Seconds from the command to the first step, added to every run. Estimate.
START_S = 120.0


class BandValues(TypedDict):
    """A band as JSON values."""

    value: float
    low: float
    high: float


class Forecast(TypedDict, total=False):
    """An answer as plan.json and `plan --json` hold it; a run has the keys of its own unit only."""

    fits: bool | None
    peak_gib: BandValues
    step_s: BandValues | None
    tokens_per_s: BandValues | None
    tokens_per_s_per_gpu: BandValues | None
    images_per_s: BandValues | None
    images_per_s_per_gpu: BandValues | None
    mfu: BandValues | None
    hours: BandValues | None
    epoch_hours: BandValues | None
    cost_usd: BandValues | None
    usd_per_1m_tokens: BandValues | None
    usd_per_1m_images: BandValues | None
    peak_terms_gib: dict[str, float]
    peak_phase: str
    capacity_gib: float | None
    step_terms_s: dict[str, float] | None
    parameters: int
    active_parameters: int
    trainable_parameters: int
    workers: int
    nodes: int
    instance: str | None
    usd_per_hour: float | None
    region: str
    steps: int | None
    tokens_per_step: int
    images_per_step: int
    checkpoint: dict[str, float | None] | None
    goodput: float | None
    reasons: list[str]


@dataclass(frozen=True)
class Band:
    """A predicted value with its lower and upper bound."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, width: float) -> Band:
        """Return the band of a relative half-width."""
        return cls(value, value * (1 - width), value * (1 + width))

    def times(self, factor: float) -> Band:
        """Multiply all three values by a factor."""
        return Band(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self, factor: float = 1.0) -> Band:
        """Return factor / value for all three; low and high swap places."""
        return Band(factor / self.value, factor / self.high, factor / self.low)

    def as_dict(self) -> BandValues:
        """Return JSON values with 6 significant digits."""
        value, low, high = (float(f"{number:.6g}") for number in (self.value, self.low, self.high))
        return {"value": value, "low": low, "high": high}


@dataclass(frozen=True)
class Saving:
    """Cost of checkpoints: size in GiB, stall, upload and interval in seconds."""

    size_gib: float
    stall_s: float
    upload_s: float
    every_s: float
    """The cheapest interval by Daly's formula, but no shorter than an upload or a stall."""
    usd_per_month: float = 0.0
    """What the checkpoints that are kept cost in S3."""
    usd: float | None = None
    """What all checkpoints cost in S3 until the run ends, and the deleted ones until they are gone;
    None: the run's hours are unknown."""


@dataclass(frozen=True)
class Answer:
    """The result of a plan; None marks what is unknown, and `reasons` says why."""

    question: Question
    fits: bool | None
    peak: Peak
    peak_gib: Band
    capacity_gib: float | None
    step: StepTime | None = None
    step_s: Band | None = None
    rate: Band | None = None
    mfu: Band | None = None
    hours: Band | None = None
    epoch_hours: Band | None = None
    """Hours per epoch, for images of a known number."""
    cost_usd: Band | None = None
    usd_per_1m: Band | None = None
    saving: Saving | None = None
    goodput: float | None = None
    reasons: list[str] = field(default_factory=list)
    """Notes: what is unknown and why, and where memory is tight."""

    def _repr_html_(self) -> str:
        rows = list[str]()
        for name, value in self.as_dict().items():
            if isinstance(value, dict) and "low" in value:
                value = f"{value['value']:,.4g} ({value['low']:,.4g} to {value['high']:,.4g})"
            if isinstance(value, str | bool | float | int):
                rows.append(f"<tr><td>{name}</td><td>{escape(str(value))}</td></tr>")
        notes = "".join(f"<li>{escape(reason)}</li>" for reason in self.reasons)
        return f"<table>{''.join(rows)}</table><ul>{notes}</ul>"

    def as_dict(self) -> Forecast:
        """Return JSON values."""
        question = self.question
        unit = question.unit
        per_gpu = None if self.rate is None else self.rate.times(1 / self.workers)
        bands = {
            "peak_gib": self.peak_gib,
            "step_s": self.step_s,
            unit.per_s: self.rate,
            unit.per_s_per_gpu: per_gpu,
            "mfu": self.mfu,
            "hours": self.hours,
            "epoch_hours": self.epoch_hours,
            "cost_usd": self.cost_usd,
            f"usd_per_1m_{unit.many}": self.usd_per_1m,
        }
        instance, shape = question.instance, question.layout.shape
        active = {"active_parameters": shape.active_parameters} if isinstance(shape, Shape) else {}
        values = {
            "fits": self.fits,
            **{name: None if band is None else band.as_dict() for name, band in bands.items()},
            "peak_terms_gib": {
                name: round(size / GIB, 3) for name, size in self.peak.terms.items()
            },
            "peak_phase": self.peak.phase,
            "capacity_gib": self.capacity_gib,
            "step_terms_s": None if self.step is None else vars(self.step),
            "parameters": question.layout.shape.parameters,
            **active,
            "trainable_parameters": question.layout.trainable,
            "workers": self.workers,
            "nodes": question.nodes,
            "instance": None if instance is None else instance.name,
            "usd_per_hour": question.usd_per_hour,
            "region": question.region,
            "steps": question.steps,
            f"{unit.many}_per_step": question.amount_per_step,
            "checkpoint": None if self.saving is None else vars(self.saving),
            "goodput": self.goodput,
            "reasons": self.reasons,
        }
        return cast(Forecast, values)  # some keys are built from the unit's name

    @property
    def workers(self) -> int:
        """Number of workers that train."""
        return self.question.workers


def answer(question: Question) -> Answer:
    """Compute everything that the question allows; what is unknown is None, with a reason.

    Raises:
        ValueError: the GPU cannot compute in this precision.
    """
    plan = _memory(question)
    if question.job is None:
        why = "no instance is named. Set cluster.instance"
        if question.instance is not None:
            why = f"{question.instance.name} has no GPU"
        plan.reasons.append(f"time and cost are unknown: {why}")
        return plan
    return _time_and_cost(plan, question.job)


def _memory(question: Question) -> Answer:
    peak = with_slack(question.layout.peak(), cuda=not question.layout.on_cpu)
    size = peak.total / GIB
    width = IMAGES_MEMORY_BAND if isinstance(question.layout, ImageLayout) else MEMORY_BAND
    if question.layout.on_cpu:
        width = PROCESS_BAND
    peak_gib = Band.around(size, width)
    capacity = _capacity_gib(question)
    fits = None if capacity is None else peak_gib.value <= capacity
    plan = Answer(question, fits, peak, peak_gib, capacity)
    if capacity is not None and fits and peak_gib.high > capacity:
        plan.reasons.append(
            f"memory is tight: the plan is {peak_gib.value:.1f} GiB of {capacity:.1f}, and its "
            f"band reaches {peak_gib.high:.1f}"
        )
    return plan


def _time_and_cost(plan: Answer, job: Workload[Any]) -> Answer:
    question, reasons = plan.question, plan.reasons
    layout, gpu = question.layout, job.machine.gpu
    images = isinstance(layout, ImageLayout)
    time = image_step_time(job) if images else step_time(job)
    compared, width = (IMAGES_COMPARED, IMAGES_SPEED_BAND) if images else (COMPARED, SPEED_BAND)
    if gpu.name not in compared:
        width = SPEED_BAND_OTHERS
        reasons.append(f"no published run on {gpu.name} was compared: the band is wide")
    shape = layout.shape
    if isinstance(shape, Shape) and shape.measured:
        width = SPEED_BAND_OTHERS
        reasons.append(f"no published run of {shape.model_type} was compared: the band is wide")
    amount = question.amount_per_step
    per_s = amount / time.total_s
    rate = Band.around(per_s, width)
    needed = layout.model_flops()
    peak_flops = gpu.flops.get(layout.precision)
    share = mfu(1.0, needed, gpus=question.workers, peak_flops=peak_flops)
    if isinstance(layout, ImageLayout):
        slow = feeding_problem(layout.shape.size, question.spare_cpus, per_s)
        reasons += [slow] if slow else []
    saving = _saving(question)
    goodput = _goodput(question, saving)
    hours = _hours(plan, rate, goodput)
    saving = _stored(saving, question.keep, None if hours is None else hours.value)
    cost = usd = None
    if question.usd_per_hour is None:
        name = question.instance.name if question.instance else "the instance"
        reasons.append(
            f"cost is unknown: {name} has no known price in {question.region}. "
            "Give --usd_per_hour of one instance"
        )
    else:
        all_nodes = question.usd_per_hour * question.nodes
        usd = rate.inverse(all_nodes / 3600 * 1e6 / goodput)
        cost = None if hours is None else hours.times(all_nodes)
    epoch = question.epoch_rows
    return replace(
        plan,
        step=time,
        step_s=rate.inverse(amount),
        rate=rate,
        mfu=None if share is None else rate.times(share),
        hours=hours,
        epoch_hours=None if epoch is None else rate.inverse(epoch / 3600),
        cost_usd=cost,
        usd_per_1m=usd,
        saving=saving,
        goodput=goodput,
    )


def _hours(plan: Answer, rate: Band, goodput: float) -> Band | None:
    question = plan.question
    if question.steps is None:
        what = "train.max_steps" if question.unit is TOKENS else "data.count (of images)"
        plan.reasons.append(
            f"hours and cost are unknown: the number of steps is unknown. Set {what}, or plan "
            "the folder of a run with prepared data"
        )
        return None
    busy = rate.inverse(question.steps * question.amount_per_step / 3600 / goodput)
    return Band(*(value + START_S / 3600 for value in (busy.value, busy.low, busy.high)))


def _capacity_gib(question: Question) -> float | None:
    instance = question.instance
    if instance is None:
        return question.capacity_gib
    if instance.gpu is None:
        return instance.memory_gib / (question.workers / question.nodes)
    return instance.gpu.memory_gib


def _saving(question: Question) -> Saving:
    assert question.job is not None
    machine, layout = question.job.machine, question.layout
    size = layout.checkpoint_bytes()
    copies = machine.ranks if layout.shards == 1 else layout.shards
    stall = size / copies / (PINNED * machine.gpu.pcie_bytes_per_s)
    network = min(S3_SHARE * machine.network_bits_per_s / 8, S3_BYTES_PER_S) * machine.nodes
    upload = size / network
    mtbf_s = 3600 * question.mtbf_hours / question.workers
    daly = math.sqrt(2 * stall * mtbf_s) - stall
    return Saving(size / GIB, stall, upload, max(daly, upload, stall))


def _stored(saving: Saving, keep: int, hours: float | None) -> Saving:
    """Add what checkpoints cost in S3, one every `saving.every_s` seconds, `keep` of them kept."""
    month = keep * saving.size_gib * USD_PER_GIB_MONTH
    if hours is None:
        return replace(saving, usd_per_month=month)
    every = saving.every_s / 3600
    committed = [every * number for number in range(1, math.floor(hours / every) + 1)]
    usd = usd_of_checkpoints(committed, keep, hours, saving.size_gib)
    return replace(saving, usd_per_month=month, usd=usd)


def _goodput(question: Question, saving: Saving) -> float:
    """Return the share of time, 0-1, spent in steps that count, at the assumed failure rate.

    A failure loses half a checkpoint interval, RECOVERY_S, and one transfer of the checkpoint.
    """
    mtbf_s = 3600 * question.mtbf_hours / question.workers
    lost = saving.every_s / 2 + RECOVERY_S + saving.upload_s
    return max(0.01, 1 - saving.stall_s / saving.every_s - lost / mtbf_s)
