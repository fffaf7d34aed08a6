"""What every run's description has, whatever it trains: the sections that its driver reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import dumps
from typing import Annotated, Any, ClassVar, Self, cast

import yaml
from pydantic import BeforeValidator, Field, field_validator

from rayapp.config.fields import (
    NAME_PATTERN,
    Choice,
    Codes,
    Gpu,
    Instances,
    OptionalFloat,
    OptionalInt,
    OptionalStr,
    Section,
    Text,
    Trackers,
    Workers,
    mapping,
    yaml_or,
)
from rayapp.config.tasks import Condition, Gate
from rayapp.config.text import Dumper, shown


class Run(Section):
    name: str = Field(default="tiny", pattern=NAME_PATTERN)
    """Name of the run and of its folder; the same name and storage mean the same run."""
    storage: Text = "runs"
    """Folder or s3://bucket/prefix that contains the run's folder; every node must reach it."""
    seed: int = Field(default=0, ge=0)
    """Seed for random weights (model.from_scratch), the order of the rows and dropout."""
    trackers: Trackers = ("tensorboard",)
    """Trackers that also get the metrics of each step: tensorboard (files in the run's folder),
    mlflow (MLFLOW_TRACKING_URI), wandb (WANDB_API_KEY); none: no tracker."""
    hooks: Codes = ()
    """Your code, as `mypackage.module:name`, that the driver notifies of steps, checkpoints and the
    end (docs/own_code.md)."""
    max_usd: OptionalFloat = Field(default=None, gt=0)
    """Maximum cost in USD of all the run's commands; the run then saves and stops."""
    max_hours: OptionalFloat = Field(default=None, gt=0)
    """Maximum hours of all the run's commands, waiting included; the run then saves and stops."""


class Checkpoint(Section):
    every_steps: OptionalInt = Field(default=None, ge=1)
    """Steps between checkpoints; none: only every_s counts."""
    every_s: OptionalFloat = Field(default=600.0, gt=0)
    """Seconds between checkpoints; none: only every_steps counts."""
    keep: int = Field(default=2, ge=1)
    """Number of committed checkpoints to keep; older ones are deleted after the next commit."""
    best: OptionalStr = None
    """A figure of the evaluations, eval_loss or a task: a checkpoint of the best evaluation is
    saved, kept beside `keep`, and exported at the end. none: the last step is exported."""
    asynchronous: bool = True
    """Copy and upload a checkpoint in the background while the next steps run."""
    export: bool = True
    """At the end, export the model to model/ as a Hugging Face folder."""


class Eval(Section):
    every_steps: OptionalInt = Field(default=None, ge=1)
    """Steps between evaluations on the held-out data; none: evaluate only at the end."""
    checkpoints: bool = False
    """Evaluate committed checkpoints during training, if resources for one more worker are free."""
    patience: OptionalInt = Field(default=None, ge=1)
    """Number of evaluations in a row without a new best (`checkpoint.best`) after which the run
    ends; none: it does all its steps."""
    gate: Gate = ()
    """List of conditions on the figures of the exported model, e.g. `[dates >= 0.9, eval_loss <=
    base + 0.1]`; base: the figure before the first step. If one is not met, the run is rejected:
    it ends with exit code 4 and exports nothing."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What `gate` says."""
        return tuple(map(Condition.parse, self.gate))


