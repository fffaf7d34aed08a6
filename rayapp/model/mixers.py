"""Run layers that mix along the sequence without attention on the documents of packed rows.

    split_documents(model, by_row=True)    # before or after shard(); the model sets `bounds`
    if not keeps_documents_apart(lm, device): ...

A causal convolution or a recurrence carries one document's values into the next. Where all that a
layer calls takes the documents' boundaries (scans.py), it runs once for each row. Any other layer
runs on each document of a row by itself, which gives what it gives for that document alone, and
costs a call for each. A block that is recomputed in the backward pass takes the boundaries of the
last forward pass: backward follows forward, micro-batch by micro-batch.

Such a layer is known by its own Conv1d: gated delta rules, Mamba's, short convolutions and gated
recurrences all begin with one. Whether that was enough is asked by gradient.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from rayapp.model.build import LanguageModel
from rayapp.model.scans import numbers_of, takes_rows
from rayapp.model.sharding import find_blocks

LENGTH = 8  # tokens per document


def split_documents(model: LanguageModel, by_row: bool = True) -> bool:
    """Make the blocks' mixers keep documents apart; return whether there are any to be made so.

    With `by_row` those that can run once for each row, else all of them document by document.
    """
    some = False
    for block in find_blocks(model.hf):
        for module in block.modules():
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                before, rows = module.forward, by_row and takes_rows(module)
                before = before.args[1] if isinstance(before, partial) else before
                module.forward = partial(_run, model, before, rows)
                some = some or rows or not by_row
    model.splits_documents = model.splits_documents or some
    return some


@torch.compiler.disable
def _run(model: LanguageModel, forward: Any, by_row: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a mixer on the rows laid end to end, or on each document of them.

    Shapes: hidden states [B, S, H] are its first tensor; others that begin with [B, S] are laid,
    and split, along with them. The result is a tensor [B, S, ...], or a tuple with one.
    """
    bounds = model.bounds
    if bounds is None:
        return forward(*args, **kwargs)
    kwargs = {
        name: None if name == "attention_mask" else value
        for name, value in kwargs.items()
        if not name.startswith("cu_seq_lens")
    }
    given = (args, kwargs)
    rows, length = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)).shape[:2]

    def part(start: int, end: int, tensor: Tensor) -> Tensor:
        if tensor.shape[:2] != (rows, length):
            return tensor
        return tensor.reshape(1, rows * length, *tensor.shape[2:])[:, start:end]

    edges = [0, rows * length] if by_row else bounds.tolist()
    more: dict[str, Tensor] = {}
    if by_row:  # the second is for causal-conv1d and mamba-ssm
        numbers = numbers_of(bounds, rows * length).int()
        more = {"cu_seq_lens_q": bounds.long(), "seq_idx": numbers[None]}
    results = []
    for start, end in pairwise(edges):
        its_args, its_kwargs = tree_map_only(Tensor, partial(part, start, end), given)
        results.append(forward(*its_args, **its_kwargs, **more))

    def joined(*parts: Any) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        return torch.cat(parts, 1).reshape(rows, length, *parts[0].shape[2:])

    return tree_map(joined, *results)


def keeps_documents_apart(model: LanguageModel, device: torch.device) -> bool:
    """Return whether the second of two documents in a row is independent of the first.

    Models differ in whether transformers builds a mask from restarting positions or passes on the
    documents' boundaries, and recurrent layers carry their state across documents whatever the
    mask. So there is no list of model names: the loss of the second document is differentiated with
    respect to the embeddings of the first one's tokens, which gives exactly zero.

    All ranks call it together: it runs one forward and one backward pass, then clears the
    gradients; weights and random state stay. False also for a model that can tell by nothing where
    a document begins: it takes no position_ids, and no layer runs document by document.
    """
    if not (model.takes_positions or model.splits_documents):
        return False
    row = torch.arange(2 * LENGTH, device=device).unsqueeze(0)
    ids = row % model.hf.config.get_text_config().vocab_size
    labels = torch.where((row < LENGTH) | (row == 2 * LENGTH - 1), -100, ids.roll(-1, 1))
    ends = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32, device=device)
    embedded: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        embedded.append(output.requires_grad_())
        output.retain_grad()

    handle = model.hf.get_input_embeddings().register_forward_hook(keep)
    training = model.training
    model.eval()  # no dropout, so that no random numbers are drawn
    try:
        with torch.compiler.set_stance("force_eager"):  # no compilation for rows of this length
            objective, _ = model(ids, labels, row % LENGTH, ends, LENGTH)
            objective.backward()
    finally:
        handle.remove()
        model.train(training)
    for parameter in model.parameters():
        parameter.grad = None
    gradient = embedded[0].grad
    assert gradient is not None
    return not gradient.flatten(0, 1)[:LENGTH].any()
