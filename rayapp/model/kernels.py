"""Compute the blocks faster: compiled, or with matmuls in float8.

use_float8(model, device)                             # before shard()
compile_blocks(model)                                 # after shard()
measure_compile(model, batch).speedup                 # once it is sharded and filled
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rayapp.model.attention import Unavailable
from rayapp.model.build import LanguageModel
from rayapp.model.sharding import find_blocks

ADA = (8, 9)  # compute capability with float8 matmuls


def compile_blocks(model: LanguageModel) -> None:
    """Compile the forward pass of each block, inside FSDP's hooks.

    Only after `shard`, which gives the blocks another class: that class's forward is the one that
    recomputes activations.

    All blocks share one code object and are alike but for their parameters, so one compilation
    serves them all. The layer's number is no guard: only a cache of keys and values asks for it,
    and training has none.
    """
    for block in find_blocks(model.hf):
        block.forward = torch.compile(block.forward)


@dataclass(frozen=True)
class CompileGain:
    """Forward and backward of one block, by the second pass or later; in seconds."""

    eager_s: float
    compiled_s: float
    compile_s: float
    """What the first compiled pass took beyond a later one."""

    @property
    def speedup(self) -> float:
        """How many times as fast it is compiled."""
        return self.eager_s / self.compiled_s

    def __str__(self) -> str:
        """Return the line to print."""
        found = f"{self.speedup:.2f}x faster"
        if self.speedup < 1.0:
            found = f"{1 / self.speedup:.2f}x slower: set train.compile=false"
        return f"compile: one block {found}, {self.compile_s:.0f} s to compile"


def measure_compile(model: LanguageModel, batch: dict[str, Any]) -> CompileGain:
    """Time the last block on what it gets of a micro-batch, as it is and compiled.

    All ranks call it together. It costs a forward pass and eight passes through one block, and
    leaves what it compiled to the training; weights, gradients and random numbers stay.
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
        ((args, kwargs),) = calls
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
    """Return what runs a block once past FSDP's hooks, with gradients that go nowhere."""
    hidden, *others = args
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]

    def run() -> None:
        start = hidden.detach().requires_grad_().clone()  # no leaf, as inside the model
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