class Cluster(Section):
    workers: Workers = Field(default="1", pattern=r"^[0-9]{1,6}(:[0-9]{1,6})?$")
    """Number of training workers: `4`, or `2:8` for an elastic number."""
    gpu: Gpu = "auto"
    """Use one GPU per worker; auto: if the cluster has GPUs."""
    instance: Instances = None
    """EC2 instance type, e.g. p5.48xlarge, for plans, costs and rendered clusters; or a list in
    order of preference, e.g. `[p5.48xlarge, p4d.24xlarge:spot@9.5]`: `:spot` names the market,
    `@9.5` the USD per hour of one instance if it is not the on-demand list price."""
    usd_per_hour: OptionalFloat = Field(default=None, gt=0)
    """USD per hour of one instance, e.g. a spot price; none: the on-demand list price."""
    ignore_plan: bool = False
    """Start even if the plan says that the memory of the instance is too small."""
    resources: Annotated[dict[str, float], BeforeValidator(mapping)] = Field(default_factory=dict)
    """Additional Ray resources per worker, e.g. `{accelerator_type:H100: 0.001}`."""
    max_failures: int = Field(default=3, ge=0)
    """Maximum failures of each kind (steps, starts, machines) within `failure_window_s`; one more
    ends the run."""
    failure_window_s: float = Field(default=21_600.0, gt=0)
    """Seconds after which a failure is no longer counted."""
    max_preemptions: OptionalInt = Field(default=None, ge=0)
    """Maximum number of preempted nodes; one more ends the run. none: no limit."""
    mtbf_hours: float = Field(default=50_000.0, gt=0)
    """Mean hours between failures of one worker, used to compute the best checkpoint interval. The
    default is Llama 3's pre-training value per GPU; spot instances fail far more often."""
    idle_minutes: OptionalInt = Field(default=60, ge=5, le=1440)
    """Minutes without GPU use after which a rendered cluster releases its workers, 1440 at most (a
    CloudWatch alarm looks back one day). none: never."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that ranks wait for one another before the workers are restarted."""
    address: OptionalStr = None
    """Ray cluster. none: use RAY_ADDRESS, or start Ray here. local: always start Ray here."""

    @property
    def min_workers(self) -> int:
        """Fewest workers that may train."""
        return int(self.workers.split(":")[0])

    @property
    def max_workers(self) -> int:
        """Most workers that may train."""
        return int(self.workers.split(":")[-1])

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What `instance` names, in order of preference."""
        named = self.instance or ()
        return tuple(map(Choice.parse, (named,) if isinstance(named, str) else named))


@dataclass(frozen=True)
class Origin:
    """A checkpoint of another run."""

    run: str
    """Folder, URL or name."""
    step: int | None = None
    """None: the newest usable checkpoint."""

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Read RUN or RUN@STEP."""
        run, _, step = text.rpartition("@")
        return cls(run, int(step)) if run and step.isdecimal() else cls(text)

    def __str__(self) -> str:
        return self.run if self.step is None else f"{self.run}@{self.step}"


MOST_PROFILED = 20  # steps
# What may change where a run is made longer.
SCHEDULE = (
    "train.max_steps",
    "train.epochs",
    "train.schedule",
    "train.decay",
    "train.min_lr",
    "train.lr",
    "train.warmup_steps",
    "train.schedule_from",
)


