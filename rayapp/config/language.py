"""The description of a run that fine-tunes a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from rayapp.config.fields import (
    AutoFloat,
    AutoInt,
    Beta,
    Codes,
    DataKind,
    OptionalCode,
    OptionalFloat,
    OptionalInt,
    OptionalStr,
    Section,
    Text,
    Texts,
    Weight,
    comma_list,
    mapping,
)
from rayapp.config.lora import Lora
from rayapp.config.optimizers import OPTIMIZERS, OptimizerName, TrainSection
from rayapp.config.sections import SCHEDULE, RunConfig, indivisible
from rayapp.config.sections import Eval as SharedEval
from rayapp.config.tasks import Tasks
from rayapp.config.text import shown

Precision = Literal["fp32", "bf16", "fp8"]
Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
Checkpointing = Literal["none", "full", "selective"]


class Model(Section):
    path: Text = "tiny"
    """Folder of a Hugging Face model or an exported adapter, or a GGUF file, here or on s3://, hub
    id, or a preset such as `tiny`."""
    adapter: Literal["train", "merge"] = "train"
    """Where path is an adapter: train goes on with it, with its own `lora` settings; merge adds it
    to its base, and trains all of that model's weights, or new adapters (`lora`)."""
    init_from: OptionalStr = None
    """RUN or RUN@STEP, a folder, a name in run.storage or s3://: start with the weights of that
    run's newest usable checkpoint, or of that step; path names the same model."""
    from_scratch: bool = False
    """Start from random weights with this model's shape; a preset without weights asks for it,
    but for `tiny`."""
    tokenizer: OptionalStr = None
    """Folder, s3:// folder or hub id; `bpe:4096` trains a byte-level BPE of that size on the
    data; `bytes` is one token a byte; none takes the model's own (presets: `bpe` of their size)."""
    new_tokens: Texts = ()
    """Token, or list of tokens, that the tokenizer lacks, e.g. `["<|im_start|>", "<|im_end|>"]`:
    they become special tokens, with rows in the embedding and the head that are trained, beside
    adapters too."""
    attention: Literal["auto", "sdpa", "flash", "flex", "varlen", "eager"] = "auto"
    """Attention kernel; auto takes the best that is there."""
    lora: Annotated[Lora | None, BeforeValidator(mapping)] = None
    """Train low-rank adapters on a frozen base; none trains all weights."""
    overrides: Annotated[dict[str, JsonValue], BeforeValidator(mapping)] = Field(
        default_factory=dict
    )
    """Fields of the model's config.json to replace, e.g. `{num_hidden_layers: 4}`."""


