"""Measure the memory of a step by running it (model, sharding and optimizer) on fake tensors.

    found = trace(source.config, world=128, micro_batch=1, seq_len=8192, strategy="full_shard")
    found.peak_bytes, found.terms                        # of one rank, and what it is made of

Nothing is allocated or computed: PyTorch's FakeTensorMode propagates shapes, a fake process group
of the real world size answers collectives, and PyTorch's FSDP memory tracker counts the bytes that
are alive after each operation. It counts tensors only, without what the allocator rounds up and
without the CUDA context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig, masking_utils

from rayapp import model
from rayapp.config import Lora
from rayapp.model.activations import checkpoint_activations
from rayapp.model.init import local_part
from rayapp.model.names import freeze as freeze_by_name
from rayapp.train.block_passes import GroupedOnShapes, build_on_shapes
from rayapp.train.loss import chunked_cross_entropy
from rayapp.train.optimizer import make_optimizers

DEVICE = torch.device("cpu")  # fake tensors of a GPU need a build of PyTorch with CUDA


@dataclass(frozen=True)
class Trace:
    """The memory of one rank at its peak, in bytes."""

    peak_bytes: int
    terms: dict[str, int]
    """Bytes by the tracker's names: sharded and unsharded parameters, activations, ..."""
    parameter_bytes: int
    """Bytes of this rank's parameter shards."""


def trace(
    config: PretrainedConfig,
    *,
    world: int,
    micro_batch: int,
    seq_len: int,
    strategy: str = "full_shard",
    replicas: int = 1,
    activation_checkpointing: str = "none",
    param_dtype: torch.dtype | None = torch.bfloat16,
    loss_chunk: int = 4096,
    accumulation: int = 1,
    lora: Lora | None = None,
    freeze: Sequence[str] = (),
    new_tokens: int = 0,
) -> Trace:
    """Run a step of rank 0 of `world` ranks on fake tensors, with the optimizer's state in place.

    Raises: RuntimeError if this process already is in a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("trace() makes a process group of its own, and there is one already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        loss = partial(chunked_cross_entropy, chunk=loss_chunk)
        frozen = torch.float32 if lora is None else param_dtype or torch.float32
        lm = build_on_shapes(config, loss, frozen)
        if lora is not None:
            model.add_adapters(lm, lora, range(new_tokens))
        freeze_by_name(lm.hf, freeze)
        checkpoint_activations(lm, activation_checkpointing)
        mesh = model.device_mesh(DEVICE.type, strategy=strategy, replicas=replicas)
        model.shard(lm, mesh, strategy=strategy, param_dtype=param_dtype)
        # Where a model's attention is its own, transformers looks for packed documents in the
        # positions, which have no values here.
        whole = mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
        with whole, FakeTensorMode(allow_non_fake_inputs=True), GroupedOnShapes():
            ends: Any = lm.hf.get_output_embeddings(), lm.hf.get_input_embeddings()
            head, table = (getattr(each, "base_layer", each) for each in ends)
            tied = head.weight is table.weight
            lm.to_empty(device=DEVICE)
            if tied:  # to_empty makes a parameter of each alias
                head.weight = table.weight
            return _run(lm.train(), micro_batch, seq_len, accumulation)
    finally:
        dist.destroy_process_group()


def _run(lm: Any, micro_batch: int, seq_len: int, accumulation: int) -> Trace:
    (optimizer,) = make_optimizers("adamw", lm, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    shards = sum(local_part(p).nbytes for p in lm.parameters())
    ids = torch.zeros(micro_batch, seq_len, dtype=torch.long, device=DEVICE)
    for parameter in lm.parameters():  # a first step makes the optimizer's state
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tracker = _Tracker(lm, optimizer)
    tracker.track_inputs((ids,))
    tracker.track_external(optimizer)
    with tracker, tracker.outside_propagation():
        for number in range(accumulation):
            if number:
                tracker.reset_mod_stats()
            lm(ids, ids)[0].backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[DEVICE]
    terms = {str(getattr(name, "value", name)): size for name, size in peak.items() if size}
    return Trace(terms.pop("Total"), terms, shards)


class _Tracker(FSDPMemTracker):
    """FSDPMemTracker that ignores the operations that DTensor runs to propagate global shapes.

    The base class recognizes them by their own FakeTensorMode, but DTensor uses the active one:
    without this class an optimizer step seems to hold the whole model.
    """

    _propagating = False

    def _fsdp_param_group_post_backward(self, module: Any, original: Any) -> Any:
        """Leave out a module that never runs: it has no gathered parameters to be read."""
        tracked = super()._fsdp_param_group_post_backward(module, original)
        group = module._get_fsdp_state()._fsdp_param_group

        def post_backward(*args: Any, **kwargs: Any) -> None:
            ran = all(hasattr(each, "_unsharded_param") for each in group.fsdp_params)
            (tracked if ran else original)(*args, **kwargs)

        return post_backward

    @contextlib.contextmanager
    def outside_propagation(self) -> Iterator[None]:
        """Inside the block, count nothing while DTensor propagates shapes."""
        name = "_propagate_tensor_meta_non_cached"
        original = getattr(ShardingPropagator, name)

        def propagate(*args: Any, **kwargs: Any) -> Any:
            self._propagating = True
            try:
                return original(*args, **kwargs)
            finally:
                self._propagating = False

        setattr(ShardingPropagator, name, propagate)
        try:
            yield
        finally:
            setattr(ShardingPropagator, name, original)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._propagating:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)
