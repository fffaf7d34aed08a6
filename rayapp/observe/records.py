"""The types of the JSON files in a run's folder; rayapp.observe.run_folder reads files by them.

A field that applies but is not known is None; a field that does not apply is absent. Files of older
versions also lack the fields that those versions did not write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, Required, TypeAlias, cast

from pydantic import Field
from typing_extensions import TypedDict

from rayapp.data.report import DataReport
from rayapp.observe.metrics import HeldOut, Sample
from rayapp.observe.run_folder import Count, Number, UnixTime
from rayapp.planner.answer import BandValues, Forecast

# ---- config.yaml ------------------------------------------------------------------------------

Sections: TypeAlias = dict[str, dict[str, Any]]
"""Fields by section, maybe of an older version; rayapp.config reads those of this version."""

# ---- plan.json --------------------------------------------------------------------------------


class Base(TypedDict, total=False):
    """The model that a run starts from."""

    name: str
    """As `model.path`, or an adapter's settings, name it."""
    id: str | None
    """On the Hugging Face hub."""
    license: str | None
    """By the hub's names; `other` has a license_name."""
    license_name: str | None
    random: bool
    """Its weights are drawn."""


class Rendered(TypedDict):
    """The first documents of one source, each in runs of (text, whether its tokens bear loss)."""

    path: str
    kind: str
    documents: list[list[tuple[str, bool]]]


class Plan(Forecast, total=False):
    """The size of a run; with the planner's forecast if it has a formula for the model."""

    fingerprint: str
    """A digest of everything that the rows were made from."""
    prepared: list[str]
    """The folders of rows, one for each source of a mixture."""
    parts: dict[str, object]
    """The parts of the fingerprint, by name."""
    base: Base
    tokenizer: str
    """URL of the tokenizer's folder."""
    vocabulary: int
    """Embeddings of the model."""
    rows_per_step: int
    micro_batches_per_step: int
    tokens: int
    images: int
    """`tokens` or `images` of the whole run, whichever the run counts in."""
    epochs: float
    data: DataReport
    rendered: list[Rendered]
    """The first records of each source as the model sees them."""
    system: str
    """The system's message with which all chats begin."""
    stops: dict[str, int]
    """The tokens that end a generation, with their ids."""
    code: dict[str, str]
    """Digests of the user's code that changes what is trained, by config field."""
    drawn_anew: list[str]
    """Parameters of an image classifier's last layer, if its weights are for other classes."""


def band_of(plan: Plan, name: str) -> BandValues | None:
    """Return a figure of a plan whose name is computed, None if the plan lacks it."""
    return cast(Mapping[str, BandValues | None], plan).get(name)


class Asked(TypedDict):
    """The content of asked.json: what a command asks of a run that has steps already."""

    attempt: Count
    """The attempt that has done the last of them."""
    plan: Plan
    config: str
    """Its config.yaml."""


# ---- events.jsonl -----------------------------------------------------------------------------


class EventFields(TypedDict, total=False):
    """The fields of events; REQUIRED lists which event has which."""

    phase: str
    host: str
    submission_id: str | None
    user: str | None
    commit: str | None
    command: str | None
    init_from: str
    """The checkpoint (RUN@STEP) whose weights the run started with."""
    seen_until: UnixTime | None
    """Unix time of the last step in metrics.jsonl when the command started."""
    nodes: Count | None
    instance: str | None
    usd_per_hour: float | None
    """The price of all nodes together."""
    workers: Count
    attempt: Count
    step: Count
    first_step_s: float
    lost_steps: Count
    lost_s: float
    kind: str
    reason: str | None
    trained_until: UnixTime | None
    status: str
    seconds: dict[str, float]


class Event(EventFields):
    """A line of events.jsonl."""

    event: str
    time: UnixTime
    """Unix time in seconds."""


class Interruption(TypedDict):
    """An attempt that ended early, with the steps and seconds that this cost."""

    time: UnixTime
    kind: str
    reason: str | None
    step: Count
    workers: Count
    lost_steps: int | None
    to_first_step_s: float | None


# ---- state.json of a checkpoint ---------------------------------------------------------------


class Best(TypedDict):
    """The best of a run's evaluations by one of their figures."""

    figure: str
    step: Count
    held_out: HeldOut
    since: Count
    """Evaluations after it."""


class LoopState(TypedDict, total=False):
    """What the training loop knows besides tensors; files of older versions lack some fields."""

    losses: list[float]
    """The last losses, which tell whether a loss is a spike."""
    spikes: list[float]
    """The losses of the spikes in a row just before."""
    at_level: int
    """Steps without a spike since the losses took a new level (see rayapp.train.loss_spikes)."""
    skips: int
    """Bad steps in a row that were skipped just before."""
    evaluate: bool
    """Whether an evaluation was given up, so that the next step is followed by one."""
    before: HeldOut
    """Figures before the first step."""
    best: Best
    """The best evaluation by checkpoint.best."""


# ---- validation.jsonl -------------------------------------------------------------------------


