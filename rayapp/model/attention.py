"""Choose the attention kernel, and add one that takes packed rows without a mask: `varlen`.

    name = choose_attention("auto", config, "cuda", torch.bfloat16)  # varlen, if they allow it
    model = build(config, loss=loss, attention=name)

sdpa and flex keep the documents of a row apart by a mask, which is built from restarting positions.
varlen and flash take the rows of a micro-batch end to end as one sequence, with the boundaries of
its documents: the same result, without work or memory for pairs of tokens in different documents.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
)

from rayapp.model.windows import hands_on_windows


class Unavailable(ValueError):
    """The machine does not support what the config asks for; says why and what to set instead."""


AMPERE = (8, 0)  # lowest compute capability that FlashAttention supports
LARGEST_HEAD = 256  # largest head size that it supports

IMPLEMENTATIONS = {  # our name -> transformers' name
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
    "varlen": "rayapp_varlen",
}
FLAGS = {"sdpa": "sdpa", "flex": "flex_attn", "flash": "flash_attn"}  # of `_supports_...`
BY_BOUNDARIES = ("varlen", "flash")


def choose_attention(
    wanted: str, config: PretrainedConfig, device_type: str, dtype: torch.dtype
) -> str:
    """Return the attention kernel for a model, device type and dtype; `auto` picks the best one.

    Raises: Unavailable saying why a wanted one cannot be had.
    """
    if wanted == "auto":
        if _capped(config) or not _supports(config, "sdpa"):
            return "eager"
        return "sdpa" if _varlen_problem(config, device_type, dtype) else "varlen"
    problem = attention_problem(wanted, config, device_type, dtype)
    if problem:
        raise Unavailable(f"model.attention={wanted} is not available: {problem}")
    return wanted


def attention_problem(
    wanted: str, config: PretrainedConfig, device_type: str, dtype: torch.dtype
) -> str | None:
    """Return why a kernel is not available and what to set; None if it is."""
    if wanted in ("auto", "eager"):
        return None
    if _capped(config):
        return (
            f"{config.model_type} caps or sinks attention scores, which only eager computes "
            "exactly. Set model.attention=auto"
        )
    if wanted in FLAGS and not _supports(config, FLAGS[wanted]):
        return f"{config.model_type} has none. Set model.attention=auto"
    if wanted == "sdpa":
        return None
    if wanted == "varlen":
        problem = _varlen_problem(config, device_type, dtype)
        return problem and f"{problem}. Set model.attention=auto"
    if device_type != "cuda":
        return f"{wanted} attention trains on GPUs only. Set model.attention=auto"
    if wanted == "flash":
        if problem := _flash_problem(config, dtype):
            return f"{problem}. Set model.attention=auto"
        if importlib.util.find_spec("flash_attn") is None:
            return "the package flash-attn is not installed. Install it, or set varlen"
    return None


def _capped(config: PretrainedConfig) -> bool:
    text = config.get_text_config()
    return bool(getattr(text, "attn_logit_softcapping", None)) or text.model_type == "gpt_oss"


def _supports(config: PretrainedConfig, what: str) -> bool:
    """Return `_supports_{what}` of the model's class; True for classes that are not known."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return known is None or bool(getattr(known, f"_supports_{what}"))


def _varlen_problem(config: PretrainedConfig, device_type: str, dtype: torch.dtype) -> str | None:
    if not _supports(config, "attention_backend"):
        return f"{config.model_type} takes no other kernel than its own"
    if getattr(config.get_text_config(), "attention_chunk_size", None):
        return f"{config.model_type} attends in chunks, which takes a mask"
    if getattr(config.get_text_config(), "index_topk", None):
        return f"{config.model_type} chooses the tokens that it attends to by a mask"
    if not hands_on_windows(config):
        return f"{config.model_type} has its sliding window in a mask alone"
    return _flash_problem(config, dtype) if device_type == "cuda" else None


