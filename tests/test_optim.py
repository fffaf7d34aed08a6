"""Check the decay groups, AdamW against a few lines of numpy, and the learning rates."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rayapp.optim
from rayapp.optim import adamw, decay_groups, lr_at, set_lr


class Tiny(nn.Module):
    """Embedding, block, norm and output layer, tied or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.frozen(self.block(self.embed(ids)).tanh())))
        return out


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_decay_and_nothing_else(tied: bool) -> None:
    model = Tiny(tied=tied)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        ([names[id(p)] for p in group["params"]], group["weight_decay"])  # type: ignore[attr-defined]
        for group in decay_groups(model, 0.1)
    ]
    matrices = ["block.weight"] + ([] if tied else ["head.weight"])
    assert groups == [
        (matrices, 0.1),
        (["embed.weight", "block.bias", "norm.weight", "norm.bias"], 0.0),
    ]


def test_no_group_is_empty() -> None:
    assert [g["weight_decay"] for g in decay_groups(nn.LayerNorm(3), 0.1)] == [0.0]
    assert [g["weight_decay"] for g in decay_groups(nn.Linear(3, 3, bias=False), 0.1)] == [0.1]


def test_adamw_equals_numpy() -> None:
    torch.manual_seed(0)
    model = Tiny(tied=True).double()
    betas, decay, eps = (0.9, 0.95), 0.1, 1e-8
    optimizer = adamw(model, lr=1.0, weight_decay=decay, betas=betas)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    weights = {name: p.detach().numpy().copy() for name, p in trained.items()}
    first = {name: np.zeros_like(w) for name, w in weights.items()}
    second = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(5):
        lr = lr_at(step, peak=1e-2, schedule="cosine", num_steps=5, warmup_steps=2)
        set_lr(optimizer, lr)
        optimizer.zero_grad()
        model(torch.arange(7)).square().sum().backward()
        for name, parameter in trained.items():
            assert parameter.grad is not None
            g = parameter.grad.numpy()
            first[name] = betas[0] * first[name] + (1 - betas[0]) * g
            second[name] = betas[1] * second[name] + (1 - betas[1]) * g**2
            m = first[name] / (1 - betas[0] ** (step + 1))
            v = second[name] / (1 - betas[1] ** (step + 1))
            w = weights[name]
            if name == "block.weight":
                w = w * (1 - lr * decay)
            weights[name] = w - lr * m / (np.sqrt(v) + eps)
        optimizer.step()
        for name, parameter in trained.items():
            np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=1e-9)


def rates(**options: object) -> list[float]:
    num_steps = options["num_steps"]
    assert isinstance(num_steps, int)
    return [lr_at(step, **options) for step in range(num_steps + 1)]  # type: ignore[arg-type]


def test_shapes() -> None:
    linear = rates(peak=2.0, schedule="linear", num_steps=8, warmup_steps=4, floor=0.0)
    assert linear == [0.5, 1.0, 1.5, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]
    cosine = rates(peak=1.0, schedule="cosine", num_steps=4, floor=0.2)
    half = math.sqrt(0.5)
    assert cosine == pytest.approx([1, 0.6 + 0.4 * half, 0.6, 0.6 - 0.4 * half, 0.2])
    constant = rates(peak=3.0, schedule="constant", num_steps=4, warmup_steps=2)
    assert constant == [1.5, 3.0, 3.0, 3.0, 3.0]


@settings(deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    num_steps=st.integers(0, 50),
    warmup_steps=st.integers(0, 60),
    floor=st.floats(0, 1),
)
def test_rises_to_the_peak_then_never_rises_again(
    schedule: str, num_steps: int, warmup_steps: int, floor: float
) -> None:
    found = rates(
        peak=1.0,
        schedule=schedule,
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        floor=floor,
    )
    rise, fall = found[:warmup_steps], found[warmup_steps:]
    assert rise == [(step + 1) / warmup_steps for step in range(len(rise))]
    assert all(0 < rate <= 1 for rate in rise)
    assert fall == sorted(fall, reverse=True) and all(floor - 1e-9 <= r <= 1 for r in fall)
    if warmup_steps < num_steps:
        assert fall[0] == 1.0  # the peak is reached
        assert fall[-1] == pytest.approx(1.0 if schedule == "constant" else floor)
    # A run that goes on past its last step stays at the floor.
    assert lr_at(
        10_000, peak=1.0, schedule=schedule, num_steps=num_steps, floor=floor
    ) == pytest.approx(1.0 if schedule == "constant" else floor)


def test_set_lr_sets_every_group() -> None:
    optimizer = adamw(Tiny(tied=False), lr=1.0, weight_decay=0.1, betas=(0.9, 0.95))
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_docstrings() -> None:
    assert doctest.testmod(rayapp.optim).failed == 0 and doctest.testmod(rayapp.optim).attempted
