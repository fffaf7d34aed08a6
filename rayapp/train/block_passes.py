"""What one block of a model computes and keeps of a row, by a pass over fake tensors.

found = block_pass(block, hidden_size, args, kwargs)
counted = total_of({0: found}, {0: 32}, length)       # of 32 such blocks, for each token
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from rayapp.train.on_shapes import ATTENDED
from rayapp.train.operations import Operations


@dataclass(frozen=True)
class Counted:
    """What the passes over a row count for each token of it."""

    flops: float = 0.0
    attention_flops: float = 0.0
    kept: float = 0.0
    kept_selective: float = 0.0
    kept_outside: float = 0.0
    largest_kept: float = 0.0
    in_flight: float = 0.0
    largest_backward: float = 0.0
    forward: float = 0.0
    forward_alone: float = 0.0
    results: float = 0.0
    products: float = 0.0
    kept_flops: float = 0.0
    traffic: float = 0.0

    def at(self, length: int, other: Counted, other_length: int, wanted: int) -> Counted:
        """Return what a row of `wanted` tokens counts, on the line through two lengths."""
        share = (wanted - length) / (other_length - length) if other_length != length else 1.0
        values = zip(vars(self).values(), vars(other).values(), strict=True)
        return Counted(*(max(0.0, a + share * (b - a)) for a, b in values))

    def plus(self, fixed: float, largest: float) -> Counted:
        """Return it with more bytes that all blocks keep, and the largest one."""
        return replace(
            self,
            kept=self.kept + fixed,
            largest_kept=self.largest_kept + largest,
            largest_backward=self.largest_backward + largest,
        )


@dataclass
class BlockPass:
    """What one block does with a row of one document."""

    counted: Operations
    kept: int
    """Bytes that it keeps for its backward pass, its input included if autograd saves it."""
    shared: dict[int, torch.UntypedStorage]
    """What it keeps and other blocks may keep too, by address, which is free once one is gone."""
    in_flight: int
    forward: int
    """Bytes at the peak of its forward pass beside those that it keeps."""
    forward_alone: int
    """Bytes at the peak of a forward pass that keeps nothing, its input left out."""
    attention: list[tuple[float, int | None]]
    sizes: tuple[int, ...]
    """Bytes of each tensor that it keeps for its backward pass, in the order of use."""


def fixed_bytes(short: BlockPass, long: BlockPass) -> int:
    """Return the bytes that a block keeps of rows of any length: what is made of weights alone."""
    if len(short.sizes) != len(long.sizes):  # it runs piece by piece
        return 0
    pairs = zip(short.sizes, long.sizes, strict=True)
    return sum(size for size, other in pairs if size == other)


def total_of(blocks: Mapping[int, BlockPass], kinds: Mapping[int, int], length: int) -> Counted:
    """Add up the blocks, of each kind as many as there are."""

    def total(count: Callable[[BlockPass], float]) -> float:
        return sum(kinds[n] * count(block) for n, block in blocks.items()) / length

    return Counted(
        flops=total(lambda block: block.counted.flops),
        attention_flops=total(lambda block: block.counted.attention_flops),
        kept=total(lambda block: block.kept),
        kept_selective=total(lambda block: block.counted.kept_results + block.counted.given),
        largest_kept=max(block.kept for block in blocks.values()) / length,
        in_flight=max(block.in_flight for block in blocks.values()) / length,
        largest_backward=max(b.kept + b.in_flight for b in blocks.values()) / length,
        forward=max(block.forward for block in blocks.values()) / length,
        forward_alone=max(block.forward_alone for block in blocks.values()) / length,
        results=total(lambda block: block.counted.results),
        products=total(lambda block: block.counted.products),
        kept_flops=total(lambda block: block.counted.kept_flops),
        traffic=total(lambda block: block.counted.traffic),
    )


def block_pass(block: nn.Module, hidden_size: int, args: Any, kwargs: Any) -> BlockPass:
    """Run one block forward and backward, without the gradients of its weights."""
    alone = _forward_alone(block, hidden_size, args, kwargs)
    args, kwargs = tree_map_only(Tensor, _detached, (args, kwargs))
    hidden = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    hidden.requires_grad_()
    counted = Operations(hidden_size)
    counted.hold([hidden])
    counted.given = counted.alive
    own: dict[int, int] = {}
    shared: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        number = counted.number(tensor)
        if number is None:
            shared[storage._cdata] = storage
        else:
            own[number] = storage.nbytes()
        return tensor

    ATTENDED.clear()
    with counted:
        with saved_tensors_hooks(pack, lambda kept: kept):
            output = next(
                leaf for leaf in tree_leaves(block(*args, **kwargs)) if isinstance(leaf, Tensor)
            )
        attention, kept = list(ATTENDED), sum(own.values())
        forward = max(0, counted.peak - kept)
        counted.counts = False
        gradient, into = torch.empty_like(output), get_gradient_edge(hidden)
        result = get_gradient_edge(output)
        del output, hidden, args, kwargs
        counted.peak = counted.alive
        torch.autograd.grad([result], [into], [gradient])
    in_flight = max(0, counted.peak - kept)
    sizes = tuple(own.values())
    return BlockPass(counted, kept, shared, in_flight, forward, alone, attention, sizes)


def _forward_alone(block: nn.Module, hidden_size: int, args: Any, kwargs: Any) -> int:
    """Return the bytes at the peak of a forward pass that keeps nothing, its input left out."""
    counted = Operations(hidden_size)
    with torch.no_grad(), counted:
        block(*args, **kwargs)
    return counted.peak


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
