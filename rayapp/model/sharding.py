"""Shard a model with FSDP2, one transformer block at a time.

    shard(model, device_mesh("cuda", strategy="full_shard"), param_dtype=torch.bfloat16)

Each parameter is sharded over the ranks along its first dimension (experts in some cases along
their second), and each transformer block is gathered by one all-gather. Embeddings, final norm and
head belong to the root, whose hook gathers them when `Wrapper.forward` starts. The frozen base of
adapters is left whole where a shard group has one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from rayapp.model.build import Wrapper, beside_text, of_adapter, text_of

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")


def num_nodes() -> int:
    """Return the number of nodes that the ranks run on; 1 if nodes have different rank counts."""
    per_node, world = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), dist.get_world_size()
    counts: list[int] = [0] * world
    dist.all_gather_object(counts, per_node)
    even = len(set(counts)) == 1 and world % per_node == 0
    return world // per_node if even else 1


def device_mesh(device_type: str, *, strategy: str, replicas: int = 1) -> DeviceMesh:
    """Return the strategy's mesh of all ranks, with dimensions (shard,) or (replicate, shard).

    Raises: ValueError if `replicas` does not divide the world.
    """
    world = dist.get_world_size()
    if strategy == "no_shard":
        # Replication as HSDP with shard groups of one rank: the same code path, hooks and DTensors
        # as the other strategies, a pure all-reduce on the wire, and it runs on gloo.
        return init_device_mesh(device_type, (world, 1), mesh_dim_names=("replicate", "shard"))
    if strategy == "hybrid_shard":
        if replicas < 1 or world % replicas:
            legal = [n for n in range(1, world + 1) if world % n == 0]
            raise ValueError(
                f"parallel.replicas={replicas} does not divide {world} workers: every replica must "
                f"have the same number of ranks. Set one of {legal}"
            )
        shape = (replicas, world // replicas)
        return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    assert strategy in STRATEGIES, strategy
    return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))


Wrapped = TypeVar("Wrapped", bound=Wrapper)


def shard(
    model: Wrapped,
    mesh: DeviceMesh,
    *,
    strategy: str = "full_shard",
    param_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> Wrapped:
    """Shard every block, then the rest, over `mesh`; gradients become sums over all ranks."""
    assert strategy in STRATEGIES, strategy
    assert mesh.ndim == (2 if strategy in ("hybrid_shard", "no_shard") else 1), (strategy, mesh)
    precision = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    offload = fsdp.OffloadPolicy()
    if cpu_offload:
        offload = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    shards = mesh.size(mesh.ndim - 1)
    base = set[nn.Parameter]()
    adapted = any(of_adapter(name) for name, _ in model.named_parameters())
    if adapted and shards == 1 and not cpu_offload:  # FSDP would copy the frozen base in each pass
        frozen = (each for each in model.parameters() if not each.requires_grad)
        base = {each for each in frozen if each.dtype == (param_dtype or each.dtype)}
    apply = partial(fsdp.fully_shard, mesh=mesh, offload_policy=offload, ignored_params=base)
    free_after_forward = strategy in ("full_shard", "hybrid_shard") and not base
    blocks = find_blocks(model.hf)
    placement = partial(_placement, shards)
    for block in blocks:
        # The last block's backward follows its forward at once, as does the root's: freeing in
        # between would only cost a second all-gather.
        apply(
            block,
            reshard_after_forward=free_after_forward and block is not blocks[-1],
            shard_placement_fn=placement,
            mp_policy=precision,
        )
    for part in beside_text(model.hf):  # it never runs, so that it is never gathered
        apply(part, mp_policy=precision)
    root = replace(precision, cast_forward_inputs=False)  # the numbers of records stay float32
    apply(model, reshard_after_forward=False, mp_policy=root)
    model.offloaded = cpu_offload
    model.freed = cast(list[fsdp.FSDPModule], blocks[:-1]) if free_after_forward else []
    sharded = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    model.replicated = sharded if mesh.size() > shards else []
    for one, following in pairwise(cast(list[fsdp.FSDPModule], blocks)):
        # FSDP prefetches in the backward only: in the forward it trusts that the host is ahead.
        one.set_modules_to_forward_prefetch([following])
    for module in sharded if mesh.size() > 1 else ():
        # The loss is divided by the valid tokens of the global batch: gradients are sums, not
        # means. Without the second call FSDP would use PREMUL_SUM, which gloo refuses.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def sum_over_replicas(model: Wrapper, last: bool) -> None:
    """Have replicas add up their gradients, and sum them over one another in the `last` backward.

    Call it before each micro-batch of a step.
    """
    for module in model.replicated:
        module.set_requires_all_reduce(last, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the module holds shards: a forward leaves some gathered."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


@contextmanager
def held(model: Wrapper, whole: bool) -> Iterator[None]:
    """Inside the block, hold what a forward gathers, if `whole`; free it at the end.

    After one forward on all ranks a further one needs no other rank.
    """
    try:
        for block in model.freed if whole else ():
            block.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for block in model.freed if whole else ():
            block.set_reshard_after_forward(True, recurse=False)
        reshard(model)


def find_blocks(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks: the outermost modules whose class HF lists as not to split.

    Of a multimodal model they are those of its text decoder.
    Raises: ValueError if the model names none and has no list of layers either.
    """
    kinds = set(hf._no_split_modules or ())
    blocks: dict[str, nn.Module] = {}
    for name, module in text_of(hf).named_modules():  # parents come first
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if type(module).__name__ in kinds and not inside:
            blocks[name] = module
    if blocks:
        return list(blocks.values())
    modules = text_of(hf).modules()
    lists = [list(module) for module in modules if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(hf).__name__} has no transformer blocks to shard")
    return max(lists, key=len)


def _placement(shards: int, parameter: nn.Parameter) -> Shard | None:
    """Shard experts [experts, rows, ...] along rows if the shards divide only the rows evenly.

    Along the first dimension, 8 experts over 32 ranks would be 32 shards of one expert, of which 24
    are padding.
    """
    if parameter.ndim == 3 and parameter.shape[0] % shards and parameter.shape[1] % shards == 0:
        return Shard(1)
    return None
