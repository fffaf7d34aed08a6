"""Compute what the reference of preferences gives each answer once, before the first step.

    references = References(spec, parts)
    references.compute(engine)                       # all ranks; units of an earlier attempt stay
    steps = references.joined(steps, "train")

The reference is the model that the run starts from. Where training leaves it intact below new
adapters, each step computes it with the adapters off. Else its two numbers a pair are computed here
and kept beside the rows, in files by shard and by the digest of the weights, so that any run on the
same rows and weights takes them. A rank holds all of them, 8 bytes a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from xxhash import xxh3_64

from rayapp.data.prepared import SPLITS
from rayapp.data.token_rows import (
    CHECKSUM,
    StepRows,
    TokenRows,
    checksum_of,
    seed_of,
    sequential_batches,
    with_checksums,
)
from rayapp.model import LanguageModel
from rayapp.model.init import whole_of
from rayapp.order import EMPTY
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.train import loop
from rayapp.train.engine import Engine
from rayapp.train.spec import LanguageSpec

NAMED = "reference.txt"  # in the run's folder: the digest of the weights that it started with
Sums = np.ndarray[Any, np.dtype[np.float32]]


class References:
    """The log-probabilities of a run's answers by its reference."""

    def __init__(self, spec: LanguageSpec, lm: LanguageModel) -> None:
        self.spec, self.lm, self.run = spec, lm, open_storage(spec.run_url)
        self.sums: dict[str, Sums] = {}
        """Of each split, fp32 [rows, documents]; 0 where a row has fewer."""

    def load_or_compute(self, engine: Engine, first_step: int) -> None:
        """Make `sums` on all ranks; at a later step, from the files alone.

        Raises:
            loop.Interrupted: the ranks leave; what is done stays.
            StorageError: files are not there any more, or not what was written.
        """
        if first_step:
            digest = self.run.read(NAMED).decode()
        else:
            digest = weights_digest(self.lm)
            if dist.get_rank() == 0:
                self.run.write(NAMED, digest.encode())
        for split in SPLITS:
            rows = self.spec.data.rows(split)
            parts = list[Sums]()
            for number, (name, count) in enumerate(rows.shards):
                place = _place(name, digest)
                if not rows.storage.exists(place):
                    if first_step:
                        raise StorageError(
                            "read",
                            f"{rows.storage.url}/{place}",
                            "the reference's log-probabilities are gone",
                            "Set another run.name to compute them again",
                        )
                    first = sum(count for _, count in rows.shards[:number])
                    made = self._computed(engine, rows, range(first, first + count))
                    if dist.get_rank() == 0:
                        _write(rows.storage, place, made)
                    dist.barrier(group=engine.control)
                parts.append(_read(rows.storage, place, count))
            self.sums[split] = _stacked(parts)

    def joined(self, batches: Iterable[StepRows], split: str) -> Iterator[StepRows]:
        """Yield the batches with the reference's log-probabilities."""
        for batch in batches:
            there = batch.rows != EMPTY
            sums = self.sums[split][np.where(there, batch.rows, 0)]
            yield replace(batch, reference=np.where(there[..., None], sums, np.float32(0)))

    def _computed(self, engine: Engine, rows: TokenRows, numbers: range) -> Sums:
        """Return the sums of some rows, fp32 [rows, documents], on all ranks."""
        rank, world = dist.get_rank(), dist.get_world_size()
        found: dict[int, torch.Tensor] = {}

        def measure(batch: StepRows, i: int, output: tuple[torch.Tensor, ...]) -> dict[str, float]:
            documents = batch.segments[i].max(-1, initial=0).tolist()
            each = output[2].float().cpu().split(documents)
            found.update(zip(batch.rows[i].tolist(), each, strict=True))
            return {"rows": float(len(documents))}

        size = self.spec.config.micro_batch
        batches = sequential_batches(rows, size, rank, world, among=numbers)
        with self.lm.answers_alone(nullcontext):
            loop.evaluate(engine, batches, measure, "computing the reference")
        found.pop(EMPTY, None)
        most = torch.tensor(max((len(each) for each in found.values()), default=0))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=engine.control)
        sums = torch.zeros(len(numbers), int(most))
        for number, each in found.items():
            sums[number - numbers.start, : len(each)] = each
        dist.all_reduce(sums, group=engine.control)
        return sums.numpy()


def weights_digest(lm: LanguageModel) -> str:
    """Return 16 hex digits of all weights by name and dtype, at any world size; collective."""
    digest = xxh3_64()
    for name, parameter in lm.hf.state_dict().items():
        whole = whole_of(parameter).cpu().contiguous()
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(whole.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _place(shard: str, digest: str) -> str:
    """Return the name of the file that belongs to a shard: in a folder beside it."""
    folder, slash, name = shard.rpartition("/")
    return f"{folder}{slash}reference-{digest}/{name}"


def _write(storage: Storage, name: str, sums: Sums) -> None:
    rows = np.ascontiguousarray(sums, "<f4").view([("sums", "<f4", (sums.shape[1],))])[:, 0]
    storage.write(name, with_checksums(rows, f"{storage.url}/{name}", 0).tobytes())


def _read(storage: Storage, name: str, count: int) -> Sums:
    """Return the sums of a shard's rows, fp32 [rows, documents].

    Raises:
        StorageError: they are not what was written.
    """
    stored = np.frombuffer(storage.read(name), np.uint8)
    seed = seed_of(f"{storage.url}/{name}")
    if len(stored) % max(count, 1) == 0:
        plain, checksums = np.split(stored.reshape(count, -1), [-CHECKSUM.itemsize], axis=1)
        known = checksums.copy().view(CHECKSUM)[:, 0].tolist()
        if known == [checksum_of(row.tobytes(), seed, number) for number, row in enumerate(plain)]:
            return np.ascontiguousarray(plain).view("<f4")
    raise StorageError(
        "read",
        f"{storage.url}/{name}",
        "it has other bytes than were written",
        "Delete that file and set another run.name: the run computes it again",
    )


def _stacked(parts: list[Sums]) -> Sums:
    most = max((part.shape[1] for part in parts), default=0)
    wide = [np.pad(part, ((0, 0), (0, most - part.shape[1]))) for part in parts]
    return np.concatenate(wide) if wide else np.zeros((0, most), np.float32)
