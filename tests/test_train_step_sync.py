"""Check what the ranks of a step agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch.distributed as dist

from rayapp import order
from rayapp.order import StepCounts
from rayapp.train.step_sync import CONTINUE, RESTART, STOP, Agreement, Totals

HIGHEST = 2**64 - 1  # of a rank's digest, so that the sum has more bits than an int64


@pytest.mark.parametrize("world", [1, 3])
def test_all_ranks_have_the_same_totals(world: int, tmp_path: Path) -> None:
    processes.spawn(rank_of, world, str(tmp_path / "rendezvous"))


def rank_of(rank: int, world: int) -> None:
    first = rank == 0
    digest = HIGHEST if first else rank

    def agreed(
        counts: StepCounts, save: bool, leave: int, poll: bool, own_us: Sequence[int] = ()
    ) -> Totals:
        # As the loop does it: what rank 0 decides, the others leave at nothing.
        agreement = Agreement(
            counts,
            digest,
            save=save and first,
            leave=leave if first else CONTINUE,
            poll=poll and first,
            group=dist.group.WORLD,
            own_us=own_us,
        )
        totals = agreement.wait()
        assert agreement.wait() is totals
        return totals

    whole = order.combine([HIGHEST, *range(1, world)])
    ranks = world * (world - 1) // 2
    summed = StepCounts(ranks, world * 2**40, weight_by_source=(world, ranks))
    for save, leave, poll in ((False, CONTINUE, False), (True, STOP, False), (True, RESTART, True)):
        of_rank = StepCounts(rank, 2**40, weight_by_source=(1, rank))
        found = agreed(of_rank, save, leave, poll)
        assert found == Totals(summed, whole, save, leave, poll, [])
        assert found.weight == max(ranks, 1)
        own_us = [rank + 5 if each == rank else 0 for each in range(world)]
        told = agreed(of_rank, save, leave, poll, own_us)
        assert told == replace(found, own_us=[each + 5 for each in range(world)])
    assert (
        agreed(StepCounts(0), False, CONTINUE, False).weight == 1
    )  # no target in a batch: divided by one


def test_a_digest_is_of_64_bits(tmp_path: Path) -> None:
    processes.spawn(wrapped_rank, 1, str(tmp_path / "rendezvous"))


def wrapped_rank(rank: int, world: int) -> None:
    digests = [
        Agreement(
            StepCounts(1), digest, save=False, leave=CONTINUE, poll=False, group=dist.group.WORLD
        )
        for digest in (5, 5 + 2**64, 6)
    ]
    one, same, other = (each.wait().digest for each in digests)
    assert one == same == order.combine([5]) != other
