"""Attend document by document with torch's own kernels: on CPUs, and with dropout.

    packed, log_sum = by_document(q, k, v, None, bounds, -1, scale)       # [T, heads, D] each

Boundaries are int32 [documents + 1], from 0 to T, of rows that are laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rayapp.model.sinks import add_sinks, gradient_of_sinks


@torch.compiler.disable
def with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bounds: Tensor,
    window: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend with dropout by sdpa, document by document: [T, heads, D] -> [T, heads, D]."""
    parts = []
    for start, end in pairwise(bounds.tolist()):
        q, k, v = _heads_first((query, key, value), start, end, query.dtype)
        mask = _window_mask(end - start, window, query)
        if sinks is not None:  # one more key, whose scores are the sinks and whose value is 0
            before = window if window >= 0 else end - start
            seen = _causal_mask(end - start, before, query).expand(len(sinks), -1, -1)
            column = sinks.to(query.dtype).view(-1, 1, 1).expand(-1, end - start, 1)
            mask = torch.cat([seen, column], 2)
            k, v = (pad(each, (0, 0, 0, 1)) for each in (k, v))
        out = scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@torch.library.custom_op("rayapp::by_document", mutates_args=())
def by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bounds: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend causally within each document, to `window` tokens before (-1: all of them).

    Shapes: query, key, value [T, heads, D], sinks [heads], bounds int32 [documents + 1] ->
    [T, heads, D] and the log-sum-exp of the scores [T, heads], sinks included. It is one operator
    for any documents, so that autograd records one node and compiled blocks have no graph break. It
    computes in fp32 or wider: torch's bf16 kernel takes four times as long, and caches compiled
    code for every length.
    """
    out, log_sum = _results(query)
    for start, end in pairwise(bounds.tolist()):
        mask = _window_mask(end - start, window, log_sum)
        part, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first((query, key, value), start, end, log_sum.dtype),
            *(0.0, mask is None),
            attn_mask=mask,
            scale=scale,
        )
        out[start:end] = part[0].transpose(0, 1)
        log_sum[start:end] = sums[0].transpose(0, 1)
    return (out, log_sum) if sinks is None else add_sinks(out, log_sum, sinks)


@by_document.register_fake
def _(query: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
    return _results(query)


@torch.library.custom_op("rayapp::by_document_backward", mutates_args=())
def _by_document_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    bounds: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, each [T, heads, D]."""
    grads = tuple(torch.empty_like(each) for each in (query, key, value))
    for start, end in pairwise(bounds.tolist()):
        mask = _window_mask(end - start, window, log_sum)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first((grad, query, key, value, out, log_sum), start, end, log_sum.dtype),
            *(0.0, mask is None),
            attn_mask=mask,
            scale=scale,
        )
        for whole, part in zip(grads, parts, strict=True):
            whole[start:end] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


@_by_document_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *unused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, unused: Tensor) -> tuple[Any, ...]:
    query, key, value, sinks, bounds, out, log_sum = ctx.saved_tensors
    options = (bounds, ctx.window, ctx.scale)
    grads = _by_document_backward(grad, query, key, value, out, log_sum, *options)
    of_sinks = None if sinks is None else gradient_of_sinks(grad, out, log_sum, sinks)
    return (*grads, of_sinks, None, None, None)


by_document.register_autograd(_differentiate, setup_context=_keep)


def _results(query: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate attention's output and its log-sum-exp (fp32 or wider)."""
    exact = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=exact)


def _heads_first(
    tensors: Iterable[Tensor], start: int, end: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return one document in the kernel's layout: [T, heads, ...] -> [1, heads, length, ...]."""
    return [each[start:end].transpose(0, 1).unsqueeze(0).to(dtype) for each in tensors]


def _window_mask(length: int, window: int, like: Tensor) -> Tensor | None:
    """Return the additive mask [length, length] of a sliding window; None if causal is enough."""
    return _causal_mask(length, window, like) if 0 <= window < length - 1 else None


def _causal_mask(length: int, window: int, like: Tensor) -> Tensor:
    """Return the additive mask [length, length] of a token and `window` tokens before it."""
    seen = torch.ones(length, length, dtype=torch.bool, device=like.device).tril().triu(-window)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -math.inf)
