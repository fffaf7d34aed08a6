"""Check that memory is booked on the phase that held it, on this machine's own resident memory."""

from __future__ import annotations

import torch

from rayapp.train.memory_peaks import Peaks

MIB = 2**18  # fp32 values
SLACK_GIB = 24 / 1024


def hold(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB)


def test_each_phase_has_its_own_peak() -> None:
    peaks = Peaks(torch.device("cpu"))
    before = peaks.highest_gib
    kept = []
    with peaks.phase("forward"):
        kept.append(hold(100))
    with peaks.phase("backward"):
        hold(200)  # freed at once: what counts is the most that was held
    with peaks.phase("optimizer"):
        pass
    first = peaks.take()
    base = first["optimizer"]
    assert abs(first["forward"] - base) < SLACK_GIB
    assert abs(first["backward"] - base - 200 / 1024) < SLACK_GIB
    assert peaks.highest_gib == max(before, *first.values()) == first["backward"]
    with peaks.phase("forward"):
        hold(50)
    with peaks.phase("forward"):
        pass
    second = peaks.take()
    assert abs(second["forward"] - base - 50 / 1024) < SLACK_GIB  # of several passes the highest
    assert second["backward"] == 0.0
    assert peaks.highest_gib == first["backward"]
    assert len(kept) == 1
