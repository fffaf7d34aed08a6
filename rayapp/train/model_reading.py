"""Read what the planner needs of a model that it has no formula for, by running it on shapes.

    shape = read(config.to_dict(), seq_len=4096, fp32=False, lora=None)
    shape.parameters, shape.measured.kept         # ask(config, read=read) asks for them itself

transformers builds the whole model on the meta device, so that parameters are counted exactly. Of
each distinct kind of block, the first runs a forward and a backward pass on fake tensors: nothing
is allocated or computed. What autograd saves, what is alive at the peak, and the FLOPs of each
operation are added up. Attention runs as on a GPU, without masks and score matrices, if the model
lets rayapp choose the kernel.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, PretrainedConfig

from rayapp import model
from rayapp.config import Lora
from rayapp.model.attention import takes_any_kernel
from rayapp.model.build import beside_text
from rayapp.model.lora_layers import linear_names
from rayapp.model.names import matching
from rayapp.model.scans import kernel_packages
from rayapp.model.sharding import find_blocks
from rayapp.planner.measured import Counted, Frozen, Measured
from rayapp.planner.shape import Linear, Shape, UnknownShape
from rayapp.train import block_passes
from rayapp.train.optimizer import embedding_tables, hidden_matrices

# Silence torch's traceback: `read` reports the same error in one line.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

LONGEST = 2048  # tokens of the longest row that is run; longer rows are extrapolated linearly


def read(
    config: Mapping[str, Any] | PretrainedConfig, *, seq_len: int, fp32: bool, lora: Lora | None
) -> Shape:
    """Return the shape that a config.json describes (see `planner.question.ReadModel`).

    Raises: UnknownShape: transformers cannot build it, or it cannot run on shapes alone.
    """
    try:
        if not isinstance(config, PretrainedConfig):
            config = AutoConfig.for_model(**config)
        lm = block_passes.build_on_shapes(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnknownShape(f"transformers cannot build the model: {_first_line(error)}") from error
    structure = _structure(lm)
    shape = _shape(lm, config, structure)
    if lora is not None:
        model.add_adapters(lm, lora)
    for parameter in lm.parameters():
        parameter.data = parameter.data.to(torch.float32 if fp32 else torch.bfloat16)
    try:
        return _with_counts(shape, lm, structure, seq_len, adapted=lora is not None)
    except Exception as error:  # any failure of the model's code on fake tensors
        raise UnknownShape(
            f"{config.model_type} does not run on shapes alone: {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error


def count(config: Mapping[str, Any], patterns: Sequence[str]) -> Frozen:
    """Return how many parameters of the model that a config.json describes the patterns name."""
    lm = block_passes.build_on_shapes(AutoConfig.for_model(**config))
    hidden = {id(p) for p in hidden_matrices(lm)}
    tables = {id(p) for p in embedding_tables(lm)}
    named = {id(p): p for pattern in patterns for p in matching(lm.hf, pattern, trained=True)}

    def size(ids: Iterable[int]) -> int:
        return sum(named[each].numel() for each in ids)

    head = id(lm.hf.get_output_embeddings().weight) in named
    return Frozen(size(named), size(hidden & named.keys()), size(tables & named.keys()), head)


@dataclass(frozen=True)
class _Structure:
    """What a model's modules say before adapters are added."""

    blocks: list[nn.Module]
    kinds: dict[int, int]
    """For the first block of each kind, by its number, how many blocks are of that kind."""
    kind_of: list[int]
    """For each block, the number of the first of its kind."""
    in_blocks: int
    """Parameters of all blocks."""
    linears: list[Linear]


def _structure(lm: model.LanguageModel) -> _Structure:
    blocks = find_blocks(lm.hf)
    first: dict[Any, int] = {}
    kind_of = [first.setdefault(_signature(block), n) for n, block in enumerate(blocks)]
    kinds = dict(Counter(kind_of))
    adapted = set(linear_names(lm.hf))
    linears = [
        replace(each, module=each.module and each.name in adapted)
        for n, count in kinds.items()
        for each in _linears(blocks[n], count)
    ]
    inside = {id(p): p.numel() for block in blocks for p in block.parameters()}
    return _Structure(blocks, kinds, kind_of, sum(inside.values()), linears)


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """Return what tells kinds of blocks apart: classes, parameters and settings of all parts."""
    parts = []
    for name, module in block.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and not key.endswith("idx")
        }
        shapes = [(key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False)]
        parts.append((name, type(module), tuple(sorted(settings.items())), tuple(shapes)))
    return tuple(parts)


