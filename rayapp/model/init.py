"""Allocate a sharded model, and draw initial weights that are the same at every world size.

    init_weights(model, seed=0, device="cuda")       # from scratch; each rank keeps its own rows
    allocate(model, "cuda")                          # or: memory and buffers, values to be loaded

transformers fills a model through `_init_weights(module)`, module by module, without documenting
which tensors of which children a call writes. Here each call runs on a copy of the module, seeded
by (seed, module name), in which only the tensors that the call writes have memory. A rank so holds
no more than those and its shards. Buffers such as rotary frequencies are rebuilt the same way,
because a model that leaves the meta device loses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rayapp.model.build import Wrapper, of_adapter


@torch.no_grad()
def init_weights(model: Wrapper, seed: int, device: torch.device | str) -> None:
    """Allocate this rank's shards and draw their values from (seed, module name).

    The HF model's own `_init_weights` draws one module at a time whole in host memory, and only the
    local rows are kept. Children come before parents, as in transformers, so that values which a
    parent draws for its children (GPT-2's scaled projections) are the final ones.
    Raises: ValueError if the HF model leaves a parameter undefined.
    """
    allocate(model, device)
    parameters = model.hf.named_parameters(remove_duplicate=False)
    own = {name: each for name, each in parameters if not of_adapter(name)}  # see init_adapters
    draw_weights(model.hf, seed, own)


@torch.no_grad()
def draw_weights(hf: PreTrainedModel, seed: int, wanted: Mapping[str, nn.Parameter]) -> None:
    """Draw the values of these parameters, by name, from (seed, module name).

    Raises: ValueError if the HF model leaves one undefined.
    """
    undefined = {id(parameter) for parameter in wanted.values()}
    for name, owner, module in _modules_bottom_up(hf):
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        inside = (each == name or each.startswith(f"{name}.") or not name for each in wanted)
        if not any(inside):
            continue
        drawn = _initial_values(owner, module, "_parameters", int.from_bytes(digest[:8], "little"))
        for path, values in drawn.items():
            parameter = wanted.get(f"{name}.{path}" if name else path)
            if parameter is not None:
                fill(parameter, values)
                undefined.discard(id(parameter))
    left = [name for name, parameter in wanted.items() if id(parameter) in undefined]
    if left:
        raise ValueError(
            f"{type(hf).__name__}._init_weights leaves {', '.join(left[:5])} undefined: it "
            "cannot be trained from scratch. Choose another model, or start from weights"
        )


@torch.no_grad()
def allocate(model: Wrapper, device: torch.device | str) -> None:
    """Allocate parameters (values undefined) and rebuild buffers; tied parameters stay tied.

    Raises: ValueError if a buffer's value cannot be recomputed.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device="cpu" if model.offloaded else device)
    for first, *aliases in names.values():  # to_empty makes a separate parameter of each alias
        for alias in aliases:
            path, _, key = alias.rpartition(".")
            setattr(model.get_submodule(path), key, model.get_parameter(first))
    for name, buffer in list(model.hf.named_buffers()):
        path, _, key = name.rpartition(".")
        model.hf.get_submodule(path)._buffers[key] = _unset_like(buffer, device)
    buffers = dict(model.hf.named_buffers())
    undefined = set(buffers)
    for name, owner, module in _modules_bottom_up(model.hf):
        for path, values in _initial_values(owner, module, "_buffers", 0).items():
            full = f"{name}.{path}" if name else path
            buffers[full].copy_(values)
            undefined.discard(full)
    undefined |= {
        f"{name}.{key}"
        for name, module in model.hf.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta  # a tensor attribute that is no buffer
    }
    if undefined:
        raise ValueError(
            f"{type(model.hf).__name__}._init_weights leaves {', '.join(sorted(undefined)[:5])} "
            "undefined, so it cannot leave the meta device. Choose another model"
        )


def local_slice(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which part of a tensor this rank holds: (offsets, sizes), one per dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets), tuple(sizes)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a possibly sharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole of a possibly sharded tensor, cast before it is gathered; collective."""
    tensor, dtype = tensor.detach(), dtype or tensor.dtype
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype)
    on = tensor.device_mesh.device_type  # offloaded shards are not on the mesh's device
    return cast(DTensor, tensor.to(on, dtype)).full_tensor()


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into `tensor`, which may be sharded."""
    assert whole.shape == tensor.shape, (whole.shape, tensor.shape)
    for dim, (offset, size) in enumerate(zip(*local_slice(tensor), strict=True)):
        whole = whole.narrow(dim, offset if size else 0, size)  # an empty part starts past the end
    local_part(tensor).copy_(whole)


def _modules_bottom_up(hf: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel, nn.Module]]:
    """Yield (name, enclosing HF model, module), children before parents."""
    owners: dict[str, PreTrainedModel] = {}
    modules = []
    for name, module in hf.named_modules():  # parents first, so the last owner is the innermost
        if isinstance(module, PreTrainedModel):
            owners[name] = module
        inside = [o for o in owners if not o or name == o or name.startswith(f"{o}.")]
        modules.append((name, owners[inside[-1]], module))
    return reversed(modules)


def _initial_values(
    owner: PreTrainedModel, module: nn.Module, kind: str, seed: int
) -> dict[str, Tensor]:
    """Return the tensors that HF's initialisation of one module writes, by path, on the CPU.

    `kind` is "_parameters" or "_buffers". A first run on meta tensors finds by version counters
    which tensors of this kind it writes, in the module and its children. Only those get memory for
    the second run, which is seeded and whose values are returned.
    """
    with torch.random.fork_rng(devices=[]):
        probe = _meta_copy(module)
        owner._init_weights(probe)
        written = {path: t for path, t in _tensors(probe, kind) if t._version > 0}
        if not written:
            return {}
        clone = _meta_copy(module)
        for path, tensor in written.items():
            parent, _, key = path.rpartition(".")
            clone.get_submodule(parent).__dict__[kind][key] = _unset_like(tensor, "cpu")
        torch.default_generator.manual_seed(seed)
        owner._init_weights(clone)
    values = {path: tensor for path, tensor in _tensors(clone, kind) if path in written}
    return {path: tensor for path, tensor in values.items() if not _has_unset(tensor)}


def _tensors(module: nn.Module, kind: str) -> Iterator[tuple[str, Tensor]]:
    for name, child in module.named_modules():
        for key, tensor in child.__dict__[kind].items():
            if tensor is not None:
                yield (f"{name}.{key}" if name else key), tensor


def _meta_copy(module: nn.Module) -> Any:
    """Copy a module and its children with meta tensors; everything else is shared."""
    kind_of = type(module)
    if isinstance(module, FSDPModule):
        kind_of = kind_of.__mro__[2]  # the class before sharding, found as FSDPModule.__new__ does
    clone = object.__new__(kind_of)
    clone.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        clone.__dict__[kind] = {
            key: None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta")
            for key, t in module.__dict__[kind].items()
        }
    clone.__dict__["_modules"] = {
        key: None if child is None else _meta_copy(child) for key, child in module._modules.items()
    }
    return clone


def _unset_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor filled with a sentinel: NaN, or for integers the smallest value."""
    value: float | int | bool = float("nan")
    if not tensor.is_floating_point():
        value = False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)


def _has_unset(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return False
    unset = (
        tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).min
    )
    return bool(unset.any())
