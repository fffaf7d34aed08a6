"""Check the decay groups, AdamW against a few lines of numpy, and the learning rates."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import processes
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rayapp.config.optimizers import OPTIMIZERS, ImageOptimizerName, OptimizerName
from rayapp.model.init import local_part
from rayapp.train.optimizer import (
    clip,
    decay_groups,
    hidden_matrices,
    lr_at,
    make_optimizers,
    set_lr,
)


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
    (optimizer,) = make_optimizers("adamw", model, lr=1.0, weight_decay=decay, betas=betas)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    weights = {name: p.detach().numpy().copy() for name, p in trained.items()}
    first = {name: np.zeros_like(w) for name, w in weights.items()}
    second = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(5):
        lr = lr_at(step, peak=1e-2, schedule="cosine", num_steps=5, warmup_steps=2)
        set_lr([optimizer], lr)
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


@pytest.mark.parametrize("world", [1, 4])
def test_adamw_and_clip_of_shards_are_bitwise_as_on_dtensors(tmp_path: Path, world: int) -> None:
    processes.spawn(_sharded_updates, world, str(tmp_path / "meet"))


def _sharded_updates(rank: int, world: int) -> None:
    """On each kind of mesh: uneven and empty shards, one along the second dimension."""
    shapes = {"a": (7, 3), "b": (1, 5), "c": (64, 9), "d": (3, world, 2)}
    for grid in sorted({(world,), (world, 1), (1, world), (max(1, world // 2), min(2, world))}):
        mesh = init_device_mesh("cpu", grid)

        def drawn(seed: int) -> nn.ParameterDict:
            torch.manual_seed(seed)
            before = [Replicate()] * (mesh.ndim - 1)  # noqa: B023
            values = {name: torch.randn(shape) for name, shape in shapes.items()}
            return nn.ParameterDict(
                {
                    name: distribute_tensor(each, mesh, [*before, Shard(int(name == "d"))])  # noqa: B023
                    for name, each in values.items()
                }
            )

        ours, theirs = drawn(0), drawn(0)
        options: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95)}
        (mine,) = make_optimizers("adamw", ours, lr=1e-2, **options)
        other = torch.optim.AdamW(decay_groups(theirs, 0.1), lr=1e-2, betas=(0.9, 0.95), fused=True)
        for seed in range(1, 4):
            for parameters in (ours, theirs):
                for name, gradient in drawn(seed).items():
                    parameters[name].grad = gradient.detach()
            norm: Any = nn.utils.get_total_norm(each.grad for each in theirs.values())
            nn.utils.clip_grads_with_norm_(theirs.values(), 0.5, norm)
            assert clip(ours, 0.5) == norm.full_tensor().item()
            mine.step()
            other.step()
            for name, parameter in ours.items():
                kept, wanted = mine.state[parameter], other.state[theirs[name]]
                for one, two in [(parameter, theirs[name])] + [
                    (kept[k], wanted[k]) for k in wanted
                ]:
                    assert isinstance(one, DTensor) == isinstance(two, DTensor)
                    assert torch.equal(local_part(one.detach()), local_part(two.detach()))


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))


def test_muon_takes_the_matrices_between_layers_and_adamw_the_rest() -> None:
    model = language_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = {}
    for optimizer in make_optimizers("muon", model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kinds[names[id(parameter)]] = (type(optimizer).__name__, group["weight_decay"])
    assert len(kinds) == len(names)
    muon = {name for name, (kind, _) in kinds.items() if kind == "Muon"}
    assert (
        muon == {n for n in kinds if "_proj" in n} == {names[id(p)] for p in hidden_matrices(model)}
    )
    assert kinds["lm_head.weight"] == ("AdamW", 0.1) and kinds["model.norm.weight"] == ("AdamW", 0)
    assert kinds["model.embed_tokens.weight"] == ("AdamW", 0)


def test_muon_takes_the_layers_of_gpt_2() -> None:
    """They are no nn.Linear: their weights are [in, out]."""
    config = GPT2Config(vocab_size=90, n_embd=64, n_layer=1, n_head=4, n_positions=32)
    model = GPT2LMHeadModel(config)
    muon, _ = make_optimizers("muon", model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    (group,) = muon.param_groups
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert [names[id(p)] for p in group["params"]] == [
        f"transformer.h.0.{layer}.weight" for layer in layers
    ]
    assert group["weight_decay"] == 0.1


def test_a_muon_update_is_orthogonal_and_as_large_as_adamws() -> None:
    model = language_model()
    optimizers = make_optimizers("muon", model, lr=0.1, weight_decay=0.0, betas=(0.9, 0.95))
    weight = model.model.layers[0].mlp.up_proj.weight  # [96, 64]
    before = weight.detach().clone()
    ids = torch.arange(80).reshape(2, 40)
    model(input_ids=ids, labels=ids).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    update = (before - weight.detach()) / 0.1
    # Newton-Schulz brings all singular values near 1, in bf16 and 5 iterations: 0.7 to 1.2.
    spread = torch.linalg.svdvals(update) / (0.2 * math.sqrt(96))
    assert spread.min() > 0.6 and spread.max() < 1.3, spread
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.15)  # AdamW's is 0.2 to 0.4
    gradient = weight.grad
    assert gradient is not None
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    polar = left @ right
    assert torch.cosine_similarity(polar.flatten(), update.flatten(), 0) > 0.97


@pytest.mark.full
def test_moments_in_8_bits_train_as_in_32() -> None:
    """The moments are a quarter of the bytes, and a regression ends where it does with AdamW."""
    ends, sizes = {}, {}
    for kind in ("adamw", "adamw8bit"):
        torch.manual_seed(0)
        model, truth = nn.Linear(256, 64, bias=False), torch.randn(64, 256) / 16
        (optimizer,) = make_optimizers(kind, model, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95))
        for step in range(60):
            set_lr([optimizer], lr_at(step, peak=1e-2, schedule="linear", num_steps=60))
            x = torch.randn(64, 256)
            loss = (model(x) - x @ truth.T).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[kind] = loss.item()
        moment = optimizer.state[model.weight]["exp_avg"]
        parts = [moment] if kind == "adamw" else [moment.codes, moment.scale, moment.qmap]
        sizes[kind] = sum(part.nbytes for part in parts)
    assert sizes["adamw8bit"] < 0.3 * sizes["adamw"]
    assert ends["adamw8bit"] == pytest.approx(ends["adamw"], rel=0.1) and ends["adamw"] < 0.05


@pytest.mark.full
@pytest.mark.parametrize("width", [64, 256])
def test_8_bits_move_no_embedding_further_than_32(width: int) -> None:
    """Few tokens are in a batch, and rows narrower than 256 share a block with others."""
    moved = {}
    for kind in ("adamw", "adamw8bit"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(384, width), nn.Linear(width, 64))
        before = model[0].weight.detach().clone()
        optimizers = make_optimizers(kind, model, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.95))
        for _ in range(24):
            ids = (384 * torch.rand(40) ** 3).long()
            model(ids).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        moved[kind] = float((model[0].weight - before).abs().max())
    assert moved["adamw8bit"] < 1.1 * moved["adamw"]


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
    wsd = rates(peak=1.0, schedule="wsd", num_steps=10, warmup_steps=2, floor=0.5, decay=0.4)
    assert wsd == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5])
    constant = rates(peak=3.0, schedule="constant", num_steps=4, warmup_steps=2)
    assert constant == [1.5, 3.0, 3.0, 3.0, 3.0]
    options = {"peak": 1.0, "schedule": "cosine", "warmup_steps": 2, "floor": 0.1}
    later = [lr_at(step, num_steps=19, first=10, **options) for step in range(10, 20)]
    assert later == rates(num_steps=9, **options)
    with pytest.raises(
        ValueError, match="step 10 is not of the schedule that begins after step 10"
    ):
        lr_at(9, num_steps=19, first=10, **options)


@settings(deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    num_steps=st.integers(0, 50),
    warmup_steps=st.integers(0, 60),
    floor=st.floats(0, 1),
)
@example(schedule="wsd", num_steps=1, warmup_steps=0, floor=0.0)
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


KINDS = dict.fromkeys(get_args(OptimizerName) + get_args(ImageOptimizerName))


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_makes_steps_and_keeps_the_bytes_that_the_plan_counts(kind: Any) -> None:
    """Counted are tensors of a parameter's shape; those of 8 bits have codes and scales."""
    torch.manual_seed(0)
    model = language_model()
    options: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.9, "betas": (0.9, 0.95)}
    optimizers = make_optimizers(kind, model, lr=1.0, **options)
    set_lr(optimizers, 0.25)
    rates = [float(group["lr"]) for each in optimizers for group in each.param_groups]
    assert set(rates) == {0.25} and len(rates) >= 2
    set_lr(optimizers, 1e-3)
    ids, before = torch.arange(80).reshape(2, 40), copy.deepcopy(model.state_dict())
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[2] < losses[0]
    moved = {name: not torch.equal(before[name], each) for name, each in model.named_parameters()}
    assert all(moved.values()), moved
    own, *_ = optimizers
    kept = [
        (parameter, sum(each.nbytes for value in state.values() for each in parts(value)))
        for parameter, state in own.state.items()
        if parameter.numel() >= 4096 and parameter.numel() % 256 == 0  # torchao: others in fp32
    ]
    assert kept
    for parameter, size in kept:
        assert size / parameter.numel() == pytest.approx(OPTIMIZERS[kind].moment_bytes, rel=0.3)
        assert OPTIMIZERS[kind].saved_bytes in (None, 8)


