"""Run a model's blocks on tensors without values, and count what a block computes and keeps.

    lm = build_on_shapes(config)                  # on the meta device, with the attention of GPUs
    with FakeTensorMode(), GroupedOnShapes():
        found = block_pass(block, hidden_size, args, kwargs)
    counted = total_of({0: found}, {0: 32}, length)       # of 32 such blocks, for each token

The kernels that train on GPUs take no mask and keep no scores; those of CPUs take a mask for a
sliding window. A model whose attention is its own keeps that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PretrainedConfig

from rayapp import model
from rayapp.model.activations import ATTENTION, keeps_result
from rayapp.model.attention import attention_problem, takes_any_kernel
from rayapp.model.build import Loss
from rayapp.planner.measured import Counted

CPU = torch.device("cpu")  # fake tensors of a GPU need a build of PyTorch with CUDA
ON_SHAPES = "rayapp_on_shapes"
ATTENDED: list[tuple[float, int | None]] = []
"""FLOPs for each attended token, and the window, of each call since the list was cleared."""
GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}


def build_on_shapes(
    config: PretrainedConfig, loss: Loss = model.no_loss, dtype: torch.dtype = torch.float32
) -> model.LanguageModel:
    """Build a model on the meta device, with the attention of GPUs if it takes any kernel."""
    refused = attention_problem("sdpa", config, CPU.type, dtype)
    attention = "eager" if refused else "sdpa"
    lm = model.build(config, loss=loss, dtype=dtype, attention=attention)
    if takes_any_kernel(config):
        for module in lm.hf.modules():
            own = getattr(module, "config", None)
            if isinstance(own, PretrainedConfig):
                own._attn_implementation = ON_SHAPES
    return lm


def attention_on_shapes(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Return a result of attention's shape; transformers calls it for every layer.

    Shapes: query [B, heads, S, D], key and value [B, kv_heads, S, D] -> [B, S, heads, D]. Kernels
    take one head size for all three. A window changes the time of a kernel, but not its memory.
    """
    heads, size, value_size = query.shape[1], query.shape[-1], value.shape[-1]
    ATTENDED.append((2.0 * heads * (size + value_size), sliding_window))
    if value_size != size:
        value = pad(value, (0, size - value_size))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)[..., :value_size], None


class GroupedOnShapes(TorchDispatchMode):
    """Let grouped products take every dtype, as they do on tensors with values.

    Those of PyTorch 2.13 on tensors without values take bfloat16 alone.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        factors = (factor.to(torch.bfloat16) for factor in args[:2])
        return func(*factors, *args[2:], **(kwargs or {})).to(args[0].dtype)


AttentionInterface.register(ON_SHAPES, attention_on_shapes)


class Operations(TorchDispatchMode):
    """What the operations inside the block have done, in FLOPs and bytes."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.flops = 0.0
        """FLOPs of matrix products and convolutions."""
        self.attention_flops = 0.0
        """Those of fused attention, with all pairs of tokens."""
        self.kept_flops = 0.0
        """Those whose results selective checkpointing keeps."""
        self.results = self.kept_results = self.traffic = 0.0
        """Bytes of results of products and attention; those that selective checkpointing keeps;
        bytes that all other operations read and write."""
        self.products = 0.0
        """Bytes of the results and of what products and attention take, without weights."""
        self.given = 0
        """Bytes of the block's input."""
        self.kernels = 0
        self.alive = self.peak = 0
        self.routed_rows = 0
        """Rows of the largest product that is grouped by experts."""
        self.counts = True
        """False: only what is alive is followed."""
        self._seen = WeakIdKeyDictionary()
        """The number of each storage: an address may be another's once one is freed."""
        self._count_seen = 0
        self._of_products = WeakIdKeyDictionary()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors as alive from here on, until their storages are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = self._count_seen = self._count_seen + 1
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.alive)

    def number(self, tensor: Tensor) -> int | None:
        """Return a number of a tensor's storage if it was made inside the block or held."""
        number: int | None = self._seen.get(tensor.untyped_storage())
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        before = {leaf.untyped_storage()._cdata for leaf in given}
        new = [leaf for leaf in made if leaf.untyped_storage()._cdata not in before]
        if self.counts and (new or func._schema.is_mutable):  # no view, and no question of a shape
            self._count(func, args, kwargs or {}, given, made)
        self.hold(new)
        return result

    def _free(self, size: int) -> None:
        self.alive -= size

    def _count(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        name = func.name().partition(".")[0]
        self.kernels += 1
        flops = self._flops(func, name, args, kwargs, made)
        if not flops and name not in ATTENTION:
            self.traffic += _nbytes(given) + _nbytes(made)
            return
        for tensor in [each for each in given if self.number(each) is not None] + made:
            storage = tensor.untyped_storage()
            if storage not in self._of_products:
                self._of_products[storage] = True
                self.products += storage.nbytes()
        size, kept = _nbytes(made), keeps_result(self.hidden_size, name, args)
        self.results += size
        self.kept_results += size if kept else 0
        if name in ATTENTION:
            self.attention_flops += flops
            return
        self.flops += flops
        self.kept_flops += flops if kept else 0.0

    def _flops(self, func: Any, name: str, args: Any, kwargs: Any, made: list[Tensor]) -> float:
        if name in GROUPED:
            rows, inputs = args[0].shape
            self.routed_rows = max(self.routed_rows, rows)
            return 2.0 * rows * inputs * made[0].shape[-1]
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            return 0.0
        return float(count(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))


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
    """Add up the blocks, of each kind as many as there are; `kept_outside` is left at 0."""
    passes = [(kinds[number], block, block.counted) for number, block in blocks.items()]

    def most(count: Callable[[BlockPass], float]) -> float:
        return max(map(count, blocks.values())) / length

    def total(name: str) -> float:
        return sum(count * getattr(each, name) for count, _, each in passes) / length

    return Counted(
        kept=sum(count * block.kept for count, block, _ in passes) / length,
        kept_selective=total("kept_results") + total("given"),
        kept_outside=0.0,
        largest_kept=most(lambda block: block.kept),
        in_flight=most(lambda block: block.in_flight),
        largest_backward=most(lambda block: block.kept + block.in_flight),
        forward=most(lambda block: block.forward),
        forward_alone=most(lambda block: block.forward_alone),
        **{name: total(name) for name in ("flops", "attention_flops", "results")},
        **{name: total(name) for name in ("products", "kept_flops", "traffic")},
    )


def block_pass(block: nn.Module, hidden_size: int, args: Any, kwargs: Any) -> BlockPass:
    """Run one block forward and backward, without the gradients of its weights."""
    alone = Operations(hidden_size)
    with torch.no_grad(), alone:
        block(*args, **kwargs)
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
    return BlockPass(counted, kept, shared, in_flight, forward, alone.peak, attention, sizes)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
