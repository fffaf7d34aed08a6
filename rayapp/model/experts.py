"""Compute the experts of a mixture by grouped matrix products, with adapters if they have any.

    expert_modules(hf)                            # those that transformers computes so
    why_not_grouped(hf, torch.bfloat16, device)   # None: one product for all experts
    compute_adapted(hf, "default")                # after peft has added adapters to parameters
    Routing(hf).take()                            # how many tokens each expert was given

transformers keeps the experts of a layer in 3-D parameters, and calls `grouped_mm` on them. peft
adapts such a parameter by adding the whole update to it in each forward pass, which takes the
memory and the traffic of all experts' weights once more. Here the adapters' factors are grouped
products of their own, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.integrations import moe

GROUPED, ADAPTED = "grouped_mm", "rayapp_adapted"  # transformers' name, and the one added here
WRAPPERS = "_rayapp_wrappers"
ALIGNED = 8  # grouped products take rows of whole 16 bytes


def expert_modules(hf: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose experts are computed by a function of transformers' choice."""
    for name, module in hf.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield name, module


def parameter_names(hf: nn.Module) -> list[str]:
    """Return the names of the experts' weights, e.g. down_proj and gate_up_proj, sorted."""
    names = {
        name
        for _, module in expert_modules(hf)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }
    return sorted(names)


def why_not_grouped(
    hf: PreTrainedModel, dtype: torch.dtype, device: torch.device, compiled: bool = False
) -> str | None:
    """Return why a mixture's experts are not computed by one product; None if they are.

    None for a model without experts too.
    """
    if not _is_mixture(hf):
        return None
    if not any(True for _ in expert_modules(hf)):
        return f"in transformers' {hf.config.model_type} each expert is computed alone"
    if compiled and dtype != torch.bfloat16:
        return "compiled blocks have grouped products in bf16 alone"
    weight = torch.empty(1, 8, 8, dtype=dtype, device=device)
    if not moe._can_use_grouped_mm(weight[0], weight, weight):
        return "this device has no grouped products: a GPU needs compute capability 8.0"
    return None


def _is_mixture(hf: PreTrainedModel) -> bool:
    config = hf.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


class Routing:
    """Counts the tokens that each expert is given while `counting`, without waiting for the GPU."""

    def __init__(self, hf: nn.Module) -> None:
        modules = [module for _, module in expert_modules(hf)]
        sizes = {int(getattr(module, "num_experts", 0)) for module in modules}
        self.experts = sizes.pop() if len(sizes) == 1 else 0  # layers are compared by their shares
        self.counting = False
        self.present: Tensor | None = None
        """Bool [B, S]: the tokens to count; None: all."""
        self._counts: list[Tensor] = []
        self._layers = len(modules) if self.experts else 0
        for number, module in enumerate(modules[: self._layers]):
            module.register_forward_pre_hook(partial(self._count, number), with_kwargs=True)

    def begin(self, present: Tensor | None, device: torch.device) -> None:
        """Count the tokens of the forward pass that follows."""
        self.counting, self.present = True, present
        if not self._counts:
            shape = self._layers, self.experts
            self._counts = list(torch.zeros(shape, dtype=torch.int64, device=device))

    def take(self) -> Tensor | None:
        """Return the counts [layers, experts] since the last call; None without any."""
        counts, self._counts = self._counts, []
        return torch.stack(counts) if counts else None

    @torch.no_grad()
    def _count(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.counting:
            return
        chosen: Tensor = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        ones = torch.ones_like(chosen, dtype=torch.int64)
        if self.present is not None and self.present.numel() == len(chosen):
            ones = ones * self.present.reshape(-1, 1)
        self._counts[number].scatter_add_(0, chosen.reshape(-1).long(), ones.reshape(-1))


def compute_adapted(hf: PreTrainedModel, adapter: str) -> None:
    """Let the adapters of experts' parameters be computed beside them, instead of added to them."""
    from peft.tuners.lora.layer import ParamWrapper

    for _, module in hf.named_modules():
        if isinstance(module, ParamWrapper):
            experts: Any = module.get_base_layer()
            wrappers = experts.__dict__.setdefault(WRAPPERS, {})  # no submodules of it
            wrappers[module.parameter_name] = module, adapter
            module.__dict__["forward"] = partial(_forward_of, module)
            experts.config._experts_implementation = ADAPTED


def _forward_of(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper.base_layer(*args, **kwargs)


def adapted_experts(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the experts' output for each token, weighted; as transformers' own function does.

    Shapes: hidden [T, H], top_k_index and top_k_weights [T, K] -> [T, H].
    """
    wrappers = module.__dict__.get(WRAPPERS)
    if not wrappers:
        return moe.grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    tokens, chosen = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1))
    bins = experts.float() if hidden.device.type == "cpu" else experts.int()
    counts = torch.histc(bins, bins=module.num_experts, min=0, max=module.num_experts - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    grouped = partial(_grouped, module, ends, experts)
    outputs = grouped("gate_up_proj" if module.has_gate else "up_proj", hidden[order // chosen])
    outputs = grouped(
        "down_proj", module._apply_gate(outputs) if module.has_gate else module.act_fn(outputs)
    )
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    outputs = outputs * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return outputs[back].view(tokens, chosen, -1).sum(1).to(hidden.dtype)


def _grouped(module: Any, ends: Tensor, experts: Tensor, name: str, values: Tensor) -> Tensor:
    """Multiply rows, sorted by expert, by their experts' weights, and add the adapters' update."""
    bias = getattr(module, f"{name}_bias")[experts] if module.has_bias else None
    output = moe._grouped_linear(values, getattr(module, name), ends, bias, module.is_transposed)
    if name not in module.__dict__[WRAPPERS]:
        return output
    wrapper, adapter = module.__dict__[WRAPPERS][name]
    if wrapper._disable_adapters:
        return output
    left, right = (
        each[adapter].weight.to(values.dtype) for each in (wrapper.lora_A, wrapper.lora_B)
    )
    first, second = expert_factors(left, right, module.num_experts)
    if missing := -second.shape[-1] % ALIGNED:
        first, second = pad(first, (0, 0, 0, missing)), pad(second, (0, missing))
    update = moe._grouped_linear(moe._grouped_linear(values, first, ends), second, ends)
    return output.add(update, alpha=wrapper.scaling[adapter])


def expert_factors(left: Tensor, right: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return peft's factors by expert.

    Shapes: left [experts * rank, in], right [out, rank * experts] -> [experts, rank, in] and
    [experts, out, rank].
    """
    first = left.reshape(experts, -1, left.shape[1])
    return first, right.reshape(right.shape[0], -1, experts).permute(2, 0, 1).contiguous()


moe.ALL_EXPERTS_FUNCTIONS.register(ADAPTED, adapted_experts)
