"""Peak bytes on a GPU during a step, term by term.

Memory is computed at eight moments of a step, and the largest is the peak: the start (the root and
the first block are copied out of what was gathered), the forward of the last block but one (three
blocks are gathered) and of the last, the loss (all activations are kept and logits exist), the
start of the blocks' backward (recomputed activations
and gradients on top), its end (gradients of all blocks exist), the backward of the root (embedding,
head and final norm), and the optimizer's step. The bytes that a block keeps for its backward are
counted operation by operation from transformers' modules and PyTorch's autograd.
Tests compare these formulas with the real step on fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from rayapp.config.language import Checkpointing, Precision, Strategy
from rayapp.config.optimizers import OPTIMIZERS, OptimizerName
from rayapp.hardware import GIB
from rayapp.planner.flops import mean_context, model_flops
from rayapp.planner.measured import Frozen
from rayapp.planner.shape import Shape, kept_linears, lora_parameters, targeted

FP32 = 4  # bytes of an fp32 number
LOG_PARTS = 8  # parts of a chunk of logits, one of which has fp32 log-probabilities at a time
LOSS_WORDS = 16_384  # vocabulary rows of the head's gradient that one product computes
# Bytes outside PyTorch's allocator: CUDA context, NCCL's channels, cuBLAS' workspace. Estimate.
CONTEXT_BYTES = 1.3 * GIB
# Bytes that a worker without a GPU holds beside its tensors: 0.5 GiB of Python, torch, transformers
# and Ray; then prefetched rows and gloo's buffers. Measured in the runs of docs/plan.md.
PROCESS_BYTES = 0.8 * GIB
# Bytes that the allocator reserves beyond live tensors, as a fraction of activations, logits and
# gathered parameters: of CUDA's caching allocator an estimate, compared with published runs' GiB;
# of glibc's heap, which keeps what is freed, fitted to the runs on CPUs (both in docs/plan.md).
FRAGMENTATION = {"cuda": 0.05, "cpu": 0.45}
# Bytes per value: nf4 has an fp32 scale per 64 values (bitsandbytes).
BYTES_NF4 = 0.5 + 4 / 64


@dataclass(frozen=True)
class Layout:
    """A language model with its sharding and its training settings."""

    shape: Shape
    shards: int
    """Ranks that each parameter is sharded over: all ranks, those of one replica, or 1."""
    micro_batch: int
    seq_len: int
    strategy: Strategy = "full_shard"
    checkpointing: Checkpointing = "none"
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    compiled: bool = False
    loss_chunk: int = 4096
    frozen: Frozen = field(default_factory=Frozen)
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    lora_experts: tuple[str, ...] = ()
    """Parameters of experts that have adapters."""
    lora_method: str = "LoRA"
    dora: bool = False
    new_tokens: int = 0
    """Tokens with trained rows beside adapters."""
    quantize: str = "none"
    cpu_offload: bool = False
    activation_offload: bool = False
    accumulates: bool = False
    """A step has several micro-batches: from the second one on, gradients are already allocated."""
    kept: tuple[str, ...] | None = None
    """Linears whose results selective checkpointing keeps; None: those of `kept_linears`."""
    on_cpu: bool = False
    """No GPU: CPUs have no kernel that adds bf16 products to an fp32 sum."""
    plain_loss: bool = False
    """All logits at once by torch's cross_entropy, as other frameworks compute the loss."""
    pairs: bool = False
    """The loss is of pairs of answers: torch's cross_entropy, chunk by chunk."""
    reference: bool = False
    """Each micro-batch first has a forward pass of the reference, which is the frozen base."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return self.seq_len

    @property
    def plain_base(self) -> bool:
        """Whether the frozen base of adapters is held whole, outside FSDP, which gathers none."""
        return self.lora_rank is not None and self.shards == 1 and not self.cpu_offload

    @property
    def frees(self) -> bool:
        """Whether a block's gathered parameters are freed between its forward and its backward."""
        return self.strategy in ("full_shard", "hybrid_shard") and not self.plain_base

    @property
    def context(self) -> float:
        """Mean number of tokens that a token attends to, as if each row held one document.

        Documents' lengths are unknown here; those of packed rows are shorter than the row.
        """
        return mean_context([self.seq_len])

    def peak(self) -> Peak:
        """Return the moment of a step with the most live bytes; `with_slack` adds the overhead.

        Raises:
            UnknownShape: a target of LoRA is no linear layer of the blocks.
        """
        return max(_moments(self), key=lambda moment: moment.total)

    def checkpoint_bytes(self) -> float:
        """Return the bytes of a checkpoint: trained parameters and moments, each stored once."""
        return FP32 * self.trainable + _moment_bytes(self, saved=True)

    def model_flops(self) -> float:
        """Return the model FLOPs per training token."""
        adapters = self.lora_rank, self.lora_targets, self.lora_experts
        return model_flops(self.shape, self.context, *adapters)

    @property
    def element(self) -> int:
        """Bytes per number in the compute precision."""
        return FP32 if self.precision == "fp32" else 2

    @property
    def trainable(self) -> int:
        """Number of parameters that have a gradient."""
        if self.lora_rank is None:
            return self.shape.text_parameters - self.frozen.parameters
        rows = self.new_tokens * (1 if self.shape.tied else 2)
        return rows * self.shape.hidden + lora_parameters(
            self.shape, self.lora_rank, self.lora_targets, self.dora, self.lora_experts
        )


