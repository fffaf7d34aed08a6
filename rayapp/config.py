"""The typed description of a run: YAML plus overrides, closed, and checked all at once.

    config = load("configs/tiny_cpu.yaml", {"train.lr": "1e-3"})

Each section is a frozen pydantic model; the string under a field is its documentation (and its
description in the JSON Schema). A value comes from the defaults, then the YAML file, then the
`--section.field=value` overrides. What is wrong is collected, never one at a time, and raised as
one `ConfigError` whose lines read `<field>=<value> is <problem>: <why>. <what to set>`.
Whatever needs a look at the outside (files, buckets, clusters) is checked by the module concerned.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class ConfigError(ValueError):
    """The run cannot start as described; `problems` holds one line for each reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


class Section(BaseModel):
    """A frozen part of the config that knows no other field than its own."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, info: ValidationInfo) -> Any:
        numbers = (int, float, int | None, float | None)
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation in numbers:
            raise ValueError("it must be a number")
        return value


def _none_or(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("none", "null", "") else value


def _yaml_or(value: Any, opening: str) -> Any:
    """Parse text that opens like a YAML list or mapping; what does not parse stays text."""
    if isinstance(value, str) and value.startswith(opening):
        try:
            return parse_yaml(value)
        except yaml.YAMLError:
            return value
    return value


def _mapping(value: Any) -> Any:
    return _none_or(_yaml_or(value, "{"))


def _comma_list(value: Any) -> Any:
    value = _yaml_or(value, "[")
    if isinstance(value, str):
        value = "" if _none_or(value) is None else value
        return [part.strip() for part in value.strip("[]()").split(",") if part.strip()]
    return value


def _one_or_list(value: Any) -> Any:
    value = _none_or(_yaml_or(value, "["))
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _auto_as_none(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() == "auto" else value


def _none_as_auto(value: int | None) -> int | str:
    return "auto" if value is None else value


def _truth_as_text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, (bool, str)) else value


Text = Annotated[str, Field(min_length=1)]
OptionalStr = Annotated[str | None, BeforeValidator(_none_or)]
OptionalInt = Annotated[int | None, BeforeValidator(_none_or)]
OptionalFloat = Annotated[float | None, BeforeValidator(_none_or)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_comma_list)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_list)]
Trackers = Annotated[
    tuple[Literal["tensorboard", "mlflow", "wandb"], ...], BeforeValidator(_comma_list)
]
Beta = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AutoInt = Annotated[
    int | None,
    BeforeValidator(_auto_as_none, json_schema_input_type=int | Literal["auto"]),
    PlainSerializer(_none_as_auto),
]
# YAML has `workers: 4` as a number and `gpu: true` as a truth value; the schema allows both.
Workers = Annotated[str, BeforeValidator(_number_as_text, json_schema_input_type=str | int)]
Gpu = Annotated[
    Literal["auto", "true", "false"],
    BeforeValidator(_truth_as_text, json_schema_input_type=Literal["auto", "true", "false"] | bool),
]


class Run(Section):
    name: str = Field(default="tiny", pattern=NAME_PATTERN)
    """Name of the run and of its folder; the same name and storage is the same run."""
    storage: Text = "runs"
    """Folder or s3://bucket/prefix that holds the run's folder; every node must reach it."""
    seed: int = Field(default=0, ge=0)
    """Seed of the weights (from scratch), of the order of rows and of dropout."""
    trackers: Trackers = ("tensorboard",)
    """Where each step's metrics go as well: tensorboard (files in the run's folder), mlflow (to
    MLFLOW_TRACKING_URI), wandb (with WANDB_API_KEY); none for nowhere."""


class Lora(Section):
    rank: int = Field(default=16, ge=1)
    """Rank of the two low-rank factors."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale; the update is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the first factor, 0-1."""
    targets: Strings = ()
    """Names of linear layers that get adapters; empty means all linear layers of the blocks."""
    quantize: Literal["none", "nf4"] = "none"
    """Hold the frozen base's linear layers in 4 bits (QLoRA); needs bitsandbytes."""
    merge: bool = False
    """Add the adapters to the base in model/, and write them alone to adapter/; false: model/ holds
    the adapters, as peft writes them."""


