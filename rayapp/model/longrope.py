"""Turn each document of a packed row by LongRoPE's factors for its own length.

    by_document(hf)        # on the meta device, before its buffers are rebuilt

LongRoPE (Ding et al. 2024, arXiv 2402.13753; Phi) has two sets of frequencies: one for sequences up
to the length of pre-training, one for longer ones. transformers takes one set for all that a
forward pass is given, by the highest position, so that one long document would change how every
short one beside it is turned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def by_document(hf: PreTrainedModel) -> None:
    """Make the rotary embeddings of a model with LongRoPE choose for each document."""
    rotary: Any
    for rotary in hf.modules():
        if getattr(rotary, "rope_type", None) == "longrope":
            limit = rotary.config.rope_parameters["original_max_position_embeddings"]
            rotary.forward = partial(_turned, type(rotary).forward, rotary, limit)


def _turned(
    forward: Callable[..., tuple[Tensor, Tensor]],
    rotary: nn.Module,
    limit: int,
    x: Tensor,
    position_ids: Tensor,
) -> tuple[Tensor, ...]:
    """Return (cos, sin) [B, S, D] of positions [B, S] that restart at 0 with each document."""
    long = is_long(position_ids, limit)
    of_long = forward(rotary, x, position_ids)
    of_short = forward(rotary, x, position_ids.masked_fill(long, 0))
    chosen = long.unsqueeze(-1)
    return tuple(torch.where(chosen, a, b) for a, b in zip(of_long, of_short, strict=True))


def is_long(position_ids: Tensor, limit: int) -> Tensor:
    """Return which positions are of a document of more than `limit` tokens: [B, S] -> bool."""
    document = (position_ids == 0).cumsum(-1)
    last = torch.zeros_like(torch.cat([position_ids, position_ids[:, :1]], 1))
    last = last.scatter_reduce(1, document, position_ids, "amax")
    return last.gather(1, document) >= limit
