"""Build a language model on one rank: apply each technique in the right order, make the optimizers.

parts = make_parts(spec, torch.device("cuda"))
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.exc import TorchDynamoException

from rayapp import model
from rayapp.config import Config
from rayapp.config.code import load_code
from rayapp.config.fields import LABEL
from rayapp.data import tokens
from rayapp.data.token_rows import step_rows
from rayapp.model.activations import checkpoint_activations, offload_activations
from rayapp.model.attention import attention_problem, choose_attention
from rayapp.model.build import Loss
from rayapp.model.kernels import CompileGain, compile_blocks, measure_compile, use_float8
from rayapp.model.lora_layers import hold_in_4_bits, takes_4_bits, unknown_targets, without_adapters
from rayapp.model.names import described, freeze, lr_factors
from rayapp.planner.trained import vocabulary_of
from rayapp.train.engine import inputs
from rayapp.train.loss import chunked_cross_entropy, liger_cross_entropy
from rayapp.train.optimizer import make_optimizers
from rayapp.train.own_code import TokenFunction, columns_of, own_loss, token_sums
from rayapp.train.preference import PreferenceLoss
from rayapp.train.spec import LanguageSpec


@dataclass
class Parts:
    """The model, optimizers and tokenizer of one rank."""

    lm: model.LanguageModel
    optimizers: list[torch.optim.Optimizer]
    source: model.ModelSource
    tokenizer: Any
    head: OutputHead


class OutputHead:
    """The output layer: returns (objective, loss).

    While `whole` it returns the logits of all positions [b, S, V] twice. A loss of the user's that
    names columns is given their `values`, [columns, b, S]; rows without any, which no record of the
    training is in (tasks, checks of the model), have cross-entropy alone, and so have rows without
    pairs of `answers`.
    """

    def __init__(self, config: Config) -> None:
        train = config.train
        self.whole = False
        plain = partial(chunked_cross_entropy, chunk=train.loss_chunk, compiled=bool(train.compile))
        self.loss: Loss = partial(plain, z_loss=train.z_loss, label_smoothing=train.label_smoothing)
        if train.loss_kernel == "liger":
            self.loss = liger_cross_entropy
        self.cross_entropy, self.columns = self.loss, tuple[str, ...]()
        self.of_pairs: PreferenceLoss | None = None
        if train.objective != "sft":
            self.cross_entropy = self.loss = plain
            self.of_pairs = PreferenceLoss(
                train.objective,
                train.beta,
                train.margin,
                train.sft_weight,
                train.label_smoothing,
                train.undesirable_weight,
                train.loss_chunk,
            )
        if train.objective == "kto":
            self.columns = (LABEL,)
        if train.loss is not None:
            function = load_code("train.loss", train.loss, checked=True)
            what = f"train.loss={train.loss}"
            self.loss = partial(own_loss, function=function, what=what, chunk=train.loss_chunk)
            self.columns = columns_of(function)
        self.own = None if train.loss is None else train.loss.rpartition(":")[2]
        """The name of the user's loss, whose sums are then the objective."""
        self.metrics: dict[str, TokenFunction] = {
            name: load_code("eval.metrics", name, checked=True) for name in config.eval.metrics
        }
        self.metric_sums: torch.Tensor | None = None
        """Set to zeros [metrics] to have the metrics of each batch added."""
        self.failed: set[str] = set()
        """The metrics that have raised an error on this rank."""

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        labels: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        each: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        answers: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
        kl: float = 0.0,
    ) -> tuple[Any, ...]:
        if self.whole:
            logits = hidden
            if weight is not None:
                logits = torch.nn.functional.linear(hidden, weight, bias)
            return logits, logits
        more: dict[str, Any]
        columns = {} if values is None else dict(zip(self.columns, values, strict=True))
        if self.metric_sums is not None:
            self.metric_sums += token_sums(
                self.metrics, hidden, weight, labels, bias, failed=self.failed, columns=columns
            )
        if self.of_pairs is not None and answers is not None:
            more = {"answers": answers, "reference": reference, "each": each}
            if values is not None:
                more |= {"desirable": values[0], "kl": kl}
            return self.of_pairs(hidden, weight, labels, bias, **more)
        if self.columns and not columns:
            return self.cross_entropy(hidden, weight, labels, bias, each=each)
        more = {"columns": columns} if columns else {}
        return self.loss(hidden, weight, labels, bias, each=each, **more)


