"""Choose the attention kernel, and add one that takes packed rows without a mask: `varlen`.

    name = choose_attention("auto", config, "cuda", torch.bfloat16)  # varlen, if they allow it
    model = build(config, loss=loss, attention=name)

sdpa and flex keep the documents of a row apart by a mask, which is built from restarting positions.
varlen and flash take the rows of a micro-batch end to end as one sequence, with the boundaries of
its documents: the same result, without work or memory for pairs of tokens in different documents.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from rayapp.model.by_document import by_document, with_dropout
from rayapp.model.sinks import FlashWithSinks, grouped_queries

log = logging.getLogger("rayapp.model")


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
PROBE = "rayapp_probe"


def choose_attention(
    wanted: str, config: PretrainedConfig, device_type: str, dtype: torch.dtype
) -> str:
    """Return the attention kernel for a model, device type and dtype; `auto` picks the best one.

    Raises: Unavailable saying why a wanted one cannot be had.
    """
    if wanted == "auto":
        if not _capped(config) and not _varlen_problem(config, device_type, dtype):
            return "varlen"
        return "eager" if _capped(config) or not _supports(config, "sdpa") else "sdpa"
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
            f"{config.model_type} caps attention scores, which only eager computes exactly. "
            "Set model.attention=auto"
        )
    if wanted in FLAGS and not _supports(config, FLAGS[wanted]):
        return f"{config.model_type} has none. Set model.attention=auto"
    named = _flag(config, "compatible_flash_implementations")  # None: all
    if wanted == "flash" and named and IMPLEMENTATIONS["flash"] not in named:
        return f"{config.model_type} has sinks, which it does not compute. Set model.attention=auto"
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


@contextmanager
def cached_attention(hf: PreTrainedModel) -> Iterator[None]:
    """Inside the block, attend by a kernel that takes a cache of keys and values."""
    name = hf.config._attn_implementation
    if name not in ("eager", "sdpa"):
        hf.set_attn_implementation("sdpa" if _supports(hf.config, "sdpa") else "eager")
    try:
        yield
    finally:
        if hf.config._attn_implementation != name:
            hf.set_attn_implementation(name)


def takes_any_kernel(config: PretrainedConfig) -> bool:
    """Return whether attention may be any function of queries, keys, values and a window."""
    return not _capped(config) and _own_attention(config) is None


def _capped(config: PretrainedConfig) -> bool:
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def _own_attention(config: PretrainedConfig) -> str | None:
    """Return why a model's attention is its own, or None."""
    others = _supports(config, "sdpa") or _supports(config, "flash_attn")
    if not (others and _supports(config, "attention_backend")):
        return f"{config.model_type} takes no other kernel than its own"
    if getattr(config.get_text_config(), "attention_chunk_size", None):
        return f"{config.model_type} attends in chunks, which takes a mask"
    if getattr(config.get_text_config(), "index_topk", None):
        return f"{config.model_type} chooses the tokens that it attends to by a mask"
    return None


def _supports(config: PretrainedConfig, what: str) -> bool:
    """Return `_supports_{what}` of the model's class; True for classes that are not known."""
    return bool(_flag(config, f"supports_{what}", True))


def _flag(config: PretrainedConfig, name: str, unknown: Any = None) -> Any:
    """Return `_{name}` of the model's class; `unknown` for classes that are not known."""
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return unknown if known is None else getattr(known, f"_{name}", None)


def _varlen_problem(config: PretrainedConfig, device_type: str, dtype: torch.dtype) -> str | None:
    if problem := _own_attention(config):
        return problem
    if not _hands_on_windows(config):
        return f"{config.model_type} has its sliding window in a mask alone"
    return _flash_problem(config, dtype) if device_type == "cuda" else None


def _hands_on_windows(config: PretrainedConfig) -> bool:
    """Return whether a model tells its attention kernel every sliding window of its masks.

    A kernel without a mask sees a window only if the model passes it on, which PhiMoE, Qwen2-MoE
    and Doge do not in transformers 5.23. The model's code is run on the meta device, with a kernel
    that notes which windows it is given, beside those that masks are made of.
    """
    values = config.get_text_config().to_dict().items()
    if not any("window" in name and value for name, value in values):
        return True
    in_masks: set[int | None] = {None}
    given: set[int | None] = {None}

    def mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> None:
        in_masks.add(local_size)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        given.add(sliding_window)
        rows, heads, length, _ = query.shape
        return value.new_empty(rows, length, heads, value.shape[-1]), None

    AttentionInterface.register(PROBE, attend)
    transformers.AttentionMaskInterface.register(PROBE, mask)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.bfloat16,  # experts' kernels take no other
            attn_implementation=PROBE,
            trust_remote_code=False,
        )
        ids = torch.zeros(1, 8, dtype=torch.long)
        try:  # with a mask of tokens, transformers does not look into the positions
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        except Exception as error:  # any failure of the model's code: what it gave so far counts
            log.info("%s: its windows are known in part (%r)", type(model).__name__, error)
    return in_masks <= given


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
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each document; transformers calls it for every layer.

    Shapes: query [B, heads, S, D], key and value [B, kv_heads, S, D] -> [B, S, heads, D]. With
    boundaries (cu_seq_lens_q [documents + 1], from 0 to S) B is 1; without, each row is a document.
    Sinks (s_aux [heads]) are scores that take a share of the softmax and have no value.
    """
    assert attention_mask is None, "varlen takes no mask"
    rows, heads, length, size = query.shape
    whole = sliding_window is None or sliding_window >= length
    plain = cu_seq_lens_q is None and whole and s_aux is None
    if plain and not _slow_in_half(query, key, dropout):
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
        packed = with_dropout(q, k, v, s_aux, cu_seq_lens_q, window, scale, dropout)
    elif query.device.type == "cuda":
        packed = _flash(q, k, v, s_aux, cu_seq_lens_q, max_length_q, window, scale)
    else:
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        packed, _ = by_document(q, k, v, s_aux, cu_seq_lens_q, window, scale)
    packed = packed.view(rows, length, heads, size)
    return packed if value_size == size else packed[..., :value_size], None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bounds: Tensor,
    longest: int,
    window: int,
    scale: float,
) -> Tensor:
    """Attend on a GPU, causally within each document: [T, heads, D] -> [T, heads, D]."""
    if sinks is not None:
        return FlashWithSinks.apply(query, key, value, sinks, bounds, longest, window, scale)
    result = varlen_attn(
        *(query, key, value, bounds, bounds, longest, longest),
        scale=scale,
        window_size=(window, 0),
        **grouped_queries(),
    )
    assert isinstance(result, Tensor)
    return result


def _slow_in_half(query: Tensor, key: Tensor, dropout: float) -> bool:
    """Return whether `by_document` is faster for whole rows too: on CPUs in 16 bits."""
    narrow = query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16)
    return narrow and not dropout and query.shape[2] == key.shape[2]


# Without a mask function of this name transformers makes no mask. With one, even one that returns
# None, it would first look for packed documents in the positions, and so wait for the GPU.
AttentionInterface.register(IMPLEMENTATIONS["varlen"], varlen_attention)
