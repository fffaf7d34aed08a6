"""Check what a checkpoint holds while training goes on; test_train_loop and test_vision resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rayapp.train.checkpoint.state import state_tensors


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    url = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, torch.Tensor):
        yield tree.to_local() if isinstance(tree, DTensor) else tree


@pytest.mark.parametrize("wrapped", ["fsdp", "ddp"])
def test_nothing_of_it_changes_before_the_optimizers_next_step(group: None, wrapped: str) -> None:
    """Though torch's own batch norm counts, and random numbers are drawn, in a forward pass."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    model: Any = fully_shard(layers) if wrapped == "fsdp" else DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = {"average": torch.ones(2)}
    trainee: Any = SimpleNamespace(model=model, optimizers=[optimizer], tensors=lambda: average)
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    tensors = state_tensors(trainee)
    assert set(tensors) == {"model", "optimizer", "rng", "average"}
    assert {"1.running_mean", "1.num_batches_tracked", "3.weight"} <= set(tensors["model"])
    held = list(leaves(tensors))
    before = [tensor.clone() for tensor in held]
    model(torch.randn(8, 3)).sum().backward()
    assert all(map(torch.equal, held, before))
    (counted,) = (b for name, b in model.named_buffers() if name.endswith("batches_tracked"))
    assert (int(counted), int(tensors["model"]["1.num_batches_tracked"])) == (2, 1)
    optimizer.step()  # the rest is no copy
    changed = [not torch.equal(now, was) for now, was in zip(held, before, strict=True)]
    parameters = len(list(model.parameters()))
    assert sum(changed) == parameters * 4  # each with two moments and a count of steps