class Data(Section):
    path: Text = "stdlib"
    """File, glob, folder, s3:// path, `org/name:config@split#revision` of the hub, or `stdlib`
    (Python's own standard library)."""
    mixture: Annotated[dict[str, Weight], BeforeValidator(mapping)] = Field(default_factory=dict)
    """Several such paths by weight instead of path, e.g. `{a.jsonl: 3, s3://b/c: 1}`: their shares
    of the rows trained on; needs train.max_steps."""
    format: Text = Field(
        default="auto",
        pattern=r"^(auto|text|jsonl|json|csv|tsv|parquet|arrow|hub|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
    )
    """auto, text, jsonl, json (an array), csv, tsv, parquet, arrow, or `mypackage.module:function`,
    which yields records; auto goes by the files' names and first bytes."""
    kind: DataKind = "auto"
    """What is made of a record: text, prompt and completion, or chat; auto goes by its columns
    (docs/data.md lists the shapes)."""
    columns: Annotated[dict[str, Text], BeforeValidator(mapping)] = Field(default_factory=dict)
    """Your columns by the names of known ones, e.g. `{question: problem, answer: solution}`."""
    chat_template: OptionalStr = None
    """Jinja file (or s3://) or `chatml` in place of the tokenizer's own, exported too; `training`:
    trl's training variant of the tokenizer's, for the rows alone (extra `chat`)."""
    reasoning: Literal["train", "mask", "drop"] = "train"
    """The assistant's reasoning: bears loss, is read without loss, or is left out."""
    special_tokens: Literal["text", "control"] = "text"
    """What the text of a control token, such as <|im_start|>, is in your records."""
    seq_len: int = Field(default=512, ge=8, le=1_048_576)
    """Tokens in a row."""
    pack: bool = True
    """Put several documents in a row (attention never crosses them); false: one piece a row."""
    packings: int = Field(default=1, ge=1, le=64)
    """Ways to put documents together in rows: epochs take them in turn, and each takes the room of
    all rows. 1: every epoch has the same rows."""
    truncate: bool = False
    """Cut documents longer than seq_len; false splits them, so that no token is lost."""
    eval_path: OptionalStr = None
    """Held-out data in the same format; none holds out eval_fraction of path."""
    eval_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share held out, 0-1: the last bytes of a single text file, otherwise documents by hash."""
    bad_rows: float = Field(default=0.01, ge=0, le=1)
    """Share of rows, 0-1, that may be unusable; more stops the run, fewer are counted and named."""
    window_bytes: OptionalInt = Field(default=None, ge=1_048_576)
    """Bytes of data, from distant places, that are shuffled and packed together (2**28 is 256 parts
    of 1 MiB); with train.max_steps training starts at the first. none: all rows at once."""
    workers: OptionalInt = Field(default=None, ge=1)
    """Ray Data tasks at once for reading and packing; none takes the CPUs that training leaves."""

    @property
    def weights(self) -> dict[str, float]:
        """Return the paths to train on, with their weights."""
        return self.mixture or {self.path: 1.0}


class Train(TrainSection):
    tokens_per_step: int = Field(default=16_384, ge=8)
    """Global batch in tokens (padding included): rows per optimizer step times seq_len."""
    micro_batch: AutoInt = Field(default=8, ge=1)
    """Rows in one forward and backward on one worker; auto: the most that fit into a worker's
    memory by the plan, half of them after a step that runs out of memory."""
    optimizer: OptimizerName = "adamw"
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
    schedule_from: int = Field(default=0, ge=0)
    """Steps done when the schedule begins: a run that is made longer may have a new one, with a
    warm-up and an end of its own, for the steps to come."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; norms, biases and embeddings have none."""
    freeze: Texts = ()
    """Pattern, or list of patterns, of names of parameters that are not trained, e.g.
    `[model.embed_tokens.*, model.layers.?.*]`: the names of the model's files."""
    lr_by_name: Annotated[dict[str, Weight], BeforeValidator(mapping)] = Field(default_factory=dict)
    """Factors of lr by such patterns, e.g. `{"*.lora_B.*": 16}`; the first that matches counts."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(comma_list)] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log of the softmax's sum in the objective; not in the loss shown."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target, 0-1, spread over the vocabulary; not in the loss shown."""
    router_loss: AutoFloat = Field(default=None, ge=0)
    """Weight of the experts' load-balancing loss in the objective; not in the loss shown. auto:
    router_aux_loss_coef of config.json, whatever its output_router_logits says; 0: none."""
    on_spike: Literal["none", "skip", "stop"] = "none"
    """At a step whose loss is far above those before it, or not finite: skip leaves the weights as
    they are and goes on, takes 8 such losses in a row that lie close together for a new level, and
    ends the run after 16 such steps in a row; stop ends it at once; both name the rows. none: only
    what is not finite ends the run."""
    spike_sigmas: float = Field(default=6.0, gt=0)
    """How many standard deviations above the mean of the last 64 steps a spike is."""
    grad_clip: OptionalFloat = Field(default=1.0, gt=0)
    """Largest global norm of the gradient; none does not clip."""
    precision: Literal["auto", Precision] = "auto"
    """Precision of compute; weights, gradients' sums and optimizer stay fp32. auto: bf16 where
    a short measurement finds it faster, else fp32. fp8: the blocks' matmuls, where GPUs have it."""
    compile: bool = False
    """torch.compile the transformer blocks, one compilation for all of them."""
    loss: OptionalCode = None
    """`mypackage.module:function` that gives the loss of each token from its logits, in place of
    the cross-entropy, which is still the loss shown (docs/own_code.md)."""
    loss_chunk: int = Field(default=4096, ge=0)
    """Tokens whose logits exist at once; 0 holds all logits of a micro-batch."""
    loss_kernel: Literal["chunked", "liger"] = "chunked"
    """chunked: PyTorch's own operations, on any device; liger: the fused kernel of the package
    liger-kernel, on GPUs, with chunks of its own size."""