class Evaluated(HeldOut):
    """Held-out figures with the step that they belong to."""

    step: Count


class Validation(Evaluated, total=False):
    """A line of validation.jsonl: a checkpoint that was evaluated during training."""

    seconds: float
    time: UnixTime


# ---- result.json ------------------------------------------------------------------------------


class Classes(TypedDict):
    """How the held-out images of each class were classified."""

    each: list[tuple[str, Count, Count]]
    """(class, images, correctly classified images)."""
    confused: list[tuple[str, str, int]]
    """(true class, predicted class, images), the most frequent first."""


class Gain(TypedDict):
    """What compiling gains (see rayapp.model.kernels.CompileGain)."""

    eager_s: float
    compiled_s: float
    compile_s: float
    speedup: float


class ExportCheck(TypedDict):
    """How the exported folder was compared with the model that was trained."""

    rows: int
    """Rows whose logits were compared; 0: names and shapes of the tensors alone."""
    difference: float | None
    """Of the logits, as a share of their norm."""
    why: str | None
    """Why the folder was not opened."""


class Estimate(TypedDict):
    """A figure with its interval of 95 %."""

    value: Number
    low: Number
    high: Number


class ScoredItem(TypedDict, total=False):
    """A line of items/STEP.jsonl: an item of a task with the model's answer, or with its loss."""

    task: Required[str]
    asked: Required[str]
    wanted: Required[str]
    answer: str
    right: bool
    nats: Number
    """Of the wanted answer."""
    tokens: Count


class ShownItem(TypedDict):
    """An item with the answers before the first step (None: not known) and at the end."""

    asked: str
    before: str | None
    after: str
    wanted: str


class TaskResult(TypedDict, total=False):
    """How a model was scored on a task: the share of right answers, 0-1, or nats per token."""

    score: Required[str]
    items: Required[Count]
    before: Required[Estimate | None]
    """Before the first step; None: not known."""
    after: Required[Estimate]
    difference: Estimate | None
    """After less before, of the same items; None: not known."""
    shown: list[ShownItem]


class Judged(TypedDict):
    """A condition of eval.gate, and whether the exported model meets it."""

    condition: str
    value: Number | None
    limit: Number | None
    met: bool


class FinalFigures(HeldOut, total=False):
    """The fields of a summary that depend on the kind of run."""

    compile: Gain | None
    samples: list[Sample]
    tasks: dict[str, TaskResult]
    """By name of eval.tasks."""
    best: Best
    """The evaluation whose checkpoint was exported, by checkpoint.best."""
    last: Evaluated
    """The evaluation of the last step, where an earlier one was exported."""
    gate: list[Judged]
    classes: Classes
    experts: list[Annotated[list[Count], Field(min_length=1)]] | None
    """Tokens that each expert of each layer was given since the workers last started."""
    model_path: str | None
    export_check: ExportCheck


class Summary(FinalFigures, total=False):
    """What rank 0 returns when it ends; the driver makes it if the run stops without workers."""

    status: Required[str]
    """done, rejected, stopped, moved or failed."""
    steps: Count
    first_step: int
    attempt: int
    parameters: int
    stall_s: float | None
    """Median seconds that training waited for a save."""
    commit_s: float | None
    seconds: dict[str, float]
    """Seconds by phase."""
    entered: float
    """Unix time at which rank 0 began."""
    group_s: float
    """Seconds from the request for workers until `entered`."""
    notice: bool
    """If status is moved: whether a node is being preempted."""
    again: bool
    """If status is moved: whether the workers and the driver saw different checkpoints."""
    reason: str


class CheckpointCost(TypedDict):
    """The cost of a checkpoint and the best interval between checkpoints, in seconds."""

    stall_s: float | None
    commit_s: float | None
    best_every_s: float | None


class StoredCost(TypedDict):
    """What a run keeps in its folder when it ends, and S3's list price; None: it is not on S3."""

    gib: float
    usd_per_month: float | None
    """Of what is kept, from the end on."""
    usd: NotRequired[float | None]
    """Of the checkpoints until the end, with those deleted; absent in runs of older releases."""


class StepSeconds(TypedDict):
    """Seconds of a step: as planned, by the run's first ten steps, and measured on later steps."""

    planned: float | None
    calibrated: float | None
    measured: float | None


class RunResult(Summary, total=False):
    """The content of result.json; a run that failed has only status, steps and reason."""

    run: str
    """URL of the run's folder."""
    tokens: int
    images: int
    lost_steps: int
    interruptions: list[Interruption]
    loss: float | None
    own_loss: float | None
    figures: dict[str, Number]
    """What the loss has told of the last step besides, by name."""
    tokens_per_s: float | None
    images_per_s: float | None
    mfu: float | None
    goodput: dict[str, Annotated[float, Field(ge=0)]]
    checkpoint: CheckpointCost
    step_s: StepSeconds
    start_s: dict[str, float]
    wall_s: float
    cost_usd: float | None
    storage: StoredCost
    profiles: list[str]
    """The files in profiles/."""
    versions: dict[str, str]
