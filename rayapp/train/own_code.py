"""Losses and metrics of the user's, computed token by token in chunks (docs/own_code.md).

    objective, loss = own_loss(hidden, weight, labels, function=load_code("train.loss", name))
    sums = token_sums({"accuracy": function}, hidden, weight, labels)

A function sees the tokens that bear loss, at most `chunk` at once: logits float32 [c, V] and labels
int64 [c]. It returns one number a token, float [c], so that its sum does not depend on how rows are
spread over micro-batches and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch.utils.checkpoint import checkpoint

from rayapp.train.loss import IGNORE


class TokenFunction(Protocol):
    """What train.loss and eval.metrics name."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, /) -> torch.Tensor:
        """Return one number a token, [c], of logits float32 [c, V] and labels int64 [c]."""
        ...


def own_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    function: TokenFunction,
    chunk: int = 4096,
    each: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (objective, cross-entropy), sums over labels that are not IGNORE; fp32 scalars.

    Shapes: hidden [..., H], weight [V, H], labels [...], bias [V]; without a weight, `hidden` holds
    the logits [..., V]. The backward pass computes each chunk's logits again, so that at most
    `chunk * V` exist at once. `each`, zeros fp32 [labels], is filled with the cross-entropy of
    each label.

    Raises:
        ValueError: the function does not return a number a token.
    """

    def of_chunk(
        part: torch.Tensor, wanted: torch.Tensor, *head: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _logits(part, *head)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        return _of_tokens("train.loss", function, logits, wanted).sum(), loss

    objective, loss = 0.0 * hidden.sum(dtype=torch.float32), hidden.new_zeros((), dtype=torch.float)
    all_of_them = []
    for part, wanted in _chunks(hidden, labels, chunk):
        more, of_labels = checkpoint(of_chunk, part, wanted, weight, bias, use_reentrant=False)
        objective, loss = objective + more, loss + of_labels.sum()
        all_of_them.append(of_labels)
    if each is not None and all_of_them:
        each[labels.reshape(-1) != IGNORE] = torch.cat(all_of_them)
    return objective, loss


@torch.no_grad()
def token_sums(
    functions: Mapping[str, TokenFunction],
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    chunk: int = 4096,
) -> torch.Tensor:
    """Return each function's sum over labels that are not IGNORE, fp64 [functions]."""
    sums = torch.zeros(len(functions), dtype=torch.float64)
    for part, wanted in _chunks(hidden, labels, chunk):
        logits = _logits(part, weight, bias)
        for place, (name, function) in enumerate(functions.items()):
            sums[place] += float(_of_tokens(f"eval.metrics={name}", function, logits, wanted).sum())
    return sums


def _chunks(
    hidden: torch.Tensor, labels: torch.Tensor, chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (hidden [c, H], labels [c]) of the tokens that bear loss."""
    flat = labels.reshape(-1)
    bears = flat != IGNORE
    hidden, flat = hidden.reshape(len(flat), -1)[bears], flat[bears]
    size = chunk or max(len(flat), 1)
    for start in range(0, len(flat), size):
        yield hidden[start : start + size], flat[start : start + size]


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    logits = hidden if weight is None else torch.nn.functional.linear(hidden, weight, bias)
    return logits.float()


def _of_tokens(
    what: str, function: Callable[..., torch.Tensor], logits: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    values = function(logits, labels)
    if not isinstance(values, torch.Tensor) or values.shape != labels.shape:
        shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(
            f"{what} is not usable: it must return one number a token, a tensor of shape "
            f"[{len(labels)}], and returned {shape}. Return it without a sum or mean over tokens"
        )
    return values.float()
