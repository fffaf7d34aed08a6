"""The optimizers, their weight-decay groups, and the learning rate as a function of the step.

    optimizers = make_optimizers("adamw", model, lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95))
    set_lr(optimizers, lr_at(step, peak=3e-4, schedule="cosine", warmup_steps=100, num_steps=5000))

The schedule holds no state, so a resume has nothing to restore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, assert_never, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rayapp.config.optimizers import OPTIMIZERS, ImageOptimizerName, OptimizerName, Updates
from rayapp.model.init import local_part, whole_of
from rayapp.model.new_tokens import NewRows

CLIP_EPS = 1e-6  # PyTorch divides by the norm plus this


def lr_at(
    step: int,
    *,
    peak: float,
    schedule: str,
    num_steps: int,
    warmup_steps: int = 0,
    floor: float = 0.1,
    decay: float = 0.2,
    first: int = 0,
) -> float:
    """Return the learning rate of a step (from 0); `floor` is the final share of the peak, 0-1.

    The schedule begins at the step `first`: the rate rises linearly over `warmup_steps`, then
    follows its shape. `wsd` (warm-up, stable, decay) stays at the peak and falls linearly over the
    last `decay` (0-1) of all steps, at least one (Hu et al. 2024, arXiv 2404.06395).

    >>> lr_at(0, peak=1.0, schedule="cosine", num_steps=10, warmup_steps=4)
    0.25
    >>> lr_at(4, peak=1.0, schedule="cosine", num_steps=10, warmup_steps=4)
    1.0
    >>> round(lr_at(10, peak=1.0, schedule="linear", num_steps=10, warmup_steps=4), 6)
    0.1
    >>> [lr_at(s, peak=1.0, schedule="wsd", num_steps=10, floor=0.0) for s in (0, 8, 9, 10)]
    [1.0, 1.0, 0.5, 0.0]
    >>> lr_at(102, peak=1.0, schedule="linear", num_steps=104, first=100, floor=0.0)
    0.5

    Raises: ValueError: the step is before `first`, so that its rate is that of another schedule.
    """
    if step < first:
        raise ValueError(f"step {step + 1} is not of the schedule that begins after step {first}")
    step, num_steps = step - first, num_steps - first
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    start = warmup_steps
    if schedule == "wsd":
        start = max(warmup_steps, num_steps - max(1, round(decay * num_steps)))
    done = min(1.0, max(0, step - start) / max(1, num_steps - start))
    shape = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return peak * (floor + (1 - floor) * shape)


def decay_groups(
    model: nn.Module, weight_decay: float, factors: Mapping[int, float] | None = None
) -> list[dict[str, Any]]:
    """Split trainable parameters into groups with weight decay (matrices) and without.

    Norms, biases and embeddings do not decay; nor does an embedding tied to the output layer.
    Parameters with a factor of the learning rate, by id, are in groups of their own.
    """
    embeddings = {id(table) for table in embedding_tables(model)}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            key = (factors or {}).get(id(parameter), 1.0), not matrix
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": params, "weight_decay": 0.0 if plain else weight_decay}
        | ({"lr_factor": factor} if factor != 1.0 else {})
        for (factor, plain), params in sorted(groups.items(), key=lambda item: item[0])
    ]


def embedding_tables(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all embeddings, also of those tied to the output layer."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, (nn.Embedding, NewRows))
        for parameter in module.parameters(recurse=False)
    ]


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW, on local tensors: on DTensors the host takes 2 to 4 times as long."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> Any:
        is_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return is_complex


class Lars(torch.optim.Optimizer):
    """SGD with momentum whose rate is scaled per layer by the weights' norm over the gradient's.

    Only parameters of two or more dimensions are scaled, not norms and biases. Source: You et al.,
    "Large Batch Training of Convolutional Networks", 2017, arXiv 1708.03888, algorithm 1.
    """

    def __init__(self, params: Any, lr: float, momentum: float, trust: float = 0.001) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.trust = trust

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights once."""
        for group in self.param_groups:
            decay = group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                change = weight.grad.add(weight, alpha=decay)
                if weight.ndim > 1:
                    norms = map(torch.linalg.vector_norm, (weight, weight.grad))
                    size, slope = map(whole_of, norms)
                    scale = self.trust * size / (slope + decay * size)
                    change.mul_(torch.where((size > 0) & (slope > 0), scale, 1.0))
                state = self.state[weight]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(weight)
                velocity = state["velocity"]
                velocity.mul_(group["momentum"]).add_(change, alpha=group["lr"])
                weight.sub_(velocity)


