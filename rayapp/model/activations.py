"""Keep fewer activations in GPU memory: recompute them, or offload them to host memory.

    checkpoint_activations(model, "selective")    # before shard()
    offload_activations(model)                    # after shard(), and after compile_blocks()

Both wrap a block's forward inside FSDP's hooks, so that a block's recomputation and backward share
one all-gather of its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rayapp.model.build import LanguageModel
from rayapp.model.sharding import find_blocks

MIN_OFFLOAD_BYTES = 2**16

# Attention kernels by device and mask. Their results are kept: for documents of S tokens,
# recomputing one costs S / 2 operations per byte that it frees.
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

    "selective" keeps the results that cost most to recompute per byte: those of attention, and of
    the attention's projections that are no wider than their input (recomputing one value costs as
    many multiply-adds as the input is wide). It recomputes the feed-forward's wide results, which
    are most of a block's activations, and everything elementwise.
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
    # The call above also makes the embeddings' output require a gradient, which only re-entrant
    # checkpoints need. With frozen embeddings that gradient would be computed and kept for nothing.
    model.hf.disable_input_require_grads()


def _policy(hidden_size: int, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = keeps_result(hidden_size, op.name(), args)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keeps_result(hidden_size: int, name: str, args: Sequence[Any]) -> bool:
    """Return whether selective checkpointing keeps the result of the operator of that name."""
    return name in ATTENTION or (name in MATMULS and _is_kept(hidden_size, *args[-2:]))


def _is_kept(hidden_size: int, left: Tensor, right: Tensor) -> bool:
    """Return whether this matmul is an attention projection: outer <= inner <= hidden_size.

    Shapes: left [tokens, inner], right [inner, outer]. The feed-forward's last matmul has a wider
    inner dimension; its result only goes to the residual stream and no backward pass needs it.
    """
    inner, outer = right.shape
    return outer <= inner <= hidden_size


def offload_activations(model: LanguageModel) -> None:
    """Offload the tensors that blocks save for the backward pass to (on GPUs: pinned) host memory.

    Parameters, expanded tensors and tensors of less than 64 KiB stay where they are.
    """
    for block in find_blocks(model.hf):
        block.forward = partial(_offloaded, block, block.forward)


def _offloaded(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def pack(tensor: Tensor) -> Any:
        small = tensor.nbytes < MIN_OFFLOAD_BYTES
        expanded = 0 in tensor.stride()  # it takes less memory than its size says
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
