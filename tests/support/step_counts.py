"""Count what one training step does: collectives, bytes, host reads and kernels, by phase.

A small Llama takes steps on CPU tensors under a fake process group of any size. Counts do not
depend on widths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from rayapp import model
from rayapp.config import Lora
from rayapp.data.packing import IGNORE
from rayapp.data.token_rows import StepRows
from rayapp.model.sharding import find_blocks, sum_over_replicas
from rayapp.train import loop
from rayapp.train.engine import Engine
from rayapp.train.loss import chunked_cross_entropy
from rayapp.train.optimizer import make_optimizers

LAYERS, SEQ_LEN, VOCABULARY = 4, 256, 512
COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}
# Operations that start no kernel on a device.
FREE = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "slice", "select", "as_strided"),
    *("expand", "unsqueeze", "squeeze", "detach", "alias", "split", "split_with_sizes", "unbind"),
    *("reshape", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "chunk"),
    *("_local_scalar_dense", "narrow", "resize_", "set_", "unflatten", "view_as", "record_stream"),
}
READS = ("item", "tolist", "__float__", "__bool__", "__int__", "numpy", "cpu", "nonzero")


@dataclass
class Counts:
    """The counts of one step of a rank."""

    collectives: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes handed to the collectives of a kind."""
    kernels: Counter[str] = field(default_factory=Counter)
    """By phase: forward, backward, optimizer."""
    sharded: Counter[str] = field(default_factory=Counter)
    """Operations that the host dispatches on DTensors, by phase."""
    reads: int = 0
    """Times at which the host waits for a number of the device."""


class _Ops(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts, self.phase = counts, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, rest = func.name().partition("::")
        name = rest.split(".")[0]
        if space == "c10d":
            tensors = args[1] if name == "_reduce_scatter_base_" else args[0]
            while isinstance(tensors, list | tuple):
                tensors = tensors[0]
            kind = COLLECTIVES[name]
            self.counts.collectives[kind] += 1
            self.counts.sent[kind] += tensors.nbytes
        elif self.phase:
            self.counts.kernels[self.phase] += name not in FREE
            self.counts.sharded[self.phase] += any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.reads += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


def rows_of(micro_batches: int, masked: float, step: int) -> StepRows:
    """Return packed rows of three documents, of whose labels a share bears no loss."""
    shape = (micro_batches, 2, SEQ_LEN)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, shape).astype(np.int32)
    segments = np.ones(shape, np.uint16)
    segments[..., 60:], segments[..., 150:] = 2, 3
    labels = ids.copy()
    labels[..., : int(masked * SEQ_LEN)] = IGNORE
    places = np.zeros(shape[:2], np.int64)
    return StepRows(step, ids, labels, segments, places, places, places)


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """Be rank 0 of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def counts_of(
    strategy: str,
    *,
    world: int = 8,
    micro_batches: int = 1,
    lora: bool = False,
    masked: float = 0.0,
    step: int = 1,
) -> Counts:
    """Return the counts of a rank's step (from 0), in bf16 with varlen attention.

    It follows another step.
    """
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
    )
    with fake_ranks(world):
        lm = model.build(
            config,
            loss=partial(chunked_cross_entropy, chunk=4096),
            attention="varlen",
            dtype=torch.bfloat16 if lora else torch.float32,
        )
        if lora:
            model.add_adapters(lm, Lora(rank=16))
        mesh = model.device_mesh("cpu", strategy=strategy, replicas=max(1, world // 8))
        model.shard(lm, mesh, strategy=strategy, param_dtype=torch.bfloat16)
        model.init_weights(lm, 0, torch.device("cpu"))
        if lora:
            model.init_adapters(lm, 0)
        optimizers = make_optimizers(
            "adamw", lm.train(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)
        )
        engine = Engine(
            lm,
            optimizers,
            lambda step: 1e-3,
            torch.device("cpu"),
            1.0,
            None,
            last_of_step=partial(sum_over_replicas, lm),
            blocks=find_blocks(lm.hf),
        )
        batch = rows_of(micro_batches, masked, step - 1)
        loop.train_step(engine, batch, loop.agree(engine, batch))
        batch = rows_of(micro_batches, masked, step)
        counts = Counts()
        ops = _Ops(counts)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            ops.phase = name
            yield
            ops.phase = ""

        engine.peaks.phase = phase  # type: ignore[method-assign, assignment]
        with ops, _Reads(counts):
            loop.train_step(engine, batch, loop.agree(engine, batch))
    return counts