def make_optimizers(
    kind: OptimizerName | ImageOptimizerName,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    momentum: float = 0.0,
    factors: Mapping[int, float] | None = None,
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of all trainable parameters; call it after sharding.

    `momentum` is for sgd and lars, `betas` for the others; `factors` multiply the rate, by a
    parameter's id. AdamW updates what the chosen optimizer does not (see OPTIMIZERS).
    """
    own, rest = _split(decay_groups(model, weight_decay, factors), model, OPTIMIZERS[kind].updates)
    made = [_maker(kind, betas, momentum)(own, lr=lr)] if own else []
    return made + ([_maker("adamw", betas, momentum)(rest, lr=lr)] if rest else [])


def _maker(
    kind: OptimizerName | ImageOptimizerName, betas: tuple[float, float], momentum: float
) -> Callable[..., torch.optim.Optimizer]:
    match kind:
        case "adamw":
            return partial(AdamW, betas=betas, fused=True)
        case "adamw8bit":  # moments in blocks of 256
            from torch._functorch import config as functorch_config
            from torchao.optim import AdamW8bit

            # torchao compiles its step. The compile cache on disk confuses 8-bit tensors of
            # different sizes (they have no stable hash), and the shards of two ranks may differ.
            functorch_config.enable_autograd_cache = False
            return partial(AdamW8bit, betas=betas)
        case "muon":
            # Its updates have the size of AdamW's, so that both use one learning rate (Liu et al.
            # 2025, arXiv 2502.16982).
            return partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
        case "sgd":
            return partial(torch.optim.SGD, momentum=momentum, nesterov=momentum > 0)
        case "lars":
            return partial(Lars, momentum=momentum)
        case _:
            assert_never(kind)


def _split(
    groups: list[dict[str, Any]], model: nn.Module, updates: Updates
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the groups of the parameters that an optimizer updates itself, and of the others.

    8-bit moments leave out embeddings: a block of 256 values holds tokens that are in the batch
    beside ones that are not, whose second moment would round to 0.
    """
    match updates:
        case "all":
            return groups, []
        case "all but embeddings":
            tables = {id(parameter) for parameter in embedding_tables(model)}
            ids = {id(parameter) for parameter in model.parameters()} - tables
        case "hidden matrices":
            ids = {id(parameter) for parameter in hidden_matrices(model)}
        case _:
            assert_never(updates)
    alone, without = (
        [g | {"params": [p for p in g["params"] if (id(p) in ids) == taken]} for g in groups]
        for taken in (True, False)
    )
    return [g for g in alone if g["params"]], [g for g in without if g["params"]]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weights of all linear layers (GPT-2's too) except the output layer."""
    heads = {
        id(module.get_output_embeddings())
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    }
    return [
        cast(nn.Parameter, module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and id(module) not in heads
        and module.weight.requires_grad
    ]


def set_lr(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of every group, times the group's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = lr * group.get("lr_factor", 1.0)
            if isinstance(group["lr"], torch.Tensor):  # torchao's compiled step reads it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


@torch.no_grad()
def clip(model: nn.Module, limit: float | None) -> float:
    """Clip the gradient to a global norm over all shards; return the norm before clipping.

    Like nn.utils.clip_grad_norm_, but on local tensors, and not by 1 within the limit.
    """
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    if not gradients:
        return 0.0
    (mesh,) = {getattr(each, "device_mesh", None) for each in gradients}  # None: not sharded
    shards = [local_part(each) for each in gradients]
    norms = torch.stack(torch._foreach_norm(shards))
    if mesh is not None and mesh.size(mesh.ndim - 1) > 1:  # the last dimension shards
        squares = norms.square()
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
        norms = squares.sqrt()
    norm = torch.linalg.vector_norm(norms)
    length = float(norm)
    if limit is not None and length > limit - CLIP_EPS:
        torch._foreach_mul_(shards, limit / (norm + CLIP_EPS))
    return length