class RunConfig(Section):
    """A run; what it trains gives `model`, `data`, `train` and `parallel` their fields."""

    MODULE: ClassVar[str]
    """The module of the command that runs it."""
    PATH_FIELDS: ClassVar[tuple[str, ...]]
    """Fields that may name files of this machine."""
    RESUME_SAFE: ClassVar[tuple[str, ...]] = (
        *("data.workers", "train.on_spike", "train.spike_sigmas", "train.profile_steps"),
        *("eval.patience", "eval.gate"),
    )
    """Fields that may change between two commands that are the same run, beside the driver's."""
    EXTENSION_FIELDS: ClassVar[tuple[str, ...]] = SCHEDULE
    """Fields with which a run may be made longer, where `growth_problem` finds nothing wrong."""

    ABSENT: ClassVar[Mapping[str, str]] = {}
    """Fields that another kind of run has and this one has not, with the reason."""

    run: Run = Run()
    model: Section = Section()
    data: Section = Section()
    train: Section = Section()
    parallel: Section = Section()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    cluster: Cluster = Cluster()

    @field_validator("*", mode="before")
    @classmethod
    def _parse_section(cls, value: Any) -> Any:
        return {} if value is None else yaml_or(value, "{")  # all below it is commented out

    @property
    def evaluated(self) -> dict[str, bool]:
        """The figures of an evaluation by name, each with whether a higher one is better."""
        return {"eval_loss": False}

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (fields, problem) for what is wrong between fields that are each legal alone."""
        yield from self._evaluations()
        cluster = self.cluster
        train, data, parallel = (cast(Any, each) for each in (self.train, self.data, self.parallel))
        if train.max_steps is not None and train.epochs is not None:
            yield (
                ("train.max_steps", "train.epochs"),
                f"train.epochs={train.epochs} is in conflict: train.max_steps={train.max_steps} "
                "also fixes the length of the run. Set one of them to none",
            )
        # The default is no wish, also where a file that to_yaml() wrote spells it out.
        if data.eval_path is not None and data.eval_fraction not in (0, type(data)().eval_fraction):
            yield (
                ("data.eval_path", "data.eval_fraction"),
                f"data.eval_fraction={data.eval_fraction} is in conflict: data.eval_path="
                f"{shown(data.eval_path)} also chooses the held-out data. Set data.eval_fraction=0",
            )
        if parallel.replicas is not None and parallel.strategy != "hybrid_shard":
            yield (
                ("parallel.replicas", "parallel.strategy"),
                f"parallel.replicas={parallel.replicas} is ineffective: only hybrid_shard "
                "has replicas. Set parallel.strategy=hybrid_shard or parallel.replicas=none",
            )
        if train.profile_steps is not None and not 0 < len(train.profiled) <= MOST_PROFILED:
            yield (
                ("train.profile_steps",),
                f"train.profile_steps={train.profile_steps} is not possible: it must be FIRST:END, "
                f"without END, of 1 to {MOST_PROFILED} steps. Set e.g. train.profile_steps=20:23",
            )
        if cluster.min_workers < 1 or cluster.min_workers > cluster.max_workers:
            yield (
                ("cluster.workers",),
                f"cluster.workers={cluster.workers} is not a range: it must be N or MIN:MAX with "
                "1 <= MIN <= MAX. Set e.g. cluster.workers=2 or cluster.workers=2:8",
            )
        if cluster.usd_per_hour is not None and len(cluster.choices) > 1:
            yield (
                ("cluster.usd_per_hour", "cluster.instance"),
                f"cluster.usd_per_hour={cluster.usd_per_hour:g} is ambiguous: "
                f"cluster.instance is a list. Set each price in that list, e.g. "
                f"{cluster.choices[0].instance}@{cluster.usd_per_hour:g}",
            )

    def _evaluations(self) -> Iterator[tuple[tuple[str, ...], str]]:
        best, data, known = self.checkpoint.best, cast(Any, self.data), set(self.evaluated)
        known |= {name.rpartition(":")[2] for name in getattr(self.eval, "metrics", ())}
        asked = {each.name: ("eval.gate", each.text) for each in self.eval.conditions}
        asked |= {best: ("checkpoint.best", best)} if best is not None else {}
        if not data.eval_fraction and data.eval_path is None:
            known -= known - set(getattr(self.eval, "tasks", ()))  # no data are held out
        for name, (field, text) in asked.items():
            legal = self.evaluated.keys() & known if field == "checkpoint.best" else known
            if name not in legal:
                yield (
                    (field, "eval.tasks", "data.eval_fraction"),
                    f"{field}={text} is not possible: no evaluation of this run has a figure "
                    f"{name}. Set one of {', '.join(sorted(legal)) or 'eval.tasks, and name it'}",
                )
        if best is not None and self.eval.every_steps is None:
            yield (
                ("checkpoint.best", "eval.every_steps"),
                f"checkpoint.best={best} is ineffective: the model is evaluated at the end alone. "
                "Set eval.every_steps",
            )
        if self.eval.patience is not None and best is None:
            yield (
                ("eval.patience", "checkpoint.best"),
                f"eval.patience={self.eval.patience} is ineffective: checkpoint.best names no "
                "figure. Set e.g. checkpoint.best=eval_loss",
            )

    def alternatives(self) -> tuple[Self, ...]:
        """Return a config for each of cluster.instance's choices, in order; itself for none."""
        named = self.cluster.instance
        each = named if isinstance(named, tuple) else (named,)
        return tuple(self.on(text) for text in each)

    def on(self, instance: str | None) -> Self:
        """Return the config with this one choice as cluster.instance."""
        return self.with_fields("cluster", instance=instance)

    def with_fields(self, section: str, **fields: object) -> Self:
        """Return the config with these values, which are not checked, in one section."""
        changed = getattr(self, section).model_copy(update=fields)
        return self.model_copy(update={section: changed})

    @property
    def origin(self) -> Origin | None:
        """The checkpoint whose weights the run starts with, if `model.init_from` names one."""
        text = getattr(self.model, "init_from", None)
        return None if text is None else Origin.parse(text)

    def to_overrides(self) -> dict[str, str]:
        """Return what differs from the defaults as `{"section.field": text}`, for `load`.

        What kind of run it is goes along, where that is not the default.
        """
        default, overrides = type(self)().model_dump(mode="json"), dict[str, str]()
        for section, values in self.model_dump(mode="json").items():
            if not isinstance(values, dict):
                overrides[section] = values
                continue
            for name, value in values.items():
                if value != default[section][name]:
                    overrides[f"{section}.{name}"] = (
                        value if isinstance(value, str) else dumps(value)
                    )
        return overrides

    def to_yaml(self) -> str:
        """Return the whole config, defaults included, as YAML."""
        values = self.model_dump(mode="json")
        first = {name: value for name, value in values.items() if not isinstance(value, dict)}
        return yaml.dump(first | values, Dumper=Dumper, sort_keys=False)


def indivisible(field: str, value: int, unit: int, what: str) -> str:
    """Return the problem of a step that is no whole number of micro-batches of `what`, `unit`."""
    below = value // unit * unit
    legal = " or ".join(f"{each:_}" for each in (below, below + unit) if each)
    return (
        f"{field}={value} is not divisible: a step must be whole micro-batches of {what}. "
        f"Set {field}={legal}"
    )
