"""Compute the blocks faster: compiled, or with matmuls in float8.

use_float8(model, device)     # before compile_blocks() and shard()
compile_blocks(model)
"""

from __future__ import annotations

import torch
from torch import nn

from rayapp.model.attention import Unavailable
from rayapp.model.build import LanguageModel, find_blocks

ADA = (8, 9)  # compute capability with float8 matmuls


def compile_blocks(model: LanguageModel) -> None:
    """Compile the forward pass of each block, inside FSDP's hooks.

    All blocks share one code object and are alike but for their parameters, so one compilation
    serves them all. The layer's number is no guard: only a cache of keys and values asks for it,
    and training has none.
    """
    for block in find_blocks(model.hf):
        block.forward = torch.compile(block.forward)


def use_float8(model: LanguageModel, device: torch.device, *, emulate: bool = False) -> None:
    """Do the blocks' matmuls in float8, scaled by rows (torchao); weights stay what they are.

    `emulate` rounds to float8 and multiplies in fp32, on any device.
    Raises: Unavailable if the device has no float8 matmuls.
    """
    if not emulate:
        name = "the CPU" if device.type != "cuda" else torch.cuda.get_device_name(device)
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < ADA:
            raise Unavailable(
                f"train.precision=fp8 is not available: {name} has no float8 matmuls (compute "
                "capability 8.9 does). Set train.precision=bf16"
            )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise")
    if emulate:
        object.__setattr__(config, "emulate", True)
    for block in find_blocks(model.hf):
        convert_to_float8_training(block, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, name: str) -> bool:
    """Tell whether a matmul is one that float8 kernels take: sides that 16 divides."""
    sides = getattr(module, "in_features", 1), getattr(module, "out_features", 1)
    return "lora_" not in name and all(side % 16 == 0 for side in sides)