class Parallel(Section):
    strategy: Strategy = "full_shard"
    """What FSDP shards, with PyTorch's names."""
    replicas: OptionalInt = Field(default=None, ge=1)
    """hybrid_shard: how many copies of the model; none is one per node."""
    activation_checkpointing: Checkpointing = "none"
    """Recompute activations in the backward pass instead of keeping them; selective keeps what
    costs most to recompute for the memory it takes."""
    activation_offload: bool = False
    """Hold what is kept for the backward pass in host memory."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


class LanguageEval(SharedEval):
    prompts: Texts = ()
    """Text, or list `[a, b]` of texts, to continue, or to answer where data.kind is chat: by the
    likeliest tokens at each evaluation of the held-out data, by drawn ones at the end. The report
    shows the answers by step."""
    tasks: Tasks = Field(default_factory=dict)
    """Questions with their answers, by name: a path, or `{path: a.jsonl, score: json}`. The model
    is scored on them before the first step, at each evaluation and at the end (docs/tasks.md)."""
    metrics: Codes = ()
    """`mypackage.module:function` that give a figure of each held-out token from its logits; their
    means are reported beside the held-out loss (docs/own_code.md)."""


class Config(RunConfig):
    """One run."""

    MODULE: ClassVar[str] = "rayapp.finetune"
    PATH_FIELDS: ClassVar[tuple[str, ...]] = (
        "data.path",
        "data.eval_path",
        "data.chat_template",
        "model.path",
        "model.tokenizer",
    )
    RESUME_SAFE: ClassVar[tuple[str, ...]] = (
        "data.workers",
        "train.micro_batch",
        "train.on_spike",
        "train.spike_sigmas",
        "eval.tasks.",
    )
    EXTENSION_FIELDS: ClassVar[tuple[str, ...]] = SCHEDULE

    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    parallel: Parallel = Parallel()
    eval: LanguageEval = LanguageEval()

    @property
    def rows_per_step(self) -> int:
        """Rows of seq_len tokens in one optimizer step, over all workers."""
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch; `auto` must have been replaced by a number."""
        assert self.train.micro_batch is not None, "train.micro_batch=auto is not chosen yet"
        return self.train.micro_batch

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches in one optimizer step, over all workers."""
        return self.rows_per_step // self.micro_batch

    def with_micro_batch(self, size: int) -> Config:
        """Return a copy with `size` rows in a micro-batch."""
        return self.model_copy(
            update={"train": self.train.model_copy(update={"micro_batch": size})}
        )

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (fields, problem) for conflicts between fields that are each valid alone."""
        yield from super().conflicts()
        yield from _batch_and_data(self)
        yield from _techniques(self)


