"""Choose the attention kernel, and add one that takes packed rows without a mask: `varlen`.

    name = choose_attention("auto", config, "cuda")       # varlen, where the GPU has it
    model = build(config, loss=loss, attention=name)

sdpa and flex keep the documents of a row apart by a mask, made from positions that restart. varlen
and flash take the rows of a micro-batch as one line of documents with their boundaries: the same
result, and no work or memory for pairs of tokens that do not see one another.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig


class Unavailable(ValueError):
    """This machine cannot do what the config asks; the message says why and what to set."""


AMPERE = (8, 0)  # compute capability that FlashAttention needs

IMPLEMENTATIONS = {  # our name -> transformers' name
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
    "varlen": "rayapp_varlen",
}
BY_BOUNDARIES = ("varlen", "flash")


def choose_attention(wanted: str, config: PretrainedConfig, device_type: str) -> str:
    """Return the kernel for a model on this machine's devices; `auto` takes the best.

    Raises: Unavailable saying why a wanted one cannot be had.
    """
    if wanted == "auto":
        if _capped(config):
            return "eager"
        return "sdpa" if _flash_problem(device_type) else "varlen"
    problem = attention_problem(wanted, config, device_type)
    if problem:
        raise Unavailable(f"model.attention={wanted} is not available: {problem}")
    return wanted


def attention_problem(wanted: str, config: PretrainedConfig, device_type: str) -> str | None:
    """Say why a kernel cannot be had and what to set; None if it can."""
    if wanted in ("auto", "eager"):
        return None
    if _capped(config):
        return (
            f"{config.model_type} caps or sinks attention scores, which only eager computes "
            "exactly. Set model.attention=auto"
        )
    if wanted == "flex" and device_type != "cuda":
        return "flex attention trains on GPUs only. Set model.attention=auto"
    if wanted == "flash":
        if problem := _flash_problem(device_type):
            return f"{problem}. Set model.attention=auto"
        if importlib.util.find_spec("flash_attn") is None:
            return "the package flash-attn is not installed. Install it, or set varlen"
    return None


def _capped(config: PretrainedConfig) -> bool:
    text = config.get_text_config()
    return bool(getattr(text, "attn_logit_softcapping", None)) or text.model_type == "gpt_oss"


def _flash_problem(device_type: str) -> str | None:
    if device_type != "cuda":
        return "it needs a GPU"
    capability = torch.cuda.get_device_capability()
    if capability < AMPERE:
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
    boundaries (cu_seq_lens_q [documents + 1], from 0 to S) B is 1; without, a row is a document.
    """
    assert attention_mask is None and not dropout, "varlen takes neither mask nor dropout"
    rows, heads, length, size = query.shape
    if cu_seq_lens_q is None and (sliding_window is None or sliding_window >= length):
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    if cu_seq_lens_q is None:  # the window needs a kernel that has one: lay the rows end to end
        max_length_q = length
        cu_seq_lens_q = torch.arange(
            0, (rows + 1) * length, length, dtype=torch.int32, device=query.device
        )
    assert max_length_q is not None
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [B * S, heads, D]
    window = -1 if sliding_window is None else sliding_window - 1
    if query.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        bounds, longest = cu_seq_lens_q, max_length_q
        packed = varlen_attn(
            *(q, k, v, bounds, bounds, longest, longest),
            scale=scaling,
            window_size=(window, 0),
            enable_gqa=True,
        )
        assert isinstance(packed, Tensor)
    else:
        packed = _document_by_document(q, k, v, scaling, window, cu_seq_lens_q)
    return packed.view(rows, length, heads, size), None


@torch.compiler.disable
def _document_by_document(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int, bounds: Tensor
) -> Tensor:
    """Do the same where there is no kernel for it: [T, heads, D] -> [T, heads, D]."""
    parts = []
    for start, end in pairwise(bounds.tolist()):
        length, mask = end - start, None
        if 0 <= window < length - 1:
            ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = ones.tril().triu(-window)
        q, k, v = (t[start:end].transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(IMPLEMENTATIONS["varlen"], varlen_attention)
AttentionMaskInterface.register(IMPLEMENTATIONS["varlen"], _no_mask)
