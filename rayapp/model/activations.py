"""Keep fewer activations for the backward pass: recompute them, or hold them in host memory.

    checkpoint_activations(model, "selective")    # before shard()
    offload_activations(model)                    # after shard(), and after compile_blocks()

Both work inside a block's forward, where FSDP's hooks are outside: what is recomputed finds the
block's parameters gathered once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rayapp.model.build import LanguageModel
from rayapp.model.sharding import find_blocks

MIN_OFFLOAD_BYTES = 2**16

# A kernel of each device and mask; recomputing one costs S / 2 times as many operations a byte as
# it gives back, for S tokens a document.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "rayapp::by_document",
    "flash_attn::_flash_attn_varlen_forward",
    "flex_attention",
}
MATMULS = {"aten::mm", "aten::addmm"}


def checkpoint_activations(model: LanguageModel, mode: str) -> None:
    """Recompute each block in the backward pass: "full", "selective" by operation, or "none".

    selective keeps what costs most to recompute for the memory it takes: the result of attention,
    and of every matmul into the attention or from it that is no wider than its input (recomputing
    a value costs as many operations as the input is wide). The feed-forward's wide results, most
    of a block's activations, and all that is elementwise are computed again.
    """
    if mode == "none":
        return
    assert mode in ("full", "selective"), mode
    kwargs: dict[str, object] = {"use_reentrant": False}
    if mode == "selective":
        hidden_size = model.hf.config.get_text_config().hidden_size
        policy = partial(_policy, hidden_size)
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    model.hf.activation_checkpointing_enable(kwargs)
    # It also makes the embeddings' result require a gradient, which re-entrant checkpoints need.
    # Beside frozen embeddings it would be computed, and kept, for nobody.
    model.hf.disable_input_require_grads()


def _policy(hidden_size: int, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name()
    if name in ATTENTION or (name in MATMULS and _is_kept(hidden_size, *args[-2:])):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(hidden_size: int, left: Tensor, right: Tensor) -> bool:
    """Tell a projection of the attention: inner and outer width at most that of the model.

    Shapes: left [tokens, inner], right [inner, outer]. The feed-forward's last matmul has a wider
    inner dimension; its result goes to the residual stream alone and no backward pass needs it.
    """
    inner, outer = right.shape
    return outer <= inner <= hidden_size


def offload_activations(model: LanguageModel) -> None:
    """Hold what blocks save for the backward pass in host memory (pinned, from a GPU).

    Parameters are not moved, nor what is smaller than 64 KiB.
    """
    for block in find_blocks(model.hf):
        block.forward = partial(_offloaded, block, block.forward)


def _offloaded(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def pack(tensor: Tensor) -> Any:
        small = tensor.nbytes < MIN_OFFLOAD_BYTES
        expanded = 0 in tensor.stride()  # less memory than its size says
        if small or expanded or tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        pinned = tensor.device.type == "cuda"
        held = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        # The stream orders this copy before whatever reuses the memory of `tensor`, and before
        # the copy back: the host need not wait.
        return tensor.device, tensor.stride(), held.copy_(tensor, non_blocking=pinned)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, stride, held = packed
        tensor = torch.empty_strided(held.shape, stride, dtype=held.dtype, device=device)
        return tensor.copy_(held, non_blocking=True)  # compiled code relies on the strides

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)