def _batch_and_data(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    train, data = config.train, config.data
    micro_batch = train.micro_batch or 1  # auto takes what divides the step
    unit = micro_batch * data.seq_len
    if train.tokens_per_step % unit:
        field, rows = "train.tokens_per_step", f"{micro_batch} rows x {data.seq_len} tokens"
        problem = indivisible(field, train.tokens_per_step, unit, f"{rows} = {unit}")
        yield (field, "train.micro_batch", "data.seq_len"), problem
    if data.mixture and train.max_steps is None:
        yield (
            ("data.mixture", "train.max_steps"),
            "train.max_steps=none is missing: a data.mixture has no epochs, because its sources "
            "end at different times. Set train.max_steps",
        )
    if data.mixture and data.path != Data().path:
        yield (
            ("data.mixture", "data.path"),
            f"data.path={shown(data.path)} is in conflict: data.mixture also names the data. "
            "Remove one of the two, or put the path into the mixture",
        )
    if data.packings > 1 and (data.mixture or data.window_bytes is not None or not data.pack):
        field = "mixture" if data.mixture else "pack" if not data.pack else "window_bytes"
        yield (
            ("data.packings", f"data.{field}"),
            f"data.packings={data.packings} is in conflict: with data.{field}="
            f"{shown(getattr(data, field))} rows are packed in one way. Set data.packings=1",
        )


def _techniques(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    train, new = config.train, config.model.new_tokens
    if len(set(new) - {""}) < len(new):
        what = "an empty token" if "" in new else "a token twice"
        yield (
            ("model.new_tokens",),
            f"model.new_tokens={shown(list(new))} is not valid: it has {what}. Set distinct texts",
        )
    if train.loss_kernel == "liger" and (train.z_loss or train.label_smoothing):
        yield (
            ("train.loss_kernel", "train.z_loss", "train.label_smoothing"),
            "train.loss_kernel=liger is in conflict: it returns only the objective, which "
            "differs from the loss with train.z_loss or train.label_smoothing. Set "
            "train.loss_kernel=chunked",
        )
    if train.loss is not None and (
        train.z_loss or train.label_smoothing or train.loss_kernel != "chunked"
    ):
        yield (
            ("train.loss", "train.z_loss", "train.label_smoothing", "train.loss_kernel"),
            f"train.loss={train.loss} is in conflict: your function is the objective, so that "
            "train.z_loss, train.label_smoothing and train.loss_kernel have no effect. Remove them",
        )
    if train.freeze and (config.model.lora is not None or config.model.init_from is not None):
        other, why, cure = (
            ("lora", "only the adapters are trained", "Leave train.freeze out")
            if config.model.lora is not None
            else ("init_from", "no checkpoint holds frozen weights", "Set model.path=RUN/model")
        )
        yield (
            ("train.freeze", f"model.{other}"),
            f"train.freeze={shown(list(train.freeze))} is in conflict: with model.{other} {why}. "
            f"{cure}",
        )
    yield from _adapters(config)
    taken = {name.rpartition(":")[2] for name in config.eval.metrics}
    for name in taken & config.eval.tasks.keys():
        yield (
            ("eval.tasks", "eval.metrics"),
            f"eval.tasks.{name} is in conflict: eval.metrics has a function of this name too. Set "
            "another name",
        )


def _adapters(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    train, lora = config.train, config.model.lora
    if lora is None:
        return
    if lora.target_parameters and (lora.dora or lora.dropout):
        name = "dora" if lora.dora else "dropout"
        value = "true" if lora.dora else lora.dropout
        yield (
            ("model.lora.target_parameters", f"model.lora.{name}"),
            f"model.lora.{name}={value} is in conflict: peft has none for adapters of "
            "parameters, as model.lora.target_parameters asks for. Leave one of them out",
        )
    if OPTIMIZERS[train.optimizer].updates == "hidden matrices":
        yield (
            ("model.lora", "train.optimizer"),
            f"train.optimizer={train.optimizer} is in conflict: it updates whole matrices, and an "
            "adapter has two thin factors instead. Set train.optimizer=adamw",
        )
    if lora.quantize != "none" and config.model.from_scratch:
        yield (
            ("model.lora.quantize", "model.from_scratch"),
            f"model.lora.quantize={lora.quantize} is in conflict: model.from_scratch=true has no "
            "weights to hold in 4 bits. Set model.from_scratch=false",
        )
    if lora.quantize != "none" and train.precision == "fp8":
        yield (
            ("model.lora.quantize", "train.precision"),
            f"model.lora.quantize={lora.quantize} is in conflict: train.precision=fp8 also says "
            "how the blocks' matmuls are done. Set train.precision=bf16",
        )
