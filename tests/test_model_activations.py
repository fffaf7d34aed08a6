"""What a step holds from its forward to its backward pass, for every pairing of what lowers it."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from rayapp.config import from_dict
from rayapp.data import tokens
from rayapp.finetune.model_parts import make_parts
from rayapp.model import LanguageModel, activations
from rayapp.model.sharding import find_blocks

LAYERS = 2
# (checkpointing, compiled, offloaded, LoRA)
PAIRINGS = list(
    itertools.product(("none", "selective", "full"), (False, True), (False, True), (False, True))
)


def checkpointed_blocks(lm: LanguageModel, batch: dict[str, Tensor]) -> int:
    """Count the blocks whose forward is given to a checkpoint function."""
    counted: list[nn.Module] = []

    def counting(block: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        counted.append(block)
        return func(*args, **kwargs)

    blocks: list[Any] = [b for b in find_blocks(lm.hf) if b.gradient_checkpointing]
    before = [block._gradient_checkpointing_func for block in blocks]
    for block, func in zip(blocks, before, strict=True):
        block._gradient_checkpointing_func = partial(counting, block, func)
    with torch.compiler.set_stance("force_eager"):
        lm(**batch)[0].backward()
    for block, func in zip(blocks, before, strict=True):
        block._gradient_checkpointing_func = func
    return len(counted)


def held_kib(lm: LanguageModel, batch: dict[str, Tensor]) -> int:
    """Return what the forward pass of a second step has allocated and not freed."""
    lm(**batch)[0].backward()  # compiles; gradients are there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        objective, _ = lm(**batch)
    objective.backward()
    return int(sum(event.self_cpu_memory_usage for event in profiled.events())) >> 10


def measure(rank: int, world: int, root: str) -> None:
    """Build every pairing as a run does; write what it checkpoints, holds and moves."""
    moved = [0]

    class Hooks(saved_tensors_hooks):
        def __init__(self, pack: Any, unpack: Any) -> None:
            super().__init__(partial(self.count, pack), unpack)

        def count(self, pack: Any, tensor: Tensor) -> Any:
            packed = pack(tensor)
            moved[0] += 0 if isinstance(packed, Tensor) else tensor.nbytes
            return packed

    activations.saved_tensors_hooks = Hooks  # type: ignore[misc]
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    ids = torch.randint(0, 259, (2, 256))
    batch, found = {"input_ids": ids, "labels": ids}, []
    for checkpointing, compiled, offloaded, lora in PAIRINGS:
        torch._dynamo.reset()
        tree: dict[str, Any] = {
            "model": {"path": root, "lora": {"rank": 4} if lora else None},
            "train": {"precision": "fp32", "compile": compiled, "loss_chunk": 64},
            "parallel": {
                "activation_checkpointing": checkpointing,
                "activation_offload": offloaded,
            },
        }
        job: Any = SimpleNamespace(config=from_dict(tree), tokenizer_url=root)
        lm = make_parts(job, torch.device("cpu")).lm
        blocks = checkpointed_blocks(lm, batch)
        held = held_kib(lm, batch)
        moved[0] = 0
        lm(**batch)
        found.append((blocks, held, moved[0] >> 10))
    Path(root, "found.json").write_text(json.dumps(found))


@pytest.mark.full
def test_compiling_and_offloading_leave_checkpointing_on(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokens.byte_tokenizer().save_pretrained(tmp_path)
    processes.spawn(measure, 1, str(tmp_path / "init"), str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    by_pairing = dict(zip(PAIRINGS, found, strict=True))
    for (checkpointing, compiled, offloaded, lora), (blocks, held, moved) in by_pairing.items():
        where = (checkpointing, compiled, offloaded, lora)
        assert blocks == (0 if checkpointing == "none" else LAYERS), where
        assert (moved > 0) is offloaded, where
        _, plain, _ = by_pairing["none", False, False, lora]
        most = {"none": 1.0, "selective": 0.4, "full": 0.2}[checkpointing]
        if offloaded and checkpointing != "selective":  # what selective keeps is not autograd's
            most = 0.2
        assert held - moved <= most * plain, (where, held, moved, plain)
        if checkpointing == "none" and not offloaded:
            assert held > 0.8 * plain, where


def test_what_comes_back_from_the_host_lies_as_it_did() -> None:
    """Compiled code relies on the strides of what it saved."""
    seen: list[tuple[bool, bool]] = []

    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *views: Tensor) -> Tensor:
            ctx.save_for_backward(*views)
            ctx.kept = views
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            for saved, view in zip(ctx.saved_tensors, ctx.kept, strict=True):
                seen.append((saved.stride() == view.stride(), torch.equal(saved, view)))
            return gradients[0], None, None, None

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            base = torch.arange(3 * 2**16).view(2**8, -1).float()
            views = (base.T, base[:, 1::2], base[:1].expand(2**8, -1))
            return Saved.apply(x, *views)  # type: ignore[no-any-return]

    block, x = Block(), torch.ones(2, requires_grad=True)
    activations._offloaded(block, block.forward, x).sum().backward()
    assert seen == [(True, True)] * 3
