"""The step engine on drawn documents, for benchmarks: no files, no Ray.

engine = make_engine(config, torch.device("cuda"))
for batch in batches(config, count=12, rank=0): step(engine, batch)
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rayapp.config import Config
from rayapp.data.packing import IGNORE
from rayapp.data.token_rows import StepRows
from rayapp.data.tokens import byte_tokenizer
from rayapp.finetune.model_parts import make_parts
from rayapp.order import StepCounts
from rayapp.train import loop
from rayapp.train.engine import Engine

LR = 1e-4


def lengths(rows: int, seq_len: int, rank: int) -> list[list[int]]:
    """Draw documents that fill rows, [rows][documents]: mostly short, as instructions are."""
    draw = np.random.default_rng(rank)
    found = []
    for _ in range(rows):
        row, left = [], seq_len
        while left:
            drawn = int(draw.lognormal(np.log(seq_len / 6), 0.8)) + 8
            row.append(min(drawn, left))
            left -= row[-1]
        found.append(row)
    return found


def batches(
    config: Config,
    vocabulary: int,
    count: int,
    rank: int,
    *,
    masked: float = 0.0,
    period: int | None = None,
) -> list[StepRows]:
    """Pack drawn documents into the rows of `count` steps of one micro-batch each.

    The first `masked` of each document bears no loss, as a chat's prompt does. With a period, a
    token follows from the one before, so that a model can learn the documents.
    """
    size, found = config.micro_batch, []
    rows = lengths(count * size, config.data.seq_len, rank)
    draw = np.random.default_rng(rank + 100)
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        segments = np.stack([np.repeat(np.arange(1, len(r) + 1), r) for r in some])
        prompt = np.stack([np.concatenate([np.arange(n) < masked * n for n in r]) for r in some])
        ids = draw.integers(0, vocabulary, segments.shape, np.int32)
        if period is not None:
            ids = (ids[:, :1] + np.arange(ids.shape[1], dtype=np.int32)) % period
        labels = np.roll(ids, -1, 1)
        ends = np.roll(segments, -1, 1) != segments
        ends[:, -1] = True
        labels[ends | prompt] = IGNORE
        step, zeros = len(found), np.zeros((1, size), np.int64)
        segments = segments.astype(np.uint16)
        found.append(StepRows(step, ids[None], labels[None], segments[None], zeros, zeros, zeros))
    return found


def make_engine(config: Config, device: torch.device) -> Engine:
    """Build the model and the optimizers as a run does."""
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        parts = make_parts(argparse.Namespace(config=config, tokenizer_url=folder), device)
    control = dist.new_group(backend="gloo")
    return Engine(parts.lm, parts.optimizers, lambda step: LR, device, 1.0, control)


def step(engine: Engine, batch: StepRows) -> tuple[StepCounts, float]:
    """Run one step; return the counts of all ranks' batches and the loss in nats per token."""
    agreement = loop.agree(engine, batch)
    update = loop.train_step(engine, batch, agreement)
    totals: Any = agreement.wait()
    return totals.counts, update.sums.loss / totals.weight
