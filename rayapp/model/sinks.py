"""Attention sinks: a learned score of each head takes a share of the softmax and has no value.

    out, log_sum = add_sinks(out, log_sum, sinks)                   # of any kernel, forward
    grad = gradient_of_sinks(grad_out, out, log_sum, sinks)

With P the probabilities and s the sink, the kernel's log-sum-exp L becomes log(exp(L) + exp(s)). A
kernel's own backward pass computes P from the log-sum-exp and the rest from the result, so that
with both replaced it gives the exact gradients of queries, keys and values.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn  # it registers the operators, too


def add_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention's result and log-sum-exp with sinks.

    Shapes: out [T, heads, D], log_sum [T, heads], sinks [heads] -> the same.
    """
    total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
    return out * (log_sum - total).exp().unsqueeze(-1).to(out.dtype), total


def gradient_of_sinks(grad: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, [heads], from the result and log-sum-exp with them."""
    share = (sinks.to(log_sum.dtype) - log_sum).exp()
    inner = (grad.to(log_sum.dtype) * out.to(log_sum.dtype)).sum(-1)
    return -(share * inner).sum(0).to(sinks.dtype)


@lru_cache(maxsize=1)
def grouped_queries() -> dict[str, Any]:
    """Return the argument that lets torch's varlen kernel take fewer key heads than query heads.

    The kernel of torch 2.11 takes them as it is, and has no such argument.
    """
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class FlashWithSinks(torch.autograd.Function):
    """torch's varlen kernel, with sinks added to what its backward pass is given.

    It attends causally within each document on a GPU.

    Shapes: query [T, heads, D], key and value [T, kv_heads, D], bounds int32 [documents + 1].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        bounds: Tensor,
        longest: int,
        window: int,
        scale: float,
    ) -> Tensor:
        ctx.options = (longest, longest, False)
        ctx.scale, ctx.window = scale, [window, 0]
        out, log_sum, state = torch.ops.torch_attn._varlen_attn(
            *(query, key, value, bounds, bounds, *ctx.options),
            scale=scale,
            window_size=ctx.window,
            **grouped_queries(),
        )
        assert log_sum.shape == (query.shape[1], query.shape[0]), "the kernel's is [heads, T]"
        out, total = add_sinks(out, log_sum.transpose(0, 1), sinks)
        log_sum = total.transpose(0, 1).contiguous()
        ctx.save_for_backward(query, key, value, sinks, bounds, out, log_sum, state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, bounds, out, log_sum, state = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_inputs = torch.ops.torch_attn._varlen_attn_backward(
            *(grad, query, key, value, out, log_sum, bounds, bounds, *ctx.options),
            *(state, ctx.scale, ctx.window),
        )
        of_sinks = gradient_of_sinks(grad, out, log_sum.transpose(0, 1), sinks)
        return (*of_inputs, of_sinks, None, None, None, None)
