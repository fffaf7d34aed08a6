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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

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

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _none_or(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("none", "null", "") else value


def _comma_list(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.strip("[]()").split(",") if part.strip()]
    return value


OptionalStr = Annotated[str | None, BeforeValidator(_none_or)]
OptionalInt = Annotated[int | None, BeforeValidator(_none_or)]
OptionalFloat = Annotated[float | None, BeforeValidator(_none_or)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_comma_list)]


class Run(Section):
    name: str = Field("tiny", pattern=NAME_PATTERN)
    """Name of the run and of its folder; the same name and storage is the same run."""
    storage: str = "runs"
    """Folder or s3://bucket/prefix that holds the run's folder; every node must reach it."""
    seed: int = Field(0, ge=0)
    """Seed of the weights (from scratch), of the order of rows and of dropout."""


class Lora(Section):
    rank: int = Field(16, ge=1)
    """Rank of the two low-rank factors."""
    alpha: float = Field(32.0, gt=0)
    """Scale; the update is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the first factor, 0-1."""
    targets: Strings = ()
    """Names of linear layers that get adapters; empty means all linear layers of the blocks."""


class Model(Section):
    path: str = "tiny"
    """Hugging Face folder, s3:// folder, hub id, or a preset such as `tiny`."""
    from_scratch: bool = False
    """Start from random weights with this model's shape (always so for a preset)."""
    tokenizer: OptionalStr = None
    """Folder, s3:// folder or hub id; `bpe:4096` trains a byte-level BPE of that size on the
    data; `bytes` is one token a byte; none takes the model's own (presets: `bpe` of their size)."""
    attention: Literal["auto", "sdpa", "flash", "flex", "varlen", "eager"] = "auto"
    """Attention kernel; auto takes the best that is there."""
    lora: Annotated[Lora | None, BeforeValidator(_none_or)] = None
    """Train low-rank adapters on a frozen base; none trains all weights."""
    overrides: dict[str, Any] = {}
    """Fields of the model's config.json to replace, e.g. `{num_hidden_layers: 4}` (from scratch)."""


class Data(Section):
    path: str = "stdlib"
    """File, glob, folder, s3:// path, hub id, or `stdlib` (Python's own standard library)."""
    format: Literal["auto", "text", "jsonl", "parquet", "hub"] = "auto"
    """How the files are read; auto goes by their names."""
    kind: Literal["auto", "text", "prompt", "chat"] = "auto"
    """text: `text` column; prompt: `prompt` and `completion`; chat: `messages`."""
    seq_len: int = Field(512, ge=8, le=1_048_576)
    """Tokens in a row."""
    pack: bool = True
    """Put several documents in a row (attention never crosses them); false: one piece a row."""
    truncate: bool = False
    """Cut documents longer than seq_len; false splits them, so that no token is lost."""
    eval_path: OptionalStr = None
    """Held-out data in the same format; none holds out eval_fraction of path."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share held out, 0-1: the last bytes of a single text file, otherwise documents drawn by hash."""
    bad_rows: float = Field(0.01, ge=0, le=1)
    """Share of rows, 0-1, that may be unusable; more stops the run, fewer are counted and named."""
    workers: OptionalInt = Field(None, ge=1)
    """Ray Data tasks at once for reading and packing; none takes the CPUs that training leaves."""