@dataclass(frozen=True)
class Peak:
    """The bytes of one rank at its peak: the moment's name and the terms."""

    phase: str
    terms: dict[str, float]

    @property
    def total(self) -> float:
        """Sum of the terms in bytes."""
        return sum(self.terms.values())


def block_bytes(layout: Layout) -> float:
    """Return the bytes that one block keeps per token for its backward, without checkpointing.

    In bf16, with H hidden and I intermediate: a norm keeps its input in fp32, the normalised and
    the scaled values (8 H); attention keeps q, k, v, its result and the fp32 log-sum-exp of each
    head; a gated MLP keeps gate, its activation, up and their product (8 I). Compiled blocks keep
    what matrices give and take, and recompute the rest: a norm keeps its input and its result in
    the compute precision, a gated MLP gate, up and their product.
    """
    shape, e = layout.shape, layout.element
    if shape.measured:  # of blocks that differ, the mean
        whole = shape.measured.products if layout.compiled else shape.measured.kept
        return whole / shape.layers
    hidden, inner = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = e * (2 * queries + 2 * keys) + FP32 * shape.heads
    experts = shape.active_experts
    # qwen3: q and k have a norm per head
    headed = shape.fp32_norms and shape.block_norm_parameters > 2 * hidden
    of_heads = FP32 * (shape.heads + shape.kv_heads)
    if layout.compiled:
        inputs = 2 if shape.fp32_norms else 1  # gpt_neox: both norms take the block's input
        norms, mlp = (2 + inputs) * e * hidden, (3 if shape.gated else 2) * e * inner * experts
        per_head = e * (queries + keys) + of_heads if headed else 0
        return norms + attention + mlp + per_head + FP32 * 2
    if not shape.fp32_norms:  # gpt_neox: LayerNorm, q and k rotated in part, biases, one residual
        return e * (10 * hidden + 2 * inner) + FP32 * shape.heads
    normed = e if layout.lora_rank is None else 0  # a frozen scale needs no normalised values
    norm = (e + normed + (FP32 if e < FP32 else 0)) * hidden  # in fp32 the copy is the input
    mlp = 4 * e * inner * experts
    routed = 2 * e * hidden * experts if shape.experts > 1 else 0
    per_head = 0
    if headed:
        per_head = (normed + (FP32 if e < FP32 else 0)) * (queries + keys) + of_heads
    return 2 * norm + attention + mlp + routed + per_head + FP32 * 2


def kept_bytes(layout: Layout) -> float:
    """Return the bytes that one block keeps on the GPU per token between forward and backward."""
    shape, e = layout.shape, layout.element
    block_input = e * shape.hidden
    if layout.activation_offload:
        return 0.0
    match layout.checkpointing:
        case "none":
            return block_bytes(layout) + _adapter_bytes(layout)
        case "full":
            return float(block_input)
        case "selective":
            if shape.measured:
                return shape.measured.kept_selective / shape.layers
            names = kept_linears(shape) if layout.kept is None else layout.kept
            kept = [linear for linear in shape.linears if linear.name in names]
            results = sum(e * linear.outputs * linear.active for linear in kept)
            attention = e * shape.heads * shape.head_dim + FP32 * shape.heads
            return float(block_input + results + attention)
        case _:
            assert_never(layout.checkpointing)


def with_slack(peak: Peak, *, cuda: bool = True) -> Peak:
    """Add `slack`: the allocator's fragmentation, and CUDA's context or the CPU process."""
    moving = sum(peak.terms[name] for name in ("activations", "logits", "gathers"))
    slack = FRAGMENTATION["cuda"] * moving + CONTEXT_BYTES
    if not cuda:
        slack = FRAGMENTATION["cpu"] * moving + PROCESS_BYTES
    return Peak(peak.phase, {**peak.terms, "slack": slack})


