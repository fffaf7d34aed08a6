"""The description of a run that fine-tunes a language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from rayapp.config.fields import (
    ABOUT_PAIRS,
    WITH_REFERENCE,
    AutoBool,
    AutoFloat,
    AutoInt,
    Beta,
    Codes,
    DataKind,
    Objective,
    OptionalCode,
    OptionalFloat,
    OptionalInt,
    OptionalStr,
    Reference,
    Section,
    Text,
    Texts,
    Weight,
    comma_list,
    mapping,
)
from rayapp.config.lora import Lora
from rayapp.config.optimizers import OPTIMIZERS, OptimizerName, TrainSection
from rayapp.config.sections import Eval as SharedEval
from rayapp.config.sections import RunConfig, indivisible
from rayapp.config.tasks import LOSSES, Tasks
from rayapp.config.text import shown

Precision = Literal["fp32", "bf16", "fp8"]
Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
Checkpointing = Literal["none", "full", "selective"]


class Model(Section):
    path: Text = "tiny"
    """The model to train: a Hugging Face model folder, an adapter folder or a GGUF file (local or
    s3://), a hub id, or a preset such as `tiny`."""
    adapter: Literal["train", "merge"] = "train"
    """Use of an adapter in path. train: continue to train it with its own `lora` settings. merge:
    add it to its base, then train all weights or new adapters (`lora`)."""
    init_from: OptionalStr = None
    """Start with the weights of another run's checkpoint: RUN (its newest usable checkpoint) or
    RUN@STEP. RUN is a folder, a name in run.storage or an s3:// URL; path names the same model."""
    from_scratch: bool = False
    """Start from random weights with the shape of this model; required for every preset that has no
    weights, except `tiny`."""
    tokenizer: OptionalStr = None
    """Folder, s3:// folder or hub id. bpe:4096: train a byte-level BPE of that size on the data.
    bytes: one token per byte. none: the model's tokenizer (presets: a `bpe` of their size)."""
    new_tokens: Texts = ()
    """Token, or list of tokens, to add to the tokenizer, e.g. `["<|im_start|>", "<|im_end|>"]`.
    They become special tokens; their embedding and output head rows are trained, also with LoRA."""
    attention: Literal["auto", "sdpa", "flash", "flex", "varlen", "eager"] = "auto"
    """Attention kernel; auto: the best kernel that is available."""
    lora: Annotated[Lora | None, BeforeValidator(mapping)] = None
    """Train low-rank adapters on a frozen base; none: train all weights."""
    overrides: Annotated[dict[str, JsonValue], BeforeValidator(mapping)] = Field(
        default_factory=dict
    )
    """Values that replace fields of the model's config.json, e.g. `{num_hidden_layers: 4}`."""


class Data(Section):
    path: Text = "stdlib"
    """The training data: a file, glob, folder, s3:// path, hub data set
    (`org/name:config@split#revision`), or `stdlib` (the source of Python's standard library)."""
    mixture: Annotated[dict[str, Weight], BeforeValidator(mapping)] = Field(default_factory=dict)
    """Several paths with weights, in place of path, e.g. `{a.jsonl: 3, s3://b/c: 1}`. The weights
    are shares of the training rows. Requires train.max_steps."""
    format: Text = Field(
        default="auto",
        pattern=r"^(auto|text|jsonl|json|csv|tsv|parquet|arrow|hub|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
    )
    """auto, text, jsonl, json (an array), csv, tsv, parquet, arrow, or `mypackage.module:function`,
    which yields records. auto: detect the format from the file names and the first bytes."""
    kind: DataKind = "auto"
    """Kind of the records: text, prompt (with completion) or chat; preference: pairs of answers as
    texts, chat_preference: as chats; unpaired, chat_unpaired: answers that are good or bad. auto:
    detect the kind from the columns (docs/data.md)."""
    columns: Annotated[dict[str, Text], BeforeValidator(mapping)] = Field(default_factory=dict)
    """Known column names and your names for them, e.g. `{question: problem, answer: solution}`."""
    chat_template: OptionalStr = None
    """Replaces the tokenizer's chat template: a Jinja file (local or s3://) or `chatml`, exported
    too. training: trl's training variant of the template, for rows only (extra `chat`)."""
    reasoning: Literal["train", "mask", "drop"] = "train"
    """The assistant's reasoning. train: it bears loss. mask: no loss. drop: it is left out."""
    special_tokens: Literal["text", "control"] = "text"
    """How control tokens such as <|im_start|> in your records are tokenised."""
    seq_len: int = Field(default=512, ge=8, le=1_048_576)
    """Number of tokens in a row."""
    pack: bool = True
    """Pack several documents into a row; attention never crosses them. false: one piece per row."""
    packings: int = Field(default=1, ge=1, le=64)
    """Number of packings of the documents into rows; epochs use them in turn. Each packing needs
    storage for all rows. 1: every epoch has the same rows."""
    truncate: bool = False
    """Cut documents longer than seq_len; false: split them, so that no token is lost."""
    eval_path: OptionalStr = None
    """Held-out data in the same format; none: hold out eval_fraction of path."""
    eval_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Fraction held out, 0-1: the last bytes of a single text file, otherwise documents by hash."""
    bad_rows: float = Field(default=0.01, ge=0, le=1)
    """Maximum fraction of unusable records, 0-1; more stop the run, fewer are counted and named."""
    window_bytes: OptionalInt = Field(default=None, ge=1_048_576)
    """Shuffle and pack the data in windows of this many bytes from all over it (2**28: 256 parts of
    1 MiB). With train.max_steps, training starts after the first. none: all rows at once."""
    workers: OptionalInt = Field(default=None, ge=1)
    """Number of Ray Data tasks that read and pack; none: use the CPUs that training leaves free."""

    @property
    def weights(self) -> dict[str, float]:
        """Return the paths to train on, with their weights."""
        return self.mixture or {self.path: 1.0}


class Train(TrainSection):
    tokens_per_step: int = Field(default=16_384, ge=8)
    """Global batch in tokens (padding included): rows per optimizer step times seq_len."""
    micro_batch: AutoInt = Field(default=None, ge=1)
    """Rows per forward and backward pass on one worker. auto: the largest number that the plan
    expects to fit into memory; it is halved after a step that runs out of memory."""
    objective: Objective = "sft"
    """sft: the cross-entropy of the labels. dpo, ipo, orpo, simpo: the loss of pairs of a chosen
    and a rejected answer. kto: the loss of answers that are good or bad (docs/preference.md)."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the preference: orpo weighs the odds ratio with it, the others scale the
    log-probabilities by it. The papers use 0.1, and 2 to 10 for simpo."""
    margin: float = Field(default=0.5, ge=0)
    """Margin between the rewards of the two answers that simpo asks for (its gamma)."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's mean cross-entropy, added to dpo, ipo or simpo; orpo has it."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the bad answers in kto; the good ones have 1. Set the number of good answers over
    that of bad ones where one of the two is rare."""
    optimizer: OptimizerName = "adamw"
    """adamw8bit: AdamW with 8-bit moments (torchao). muon: Muon for the matrices of the blocks and
    AdamW for all other parameters, with the same lr."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate of the cosine, linear and wsd schedules, as a fraction of lr, 0-1."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; norms, biases and embeddings are not decayed."""
    freeze: Texts = ()
    """Pattern, or list of patterns, of parameters to freeze, by their names in the model's files,
    e.g. `[model.embed_tokens.*, model.layers.?.*]`."""
    lr_by_name: Annotated[dict[str, Weight], BeforeValidator(mapping)] = Field(default_factory=dict)
    """Factors of lr by name pattern, e.g. `{"*.lora_B.*": 16}`; the first match is used."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(comma_list)] = (0.9, 0.95)
    """AdamW's beta1 and beta2, the decay rates of its two moments."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the z-loss (squared log of the softmax's sum); not in the displayed loss."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the target, 0-1, spread over the vocabulary; not in the displayed loss. With dpo
    and simpo: fraction of the pairs, below 0.5, that are taken to be the wrong way round."""
    router_loss: AutoFloat = Field(default=None, ge=0)
    """Weight of the experts' load-balancing loss in the objective; not in the displayed loss. auto:
    router_aux_loss_coef of config.json, whatever output_router_logits is. 0: no such loss."""
    grad_clip: OptionalFloat = Field(default=1.0, gt=0)
    """Clip the gradient to this global norm; none: do not clip."""
    precision: Literal["auto", Precision] = "auto"
    """Compute precision; weights, gradient sums and optimizer state stay fp32. auto: bf16 if a
    short measurement finds it faster, else fp32. fp8: matmuls of the blocks, on GPUs with fp8."""
    compile: AutoBool = None
    """Compile the transformer blocks with torch.compile, once for all of them, and the loss. auto:
    if the run is long enough for compiled steps to save more time than the compilation takes."""
    loss: OptionalCode = None
    """`mypackage.module:function` that computes the loss of each token from its logits; it replaces
    the cross-entropy, which remains the displayed loss (docs/own_code.md)."""
    loss_chunk: int = Field(default=4096, ge=0)
    """Number of tokens whose logits are in memory at once; 0: all tokens of a micro-batch."""
    loss_kernel: Literal["chunked", "liger"] = "chunked"
    """chunked: plain PyTorch operations, on any device. liger: the fused kernel of the package
    liger-kernel, on GPUs; it chooses its own chunk size."""


class Parallel(Section):
    strategy: Literal["auto", Strategy] = "auto"
    """What FSDP shards; the names are PyTorch's. auto: the fastest strategy that the plan expects
    to fit into memory."""
    replicas: OptionalInt = Field(default=None, ge=1)
    """Number of model replicas for hybrid_shard; none: one per node."""
    activation_checkpointing: Checkpointing = "none"
    """Recompute activations in the backward pass instead of keeping them. full: recompute all.
    selective: keep the activations that are expensive to recompute for the memory they need."""
    activation_offload: bool = False
    """Keep the saved activations in host memory."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""


class LanguageEval(SharedEval):
    prompts: Texts = ()
    """Text, or list `[a, b]` of texts, that the model continues, or answers if data.kind is chat:
    greedy at each held-out evaluation, sampled at the end. The report shows the answers by step."""
    tasks: Tasks = Field(default_factory=dict)
    """Questions with answers, by task name: a path, or `{path: a.jsonl, score: json}`. The model is
    scored before the first step, at each evaluation and at the end (docs/tasks.md)."""
    metrics: Codes = ()
    """List of `mypackage.module:function` that compute a metric of each held-out token from its
    logits. The mean of each metric is reported with the held-out loss (docs/own_code.md)."""


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
    RESUME_SAFE = (*RunConfig.RESUME_SAFE, "train.micro_batch", "eval.tasks.")

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
    def strategy(self) -> Strategy:
        """What FSDP shards; full_shard where nothing has replaced `auto`."""
        return "full_shard" if self.parallel.strategy == "auto" else self.parallel.strategy

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches in one optimizer step, over all workers."""
        return self.rows_per_step // self.micro_batch

    def with_micro_batch(self, size: int) -> Config:
        """Return a copy with `size` rows in a micro-batch."""
        return self.with_fields("train", micro_batch=size)

    @property
    def evaluated(self) -> dict[str, bool]:
        """The figures of an evaluation by name, each with whether a higher one is better."""
        tasks = self.eval.tasks.items()
        of_pairs = self.train.objective != "sft"
        known = super().evaluated | (dict.fromkeys(ABOUT_PAIRS, True) if of_pairs else {})
        return known | {name: task.score not in LOSSES for name, task in tasks}

    def reference(self, adapter: object = None) -> Reference | None:
        """Return where preferences have their reference from, None without one.

        `adapter` is what model.path holds of one, None if it is a base model.
        """
        if self.train.objective not in WITH_REFERENCE:
            return None
        intact = self.origin is None and (adapter is None or self.model.adapter == "merge")
        new = self.model.lora is not None and not self.model.new_tokens
        return "adapters off" if new and intact else "computed before"

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
            f"{shown(getattr(data, field))} there is only one packing. Set data.packings=1",
        )


