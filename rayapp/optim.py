"""The optimizer: which parameters decay, and the learning rate as a pure function of the step.

    optimizer = adamw(model, lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95))
    set_lr(optimizer, lr_at(step, peak=3e-4, schedule="cosine", warmup_steps=100, num_steps=5000))

The schedule holds no state, so a resume has nothing to restore and nothing to get wrong.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def lr_at(
    step: int,
    *,
    peak: float,
    schedule: str,
    num_steps: int,
    warmup_steps: int = 0,
    floor: float = 0.1,
) -> float:
    """Return the learning rate of a step (from 0); `floor` is the final share of the peak, 0-1.

    >>> lr_at(0, peak=1.0, schedule="cosine", num_steps=10, warmup_steps=4)
    0.25
    >>> lr_at(4, peak=1.0, schedule="cosine", num_steps=10, warmup_steps=4)
    1.0
    >>> round(lr_at(10, peak=1.0, schedule="linear", num_steps=10, warmup_steps=4), 6)
    0.1
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    shape = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}[schedule]
    return peak * (floor + (1 - floor) * shape)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split trainable parameters: matrices decay; norms, biases and embeddings do not.

    An embedding tied to the output layer is an embedding.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decay if matrix else plain).append(parameter)
    groups = [(decay, weight_decay), (plain, 0.0)]
    return [{"params": params, "weight_decay": value} for params, value in groups if params]


def adamw(
    model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """Return fused AdamW over the model's decay groups; call it after sharding."""
    return torch.optim.AdamW(decay_groups(model, weight_decay), lr=lr, betas=betas, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