class Model(Section):
    path: Text = "tiny"
    """Hugging Face folder, s3:// folder, hub id, or a preset such as `tiny`."""
    from_scratch: bool = False
    """Start from random weights with this model's shape (always so for a preset)."""
    tokenizer: OptionalStr = None
    """Folder, s3:// folder or hub id; `bpe:4096` trains a byte-level BPE of that size on the
    data; `bytes` is one token a byte; none takes the model's own (presets: `bpe` of their size)."""
    attention: Literal["auto", "sdpa", "flash", "flex", "varlen", "eager"] = "auto"
    """Attention kernel; auto takes the best that is there."""
    lora: Annotated[Lora | None, BeforeValidator(_mapping)] = None
    """Train low-rank adapters on a frozen base; none trains all weights."""
    overrides: Annotated[dict[str, JsonValue], BeforeValidator(_mapping)] = {}
    """Fields of the model's config.json to replace, e.g. `{num_hidden_layers: 4}`."""


class Data(Section):
    path: Text = "stdlib"
    """File, glob, folder, s3:// path, hub id, or `stdlib` (Python's own standard library)."""
    mixture: Annotated[dict[str, Weight], BeforeValidator(_mapping)] = {}
    """Several such paths by weight instead of path, e.g. `{a.jsonl: 3, s3://b/c: 1}`: their shares
    of the rows trained on; needs train.max_steps."""
    format: Literal["auto", "text", "jsonl", "parquet", "hub"] = "auto"
    """How the files are read; auto goes by their names."""
    kind: Literal["auto", "text", "prompt", "chat"] = "auto"
    """text: `text` column; prompt: `prompt` and `completion`; chat: `messages`."""
    seq_len: int = Field(default=512, ge=8, le=1_048_576)
    """Tokens in a row."""
    pack: bool = True
    """Put several documents in a row (attention never crosses them); false: one piece a row."""
    truncate: bool = False
    """Cut documents longer than seq_len; false splits them, so that no token is lost."""
    eval_path: OptionalStr = None
    """Held-out data in the same format; none holds out eval_fraction of path."""
    eval_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share held out, 0-1: the last bytes of a single text file, otherwise documents by hash."""
    bad_rows: float = Field(default=0.01, ge=0, le=1)
    """Share of rows, 0-1, that may be unusable; more stops the run, fewer are counted and named."""
    workers: OptionalInt = Field(default=None, ge=1)
    """Ray Data tasks at once for reading and packing; none takes the CPUs that training leaves."""

    @property
    def weights(self) -> dict[str, float]:
        """Return the paths to train on, with their weights."""
        return self.mixture or {self.path: 1.0}


class Train(Section):
    tokens_per_step: int = Field(default=16_384, ge=8)
    """Global batch in tokens (padding included): rows per optimizer step times seq_len."""
    micro_batch: AutoInt = Field(default=8, ge=1)
    """Rows in one forward and backward on one worker; auto: the most that fit into a worker's
    memory by the plan, half of them after a step that runs out of memory."""
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw8bit keeps the moments in 8 bits (torchao); muon: Muon for the blocks' matrices and
    AdamW for all else, with one lr."""
    max_steps: OptionalInt = Field(default=None, ge=0)
    """Optimizer steps; none is derived from epochs."""
    epochs: OptionalInt = Field(default=None, ge=1)
    """Passes over the data, when max_steps is none (then 1 if this is none too)."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of cosine, linear and wsd, as a share of lr, 0-1."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up; wsd stays at the peak and falls at the end."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps, 0-1, over which wsd falls."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; norms, biases and embeddings have none."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_comma_list)] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log of the softmax's sum in the objective; not in the loss shown."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target, 0-1, spread over the vocabulary; not in the loss shown."""
    on_spike: Literal["none", "skip", "stop"] = "none"
    """At a step whose loss is far above those before it, or not finite: skip leaves the weights as
    they are and goes on, stop ends the run; both name the rows. none: only what is not finite
    ends the run."""
    spike_sigmas: float = Field(default=6.0, gt=0)
    """How many standard deviations above the mean of the last 64 steps a spike is."""
    grad_clip: OptionalFloat = Field(default=1.0, gt=0)
    """Largest global norm of the gradient; none does not clip."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """Precision of compute; weights, gradients' sums and optimizer stay fp32. auto: bf16 where
    a short measurement finds it faster, else fp32. fp8: the blocks' matmuls, where GPUs have it."""
    compile: bool = False
    """torch.compile the transformer blocks, one compilation for all of them."""
    loss_chunk: int = Field(default=4096, ge=0)
    """Tokens whose logits exist at once; 0 holds all logits of a micro-batch."""
    loss_kernel: Literal["chunked", "liger"] = "chunked"
    """chunked: PyTorch's own operations, on any device; liger: the fused kernel of the package
    liger-kernel, on GPUs, with chunks of its own size."""


