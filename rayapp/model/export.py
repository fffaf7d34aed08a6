"""Write a sharded model as an ordinary Hugging Face folder, no rank ever holding all of it.

    export(model, open_storage("s3://bucket/run/model"), tokenizer=tokenizer)
    AutoModelForCausalLM.from_pretrained("run/model")

Every rank derives the same plan from shapes: which parameters make which tensors on disk (the
reverse of transformers' loading conversions), in which file, at which offset, written by which
rank. Then all ranks gather one parameter at a time, and the rank that owns its file streams it
there. Parameters of different ranks' files are gathered in turn, so that their uploads overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from rayapp.model.build import State, Wrapper, base_state
from rayapp.model.files import SINGLE, layout
from rayapp.model.init import whole_of
from rayapp.model.lora_layers import LoraUpdate, updates
from rayapp.model.new_tokens import RowsUpdate
from rayapp.model.quantize import Linear4bit
from rayapp.model.sharding import reshard
from rayapp.model.small_files import write_small_files
from rayapp.storage import Storage

MAX_FILE_BYTES = 4 * 2**30


class WrongExport(RuntimeError):
    """An exported folder is not the model that was trained; the message says how."""


@dataclass
class Group:
    """Parameters that are converted and written together, and the tensors on disk they become."""

    converter: loading.WeightConverter | None
    members: list[tuple[str, str]] = field(default_factory=list)
    """(parameter, source pattern of the converter)"""
    tensors: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes on disk of each tensor."""
        tensors = self.tensors.items()
        return {name: shape.numel() * dtype.itemsize for name, (dtype, shape) in tensors}


class Reverse:
    """Undo transformers' loading conversions, one group of parameters at a time.

    It follows transformers' revert_weight_conversion (5.23), which needs the whole state dict. Both
    skip prefix changes: it is unknown whether the original had the prefix, and both forms load.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        forward = get_model_conversion_mapping(hf, add_legacy=False)
        kept = [t for t in forward if not isinstance(t, loading.PrefixChange)]
        reverse = [t.reverse_transform() for t in reversed(kept)]
        self.renamings = [t for t in reverse if isinstance(t, loading.WeightRenaming)]
        self.converters = [t for t in reverse if isinstance(t, loading.WeightConverter)]

    def groups(self, dtype: torch.dtype) -> list[Group]:
        """Group the state dict (tied tensors once); find names and shapes on meta tensors."""
        by_pattern = {p: c for c in self.converters for p in c.source_patterns}
        state = _untied(self.hf)
        groups: dict[str, Group] = {}
        for name in sorted(state, key=loading.dot_natural_key):
            renamed, pattern = loading.apply_converters(name, self.converters)
            key = name if pattern is None else renamed
            group = groups.setdefault(key, Group(by_pattern[pattern] if pattern else None))
            group.members.append((name, pattern or name))
        for group in groups.values():
            meta = {}
            for name, _ in group.members:
                stored = _stored_as(state[name], dtype)
                meta[name] = torch.empty(state[name].shape, dtype=stored, device="meta")
            made = self.run(group, meta)
            group.tensors = {name: (t.dtype, t.shape) for name, t in made.items()}
        return list(groups.values())

    def run(self, group: Group, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the parameters of a group to tensors, by their names on disk."""
        first, _ = group.members[0]
        if group.converter is None:
            return {loading.apply_renamings(first, self.renamings): values[first]}
        converter = deepcopy(group.converter)
        renamed, _ = loading.apply_converters(first, [converter])
        for name, pattern in group.members:
            converter.add_tensor(renamed, name, pattern, cast(Any, values[name]))  # or a Future
        made = converter.convert(renamed, model=self.hf, config=self.hf.config)
        return {
            loading.apply_renamings(name, self.renamings): t[0] if isinstance(t, list) else t
            for name, t in made.items()
        }