def _flash_problem(config: PretrainedConfig, dtype: torch.dtype) -> str | None:
    """Return why FlashAttention's kernels (varlen on GPUs uses them) cannot be used, or None."""
    if dtype == torch.float32:
        return "on GPUs it computes in 16 bits, and train.precision is fp32"
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head > LARGEST_HEAD:
        return f"it takes heads of {LARGEST_HEAD} at most, and these have {head}"
    if torch.cuda.get_device_capability() < AMPERE:
        return f"it needs compute capability 8.0, and {torch.cuda.get_device_name()} is older"
    return None


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each document; transformers calls it for every layer.

    Shapes: query [B, heads, S, D], key and value [B, kv_heads, S, D] -> [B, S, heads, D]. With
    boundaries (cu_seq_lens_q [documents + 1], from 0 to S) B is 1; without, each row is a document.
    """
    assert attention_mask is None, "varlen takes no mask"
    rows, heads, length, size = query.shape
    whole = sliding_window is None or sliding_window >= length
    if cu_seq_lens_q is None and whole and not _slow_in_half(query, key, dropout):
        out = scaled_dot_product_attention(
            query, key, value, None, dropout, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    if cu_seq_lens_q is None:  # lay the rows end to end
        max_length_q = length
        cu_seq_lens_q = torch.arange(
            0, (rows + 1) * length, length, dtype=torch.int32, device=query.device
        )
    assert max_length_q is not None
    value_size = value.shape[-1]
    if value_size != size:  # kernels take one head size for q, k and v
        value = pad(value, (0, size - value_size))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [B * S, heads, D]
    window = -1 if sliding_window is None else sliding_window - 1
    scale = size**-0.5 if scaling is None else scaling
    if dropout:
        packed = _with_dropout(q, k, v, cu_seq_lens_q, window, scale, dropout)
    elif query.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        bounds, longest = cu_seq_lens_q, max_length_q
        result = varlen_attn(
            *(q, k, v, bounds, bounds, longest, longest),
            scale=scale,
            window_size=(window, 0),
            enable_gqa=True,
        )
        assert isinstance(result, Tensor)
        packed = result
    else:
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        packed, _ = _by_document(q, k, v, cu_seq_lens_q, window, scale)
    packed = packed.view(rows, length, heads, size)
    return packed if value_size == size else packed[..., :value_size], None


@torch.compiler.disable
def _with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
        out = scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


# ---- varlen on CPUs: torch's own kernel, one document after the other ----------------------------


@torch.library.custom_op("rayapp::by_document", mutates_args=())
def _by_document(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend causally within each document, to `window` tokens before (-1: all of them).

    Shapes: query, key, value [T, heads, D], bounds int32 [documents + 1] -> [T, heads, D] and the
    log-sum-exp of the scores [T, heads]. It is one operator for any documents, so that autograd
    records one node and compiled blocks have no graph break. It computes in fp32 or wider: torch's
    bf16 kernel takes four times as long, and caches compiled code for every length.
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
    return out, log_sum


@_by_document.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
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
    query, key, value, bounds, out, log_sum = ctx.saved_tensors
    options = (bounds, ctx.window, ctx.scale)
    grads = _by_document_backward(grad, query, key, value, out, log_sum, *options)
    return (*grads, None, None, None)


_by_document.register_autograd(_differentiate, setup_context=_keep)


def _slow_in_half(query: Tensor, key: Tensor, dropout: float) -> bool:
    """Return whether `_by_document` is faster for whole rows too: on CPUs in 16 bits."""
    narrow = query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16)
    return narrow and not dropout and query.shape[2] == key.shape[2]


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
    if not 0 <= window < length - 1:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=like.device).tril().triu(-window)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -math.inf)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(IMPLEMENTATIONS["varlen"], varlen_attention)
AttentionMaskInterface.register(IMPLEMENTATIONS["varlen"], _no_mask)
