"""8-bit optimizer moments (torchao) in a checkpoint.

Codes and scales are valid only for one rank's shard: a block of 256 values crosses row ends, and a
shard whose size is no multiple of a block is not quantized. So a checkpoint holds the moments in
fp32, which any number of ranks can shard, and each rank's scales. With the scales, a shard of the
same size gets its moments back bit for bit. Without them, a block whose largest value is negative
would shrink at each resume, as torchao's code map ends at -0.993.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local(tensor: torch.Tensor) -> Any:
    """Return this rank's shard of a tensor: a plain tensor, or torchao's if it is quantized."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_quantized(leaf: Any) -> bool:
    """Say whether a leaf of a state dict, or this rank's shard of it, is a torchao tensor."""
    return isinstance(leaf, torch.Tensor) and is_traceable_wrapper_subclass(local(leaf))


def values(leaf: Any) -> torch.Tensor:
    """Return the fp32 values of a quantized leaf on the CPU, sharded like the leaf."""
    full: torch.Tensor = local(leaf).dequantize().cpu()
    if not isinstance(leaf, DTensor):
        return full
    # from_local would move the shard to the mesh's device.
    return DTensor(full, leaf._spec, requires_grad=False)


def widened(state: Any) -> Any:
    """Return a state with each quantized leaf replaced by its fp32 values; copy no other leaf."""
    return pytree.tree_map(lambda leaf: values(leaf) if is_quantized(leaf) else leaf, state)


def scales(state: Any) -> dict[str, torch.Tensor]:
    """Return the scales of this rank's quantized shards, by the path of the leaf in the state."""
    leaves = pytree.tree_leaves_with_path(state)
    return {pytree.keystr(path): local(leaf).scale for path, leaf in leaves if is_quantized(leaf)}


def narrowed(state: Any, loaded: Any, known: dict[str, torch.Tensor]) -> Any:
    """Quantize `loaded` values into the quantized leaves of `state`; return `loaded` with those.

    `known` holds this rank's saved scales by path; a leaf without one gets new scales.
    """
    leaves, form = pytree.tree_flatten(loaded)
    for index, (path, leaf) in enumerate(pytree.tree_leaves_with_path(state)):
        if not is_quantized(leaf):
            continue
        target = local(leaf)
        source = local(leaves[index]).to(target.device)
        if pytree.keystr(path) in known:
            _quantize(target, source, known[pytree.keystr(path)].to(target.device))
        else:
            target.copy_(source)
        leaves[index] = leaf
    return pytree.tree_unflatten(leaves, form)


def _quantize(target: Any, source: torch.Tensor, scale: torch.Tensor) -> None:
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    blocks = source.reshape(-1, target.block_size) / scale.clip(1e-12).unsqueeze(1)
    target.codes.copy_(quantize_8bit_with_qmap(blocks.flatten(), target.qmap).view(source.shape))
    target.scale.copy_(scale)