class Parallel(Section):
    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """What FSDP shards, with PyTorch's names."""
    replicas: OptionalInt = Field(default=None, ge=1)
    """hybrid_shard: how many copies of the model; none is one per node."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in the backward pass instead of keeping them; selective keeps what
    costs most to recompute for the memory it takes."""
    activation_offload: bool = False
    """Hold what is kept for the backward pass in host memory."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


class Checkpoint(Section):
    every_steps: OptionalInt = Field(default=None, ge=1)
    """Steps between checkpoints; none saves by every_s alone."""
    every_s: OptionalFloat = Field(default=600.0, gt=0)
    """Seconds between checkpoints; none saves by every_steps alone."""
    keep: int = Field(default=2, ge=1)
    """Committed checkpoints to keep; an older one goes after the next commit."""
    asynchronous: bool = True
    """Upload beside the next steps; only the copy off the device stalls."""
    export: bool = True
    """Write model/ as a Hugging Face folder at the end."""


class Eval(Section):
    every_steps: OptionalInt = Field(default=None, ge=1)
    """Steps between held-out evaluations; none evaluates only at the end."""
    checkpoints: bool = False
    """Evaluate committed checkpoints beside training, where a worker's room is free."""
    prompts: Texts = ()
    """Text, or list `[a, b]` of texts, to continue at the end: a sample of what the model does."""


class Cluster(Section):
    workers: Workers = Field(default="2", pattern=r"^[0-9]{1,6}(:[0-9]{1,6})?$")
    """Training workers: `4`, or `2:8` for elastic."""
    gpu: Gpu = "auto"
    """One GPU per worker; auto: if the cluster has any."""
    instance: OptionalStr = None
    """EC2 instance type, e.g. p5.48xlarge, for plans, costs and rendered clusters."""
    usd_per_hour: OptionalFloat = Field(default=None, gt=0)
    """Price of one instance, e.g. of spot; none takes the list price on demand."""
    ignore_plan: bool = False
    """Start although the plan says that instance's memory is too small."""
    resources: Annotated[dict[str, float], BeforeValidator(_mapping)] = {}
    """More Ray resources per worker, e.g. `{accelerator_type:H100: 0.001}`."""
    max_failures: int = Field(default=3, ge=0)
    """Worker failures to recover from before giving up."""
    max_preemptions: OptionalInt = Field(default=None, ge=0)
    """Nodes taken away to recover from before giving up; none is any number."""
    mtbf_hours: float = Field(default=50_000.0, gt=0)
    """Hours between failures of one worker, assumed when the best checkpoint interval is computed.
    The default is what Llama 3's pre-training saw per GPU; spot instances have far less."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that ranks wait for one another before the workers are started again."""
    address: OptionalStr = None
    """Ray cluster: none takes RAY_ADDRESS or starts Ray here; `local` always starts Ray here."""

    @property
    def min_workers(self) -> int:
        """Fewest workers that may train."""
        return int(self.workers.split(":")[0])

    @property
    def max_workers(self) -> int:
        """Most workers that may train."""
        return int(self.workers.split(":")[-1])