def state_bytes(layout: Layout) -> dict[str, float]:
    """Return the bytes of one rank's parameters, gradients and optimizer state, by name."""
    shape, shards = layout.shape, layout.shards
    trainable = float(layout.trainable)
    frozen = float(FP32 * (shape.beside + layout.frozen.parameters))
    if layout.lora_rank is not None:
        quantized = 0
        if layout.quantize == "nf4":
            quantized = shape.total(lambda linear: linear.parameters, targeted(shape))
        frozen = BYTES_NF4 * quantized + layout.element * (shape.parameters - quantized)
    return {
        "parameters": (frozen + FP32 * trainable) / shards,
        "gradients": FP32 * trainable / shards,
        "optimizer": _moment_bytes(layout) / shards,
    }


def _moment_bytes(layout: Layout, *, saved: bool = False) -> float:
    """Return the bytes of the optimizer's moments, of all ranks: in memory, or `saved`."""
    shape, trainable, adamw = layout.shape, float(layout.trainable), OPTIMIZERS["adamw"]
    chosen = OPTIMIZERS[layout.optimizer]
    match chosen.updates:
        case "all":
            updated = trainable
        case "all but embeddings":
            tables = shape.embedding_parameters if layout.lora_rank is None else 0
            updated = trainable - tables + layout.frozen.tables
        case "hidden matrices":
            every = shape.total(
                lambda each: each.inputs * each.outputs * each.copies, shape.linears
            )
            updated = every - layout.frozen.matrices
        case _:
            assert_never(chosen.updates)
    each = chosen.saved_bytes if saved and chosen.saved_bytes else chosen.moment_bytes
    return each * updated + adamw.moment_bytes * (trainable - updated)


def _adapter_bytes(layout: Layout) -> float:
    """Return the bytes that adapters keep per token and block: the results of their first factor.

    Adapters compute in the compute precision, so peft's cast of the input to the adapter's dtype
    makes no copy.
    """
    shape = layout.shape
    if layout.lora_rank is None or (shape.measured and shape.measured.adapted):
        return 0.0
    adapted = targeted(shape, layout.lora_targets, layout.lora_experts)
    count = shape.total(lambda linear: linear.active, adapted) / shape.layers
    return layout.element * layout.lora_rank * count


class _Gathers(NamedTuple):
    """Bytes of gathered parameters, their buffers and gradients on one rank, by moment."""

    start: float
    forward: float
    last: float
    """The last forward, and the loss."""
    backward: float
    root: float


def _gathers(layout: Layout) -> _Gathers:
    shape, e, trains_all = layout.shape, layout.element, layout.lora_rank is None
    adapters = 0.0 if trains_all else float(layout.trainable)
    base = 0 if layout.plain_base else e
    block = base * shape.block_parameters + e * adapters / shape.layers
    root = float(base * shape.root_parameters)  # embedding, head, final norm: the micro-batch
    blocks = 0.0 if layout.frees else base * shape.all_blocks_parameters + e * adapters
    prefetched = block if layout.frees else 0.0
    # The result of an all-gather stays until the next one is copied out of its own.
    buffer, root_buffer = (block, root) if layout.shards > 1 else (0.0, 0.0)
    trained_root = shape.root_parameters - layout.frozen.tables if trains_all else 0.0
    last = root + blocks + prefetched + buffer
    backward = root + blocks + 2 * prefetched
    if trains_all:  # the gradients of a block's weights, also in fp32, and of the head
        head = 0 if layout.frozen.head else shape.embedding_parameters
        backward += e * (shape.block_parameters + head) + FP32 * shape.block_parameters
    return _Gathers(
        start=root + block + root_buffer + buffer,
        # In the forward of the last block but one, the next block is on its way too.
        forward=last + (buffer if prefetched else 0.0),
        last=last,
        backward=backward,
        # The gathered root is freed; its gradients and their fp32 copy exist. Where ranks hold it
        # whole, it stays, and its gradients are summed into another copy.
        root=(e + FP32) * trained_root * (2 if layout.strategy == "no_shard" else 1),
    )


