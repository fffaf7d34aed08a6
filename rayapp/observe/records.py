"""What the JSON of a run's folder holds, by file: rayapp.observe.run_folder names the files.

A field that is None was asked for and is not known; one that is not there does not apply. Files
of older versions lack what they did not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, Required, TypeAlias, TypedDict, cast

from rayapp.data.report import DataReport
from rayapp.planner.answer import BandValues, Forecast

# ---- config.yaml ------------------------------------------------------------------------------

Sections: TypeAlias = dict[str, dict[str, Any]]
"""Fields by section, maybe of an older version: rayapp.config reads those of this one."""

# ---- plan.json --------------------------------------------------------------------------------


class Plan(Forecast, total=False):
    """What a run amounts to; what the planner foretells is there where it knows the model."""

    fingerprint: str
    """What the rows were made from."""
    rows_per_step: int
    micro_batches_per_step: int
    tokens: int
    images: int
    """Of the whole run, in what it is counted in."""
    epochs: float
    data: DataReport


def band_of(plan: Plan, name: str) -> BandValues | None:
    """Return a figure of a plan by a name that is made up."""
    return cast(Mapping[str, BandValues | None], plan).get(name)


# ---- metrics.jsonl ----------------------------------------------------------------------------


class MetricsLine(TypedDict):
    """A step as metrics.jsonl has it: a StepRecord, None in place of what is not finite."""

    step: int
    epoch: float
    loss: float | None
    grad_norm: float | None
    lr: float
    mfu: float | None
    step_s: float
    data_wait_s: float
    checkpoint_stall_s: float
    eval_s: float
    skipped: bool
    peak_gib: float
    peak_forward_gib: NotRequired[float]
    peak_backward_gib: NotRequired[float]
    peak_optimizer_gib: NotRequired[float]
    workers: int
    attempt: int
    batch_digest: str
    time: float
    eval_loss: NotRequired[float | None]
    # Of tokens.
    loss_per_byte: NotRequired[float | None]
    tokens: NotRequired[int]
    tokens_per_s: NotRequired[float]
    tokens_per_s_per_gpu: NotRequired[float]
    eval_loss_per_byte: NotRequired[float | None]
    # Of images.
    images: NotRequired[int]
    images_per_s: NotRequired[float]
    images_per_s_per_gpu: NotRequired[float]
    eval_top1: NotRequired[float | None]
    eval_top5: NotRequired[float | None]


def figure(record: Mapping[str, object], name: str) -> float | None:
    """Return a number of a record by a name that is made up, None where it has none."""
    found = record.get(name)
    return found if isinstance(found, int | float) else None


# ---- events.jsonl -----------------------------------------------------------------------------


class EventFields(TypedDict, total=False):
    """Fields of an event; rayapp.observe.goodput says which event has which."""

    host: str
    submission_id: str | None
    seen_until: float | None
    """Unix time of the last step that the command found."""
    nodes: int | None
    instance: str | None
    usd_per_hour: float | None
    """Of all nodes together."""
    workers: int
    attempt: int
    step: int
    first_step_s: float
    lost_steps: int
    lost_s: float
    kind: str
    reason: str | None
    trained_until: float | None
    status: str
    seconds: dict[str, float]


class Event(EventFields):
    """A line of events.jsonl."""

    event: str
    time: float
    """Unix time in seconds."""


class Interruption(TypedDict):
    """An attempt that ended early, and what that has cost."""

    time: float
    kind: str
    reason: str | None
    step: int
    workers: int
    lost_steps: int | None
    to_first_step_s: float | None


# ---- validation.jsonl and held-out figures ----------------------------------------------------


class HeldOut(TypedDict, total=False):
    """Figures of the held-out data: of a step, a checkpoint or the end."""

    eval_loss: float | None
    eval_loss_per_byte: float | None
    eval_top1: float | None
    eval_top5: float | None


class Evaluated(HeldOut):
    """The same, after a step."""

    step: int


class Validation(Evaluated):
    """A line of validation.jsonl: a checkpoint, evaluated beside the training."""

    seconds: float
    time: float


# ---- result.json ------------------------------------------------------------------------------

Sample: TypeAlias = tuple[str, str]
"""A prompt, and what the model has made of it."""


class Classes(TypedDict):
    """How the held-out images of each class were classified."""

    each: list[tuple[str, int, int]]
    """(class, images, right ones)."""
    confused: list[tuple[str, str, int]]
    """(class, taken for, images), the most frequent first."""


class Gain(TypedDict):
    """What compiling gains: see rayapp.model.kernels.CompileGain."""

    eager_s: float
    compiled_s: float
    compile_s: float
    speedup: float


class Outcome(HeldOut, total=False):
    """What only a kind of run knows of itself."""

    compile: Gain | None
    samples: list[Sample]
    classes: Classes
    model_path: str | None


class Summary(Outcome, total=False):
    """What rank 0 says when it ends; of a run that is stopped without workers, the driver."""

    status: Required[str]
    """done, stopped, moved or failed."""
    steps: int
    first_step: int
    attempt: int
    parameters: int
    stall_s: float | None
    """Median seconds that a save has held up the steps."""
    commit_s: float | None
    seconds: dict[str, float]
    """By phase."""
    entered: float
    """Unix time at which rank 0 began."""
    group_s: float
    """From the request for workers until then."""
    notice: bool
    """Of workers that move: a node is taken away."""
    again: bool
    """Of workers that move: they and the driver saw other checkpoints."""
    reason: str


class CheckpointCost(TypedDict):
    """What a checkpoint has cost, and how often one is best made."""

    stall_s: float | None
    commit_s: float | None
    best_every_s: float | None


class StepSeconds(TypedDict):
    """A step as planned, as the first ten have foretold it, and as the others were."""

    planned: float | None
    calibrated: float | None
    measured: float | None


class RunResult(Summary, total=False):
    """What came out of a run; of one that failed only status, steps and reason."""

    run: str
    """The folder."""
    tokens: int
    images: int
    lost_steps: int
    interruptions: list[Interruption]
    loss: float | None
    tokens_per_s: float | None
    images_per_s: float | None
    mfu: float | None
    goodput: dict[str, float]
    checkpoint: CheckpointCost
    step_s: StepSeconds
    start_s: dict[str, float]
    wall_s: float
    cost_usd: float | None
    versions: dict[str, str]


# ---- LEASE ------------------------------------------------------------------------------------


class Holder(TypedDict):
    """The process that holds a run's lease."""

    host: str
    pid: int
    process: str | None
    """What tells it from an earlier one with its number."""
    machine: list[str]
    renewed: NotRequired[int]
