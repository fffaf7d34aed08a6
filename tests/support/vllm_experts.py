"""A kernel of adapters of experts for vLLM's build for CPUs, which has none: a loop in torch.

It computes on the factors that vLLM has loaded. `as_plugin` makes a folder for PYTHONPATH, in which
vLLM finds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

METADATA = "Metadata-Version: 2.1\nName: vllm-experts\nVersion: 1\n"
ENTRY = "[vllm.general_plugins]\nvllm_experts = vllm_experts:register\n"


def as_plugin(folder: Path) -> str:
    """Write a distribution of this file into a folder; return what PYTHONPATH takes."""
    named = folder / "vllm_experts-1.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(METADATA)
    (named / "entry_points.txt").write_text(ENTRY)
    (folder / Path(__file__).name).write_bytes(Path(__file__).read_bytes())
    return str(folder)


def register() -> None:
    """Take the place of the kernel; vLLM calls it at its start."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    TritonExperts.apply = apply


def apply(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    *_: Any,
    **__: Any,
) -> None:
    """Compute the experts of each token [n, h] with the adapter of its slot, of SiLU models."""
    import torch

    lora = self._lora_context
    slots = [] if lora is None else lora.punica_wrapper.token_lora_indices.tolist()
    out = torch.zeros_like(output)
    for token, x in enumerate(hidden_states.float()):
        slot = slots[token] if token < len(slots) else -1
        on = slot >= 0 and int(lora.adapter_enabled[slot]) == 1
        for place, expert in enumerate(topk_ids[token].tolist()):
            gates = w1[expert].float() @ x
            if on:
                pairs = zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, strict=True)
                gates = gates + torch.cat([_update(a, b, slot, expert, x) for a, b in pairs])
            gate, up = gates.chunk(2)
            h = torch.nn.functional.silu(gate) * up
            y = w2[expert].float() @ h
            if on:
                (a,), (b,) = lora.w2_lora_a_stacked, lora.w2_lora_b_stacked
                y = y + _update(a, b, slot, expert, h)
            out[token] += (topk_weights[token, place].float() * y).to(out.dtype)
    output.copy_(out)


def _update(left: Any, right: Any, slot: int, expert: int, x: Any) -> Any:
    first = left[slot, 0 if left.shape[1] == 1 else expert].float()
    return right[slot, expert].float() @ (first @ x)
