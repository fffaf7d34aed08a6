"""Add up what the operations of a pass do: FLOPs, bytes that are alive, results that are kept.

counted = Operations(hidden_size)
with counted:
    output = block(hidden)
counted.flops, counted.peak, counted.traffic
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from rayapp.model.activations import ATTENTION, keeps_result

GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


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
            self.traffic += nbytes(given) + nbytes(made)
            return
        for tensor in [each for each in given if self.number(each) is not None] + made:
            storage = tensor.untyped_storage()
            if storage not in self._of_products:
                self._of_products[storage] = True
                self.products += storage.nbytes()
        size, kept = nbytes(made), keeps_result(self.hidden_size, name, args)
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
