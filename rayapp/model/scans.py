"""Let what mixes along the sequence without attention take packed rows, on any device.

    guard(hf)                                  # in build()
    takes_rows(mixer), missing_kernels(hf)     # ["flash-linear-attention"]

Gated delta rules, Mamba 2 and short convolutions of transformers call functions that packages
replace by kernels. The kernels take the boundaries of a row's documents, and run on GPUs alone;
transformers' own references refuse boundaries. Here the reference runs wherever the tensors are on
no GPU or the package is missing, and takes boundaries too: a convolution over the row with zeros
between its documents, a recurrence document by document.

Source: transformers 5.23, integrations/hub_kernels.py, use_kernel_func_from_hub_with_fallback.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

CONVOLUTION, FUSED = "causal_conv1d_fn", "mamba_split_conv1d_scan_combined"
SCANS = ("chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined")
ONE_DOCUMENT = ("mamba_inner_fn", "selective_scan_fn")  # which take no boundaries


@dataclass(frozen=True, eq=False)
class Scan:
    """A function of transformers' that a package may replace; called in its place."""

    name: str
    """As the package names it."""
    package: str
    kernel: Callable[..., Any] | None
    """None: the package is not installed."""
    reference: Callable[..., Any]
    takes: frozenset[str]
    """The names of the reference's parameters."""

    def __call__(self, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the function does, with documents apart if `cu_seq_lens_q` is given."""
        if self.kernel is not None and on_gpu(first):
            return self.kernel(first, *args, **kwargs)
        bounds = kwargs.get("cu_seqlens", kwargs.get("cu_seq_lens_q"))
        kwargs = {name: value for name, value in kwargs.items() if name in self.takes}
        if bounds is not None and self.name == CONVOLUTION:
            return self._convolved(bounds, first, *args, **kwargs)
        if bounds is not None and self.name in SCANS:
            return self._scanned(bounds, first, *args, **kwargs)
        return self.reference(first, *args, **kwargs)

    def _convolved(
        self, bounds: Tensor, row: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Shapes: bounds [documents + 1], row [1, C, T], weight [C, width] -> [1, C, T]."""
        gap, length = weight.shape[-1] - 1, row.shape[-1]
        numbers = numbers_of(bounds, length)
        places = torch.arange(length, device=row.device) + gap * numbers
        spread = row.new_zeros(*row.shape[:2], length + gap * (len(bounds) - 2))
        spread = spread.index_copy(2, places, row)
        return self.reference(spread, weight, *args, **kwargs).index_select(2, places)

    def _scanned(self, bounds: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Shapes: tensors that begin with [1, T], as the first does, have a value for a token."""
        whole = args[0].shape[:2]
        results = []
        for start, end in pairwise(bounds.tolist()):

            def part(tensor: Tensor, start: int = start, end: int = end) -> Tensor:
                return tensor[:, start:end] if tensor.shape[:2] == whole else tensor

            its_args, its_kwargs = tree_map_only(Tensor, part, (args, kwargs))
            results.append(self.reference(*its_args, **its_kwargs))
        if isinstance(results[0], Tensor):
            return torch.cat(results, 1)
        return torch.cat([out for out, _ in results], 1), None  # without the last state


def on_gpu(tensor: Tensor) -> bool:
    """Return whether kernels take a tensor; one without values, of a plan, is on the CPU."""
    return tensor.is_cuda


def numbers_of(bounds: Tensor, length: int) -> Tensor:
    """Return the number of each token's document, from 0: [documents + 1] -> [length]."""
    numbers = torch.arange(len(bounds) - 1, device=bounds.device)
    return torch.repeat_interleave(numbers, bounds.diff(), output_size=length)


def guard(hf: nn.Module) -> None:
    """Put a Scan in the place of each function that the model's mixers call.

    A fused kernel calls that of the convolution, and so needs both packages.
    """
    for module in hf.modules():
        found = scans_of(module)
        bare = any(each.name == CONVOLUTION and each.kernel is None for each in found.values())
        for name, scan in found.items():
            if scan.name == FUSED and bare:
                scan = replace(scan, kernel=None)
            inspect.unwrap(type(module).forward).__globals__[name] = scan


def takes_rows(module: nn.Module) -> bool:
    """Return whether all that mixes a module's tokens is told the documents of a row."""
    names = {scan.name for scan in scans_of(module).values()}
    return CONVOLUTION in names and names.isdisjoint(ONE_DOCUMENT)


def kernel_packages(hf: nn.Module) -> dict[str, bool]:
    """Return the packages with kernels for the model's mixers, and whether each is installed."""
    every = [scan for module in hf.modules() for scan in scans_of(module).values()]
    lacked = {scan.package for scan in every if scan.kernel is None and scan.name != FUSED}
    found = {
        "flash-linear-attention" if name == "fla" else name.replace("_", "-"): name not in lacked
        for name in {scan.package for scan in every}
    }
    return dict(sorted(found.items()))


def missing_kernels(hf: nn.Module) -> list[str]:
    """Return the packages with kernels for the model's mixers that cannot be imported here."""
    return [name for name, there in kernel_packages(hf).items() if not there]


def scans_of(module: nn.Module) -> dict[str, Scan]:
    """Return the functions that a module's forward calls and a package may replace, by names."""
    forward, found = inspect.unwrap(type(module).forward), dict[str, Scan]()
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, Scan):
            found[name] = function
        elif inspect.isfunction(function) and hasattr(function, "__wrapped__"):
            inner = inspect.getclosurevars(function).nonlocals
            if "is_new_implementation" in inner:
                kernel = function if inner["is_new_implementation"] else None
                reference = inner["torch_function"]
                takes = frozenset(inspect.signature(reference).parameters)
                found[name] = Scan(inner["func_name"], inner["package"], kernel, reference, takes)
    return found