def parts(value: object) -> list[torch.Tensor]:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return []
    return [value.codes, value.scale] if hasattr(value, "codes") else [value]


def test_lars_is_the_papers_formula() -> None:
    """In float64, weight by weight: what is scaled, what is not, and what is all zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))
    model.double()
    with torch.no_grad():
        model[3].weight.zero_()  # has no norm to scale by
    options: dict[str, Any] = {"weight_decay": 0.01, "momentum": 0.9, "betas": (0.9, 0.99)}
    (optimizer,) = make_optimizers("lars", model, lr=0.3, **options)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step in range(4):
        lr = lr_at(step, peak=0.3, schedule="constant", num_steps=4, warmup_steps=2)
        set_lr([optimizer], lr)
        model(torch.randn(5, 2, 4, 4, dtype=torch.float64)).square().sum().backward()
        for name, parameter in model.named_parameters():
            weight, gradient = expected[name], parameter.grad
            assert gradient is not None
            decay, trust = 0.01 if weight.ndim > 1 else 0.0, 1.0
            if weight.ndim > 1 and weight.any() and gradient.any():
                trust = float(0.001 * weight.norm() / (gradient.norm() + decay * weight.norm()))
            velocity[name] = 0.9 * velocity[name] + lr * trust * (gradient + decay * weight)
            expected[name] = weight - velocity[name]
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_optimizers_of_image_classifiers() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    options: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9, "betas": (0.8, 0.9)}
    made = {}
    for kind in get_args(ImageOptimizerName):
        (made[kind],) = make_optimizers(kind, model, lr=1.0, **options)
        groups = made[kind].param_groups
        shown = [([p.ndim for p in group["params"]], group["weight_decay"]) for group in groups]
        assert shown == [([4], 0.1), ([1, 1, 1], 0.0)]
    sgd, adamw = made["sgd"].param_groups[0], made["adamw"].param_groups[0]
    assert sgd["nesterov"] and sgd["momentum"] == 0.9 and adamw["betas"] == (0.8, 0.9)
