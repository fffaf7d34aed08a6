"""Check that a rank that lags is named, by its own time alone."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from step_counts import fake_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rayapp.train import own_time
from rayapp.train.own_time import EVERY_STEPS, SAMPLES, OwnTime

EVEN, JUST, SLOW = [1.0, 1.0, 1.0, 1.01], [1.0, 1.0, 1.14, 1.0], [1.0, 1.0, 1.3, 1.0]
CASES = [
    ([EVEN] * SAMPLES, None),
    ([JUST] * SAMPLES, None),
    ([SLOW] * (SAMPLES - 1), None),
    ([*[SLOW] * (SAMPLES - 1), EVEN, *[SLOW] * (SAMPLES - 1)], None),
    ([SLOW] * SAMPLES, "rank 2 on c computes 30% longer than the median rank"),
    ([*[SLOW] * SAMPLES, EVEN], None),
    (
        [[1.0, 1.5, 1.2, 0.9]] * SAMPLES,
        "rank 1 on b computes 50% longer than the median rank (2 ranks lag)",
    ),
    ([[0.1, 0.2]] * SAMPLES, "rank 1 on b computes 100% longer than the median rank"),
    ([[0.2]] * SAMPLES, None),
]


@pytest.mark.parametrize(("samples", "named"), CASES)
def test_a_rank_lags_that_is_slow_in_all_of_the_last_samples(
    samples: list[list[float]],
    named: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    own = OwnTime([], torch.device("cpu"))
    own.nodes = "abcd"
    told = [own.figures([round(1e6 * each) for each in sample]) for sample in samples]
    assert told[0]["rank_s"] == {str(rank): each for rank, each in enumerate(samples[0])}
    assert told[-1]["lagging"] == named
    assert own.figures([]) == {"lagging": named}  # until the next sample
    assert len(caplog.records) == any(each["lagging"] for each in told)
    own.nodes = ()
    unknown = own.figures([round(1e6 * each) for each in samples[-1]])
    assert named is None or unknown["lagging"] == re.sub(" on .", "", named)


class Spends(nn.Module):
    """Let a clock go on for some seconds."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock[0] += self.seconds
        return x


class Event:
    """An event of a GPU whose stream is as far as the clock."""

    def __init__(self, clock: list[float], enable_timing: bool) -> None:
        assert enable_timing
        self.clock = clock

    def record(self) -> None:
        self.at = self.clock[0]

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waits_before_and_between_blocks_are_not_the_ranks_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "Event", partial(Event, clock))
    else:
        monkeypatch.setattr(own_time.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    wait, block, other, loss = (Spends(clock, seconds) for seconds in (100.0, 1.0, 2.0, 0.5))
    model, x = nn.Sequential(wait, block, wait, other, loss), torch.zeros(1)
    # As FSDP waits for a block's parameters, in hooks of its own.
    block.register_forward_pre_hook(lambda *args: wait(x) and None, prepend=True)
    block.register_forward_hook(lambda *args: wait(x) and None)
    own = OwnTime([block, other], torch.device(device))
    told = (EVERY_STEPS - 2, []), (EVERY_STEPS - 1, [0, 7_000_000, 0]), (EVERY_STEPS, [])
    for step, own_us in told:
        for _ in range(2):  # micro-batches
            with own.forward(step):
                model(x)
            block(x)  # recomputed in the backward pass
        assert own.take() == own_us


def test_a_block_is_measured_inside_of_fsdps_hooks() -> None:
    """They wait for the parameters, and prefetch those of the next block."""
    with fake_ranks(4):
        block = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))
        own = OwnTime([block], torch.device("cpu"))
        with own.forward(EVERY_STEPS - 1):
            before, after = [*block._forward_pre_hooks.values()], [*block._forward_hooks.values()]
            assert len(before) == len(after) == 2
            assert before[-1] == after[0] == own._mark
            block(torch.ones(1, 4))
        assert len(block._forward_pre_hooks) == len(block._forward_hooks) == 1