@torch.no_grad()
def export(
    model: Wrapper,
    storage: Storage,
    *,
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
    processor: Mapping[str, bytes] | None = None,
    dtype: torch.dtype | None = None,
    trained: Wrapper | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Write the model to `storage`, called by all ranks; return the names of all files.

    Adapters are merged into the weights that they change, in fp32: the model's own or, if it is the
    base of a `trained` model, that one's, with the layers that it holds in 4 bits.
    The dtype defaults to that of the model's original config.json, or fp32 if it names none.
    Weights are written first and config.json last, so that a folder with config.json is complete.
    Raises: RuntimeError on every rank if any of them could not write.
    """
    for each in (model, trained or model):
        reshard(each)
    dtype = dtype or model.source_dtype or torch.float32
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    reverse = Reverse(model.hf)
    files = _split(reverse.groups(dtype), max_file_bytes)
    count = len(files)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else [SINGLE]
    state, changes = _untied(model.hf), updates((trained or model).hf)
    if trained is not None:
        held = base_state(trained.hf)
        state |= {name: each for name, each in held.items() if isinstance(each, Linear4bit)}
    error: Exception | None = None
    for start in range(0, len(files), world):  # a wave: one file per rank
        wave = files[start : start + world]
        turns = _gather_in_turns(wave, state, changes, dtype)
        try:
            if rank < len(wave) and error is None:
                with storage.open_write(names[start + rank]) as out:
                    specs = [spec for group in wave[rank] for spec in group.tensors.items()]
                    out.write(layout(dict(specs)))
                    for owner, group, values in turns:
                        if owner == rank:
                            _write(out, group, reverse.run(group, values))
        except Exception as caught:  # raised below on all ranks, which wait for this one's gathers
            error = caught
        for _ in turns:  # a rank with nothing to write, or that failed, joins the gathers
            pass
    _raise_together(error, storage)
    small: list[str] = []
    try:
        if rank == 0:
            sizes = {
                name: {key: size for group in groups for key, size in group.sizes.items()}
                for name, groups in zip(names, files, strict=True)
            }
            small = write_small_files(
                model.hf, storage, sizes, tokenizer, generation_config, dtype, processor or {}
            )
    except Exception as caught:
        error = caught
    return sorted({*names, *_raise_together(error, storage, small)})


def _split(groups: list[Group], max_file_bytes: int) -> list[list[Group]]:
    """Divide groups over files in order; a group above the limit gets a file of its own."""
    files: list[list[Group]] = [[]]
    size = 0
    for group in groups:
        num_bytes = sum(group.sizes.values())
        if files[-1] and size + num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(group)
        size += num_bytes
    return files


def _gather_in_turns(
    wave: list[list[Group]],
    state: State,
    changes: Mapping[str, LoraUpdate | RowsUpdate],
    dtype: torch.dtype,
) -> Iterator[tuple[int, Group, dict[str, Tensor]]]:
    """Gather the groups of a wave's files, one group of each file in turn; collective."""
    for turn in zip_longest(*wave):
        for owner, group in enumerate(turn):
            if group is not None:
                names = [name for name, _ in group.members]
                whole = {name: _gather(state[name], dtype, changes.get(name)) for name in names}
                yield owner, group, whole


def _gather(
    tensor: Tensor | Linear4bit, dtype: torch.dtype, change: LoraUpdate | RowsUpdate | None = None
) -> Tensor:
    """Return a whole tensor on every rank, with its update by adapters if any; collective.

    Without an update, shards are cast before they are gathered.
    """
    dtype = _stored_as(tensor, dtype)
    first = dtype if change is None else None
    whole = tensor.whole() if isinstance(tensor, Linear4bit) else whole_of(tensor, first)
    if change is not None:
        whole = change.merged(whole.float(), partial(whole_of, dtype=torch.float32))
    return whole.to(dtype)


def _stored_as(tensor: Tensor | Linear4bit, dtype: torch.dtype) -> torch.dtype:
    return dtype if isinstance(tensor, Linear4bit) or tensor.is_floating_point() else tensor.dtype


def _untied(hf: PreTrainedModel) -> State:
    """Return the state dict to save, with shared tensors once under their first name."""
    seen: set[int] = set()
    state: State = {}
    for name, tensor in base_state(hf, keep_vars=True).items():
        if id(tensor) not in seen and name not in (hf._keys_to_ignore_on_save or ()):
            seen.add(id(tensor))
            state[name] = tensor
    return state


def _write(out: BinaryIO, group: Group, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of a group in the order in which the header lists them."""
    for name, (dtype, shape) in group.tensors.items():
        tensor = tensors[name].cpu().contiguous()
        assert (tensor.dtype, tensor.shape) == (dtype, shape), name
        out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _raise_together(
    error: Exception | None, storage: Storage, names: list[str] | None = None
) -> list[str]:
    """Wait for all ranks; return rank 0's `names`, or raise on every rank if any failed.

    Raises: RuntimeError naming the ranks and their errors.
    """
    mine = (names or [], None if error is None else f"{type(error).__name__}: {error}")
    every = [mine]
    if dist.is_initialized():
        every = [mine] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    if failed := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(every) if why]:
        raise RuntimeError(f"cannot export to {storage.url}: {'; '.join(failed)}") from error
    return every[0][0]
