"""Run layers that mix along the sequence without attention on the documents of packed rows.

    split_documents(model, by_row=True)    # before or after shard(); the model sets `bounds`

A causal convolution or a recurrence carries one document's values into the next. Where all that a
layer calls takes the documents' boundaries (scans.py), it runs once for each row. Any other layer
runs on each document of a row by itself, which gives what it gives for that document alone, and
costs a call for each. A block that is recomputed in the backward pass takes the boundaries of the
last forward pass: backward follows forward, micro-batch by micro-batch.

Such a layer is known by its own Conv1d: gated delta rules, Mamba's, short convolutions and gated
recurrences all begin with one. Whether that was enough is asked by gradient (documents.py).
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rayapp.model.build import LanguageModel
from rayapp.model.scans import numbers_of, takes_rows
from rayapp.model.sharding import find_blocks


def split_documents(model: LanguageModel, by_row: bool = True) -> bool:
    """Make the blocks' mixers keep documents apart; return whether there are any to be made so.

    With `by_row` those that can run once for each row, else all of them document by document.
    """
    some = False
    for block in find_blocks(model.hf):
        for module in block.modules():
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                run = _by_row if by_row and takes_rows(module) else _by_document
                before = module.forward
                if isinstance(before, partial):
                    before = before.args[1]
                module.forward = partial(run, model, before)
                some = some or not by_row or run is _by_row
    model.splits_documents = model.splits_documents or some
    return some


def _end_to_end(given: Any) -> tuple[Any, tuple[int, int]]:
    """Lay rows end to end; return them and the shape of the rows, (B, S).

    Shapes: hidden states [B, S, H] are the first tensor; others that begin with [B, S] are laid
    along with them.
    """
    rows, length = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)).shape[:2]

    def laid(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] != (rows, length):
            return tensor
        return tensor.reshape(1, rows * length, *tensor.shape[2:])

    return tree_map_only(Tensor, laid, given), (rows, length)


def _without_documents(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a mixer without what tells attention the documents."""
    kwargs = {**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs
    return {name: value for name, value in kwargs.items() if not name.startswith("cu_seq_lens")}


@torch.compiler.disable
def _by_row(model: LanguageModel, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a mixer on the rows laid end to end, with the boundaries of their documents."""
    bounds = model.bounds
    if bounds is None:
        return forward(*args, **kwargs)
    (args, kwargs), shape = _end_to_end((args, _without_documents(kwargs)))
    numbers = numbers_of(bounds, shape[0] * shape[1]).int()[None]  # causal-conv1d and mamba-ssm
    mixed = forward(*args, **kwargs, cu_seq_lens_q=bounds.long(), seq_idx=numbers)
    return mixed.reshape(*shape, *mixed.shape[2:])


@torch.compiler.disable
def _by_document(model: LanguageModel, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a mixer on each document; the result is a tensor [B, S, ...]."""
    if model.bounds is None:
        return forward(*args, **kwargs)
    given, shape = _end_to_end((args, _without_documents(kwargs)))

    def part(start: int, end: int, tensor: Tensor) -> Tensor:
        whole = tensor.shape[:2] == (1, shape[0] * shape[1])
        return tensor[:, start:end] if whole else tensor

    results = []
    for start, end in pairwise(model.bounds.tolist()):
        its_args, its_kwargs = tree_map_only(Tensor, partial(part, start, end), given)
        results.append(forward(*its_args, **its_kwargs))
    mixed = torch.cat(results, 1)
    return mixed.reshape(*shape, *mixed.shape[2:])
