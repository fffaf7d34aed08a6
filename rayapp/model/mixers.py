"""Run layers that mix along the sequence without attention document by document.

    split_documents(model)          # before or after shard(); the model then sets `mixers.bounds`

A causal convolution or a recurrence carries one document's values into the next, and few of
transformers' layers take the documents' boundaries. Run on each document of a packed row by itself,
any such layer gives what it gives for that document alone. It costs one call of the layer for each
document instead of one for each row. A block that is recomputed in the backward pass takes the
boundaries of the last forward pass: backward follows forward, micro-batch by micro-batch.

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
from rayapp.model.sharding import find_blocks


def split_documents(model: LanguageModel) -> bool:
    """Make the blocks' mixers run document by document; return whether there are any."""
    if model.splits_documents:
        return True
    for block in find_blocks(model.hf):
        for module in block.modules():
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                module.forward = partial(_run, model, module.forward)
                model.splits_documents = True
    return model.splits_documents


@torch.compiler.disable
def _run(model: LanguageModel, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a mixer on each document, with the rows laid end to end.

    Shapes: hidden states [B, S, H] are its first tensor; others that begin with [B, S] are split
    along with them. The result is a tensor [B, S, ...].
    """
    bounds = model.bounds
    if bounds is None:
        return forward(*args, **kwargs)
    kwargs = {**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs
    kwargs = {name: value for name, value in kwargs.items() if not name.startswith("cu_seq_lens")}
    given = (args, kwargs)
    rows, length = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)).shape[:2]

    def part(start: int, end: int, tensor: Tensor) -> Tensor:
        if tensor.shape[:2] != (rows, length):
            return tensor
        return tensor.reshape(1, rows * length, *tensor.shape[2:])[:, start:end]

    results = []
    for start, end in pairwise(bounds):
        its_args, its_kwargs = tree_map_only(Tensor, partial(part, start, end), given)
        results.append(forward(*its_args, **its_kwargs))
    mixed = torch.cat(results, 1)
    return mixed.reshape(rows, length, *mixed.shape[2:])