class Config(Section):
    """One run."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    cluster: Cluster = Cluster()

    @field_validator("*", mode="before")
    @classmethod
    def _parse_section(cls, value: Any) -> Any:
        return {} if value is None else _yaml_or(value, "{")  # all below it is commented out

    @property
    def rows_per_step(self) -> int:
        """Rows of seq_len tokens in one optimizer step, over all workers."""
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch, once there is a number instead of `auto`."""
        assert self.train.micro_batch is not None, "train.micro_batch=auto is not chosen yet"
        return self.train.micro_batch

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches in one optimizer step, over all workers."""
        return self.rows_per_step // self.micro_batch

    def with_micro_batch(self, size: int) -> Config:
        """Return the config with so many rows in a micro-batch."""
        return self.model_copy(
            update={"train": self.train.model_copy(update={"micro_batch": size})}
        )

    def to_overrides(self) -> dict[str, str]:
        """Return what differs from the defaults as `{"section.field": text}`, for `load`."""
        default, found = Config().model_dump(mode="json"), {}
        for section, values in self.model_dump(mode="json").items():
            for name, value in values.items():
                if value != default[section][name]:
                    found[f"{section}.{name}"] = value if isinstance(value, str) else dumps(value)
        return found

    def to_yaml(self) -> str:
        """Return the whole config, defaults included, as YAML."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def load(path: str | None = None, overrides: Mapping[str, str] | None = None) -> Config:
    """Read a YAML file (or only the defaults) and `section.field` overrides into a checked Config.

    Raises:
        ConfigError: with every problem of the file, the overrides and their combination.
    """
    tree, problems = ({}, []) if path is None else _read_yaml(path)
    for field, value in (overrides or {}).items():
        _set(tree, field, value, problems)
    return from_dict(tree, problems)


def from_dict(tree: Mapping[str, Any], problems: Iterable[str] = ()) -> Config:
    """Check a nested mapping of sections and fields; `problems` are reported with what is found.

    Raises:
        ConfigError: with every problem.
    """
    problems = list(problems)
    config, wrong = None, []
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(item) for item in error.errors()]
        wrong = [tuple(map(str, item["loc"])) for item in error.errors()]
    if wrong:  # what is right is still checked for what is wrong between its fields
        try:
            config = Config.model_validate(_without(tree, wrong))
        except ValidationError:
            config = None
    if config is not None:
        problems += [
            problem
            for names, problem in _combined(config)
            if not any(_overlap(tuple(name.split(".")), at) for name in names for at in wrong)
        ]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _overlap(a: Sequence[str], b: Sequence[str]) -> bool:
    return all(x == y for x, y in zip(a, b, strict=False))


def combined_problems(config: Config) -> list[str]:
    """Return what is wrong between fields that are each legal alone."""
    return [problem for _, problem in _combined(config)]