def _techniques(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    train, new = config.train, config.model.new_tokens
    if len(set(new) - {""}) < len(new):
        what = "contains an empty token" if "" in new else "contains a token twice"
        yield (
            ("model.new_tokens",),
            f"model.new_tokens={shown(list(new))} is not valid: it {what}. Set distinct texts",
        )
    if train.loss_kernel == "liger" and (train.z_loss or train.label_smoothing):
        yield (
            ("train.loss_kernel", "train.z_loss", "train.label_smoothing"),
            "train.loss_kernel=liger is in conflict: the kernel returns only the objective, and "
            "train.z_loss and train.label_smoothing make the displayed loss differ from it. Set "
            "train.loss_kernel=chunked",
        )
    if train.loss is not None and (
        train.z_loss or train.label_smoothing or train.loss_kernel != "chunked"
    ):
        yield (
            ("train.loss", "train.z_loss", "train.label_smoothing", "train.loss_kernel"),
            f"train.loss={train.loss} is in conflict: your function is the objective, so "
            "train.z_loss, train.label_smoothing and train.loss_kernel have no effect. Remove them",
        )
    if train.freeze and (config.model.lora is not None or config.model.init_from is not None):
        other, why, cure = (
            ("lora", "only the adapters are trained", "Remove train.freeze")
            if config.model.lora is not None
            else ("init_from", "checkpoints contain no frozen weights", "Set model.path=RUN/model")
        )
        yield (
            ("train.freeze", f"model.{other}"),
            f"train.freeze={shown(list(train.freeze))} is in conflict: with model.{other} {why}. "
            f"{cure}",
        )
    yield from _preference(config)
    yield from _adapters(config)
    taken = {name.rpartition(":")[2] for name in config.eval.metrics}
    for name in taken & config.eval.tasks.keys():
        yield (
            ("eval.tasks", "eval.metrics"),
            f"eval.tasks.{name} is in conflict: eval.metrics has a function with the same name. "
            "Rename one of the two",
        )


def _preference(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    train = config.train
    if train.sft_weight and train.objective not in ("dpo", "ipo", "simpo"):
        yield (
            ("train.objective", "train.sft_weight"),
            f"train.sft_weight={train.sft_weight} is in conflict: only dpo, ipo and simpo take it. "
            "Remove it",
        )
    if train.objective == "sft":
        return
    why = f"is in conflict: train.objective={train.objective} is a loss of whole answers"
    others = {
        "loss": (train.loss is not None, f"train.loss={train.loss}"),
        "z_loss": (train.z_loss > 0, f"train.z_loss={train.z_loss}"),
        "loss_kernel": (train.loss_kernel != "chunked", f"train.loss_kernel={train.loss_kernel}"),
    }
    for name, (is_set, value) in others.items():
        if is_set:
            yield ("train.objective", f"train.{name}"), f"{value} {why}. Remove it"
    smoothed = train.label_smoothing
    if smoothed and (train.objective not in ("dpo", "simpo") or smoothed >= 0.5):
        yield (
            ("train.objective", "train.label_smoothing"),
            f"train.label_smoothing={smoothed} is in conflict: only dpo and simpo take it, below "
            "0.5. Set train.label_smoothing=0",
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
            f"model.lora.{name}={value} is in conflict: peft does not support it for "
            "adapters of parameters (model.lora.target_parameters). Remove one of the two",
        )
    if OPTIMIZERS[train.optimizer].updates == "hidden matrices":
        yield (
            ("model.lora", "train.optimizer"),
            f"train.optimizer={train.optimizer} is in conflict: it updates whole matrices, but an "
            "adapter consists of two low-rank factors. Set train.optimizer=adamw",
        )
    if lora.quantize != "none" and config.model.from_scratch:
        yield (
            ("model.lora.quantize", "model.from_scratch"),
            f"model.lora.quantize={lora.quantize} is in conflict: with model.from_scratch=true "
            "there are no weights to hold in 4 bits. Set model.from_scratch=false",
        )
    if lora.quantize != "none" and train.precision == "fp8":
        yield (
            ("model.lora.quantize", "train.precision"),
            f"model.lora.quantize={lora.quantize} is in conflict: train.precision=fp8 also sets "
            "the precision of the blocks' matmuls. Set train.precision=bf16",
        )
