"""Counts of a training step: one more collective, kernel or read of the device fails a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from step_counts import LAYERS, counts_of

from rayapp.train import loop
from rayapp.train.own_time import EVERY_STEPS

PAGE = Path(__file__).parent.parent / "docs/numbers.md"
BEGIN, END = "<!-- counts -->\n", "<!-- end of counts -->\n"
ROWS = (
    ("full_shard", 1, 1, False),
    ("full_shard", 8, 1, False),
    ("full_shard", 8, 4, False),
    ("full_shard", 256, 4, False),
    ("shard_grad_op", 8, 4, False),
    ("hybrid_shard", 16, 1, False),
    ("hybrid_shard", 16, 4, False),
    ("no_shard", 8, 1, False),
    ("no_shard", 8, 4, False),
    ("full_shard", 1, 4, True),
    ("full_shard", 8, 4, True),
    ("no_shard", 8, 4, True),
)
HEAD = (
    "| strategy | ranks | micro-batches | LoRA | all-gathers | reduce-scatters | all-reduces | "
    "kB handed to them | kernels: forward | backward | update |\n" + "|---" * 11 + "|\n"
)


def row_of(strategy: str, world: int, micro_batches: int, lora: bool) -> str:
    counts = counts_of(strategy, world=world, micro_batches=micro_batches, lora=lora)
    kinds = [counts.collectives[kind] for kind in ("all-gather", "reduce-scatter", "all-reduce")]
    phases = [counts.kernels[phase] for phase in ("forward", "backward", "optimizer")]
    cells = [f"`{strategy}`", world, micro_batches, "yes" if lora else "no", *kinds]
    cells += [f"{sum(counts.sent.values()) / 1000:,.0f}", *phases]
    return f"| {' | '.join(map(str, cells))} |\n"


@pytest.fixture(autouse=True)
def _good_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No gradient of a fake group is right, and one thread computes it."""
    monkeypatch.setattr(loop, "is_bad", lambda *each: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.full
def test_a_step_does_what_the_page_counts() -> None:
    made = HEAD + "".join(row_of(*row) for row in ROWS)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")
    else:
        assert found == made, "if meant so, GOLDEN=write"


def test_replicas_sum_their_gradients_once_a_step() -> None:
    one, four = (counts_of("no_shard", world=8, micro_batches=m) for m in (1, 4))
    assert one.collectives == four.collectives and one.sent == four.sent
    assert four.collectives["all-reduce"] == LAYERS + 1 + 2  # blocks, root; agreement, sums


def test_the_host_reads_as_often_in_any_step() -> None:
    reads = {
        counts_of("full_shard", micro_batches=m, masked=masked).reads
        for m, masked in ((1, 0.0), (3, 0.0), (2, 0.7))
    }
    assert len(reads) == 1


def test_the_update_is_of_local_tensors() -> None:
    """The host takes 2 to 4 times as long to dispatch an operation on DTensors."""
    for lora in (False, True):
        counts = counts_of("full_shard", lora=lora)
        assert counts.sharded["optimizer"] == 0
        assert counts.collectives["all-reduce"] == 3  # agreement, sums, norm


@pytest.mark.parametrize("step", [EVERY_STEPS - 1, EVERY_STEPS])
def test_a_sample_of_own_time_rides_on_the_steps_message(step: int) -> None:
    usual, sampled = (counts_of("full_shard", micro_batches=2, step=each) for each in (1, step))
    assert sampled.collectives == usual.collectives
    assert sampled.kernels == usual.kernels and sampled.reads == usual.reads
    more = sampled.sent["all-reduce"] - usual.sent["all-reduce"]
    assert more == (8 * 8 if step == EVERY_STEPS else 0)  # int64 of each rank, in the step after
