"""Check and read a folder of safetensors; each rank reads only what its own shards need.

    for problem in problems(source, from_scratch=False): print(problem)   # headers only, cheap
    stats = load_weights(model, source, device)      # stats.bytes_read is about size / world

Tensors on disk are row-major, so a rank's rows of a tensor are a single byte range. transformers'
conversion tables map names on disk to parameter names: most tensors are renamed, some are converted
(Mixtral's experts are stored one by one and trained as one 3-D parameter). `_plan` runs every
conversion on meta tensors first, which finds missing tensors and wrong shapes before any data is
read. Some conversions need whole tensors; then every rank reads those.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from rayapp.model.build import State, Wrapper, base_state, build, no_loss
from rayapp.model.files import ShardReader, Stored, read_headers
from rayapp.model.init import allocate, fill, local_part, local_slice
from rayapp.model.quantize import Linear4bit
from rayapp.model.source import ModelSource
from rayapp.presets import PRESETS

READS_AT_ONCE = 8  # limits memory to as many slices, and hides S3's latency
MAX_LAYERS = 10_000
MAX_NAMED = 5  # at most this many tensors are named per kind of problem


@dataclass
class Conversion:
    """How tensors on disk become one or more parameters.

    Without a converter one tensor becomes one parameter. `sources` maps the converter's patterns to
    names on disk, in the order that the converter expects.
    """

    converter: loading.WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)
    targets: dict[str, torch.Size] = field(default_factory=dict)

    def run(self, hf: PreTrainedModel, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Convert tensors, keyed by source pattern, to parameters, keyed by name."""
        first = next(iter(self.targets))
        if self.converter is None:
            return {first: next(iter(tensors.values()))[0]}
        converter = deepcopy(self.converter)
        for pattern, collected in tensors.items():
            for tensor in collected:
                converter.add_tensor(first, first, pattern, cast(Any, tensor))  # or a Future
        made = converter.convert(first, model=hf, config=hf.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    def is_stack(self) -> bool:
        """Return whether row i of the result depends on the i-th tensor of each source only."""
        if self.converter is None or len(self.targets) != 1:
            return False
        merge, *rest = self.converter.operations
        return (
            isinstance(merge, loading.MergeModulelist)
            and merge.dim == 0
            and all(isinstance(op, loading.Concatenate) and op.dim == 1 for op in rest)
        )


NewTokens: TypeAlias = Mapping[int, Sequence[int]]
"""New tokens by id, each with the tokens whose mean its row begins as; without any it is zero."""
Tie: TypeAlias = tuple[str, str, tuple[Conversion, Conversion]]
"""Names of one tensor that is stored twice, and the conversions of both."""


@dataclass(frozen=True)
class LoadStats:
    """What this rank read."""

    bytes_read: int
    largest_tensor_bytes: int
    """Most bytes read for one conversion: the memory that a read needs beside the shards."""
    extra: tuple[str, ...]
    """Names of tensors on disk that match no parameter."""


def load_weights(
    model: Wrapper,
    source: ModelSource,
    device: torch.device | str,
    drawn: Collection[str] = (),
    new: NewTokens | None = None,
) -> LoadStats:
    """Allocate this rank's shards and fill all but `drawn` from the source's safetensors.

    Values are cast to the parameters' dtype. Works the same for a model that is not sharded. The
    embedding and the head may have rows more than on disk, for `new` tokens.
    Raises: ValueError if a parameter is missing on disk or of another shape, or a file is damaged.
    """
    assert source.storage is not None, f"{source.name} has no weights"
    stored = read_headers(source.storage)
    plan, extra = _plan(model.hf, stored, drawn)
    tables = _tables(model.hf) if new else set[str]()
    if wrong := _misfits(model.hf, plan, source.name, source.storage.url, drawn, bool(new)):
        raise ValueError("\n".join(wrong))
    allocate(model, device)
    if model.source_dtype is None:  # config.json names none
        model.source_dtype = max(stored.values(), key=lambda each: each.num_bytes).dtype
    reader = ShardReader(source.storage, stored)
    tensors = base_state(model.hf)

    def load(conversion: Conversion) -> int:
        grown = new if tables & conversion.targets.keys() else None
        return _load_one(model.hf, conversion, tensors, reader, grown or {})

    plan, twice = _split_ties(model.hf, plan)
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        largest = max(pool.map(load, plan), default=0)
    plain = {name: each for name, each in tensors.items() if isinstance(each, Tensor)}
    _check_ties(twice, plain, reader, source.name, new or {})
    return LoadStats(reader.bytes_read, largest, tuple(extra))


def problems(source: ModelSource, from_scratch: bool) -> list[str]:
    """Return every problem that prevents building or filling the model.

    It reads the headers, and a few rows of tensors that are tied but stored twice.
    """
    try:
        config, _ = source.config, source.generation_config
    except ValueError as error:
        return [str(error)]
    if from_scratch:
        return _build_problems(source, config)
    if source.storage is None:
        preset = PRESETS[source.name]
        weights = f"model.path={preset.source}, whose licence is: {preset.licence}"
        if "/" not in preset.source:
            weights = "model.path to a model folder or hub id"
        return [
            f"model.path={source.name} is a preset, which has no weights: the run would train "
            f"random ones. Set model.from_scratch=true if you mean that, or {weights}"
        ]
    if getattr(config, "quantization_config", None) is not None:
        return [
            f"model.path={source.name} is quantized ({source.storage.url}/config.json has "
            "quantization_config): its weights cannot be trained. Give the unquantized model"
        ]
    try:
        stored = read_headers(source.storage)
    except ValueError as error:
        return str(error).splitlines()
    if wrong := _build_problems(source, config):
        return wrong
    hf = build(config, loss=no_loss, attention="eager").hf
    plan, _ = _plan(hf, stored)
    grown = source.adapter is not None and bool(source.adapter.tokens)
    if wrong := _misfits(hf, plan, source.name, source.storage.url, grown=grown):
        return wrong
    reader, ties = ShardReader(source.storage, stored), _split_ties(hf, plan)[1]
    return [_untied(source.name, first, name) for first, name, two in ties if _differ(reader, two)]


def _differ(reader: ShardReader, two: tuple[Conversion, Conversion]) -> bool:
    """Compare a few rows of two tensors that should be one."""
    keys = [key for conversion in two for (key,) in conversion.sources.values()]
    size = reader.stored[keys[0]].shape[0]
    rows = ([reader.rows(key, row, 1).float() for key in keys] for row in (0, size // 2, size - 1))
    return not all(torch.equal(first, second) for first, second in rows)


def misfits_of(hf: PreTrainedModel, source: ModelSource, *, grown: bool = False) -> list[str]:
    """Return the problems that prevent filling a model on the meta device; see `_misfits`."""
    if source.storage is None:
        return [f"model.path={source.name} is a preset of language models, and has no weights"]
    try:
        stored = read_headers(source.storage)
    except ValueError as error:
        return str(error).splitlines()
    return _misfits(hf, _plan(hf, stored)[0], source.name, source.storage.url, grown=grown)


def _tables(hf: PreTrainedModel) -> set[str]:
    """Return the names of the embedding and the head, with its bias."""
    modules = hf.get_input_embeddings(), hf.get_output_embeddings()
    own = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {name for name, p in base_state(hf, keep_vars=True).items() if id(p) in own}


def _build_problems(source: ModelSource, config: PretrainedConfig) -> list[str]:
    """Return why transformers cannot build this configuration; [] if it can."""
    try:
        if (layers := getattr(config.get_text_config(), "num_hidden_layers", 0)) > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {layers}")  # to build them would take for ever
        build(config, loss=no_loss, attention="eager")
    except Exception as error:  # each family's own code takes the values
        return [
            f"model.path={source.name} cannot be built from {source.folder.url}/config.json: "
            f"{' '.join(repr(error).split()):.300}. Correct the file, or choose a causal language "
            "model"
        ]
    return []


def _plan(
    hf: PreTrainedModel, stored: Mapping[str, Stored], drawn: Collection[str] = ()
) -> tuple[list[Conversion], list[str]]:
    """Assign tensors on disk to parameters; return the conversions and the unused names.

    It follows transformers' convert_and_load_state_dict_in_model (5.23), but reads no data.
    """
    transforms = get_model_conversion_mapping(hf)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    wanted = base_state(hf)
    prefix = hf.base_model_prefix
    plan: dict[str, Conversion] = {}
    extra = []
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:  # the name on disk is already the parameter's
            name, pattern = loading.rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted or name in drawn:
            extra.append(key)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        conversion = plan.setdefault(name, Conversion(converter))
        conversion.sources.setdefault(pattern or key, []).append(key)
    for name, conversion in plan.items():
        conversion.targets[name] = wanted[name].shape  # `run` needs the first name
        meta = {
            pattern: [torch.empty(stored[k].shape, device="meta") for k in keys]
            for pattern, keys in conversion.sources.items()
        }
        made = conversion.run(hf, meta)
        conversion.targets = {target: tensor.shape for target, tensor in made.items()}
    return list(plan.values()), extra


def _misfits(
    hf: PreTrainedModel,
    plan: list[Conversion],
    name: str,
    url: str,
    drawn: Collection[str] = (),
    grown: bool = False,
) -> list[str]:
    """Return the problems of parameters that no tensor fills, or one of another shape.

    The embedding and the head of a `grown` model may have rows more than on disk.
    """
    wanted = base_state(hf)
    shapes = {target: shape for conversion in plan for target, shape in conversion.targets.items()}
    missing = [names[0] for names in _tied_names(hf) if not {*shapes, *drawn} & set(names)]
    misfits = []
    if missing:
        listed = ", ".join(missing[:MAX_NAMED]) + (", ..." if len(missing) > MAX_NAMED else "")
        misfits.append(
            f"model.path={name} lacks {len(missing)} of the model's tensors in {url}: {listed}. "
            "config.json and weights do not belong together, or a file was not copied. "
            "Copy the whole folder"
        )
    wrong = [key for key in shapes if key in wanted and shapes[key] != wanted[key].shape]
    for key in {*wrong} & (_tables(hf) if grown else set()):
        (rows, *others), (most, *sizes) = shapes[key], wanted[key].shape
        if others == sizes and rows < most:
            wrong.remove(key)
    for key in wrong[:MAX_NAMED]:
        misfits.append(
            f"model.path={name} has {key} as {list(shapes[key])} in {url}, but config.json makes "
            f"it {list(wanted[key].shape)}. Correct config.json or copy the folder anew"
        )
    if len(wrong) > MAX_NAMED:
        misfits.append(f"model.path={name} has {len(wrong) - MAX_NAMED} more shapes wrong in {url}")
    return misfits


def _tied_names(hf: PreTrainedModel) -> list[list[str]]:
    """Return the state dict's names, grouped by tensor: tied names are in one group."""
    groups: dict[int, list[str]] = {}
    for name, tensor in base_state(hf, keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


@torch.no_grad()  # gradient mode is per thread
def _load_one(
    hf: PreTrainedModel, conversion: Conversion, tensors: State, reader: ShardReader, new: NewTokens
) -> int:
    """Fill the local part of one conversion's parameters; return the bytes read for it."""
    if conversion.converter is not None and not conversion.is_stack():
        whole = {p: [reader.rows(k) for k in keys] for p, keys in conversion.sources.items()}
        num_bytes = _num_bytes(whole)
        for name, tensor in conversion.run(hf, whole).items():
            target = tensors[name]
            if isinstance(target, Linear4bit):
                offsets, sizes = local_slice(target.packed)
                target.fill(tensor[offsets[0] : offsets[0] + sizes[0]])
            else:
                fill(target, tensor)
        return num_bytes
    (target,) = (tensors[name] for name in conversion.targets)
    offsets, sizes = local_slice(target.packed if isinstance(target, Linear4bit) else target)
    if math.prod(sizes) == 0:
        return 0
    stacked = len(sizes) == 3 and conversion.converter is not None
    if stacked and isinstance(target, Tensor) and sizes[1] < target.shape[1]:
        value = _rows_of_experts(conversion, reader, offsets[1], sizes[1])
        local_part(target).copy_(value)
        return value.nbytes
    if conversion.converter is None:
        ((pattern, (key,)),) = conversion.sources.items()
        part = _rows(reader, key, offsets[0], sizes[0], new) if sizes else reader.rows(key)
        read = {pattern: [part]}
    else:
        mine = slice(offsets[0], offsets[0] + sizes[0])  # the experts held by this rank
        read = {p: [reader.rows(k) for k in keys[mine]] for p, keys in conversion.sources.items()}
    num_bytes = _num_bytes(read)
    (value,) = conversion.run(hf, read).values()
    if isinstance(target, Linear4bit):
        target.fill(value)  # rows are sharded, columns never are
        return num_bytes
    for dim in range(1, value.ndim):
        value = value.narrow(dim, offsets[dim], sizes[dim])
    local_part(target).copy_(value)
    return num_bytes


def _rows(reader: ShardReader, key: str, start: int, count: int, new: NewTokens) -> Tensor:
    """Read rows of a tensor, with those of `new` tokens.

    A new token's row is the mean of the rows of its pieces (Gee et al. 2022, Fast Vocabulary
    Transfer, arXiv 2402.09977): two control tokens so do not begin alike, as by the mean of all.
    """
    there = max(0, min(count, reader.stored[key].shape[0] - start)) if new else count
    part = reader.rows(key, start, there)
    if new:
        part = torch.cat([part, part.new_zeros(count - there, *part.shape[1:])])
    for token, pieces in new.items():
        if pieces and start <= token < start + count:
            rows = [reader.rows(key, piece, 1)[0].float() for piece in pieces]
            part[token - start] = torch.stack(rows).mean(0)
    return part


def _rows_of_experts(conversion: Conversion, reader: ShardReader, start: int, count: int) -> Tensor:
    """Read the same rows of all experts, [experts, count, ...], of a stack sharded in dimension 1.

    If several tensors make up an expert (gate and up), their rows are concatenated.
    """
    parts, first = [], 0
    for keys in conversion.sources.values():
        rows = reader.stored[keys[0]].shape[0]
        low, high = max(start, first), min(start + count, first + rows)
        if low < high:
            parts.append(torch.stack([reader.rows(k, low - first, high - low) for k in keys]))
        first += rows
    return torch.cat(parts, 1)


def _num_bytes(tensors: Mapping[str, list[Tensor]]) -> int:
    return sum(tensor.nbytes for listed in tensors.values() for tensor in listed)


def _split_ties(hf: PreTrainedModel, plan: list[Conversion]) -> tuple[list[Conversion], list[Tie]]:
    by_target = {target: conversion for conversion in plan for target in conversion.targets}
    twice: list[Tie] = []
    for names in _tied_names(hf):
        present = [name for name in names if name in by_target]
        first = by_target[present[0]] if present else None
        twice += [(present[0], name, (first, by_target[name])) for name in present[1:] if first]
    aliases = {id(conversion) for _, _, (_, conversion) in twice}
    return [conversion for conversion in plan if id(conversion) not in aliases], twice


def _untied(name: str, first: str, alias: str) -> str:
    return (
        f"model.path={name} ties {first} and {alias} by tie_word_embeddings, but stores "
        "different values for them. Set tie_word_embeddings to false in its config.json"
    )


def _check_ties(
    twice: list[Tie], tensors: dict[str, Tensor], reader: ShardReader, name: str, new: NewTokens
) -> None:
    """Compare tensors that config.json ties but that are stored twice.

    Raises: ValueError naming both.
    """
    for first, alias, (_, conversion) in twice:
        ((key,),) = conversion.sources.values()
        offsets, sizes = local_slice(tensors[alias])
        held = local_part(tensors[alias]).detach().cpu()
        if not torch.equal(held, _rows(reader, key, offsets[0], sizes[0], new).to(held.dtype)):
            raise ValueError(_untied(name, first, alias))