def _combined(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (the fields it is between, the problem)."""
    train, data, cluster, parallel = config.train, config.data, config.cluster, config.parallel
    micro_batch = train.micro_batch or 1  # auto takes what divides the step
    unit = micro_batch * data.seq_len
    if train.tokens_per_step % unit:
        below = train.tokens_per_step // unit * unit
        legal = " or ".join(f"{value:_}" for value in (below, below + unit) if value)
        yield (
            ("train.tokens_per_step", "train.micro_batch", "data.seq_len"),
            f"train.tokens_per_step={train.tokens_per_step} is not divisible: a step is a whole "
            f"number of micro-batches of {micro_batch} rows x {data.seq_len} tokens = "
            f"{unit}. Set train.tokens_per_step={legal}",
        )
    if train.max_steps is not None and train.epochs is not None:
        yield (
            ("train.max_steps", "train.epochs"),
            f"train.epochs={train.epochs} is in conflict: train.max_steps={train.max_steps} "
            "also fixes the length of the run. Set one of them to none",
        )
    if cluster.min_workers < 1 or cluster.min_workers > cluster.max_workers:
        yield (
            ("cluster.workers",),
            f"cluster.workers={cluster.workers} is not a range: it must be N or MIN:MAX with "
            "1 <= MIN <= MAX. Set e.g. cluster.workers=2 or cluster.workers=2:8",
        )
    if data.mixture and train.max_steps is None:
        yield (
            ("data.mixture", "train.max_steps"),
            "train.max_steps=none is missing: the sources of data.mixture end at different times, "
            "so that it has no epochs. Set train.max_steps",
        )
    if data.mixture and data.path != Data().path:
        yield (
            ("data.mixture", "data.path"),
            f"data.path={_shown(data.path)} is in conflict: data.mixture also names the data. "
            "Remove one of the two, or put the path into the mixture",
        )
    # The default is no wish, also where a file that to_yaml() wrote spells it out.
    if data.eval_path is not None and data.eval_fraction not in (0, Data().eval_fraction):
        yield (
            ("data.eval_path", "data.eval_fraction"),
            f"data.eval_fraction={data.eval_fraction} is in conflict: data.eval_path="
            f"{_shown(data.eval_path)} also chooses the held-out data. Set data.eval_fraction=0",
        )
    if parallel.replicas is not None and parallel.strategy != "hybrid_shard":
        yield (
            ("parallel.replicas", "parallel.strategy"),
            f"parallel.replicas={parallel.replicas} is without effect: only hybrid_shard "
            "has replicas. Set parallel.strategy=hybrid_shard or parallel.replicas=none",
        )
    if train.loss_kernel == "liger" and (train.z_loss or train.label_smoothing):
        yield (
            ("train.loss_kernel", "train.z_loss", "train.label_smoothing"),
            "train.loss_kernel=liger is in conflict: it gives the objective alone, and with "
            "train.z_loss or train.label_smoothing the loss is another number. Set "
            "train.loss_kernel=chunked",
        )
    lora = config.model.lora
    if lora is not None and train.optimizer == "muon":
        yield (
            ("model.lora", "train.optimizer"),
            "train.optimizer=muon is in conflict: orthogonal updates of the two thin factors of an "
            "adapter are not those of a matrix. Set train.optimizer=adamw",
        )
    if lora is not None and lora.quantize != "none" and config.model.from_scratch:
        yield (
            ("model.lora.quantize", "model.from_scratch"),
            f"model.lora.quantize={lora.quantize} is in conflict: model.from_scratch=true has no "
            "weights to hold in 4 bits. Set model.from_scratch=false",
        )
    if lora is not None and lora.quantize != "none" and train.precision == "fp8":
        yield (
            ("model.lora.quantize", "train.precision"),
            f"model.lora.quantize={lora.quantize} is in conflict: train.precision=fp8 also says "
            "how the blocks' matmuls are done. Set train.precision=bf16",
        )


def differences(old: Config, new: Config) -> list[str]:
    """Return `field: old -> new` for fields that make it another run.

    Where a run executes (`cluster`), how often it saves (`checkpoint`), where its storage is and
    who is told of it, and how a step is cut into micro-batches (its rows are the same) may change
    between two commands that are the same run; all else may not.
    """
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    free: tuple[str, ...] = ("cluster.", "checkpoint.", "run.storage", "run.trackers")
    free += ("data.workers", "train.micro_batch")
    return [
        f"{field}: {before.get(field)} -> {after.get(field)}"
        for field in sorted(before.keys() | after.keys())
        if before.get(field) != after.get(field) and not field.startswith(free)
    ]


def fields() -> dict[str, str]:
    """Return every `section.field` with its documentation."""
    found = {}
    for section, info in Config.model_fields.items():
        assert isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        for name, field in info.annotation.model_fields.items():
            found[f"{section}.{name}"] = " ".join((field.description or "").split())
    return found | {
        f"model.lora.{name}": " ".join((field.description or "").split())
        for name, field in Lora.model_fields.items()
    }


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of plain values, and no key twice in a mapping.

    PyYAML reads YAML 1.1, where `2:8` is the number 128, `1e-3` is text and `no` is false.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    why = f"{key.value} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would read as something else than text."""


_PLAIN = (  # tag, what it looks like, how it may begin
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9_]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
)
for _tag, _pattern, _first in _PLAIN:
    for _class in (_Loader, _Dumper):
        _regexp = re.compile(f"^(?:{_pattern})$")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, _first)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, read as YAML 1.2 and without duplicate keys.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except (ValueError, RecursionError) as error:  # e.g. an integer of 5000 digits
        raise yaml.YAMLError(str(error)) from error