class Train(Section):
    tokens_per_step: int = Field(16_384, ge=8)
    """Global batch in tokens (padding included): rows per optimizer step times seq_len."""
    micro_batch: int = Field(8, ge=1)
    """Rows in one forward and backward on one worker."""
    max_steps: OptionalInt = Field(None, ge=0)
    """Optimizer steps; none is derived from epochs."""
    epochs: OptionalInt = Field(None, ge=1)
    """Passes over the data, when max_steps is none (then 1 if this is none too)."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end of cosine and linear, as a share of lr, 0-1."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; norms, biases and embeddings have none."""
    betas: Annotated[tuple[float, float], BeforeValidator(_comma_list)] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    grad_clip: OptionalFloat = Field(1.0, gt=0)
    """Largest global norm of the gradient; none does not clip."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """Precision of compute; weights, gradients' sums and optimizer stay fp32. auto: bf16 where
    a short measurement finds it faster, else fp32."""
    compile: bool = False
    """torch.compile each transformer block."""
    loss_chunk: int = Field(4096, ge=0)
    """Tokens whose logits exist at once; 0 holds all logits of a micro-batch."""


class Parallel(Section):
    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """What FSDP shards, with PyTorch's names."""
    replicas: OptionalInt = Field(None, ge=1)
    """hybrid_shard: how many copies of the model; none is one per node."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in the backward pass instead of keeping them."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


class Checkpoint(Section):
    every_steps: OptionalInt = Field(None, ge=1)
    """Steps between checkpoints; none saves by every_s alone."""
    every_s: OptionalFloat = Field(600.0, gt=0)
    """Seconds between checkpoints; none saves by every_steps alone."""
    keep: int = Field(2, ge=1)
    """Committed checkpoints to keep; an older one goes after the next commit."""
    asynchronous: bool = True
    """Upload beside the next steps; only the copy off the device stalls."""
    export: bool = True
    """Write model/ as a Hugging Face folder at the end."""


class Eval(Section):
    every_steps: OptionalInt = Field(None, ge=1)
    """Steps between held-out evaluations; none evaluates only at the end."""
    prompts: Strings = ()
    """Texts to continue at the end, as a sample of what the model does."""


class Cluster(Section):
    workers: str = Field("2", pattern=r"^\d+(:\d+)?$")
    """Training workers: `4`, or `2:8` for elastic."""
    gpu: Literal["auto", "true", "false"] = "auto"
    """One GPU per worker; auto: if the cluster has any."""
    instance: OptionalStr = None
    """EC2 instance type, e.g. p5.48xlarge, for plans and rendered clusters."""
    resources: dict[str, float] = {}
    """More Ray resources per worker, e.g. `{accelerator_type:H100: 0.001}`."""
    max_failures: int = Field(3, ge=0)
    """Worker failures to recover from before giving up."""
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

    @property
    def rows_per_step(self) -> int:
        """Rows of seq_len tokens in one optimizer step, over all workers."""
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches in one optimizer step, over all workers."""
        return self.rows_per_step // self.train.micro_batch

    def to_yaml(self) -> str:
        """Return the whole config, defaults included, as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


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
    config = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(item) for item in error.errors()]
    if config is not None:
        problems += combined_problems(config)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def combined_problems(config: Config) -> list[str]:
    """Return what is wrong between fields that are each legal alone."""
    problems = []
    train, data, cluster = config.train, config.data, config.cluster
    unit = train.micro_batch * data.seq_len
    if train.tokens_per_step % unit:
        below = train.tokens_per_step // unit * unit
        legal = " or ".join(
            f"{value:,}".replace(",", "_") for value in (below, below + unit) if value
        )
        problems.append(
            f"train.tokens_per_step={train.tokens_per_step} is not divisible: a step is a whole "
            f"number of micro-batches of {train.micro_batch} rows x {data.seq_len} tokens = {unit}. "
            f"Set train.tokens_per_step={legal}"
        )
    if train.max_steps is not None and train.epochs is not None:
        problems.append(
            f"train.epochs={train.epochs} is in conflict with train.max_steps={train.max_steps}: "
            "both fix the length of the run. Set one of them to none"
        )
    if cluster.min_workers < 1 or cluster.min_workers > cluster.max_workers:
        problems.append(
            f"cluster.workers={cluster.workers} is not a range: it must be N or MIN:MAX with "
            "1 <= MIN <= MAX. Set e.g. cluster.workers=2 or cluster.workers=2:8"
        )
    if (
        data.eval_path is not None
        and "eval_fraction" in data.model_fields_set
        and data.eval_fraction
    ):
        problems.append(
            f"data.eval_fraction={data.eval_fraction} is in conflict with data.eval_path="
            f"{data.eval_path}: both choose the held-out data. Set data.eval_fraction=0"
        )
    if config.parallel.replicas is not None and config.parallel.strategy != "hybrid_shard":
        problems.append(
            f"parallel.replicas={config.parallel.replicas} is without effect: only hybrid_shard "
            "has replicas. Set parallel.strategy=hybrid_shard or parallel.replicas=none"
        )
    for name, why in _not_yet(config):
        problems.append(f"{name} is not available: {why}")
    return problems


def differences(old: Config, new: Config) -> list[str]:
    """Return `field: old -> new` for fields that make it another run.

    Where a run executes (`cluster`), how often it saves (`checkpoint`) and where its storage is
    may change between two commands that are the same run; all else may not.
    """
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    free = ("cluster.", "checkpoint.", "run.storage", "data.workers")
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


def _not_yet(config: Config) -> Iterable[tuple[str, str]]:
    """Name what the config can say and the step engine cannot do."""
    if config.train.precision == "fp8":
        yield "train.precision=fp8", "no fp8 path is built in. Set train.precision=bf16"
    if config.model.lora is not None:
        yield "model.lora", "adapters are not built in. Remove model.lora to train all weights"
    if config.parallel.activation_checkpointing == "selective":
        yield (
            "parallel.activation_checkpointing=selective",
            "only whole blocks are recomputed. Set parallel.activation_checkpointing=full",
        )
    if config.model.attention in ("flash", "flex", "varlen"):
        yield (
            f"model.attention={config.model.attention}",
            "documents are kept apart by sdpa's mask. Set model.attention=auto",
        )


def _read_yaml(path: str) -> tuple[dict[str, Any], list[str]]:
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        return {}, [
            f"config file {path} is not readable: {error.strerror}. Give the path of a YAML file"
        ]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, [f"config file {path} is not YAML: {' '.join(str(error).split())}"]
    if tree is None:
        return {}, []
    if not isinstance(tree, dict):
        return {}, [
            f"config file {path} is not a mapping of sections: it holds a {type(tree).__name__}"
        ]
    return tree, []


def _set(tree: dict[str, Any], field: str, value: str, problems: list[str]) -> None:
    """Put an override into the tree; mappings and lists are given as YAML, e.g. `{a: 1}`."""
    *sections, name = field.split(".")
    node = tree
    for section in sections:
        child = node.get(section)
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            problems.append(
                f"--{field}={value} is misplaced: {section} holds {child!r}, not fields"
            )
            return
        node = child
    node[name] = yaml.safe_load(value) if value.startswith("{") else value


def _explain(error: Any) -> str:
    """Turn one pydantic error into a line of the house form."""
    location = [str(part) for part in error["loc"]]
    field, value, kind = ".".join(location), error.get("input"), error["type"]
    if kind == "extra_forbidden":
        known = list(fields()) + list(Config.model_fields)
        near = difflib.get_close_matches(field, known, n=1, cutoff=0.5)
        if not near:
            by_name = {name.rsplit(".", 1)[-1]: name for name in known}
            close = difflib.get_close_matches(location[-1], list(by_name), n=1, cutoff=0.6)
            near = [by_name[close[0]]] if close else []
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"{field}={value} is unknown: there is no such field.{hint}"
    why = {
        "int_parsing": "it must be a whole number",
        "int_type": "it must be a whole number",
        "int_from_float": "it must be a whole number",
        "float_parsing": "it must be a number",
        "float_type": "it must be a number",
        "bool_parsing": "it must be true or false",
        "model_type": "it must be a mapping of fields",
        "model_attributes_type": "it must be a mapping of fields",
    }.get(kind, error["msg"][0].lower() + error["msg"][1:])
    shown = "" if value is None else f"={value}"
    documentation = fields().get(field)
    about = f". {documentation}" if documentation else ""
    return f"{field}{shown} is not valid: {why}{about}"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
