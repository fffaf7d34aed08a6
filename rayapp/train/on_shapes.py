"""Build a model whose blocks run on tensors without values, with the attention of GPUs.

    lm = build_on_shapes(config)                  # on the meta device
    ATTENDED                                      # what its attention was asked for
    with FakeTensorMode(), GroupedOnShapes(): ... # experts in any dtype

The kernels that train on GPUs take no mask and keep no scores; those of CPUs take a mask for a
sliding window. A model whose attention is its own keeps that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PretrainedConfig

from rayapp import model
from rayapp.model.attention import takes_any_kernel

CPU = torch.device("cpu")  # fake tensors of a GPU need a build of PyTorch with CUDA
ON_SHAPES = "rayapp_on_shapes"
ATTENDED: list[tuple[float, int | None]] = []
"""FLOPs for each attended token, and the window, of each call since the list was cleared."""


def build_on_shapes(
    config: PretrainedConfig,
    loss: model.Loss = model.no_loss,
    dtype: torch.dtype = torch.float32,
) -> model.LanguageModel:
    """Build a model on the meta device, with the attention of GPUs if it takes any kernel."""
    refused = model.attention_problem("sdpa", config, CPU.type, dtype)
    attention = "eager" if refused else "sdpa"
    lm = model.build(config, loss=loss, dtype=dtype, attention=attention)
    if takes_any_kernel(config):
        attend_on_shapes(lm)
    return lm


def attend_on_shapes(lm: model.LanguageModel) -> None:
    """Make attention take and keep what the kernels of GPUs do, on tensors without values."""
    for module in lm.hf.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = ON_SHAPES


def attention_on_shapes(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Return a result of attention's shape; transformers calls it for every layer.

    Shapes: query [B, heads, S, D], key and value [B, kv_heads, S, D] -> [B, S, heads, D]. Kernels
    take one head size for all three. A window changes the time of a kernel, but not its memory.
    """
    heads, size, value_size = query.shape[1], query.shape[-1], value.shape[-1]
    ATTENDED.append((2.0 * heads * (size + value_size), sliding_window))
    if value_size != size:
        value = pad(value, (0, size - value_size))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)[..., :value_size], None


class GroupedOnShapes(TorchDispatchMode):
    """Let grouped products take every dtype, as they do on tensors with values.

    Those of PyTorch 2.13 on tensors without values take bfloat16 alone.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        factors = (factor.to(torch.bfloat16) for factor in args[:2])
        return func(*factors, *args[2:], **(kwargs or {})).to(args[0].dtype)


AttentionInterface.register(ON_SHAPES, attention_on_shapes)