def make_parts(spec: LanguageSpec, device: torch.device) -> Parts:
    """Build the model on the meta device, shard it, fill its shards and make the optimizers."""
    config = spec.config
    source = model.resolve(config.model.path)
    tokenizer = tokens.load_tokenizer(spec.tokenizer_url)
    head = OutputHead(config)
    shape = model_shape(source, config, tokens.num_ids(tokenizer))
    lora, parallel = config.model.lora, config.parallel
    compute = compute_dtype(config)
    lm = model.build(
        shape,
        loss=head,
        dtype=torch.float32 if lora is None else compute,  # frozen weights need no fp32 master copy
        attention=choose_attention(config.model.attention, shape, device.type, compute),
        router_weight=config.train.router_loss,
    )
    lm.shows_objective = config.train.loss is not None
    if config.reference(source.adapter) == "adapters off":
        lm.as_reference = partial(without_adapters, lm.hf)
    # The order matters: adapters wrap linear layers, and float8 then replaces those that compute.
    # Activation checkpointing comes before sharding, which changes the class of a block to FSDP's;
    # compile and offload apply to the forward of that class.
    if lora is not None:
        rows = tokenizer.convert_tokens_to_ids(list(config.model.new_tokens))
        model.add_adapters(lm, lora, rows)
        if lora.quantize == "nf4":
            hold_in_4_bits(lm, compute)
    freeze(lm.hf, config.train.freeze)
    if config.train.precision == "fp8":
        use_float8(lm, device)
    checkpoint_activations(lm, parallel.activation_checkpointing)
    model.shard(
        lm,
        _mesh(config, device),
        strategy=config.strategy,
        param_dtype=None if compute == torch.float32 else compute,
        cpu_offload=parallel.cpu_offload,
    )
    if config.train.compile:
        compile_blocks(lm)
    if parallel.activation_offload:
        offload_activations(lm)
    if source.preset or config.model.from_scratch:
        model.init_weights(lm, config.run.seed, device)
    else:
        model.load_weights(lm, source, device, new=_new_tokens(config, source, tokenizer))
    adapter, merged = source.adapter, config.model.adapter == "merge"
    if adapter is not None:
        (model.merge_adapters if merged else model.load_adapters)(lm, adapter)
    if lora is not None and (adapter is None or merged):
        model.init_adapters(lm, config.run.seed)
    optimizers = make_optimizers(
        config.train.optimizer,
        lm,
        lr=config.train.lr,
        weight_decay=config.train.weight_decay,
        betas=config.train.betas,
        factors=lr_factors(lm.hf, config.train.lr_by_name),
    )
    return Parts(lm.train(), optimizers, source, tokenizer, head)


def _mesh(config: Config, device: torch.device) -> Any:
    parallel = config.parallel
    hybrid = config.strategy == "hybrid_shard"
    replicas = (parallel.replicas or model.num_nodes()) if hybrid else 1
    return model.device_mesh(device.type, strategy=config.strategy, replicas=replicas)


def exact_base(config: Config, parts: Parts, device: torch.device) -> model.LanguageModel | None:
    """Read the frozen base again if training holds it rounded, in host memory; None if it does not.

    A merged model so has the source's own values where no adapter is.
    """
    lm, source = parts.lm, parts.source
    stored, held = lm.source_dtype or torch.float32, compute_dtype(config)
    drawn = source.preset or config.model.from_scratch
    if drawn or torch.promote_types(stored, held) == held:
        return None
    shape = model_shape(source, config, tokens.num_ids(parts.tokenizer))
    base = model.build(shape, loss=model.no_loss, dtype=stored, attention="eager")
    mesh = _mesh(config, device)
    model.shard(base, mesh, strategy=config.strategy, cpu_offload=True)
    model.load_weights(base, source, device, new=_new_tokens(config, source, parts.tokenizer))
    if source.adapter is not None and config.model.adapter == "merge":
        model.merge_adapters(base, source.adapter)
    return base