def _moments(layout: Layout) -> list[Peak]:
    shape, e, tokens = layout.shape, layout.element, layout.tokens
    state = state_bytes(layout)
    state = dict.fromkeys(state, 0.0) if layout.cpu_offload else state
    gradients, gathers = state.pop("gradients"), _gathers(layout)
    before = gradients if layout.accumulates else 0.0
    share = 1.0  # of the gradients, those of blocks
    if layout.lora_rank is None and not layout.frozen.parameters:
        share -= shape.root_parameters / shape.text_parameters
    of_blocks = max(before, gradients * share)
    hidden = float(tokens * e * shape.hidden)
    outside = shape.measured.kept_outside if shape.measured else 0.0
    kept = (kept_bytes(layout) * shape.layers + outside) * tokens
    forward = _forward_bytes(layout) * tokens
    # Final norm, hidden states and their gradient.
    final_norm = 4 * hidden + (tokens * FP32 * shape.hidden if e < FP32 else 0)
    # Of a block's backward: recomputed activations, gradients of activations.
    block = _in_flight_bytes(layout)
    if layout.checkpointing != "none" or layout.activation_offload:
        measured = None if layout.compiled else shape.measured
        largest = measured.largest_kept if measured else block_bytes(layout)
        block += (largest + _adapter_bytes(layout)) * tokens
    moments = {  # gradients, activations, logits, gathers
        "start": (before, hidden, 0.0, gathers.start),
        "forward": (before, kept + forward - kept_bytes(layout) * tokens, 0.0, gathers.forward),
        "last forward": (before, kept + forward, 0.0, gathers.last),
        "loss": (before, kept + final_norm, _logit_bytes(layout), gathers.last),
        "backward": (before, kept + block, 0.0, gathers.backward),
        "end of backward": (of_blocks, kept / shape.layers + block, 0.0, gathers.backward),
        "root": (of_blocks, hidden, 0.0, gathers.root),
        "optimizer": (gradients, 0.0, 0.0, 0.0),
    }
    names = ("gradients", "activations", "logits", "gathers")
    named = {moment: dict(zip(names, terms, strict=True)) for moment, terms in moments.items()}
    return [Peak(moment, {**state, **terms}) for moment, terms in named.items()]


def _forward_bytes(layout: Layout) -> float:
    """Return the bytes per token that a block's forward makes beside what it keeps, at its most."""
    shape, e, kept = layout.shape, layout.element, layout.checkpointing == "none"
    if shape.measured:
        return shape.measured.forward if kept else shape.measured.forward_alone
    adapted = layout.lora_rank is not None
    inner = e * shape.intermediate * shape.active_experts
    if kept:  # of a wide layer, the results of its matrix and of its adapter, before their sum
        return inner if adapted else 0.0
    wide = 3 if shape.gated else 2  # the activation, the other matrix and their product
    if shape.experts > 1:  # both matrices are one product; each expert's rows are copied
        return 4 * inner + e * shape.hidden * (2 + shape.active_experts)
    return (wide + (1 if adapted else 0)) * inner + 2 * e * shape.hidden


def _in_flight_bytes(layout: Layout) -> float:
    """Return the bytes of the gradients of activations at the peak of a block's backward."""
    shape = layout.shape
    if shape.measured and layout.checkpointing != "none":  # beside a block that is recomputed
        measured = shape.measured
        return (measured.largest_backward - measured.largest_kept) * layout.tokens
    if shape.measured:
        return shape.measured.in_flight * layout.tokens
    widest = max(linear.active * linear.outputs for linear in shape.linears)
    return float(2 * layout.tokens * layout.element * (shape.hidden + widest))


def _logit_bytes(layout: Layout) -> float:
    """Return the bytes of the logits that exist at once, and of the head's gradient."""
    shape, e, tokens = layout.shape, layout.element, layout.tokens
    if layout.plain_loss:  # bf16 logits, an fp32 copy, its log-softmax and the gradient
        return tokens * shape.vocabulary * (e + 3 * FP32)
    chunk = min(layout.loss_chunk or tokens, tokens)
    if layout.pairs:
        return chunk * shape.vocabulary * (e + 3 * FP32)
    # A part's log-probabilities and, in bf16, its copy before them; compiled, neither is stored.
    fp32_logits = 0 if layout.compiled else FP32 * (2 if e < FP32 else 1) / LOG_PARTS
    if shape.measured and shape.measured.whole_logits:  # and their gradient; a chunk's in fp32
        return 2 * e * tokens * shape.vocabulary + fp32_logits * chunk * shape.vocabulary
    logits = chunk * shape.vocabulary * (e + fp32_logits)
    if layout.new_tokens:  # a copy of the head has columns for them
        return logits + e * shape.vocabulary * (shape.hidden + layout.new_tokens)
    if layout.lora_rank is not None or layout.frozen.head:
        return logits
    # On CPUs, a product that is added to the head's fp32 gradient; after the loss, its cast.
    head = shape.embedding_parameters
    product = e * min(head, LOSS_WORDS * shape.hidden) if e < FP32 and layout.on_cpu else 0
    cast = e * head if e < FP32 else 0
    return max(logits, chunk * shape.vocabulary * e + product, cast) + FP32 * head
