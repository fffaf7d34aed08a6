"""Speed up the blocks: compile them, or run their matmuls in float8.

use_float8(model, device)                             # before shard()
compile_blocks(model)                                 # after shard()
measure_compile(model, batch).speedup                 # once it is sharded and filled
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rayapp.model.attention import Unavailable
from rayapp.model.build import LanguageModel
from rayapp.model.sharding import find_blocks

ADA = (8, 9)  # lowest compute capability with float8 matmuls


def compile_blocks(model: LanguageModel) -> None:
    """Compile the forward pass of each block, inside FSDP's hooks.

    Call it after `shard`, which gives the blocks a new class: activations are recomputed by the
    forward of that class.

    All blocks share one code object and differ only in their parameters, so one compilation serves
    them all. The layer's index adds no guard: only a key-value cache reads it, and training uses
    none.
    """
    for block in find_blocks(model.hf):
        block.forward = torch.compile(block.forward)


@dataclass(frozen=True)
class CompileGain:
    """Seconds of one block's forward and backward, eager and compiled, measured after a warm-up."""

    eager_s: float
    compiled_s: float
    compile_s: float
    """Extra seconds of the first compiled pass over a later one."""

    @property
    def speedup(self) -> float:
        """Eager time over compiled time."""
        return self.eager_s / self.compiled_s

    def __str__(self) -> str:
        """Return the result as one line of text."""
        gain = f"{self.speedup:.2f}x faster"
        if self.speedup < 1.0:
            gain = f"{1 / self.speedup:.2f}x slower: set train.compile=false"
        return f"compile: one block {gain}, {self.compile_s:.0f} s to compile"


def measure_compile(model: LanguageModel, batch: dict[str, Any]) -> CompileGain:
    """Time the last block on its inputs of a micro-batch, eager and compiled.

    All ranks call it together. It costs one forward pass of the model and eight forward and
    backward passes of one block; training reuses the compiled code. Weights, gradients and random
    state stay as they were.
    """
    block = find_blocks(model.hf)[-1]
    calls: list[tuple[tuple[Any, ...], dict[str, object]]] = []
    hook = block.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    device = batch["input_ids"].device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            model(**batch)
        hook.remove()
        args, kwargs = calls[-1]  # a reference of preferences passes first
        if isinstance(block, FSDPModule):
            block.unshard()
        run = _forward_and_backward(block, args, kwargs)
        with torch.compiler.set_stance("force_eager"):
            run()
            eager_s = min(_seconds(run, device) for _ in range(3))
        first_s = _seconds(run, device)
        compiled_s = min(_seconds(run, device) for _ in range(3))
        if isinstance(block, FSDPModule):
            block.reshard()
    return CompileGain(eager_s, compiled_s, max(0.0, first_s - compiled_s))


def _forward_and_backward(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
) -> Callable[[], None]:
    """Return a function that runs a block once without FSDP's hooks and discards the gradients."""
    hidden, *others = args
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]

    def run() -> None:
        start = hidden.detach().requires_grad_().clone()  # not a leaf, as inside the model
        output = block.forward(start, *others, **kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        torch.autograd.grad(output, [start, *trained], torch.ones_like(output), allow_unused=True)

    return run


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def use_float8(model: LanguageModel, device: torch.device) -> None:
    """Run the blocks' matmuls in float8 with row-wise scales (torchao); weights keep their dtype.

    Raises: Unavailable if the device has no float8 matmuls.
    """
    name = "the CPU" if device.type != "cuda" else torch.cuda.get_device_name(device)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < ADA:
        raise Unavailable(
            f"train.precision=fp8 is not available: {name} has no float8 matmuls (compute "
            "capability 8.9 does). Set train.precision=bf16"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise")
    # The weight's gradient sums over tokens, which float8 kernels take in multiples of 16.
    config = replace(config, pad_inner_dim=True)
    for block in find_blocks(model.hf):
        convert_to_float8_training(block, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, name: str) -> bool:
    """Return whether float8 kernels take this layer: no adapter, both sides multiples of 16."""
    sides = getattr(module, "in_features", 1), getattr(module, "out_features", 1)
    return "lora_" not in name and all(side % 16 == 0 for side in sides)