def _read_yaml(path: str) -> tuple[dict[str, Any], list[str]]:
    give = "Give the path of a YAML file of sections and fields"
    try:
        tree = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        return {}, [f"config file {path} is not YAML: {' '.join(str(error).split())}. {give}"]
    except UnicodeDecodeError as error:
        return {}, [f"config file {path} is not text: {error}. {give}"]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return {}, [f"config file {path} is not readable: {why}. {give}"]
    if tree is None:
        return {}, []
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        return {}, [f"config file {path} is not a mapping: it holds a {kind}. {give}"]
    return tree, []


def _set(tree: dict[str, Any], field: str, value: Any, problems: list[str]) -> None:
    """Put an override into the tree."""
    *sections, name = field.split(".")
    node = tree
    for section in sections:
        child = node.get(section)
        if _none_or(child) is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            problems.append(
                f"{field}={_shown(value)} is misplaced: {section} holds {_shown(child)}, not "
                f"fields. Remove one of the two"
            )
            return
        node = child
    node[name] = value


def _without(tree: Any, locations: Iterable[Sequence[str]]) -> Any:
    """Return a copy of a nested mapping that lacks what stands at, or holds, the locations."""
    if not isinstance(tree, Mapping):
        return {}
    copy: dict[Any, Any] = {}
    for name, value in tree.items():
        below = [location[1:] for location in locations if location[0] == str(name)]
        if not below:
            copy[name] = value
        elif all(below) and isinstance(value, Mapping):
            copy[name] = _without(value, below)
    return copy


_WHY = {  # what pydantic calls the error -> why
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "string_type": "it must be text, in quotes where YAML would read something else",
    "model_type": "it must be a mapping of fields",
    "model_attributes_type": "it must be a mapping of fields",
    "dict_type": "it must be a mapping such as {name: value}",
    "run.name": "it must be letters, digits, '.', '_' or '-', 63 at most, a letter or digit first",
    "cluster.workers": "it must be N or MIN:MAX",
}


def _explain(error: Any) -> str:
    """Turn one pydantic error into a line of the house form."""
    location, kind = [str(part) for part in error["loc"]], error["type"]
    if kind == "extra_forbidden":
        return _explain_unknown(location, error["input"])
    known = fields()
    home = next((".".join(location[:n]) for n in (3, 2) if ".".join(location[:n]) in known), "")
    why = _WHY.get(home if kind == "string_pattern_mismatch" else kind)
    if why is None:
        message = error["msg"].removeprefix("Value error, ").replace("Input should", "it must")
        why = message[0].lower() + message[1:].rstrip(".")
    if home:
        what = f"Set {home}: {known[home].rstrip('.')}"
    else:
        beside = [name for name in known if name.startswith(f"{location[0]}.")] if location else []
        what = f"Set {' or '.join(beside[:2]) or 'sections, e.g. run'}"
    field = ".".join(location) or "config"
    return f"{field}={_shown(error['input'])} is not valid: {why}. {what}"


def _explain_unknown(location: list[str], value: Any) -> str:
    field, section = ".".join(location), ".".join(location[:-1])
    known = [*Config.model_fields, *fields()]
    beside = [name for name in known if name.rpartition(".")[0] == section]
    for candidates in (beside, known):
        by_name = {name.rpartition(".")[2]: name for name in candidates}
        near = difflib.get_close_matches(location[-1], list(by_name), n=1, cutoff=0.6)
        if near:
            what = f"Did you mean {by_name[near[0]]}?"
            break
    else:
        what = f"Set one of {', '.join(name.rpartition('.')[2] for name in beside)}"
    return f"{field}={_shown(value)} is unknown: there is no such field. {what}"


def _shown(value: Any) -> str:
    """Return a value as one would write it, on one line and not longer than 80 characters."""
    if value is None or isinstance(value, bool):
        value = "none" if value is None else str(value).lower()
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