def _linears(block: nn.Module, count: int) -> Iterator[Linear]:
    """Yield a block's matrices; of experts that are one parameter, all are active."""
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            last, bias = name.rpartition(".")[2], module.bias is not None
            yield Linear(last, module.in_features, module.out_features, bias, blocks=count)
            continue
        for key, parameter in module.named_parameters(recurse=False):
            *copies, rows, columns = (1, *parameter.shape) if parameter.ndim > 1 else (1, 1, 1)
            if min(rows, columns) > 1:  # which of them are inputs makes no difference here
                each = copies[-1]
                yield Linear(key, columns, rows, False, each, each, module=False, blocks=count)


@contextlib.contextmanager
def _one_of_each_kind(
    structure: _Structure, outside: Callable[[bool], None]
) -> Iterator[dict[int, tuple[Any, Any]]]:
    """Inside the block, run the first block of each kind and record what it is called with.

    The others return what the first of their kind has returned. `outside` is told when a block
    begins (False) and ends (True); what follows the last block is not of interest.
    """
    calls: dict[int, tuple[Any, Any]] = {}
    results: dict[int, Any] = {}

    def run(number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        kind = structure.kind_of[number]
        outside(False)
        if kind not in results:
            calls[kind], results[kind] = (args, kwargs), forward(*args, **kwargs)
        outside(number < len(structure.blocks) - 1)
        return results[kind]

    for number, block in enumerate(structure.blocks):
        block.forward = partial(run, number, block.forward)
    try:
        yield calls
    finally:
        for block in structure.blocks:
            del block.forward


def _passes(
    lm: model.LanguageModel, structure: _Structure, length: int
) -> tuple[Counted, dict[int, block_passes.BlockPass]]:
    """Run rows of `length` tokens through the first block of each kind; count for all blocks."""
    state = {"outside": True}
    parameters = {p.untyped_storage()._cdata for p in lm.parameters()}
    shared: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if state["outside"] and storage._cdata not in parameters:
            shared[storage._cdata] = storage
        return tensor

    rows = _rows(lm)
    ids = torch.zeros(rows, length, dtype=torch.long, device=block_passes.CPU)
    around = _one_of_each_kind(structure, lambda outside: state.update(outside=outside))
    with around as calls, saved_tensors_hooks(pack, lambda kept: kept):
        output = lm.hf.base_model(input_ids=ids, use_cache=False)
    hidden_size = lm.hf.config.get_text_config().hidden_size
    blocks = {
        n: block_passes.block_pass(structure.blocks[n], hidden_size, *call)
        for n, call in calls.items()
    }
    del output
    for block in blocks.values():
        shared |= {key: each for key, each in block.shared.items() if key not in parameters}
    total = block_passes.total_of(blocks, structure.kinds, rows * length)
    outside = sum(storage.nbytes() for storage in shared.values())
    return replace(total, kept_outside=outside / (rows * length)), blocks


def _rows(lm: model.LanguageModel) -> int:
    """Return the rows that are run: what broadcasts over rows may copy only where there are two."""
    return 1 if takes_any_kernel(lm.hf.config) else 2


def _shape(lm: model.LanguageModel, config: PretrainedConfig, structure: _Structure) -> Shape:
    """Return the shape without what is counted by running the blocks."""
    head = lm.hf.get_output_embeddings()
    text = config.get_text_config()
    vocabulary, hidden = head.weight.shape
    tied = head.weight is lm.hf.get_input_embeddings().weight
    beside = sum(model.num_parameters(part) for part in beside_text(lm.hf))
    outside = model.num_parameters(lm) - structure.in_blocks - beside
    return Shape(
        model_type=config.model_type,
        hidden=hidden,
        layers=len(structure.blocks),
        heads=getattr(text, "num_attention_heads", None) or 0,
        kv_heads=0,
        head_dim=0,
        intermediate=0,
        vocabulary=vocabulary,
        tied=tied,
        linears=tuple(structure.linears),
        gated=False,
        fp32_norms=False,
        rotary=0.0,
        block_norm_parameters=0,
        final_norm_parameters=outside - (1 if tied else 2) * vocabulary * hidden,
        beside=beside,
    )


def _with_counts(
    shape: Shape, lm: model.LanguageModel, structure: _Structure, seq_len: int, *, adapted: bool
) -> Shape:
    rows, longest = _rows(lm), min(seq_len, LONGEST)
    shortest = max(1, longest // 2)
    with FakeTensorMode(allow_non_fake_inputs=True), block_passes.GroupedOnShapes():
        lm.to_empty(device=block_passes.CPU).train()
        short, before = _passes(lm, structure, shortest)
        long, blocks = _passes(lm, structure, longest)
    counted = _at(seq_len, short, long, longest)
    if shortest < longest:  # what is made of weights alone does not grow with the row
        fixed = {n: block_passes.fixed_bytes(before[n], blocks[n]) / rows for n in blocks}
        every = sum(structure.kinds[n] * size for n, size in fixed.items()), max(fixed.values())
        first, last = _plus(short, every, -1 / shortest), _plus(long, every, -1 / longest)
        counted = _plus(_at(seq_len, first, last, longest), every, rows / seq_len)
    if takes_any_kernel(lm.hf.config):
        flops, attention = counted.flops, _windows(blocks, structure.kinds)
    else:  # its own attention: what grows with the row is attention's
        growth = (long.flops - short.flops) / max(1, longest - shortest)
        flops = long.flops - growth * longest
        attention = ((growth + long.attention_flops / longest, None),)
    routed = max(block.counted.routed_rows for block in blocks.values()) // (rows * longest)
    measured = Measured(
        **vars(counted) | {"flops": flops},
        selective_share=counted.kept_flops / counted.flops,
        parameters=structure.in_blocks,
        largest=max(model.num_parameters(block) for block in structure.blocks),
        attention=attention,
        kernels=sum(structure.kinds[n] * block.counted.kernels for n, block in blocks.items()),
        adapted=adapted,
        kernel_packages=tuple(kernel_packages(lm.hf)),
        whole_logits=not lm.plain_head,
    )
    experts = [
        replace(each, active=min(each.copies, max(1, routed))) if each.copies > 1 else each
        for each in shape.linears
    ]
    return replace(
        shape,
        linears=tuple(experts),
        measured=measured,
        experts=max(each.copies for each in experts),
        active_experts=max(1, routed),
    )


def _at(wanted: int, short: Counted, long: Counted, longest: int) -> Counted:
    """Return what a row of `wanted` tokens counts, on the line through half the length and all."""
    shortest = max(1, longest // 2)
    share = (wanted - shortest) / (longest - shortest) if longest != shortest else 1.0
    pairs = {name: (each, getattr(long, name)) for name, each in vars(short).items()}
    return Counted(**{name: max(0.0, a + share * (b - a)) for name, (a, b) in pairs.items()})


def _plus(counted: Counted, fixed: tuple[float, float], share: float) -> Counted:
    """Return it with a share of the bytes that all blocks keep of any row, and the largest one."""
    every, largest = fixed
    return replace(
        counted,
        kept=counted.kept + share * every,
        largest_kept=counted.largest_kept + share * largest,
        largest_backward=counted.largest_backward + share * largest,
    )


def _windows(
    blocks: Mapping[int, block_passes.BlockPass], kinds: Mapping[int, int]
) -> tuple[tuple[float, int | None], ...]:
    """Add up attention's FLOPs for each attended token, by sliding window."""
    flops_of: dict[int | None, float] = {}
    for number, block in blocks.items():
        for flops, window in block.attention:
            flops_of[window] = flops_of.get(window, 0.0) + kinds[number] * flops
    return tuple((flops, window) for window, flops in flops_of.items())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