def _new_tokens(config: Config, source: model.ModelSource, tokenizer: Any) -> dict[int, list[int]]:
    """Return the pieces of the new tokens; none of an adapter's, which holds their rows."""
    theirs = source.adapter.tokens if source.adapter else ()
    pieces = tokens.pieces(tokenizer, config.model.new_tokens)
    return {token: list[int]() for token in theirs} | pieces


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype that the blocks compute in; with fp8, that of all but the float8 layers."""
    return torch.float32 if config.train.precision == "fp32" else torch.bfloat16


def compile_gain(spec: LanguageSpec, parts: Parts, device: torch.device) -> CompileGain | None:
    """Measure what compiling a block gains on this rank's first rows; rank 0 prints it.

    Returns None if train.compile is off, there are no steps, or `auto` has chosen to compile and
    this machine cannot, e.g. without a C++ compiler: the blocks then stay eager.
    """
    if not spec.config.train.compile or not spec.order.num_steps:
        return None
    rank = dist.get_rank()
    rows = step_rows(spec.data.rows("train"), spec.order, 0, rank, dist.get_world_size())
    try:
        gain = measure_compile(parts.lm, inputs(rows, 0, device))
    except TorchDynamoException as error:
        if "compile" not in spec.auto:
            raise
        torch.compiler.set_stance("force_eager")
        if rank == 0:
            why = str(error).strip().splitlines()[0]
            print(f"compile: not possible here, and so slower: {why}", flush=True)
        return None
    if rank == 0:
        print(gain, flush=True)
    return gain


def technique_problems(config: Config, source: model.ModelSource, device_type: str) -> list[str]:
    """Return the settings that this machine's software or the workers' kind of device cannot do.

    A worker checks what depends on the GPU itself (`model.Unavailable`).
    """
    problems = []
    if device_type != "cuda":
        kernel = config.model.attention
        dtype = compute_dtype(config)
        if problem := attention_problem(kernel, source.config, device_type, dtype):
            problems.append(f"model.attention={kernel} is not available: {problem}")
        why = "is not available: the workers have no GPU. Set"
        if config.train.precision == "fp8":
            problems.append(f"train.precision=fp8 {why} train.precision=auto")
        if config.train.loss_kernel == "liger":
            problems.append(f"train.loss_kernel=liger {why} train.loss_kernel=chunked")
    lora = config.model.lora
    in_4_bits = lora is not None and lora.quantize == "nf4"
    needed = {
        "bitsandbytes": ("model.lora.quantize=nf4", in_4_bits, "gpu"),
        "torchao": ("train.optimizer=adamw8bit", config.train.optimizer == "adamw8bit", "gpu"),
        "liger_kernel": ("train.loss_kernel=liger", config.train.loss_kernel == "liger", "liger"),
    }
    for package, (setting, wanted, extra) in needed.items():
        if wanted and importlib.util.find_spec(package) is None:
            problems.append(
                f"{setting} is not available: the package {package} is not installed. "
                f"Install rayapp[{extra}], or {package.replace('_', '-')}"
            )
    if in_4_bits and source.preset:
        problems.append(
            f"model.lora.quantize=nf4 is in conflict: the preset model.path={source.name} has no "
            "weights to hold in 4 bits. Set model.lora.quantize=none, or model.path to a folder"
        )
    by_name = bool(config.train.freeze or config.train.lr_by_name)
    of_lora = lora is not None and bool(lora.targets or lora.target_parameters or in_4_bits)
    if not (by_name or of_lora):
        return problems
    lm = model.build(overridden(source, config), loss=model.no_loss, attention="eager")
    if lora is not None:
        problem = unknown_targets(lora, lm.hf)
        problems += [problem] if problem else []
        if in_4_bits and not takes_4_bits(lm.hf):
            problems.append(
                f"model.lora.quantize=nf4 is not available: no layer of {lm.hf.config.model_type} "
                "is an nn.Linear of a width that 64 divides. Set model.lora.quantize=none"
            )
        if problem:
            return problems
        model.add_adapters(lm, lora)
    return problems + described(config, lm.hf)[1]


def model_shape(source: model.ModelSource, config: Config, size: int | None) -> Any:
    """Return the model's config with the run's overrides and its vocabulary size.

    `size` is the size of the tokenizer, None if it is still to be trained (`vocabulary_of`).
    """
    shape = overridden(source, config)
    if source.preset or config.model.new_tokens:
        text = shape.get_text_config()
        own, preset = text.vocab_size, source.preset
        text.vocab_size = vocabulary_of(config, own, preset=preset, tokens=size)
    return shape


def overridden(source: model.ModelSource, config: Config) -> Any:
    """Return a copy of the model's config with the run's overrides."""
    shape = copy.deepcopy(source.config)
    for name, value in config.model.overrides.items():
        setattr(shape.get_text_config(), name, value)
    return shape
