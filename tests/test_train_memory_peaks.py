"""Check that memory is booked on the phase that held it, on a process's own resident memory."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest
import torch

from rayapp.train.memory_peaks import Peaks

MIB = 2**18  # fp32 values
SLACK_GIB = 24 / 1024


@pytest.fixture(scope="module")
def process() -> Iterator[Pool]:
    """A process apart: the threads that other tests leave behind free memory meanwhile."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def hold(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB)


def measured() -> tuple[dict[str, float], dict[str, float], list[float]]:
    """Return the peaks of two steps, and the highest before, between and after them, in GiB."""
    peaks = Peaks(torch.device("cpu"))
    highest = [peaks.highest_gib]
    kept = []
    with peaks.phase("forward"):
        kept.append(hold(100))
    with peaks.phase("backward"):
        hold(200)  # freed at once: what counts is the most that was held
    with peaks.phase("optimizer"):
        pass
    first = peaks.take()
    highest.append(peaks.highest_gib)
    with peaks.phase("forward"):
        hold(50)
    with peaks.phase("forward"):
        pass
    second = peaks.take()
    highest.append(peaks.highest_gib)
    assert len(kept) == 1
    return first, second, highest


def test_each_phase_has_its_own_peak(process: Pool) -> None:
    first, second, highest = process.apply(measured)
    base = first["optimizer"]
    assert abs(first["forward"] - base) < SLACK_GIB
    assert abs(first["backward"] - base - 200 / 1024) < SLACK_GIB
    assert abs(second["forward"] - base - 50 / 1024) < SLACK_GIB  # of several passes the highest
    assert second["backward"] == 0.0
    assert highest[1] == max(highest[0], *first.values()) == first["backward"] == highest[2]


def measured_beside_shared_memory() -> tuple[float, float]:
    """Return the peaks in GiB of a phase without and of one with 100 MiB more of shared pages."""
    peaks = Peaks(torch.device("cpu"))
    with peaks.phase("forward"):
        pass
    with mmap.mmap(-1, 100 * 2**20) as shared, peaks.phase("backward"):
        for _ in range(100):
            shared.write(bytes(2**20))
    taken = peaks.take()
    return taken["forward"], taken["backward"]


def test_shared_memory_is_no_memory_of_the_process(process: Pool) -> None:
    """Ray's object store is mapped page by page, so that memory would seem to grow for ever."""
    without, beside = process.apply(measured_beside_shared_memory)
    assert abs(beside - without) < SLACK_GIB


def test_a_gpus_peak_is_read_without_its_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks_gib, resets = iter([1.0, 2.0, 3.0, 2.0, 5.0]), []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *args, **kwargs: pytest.fail("slow"))
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", torch.cuda.memory_stats)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda device: {"allocated_bytes": {"all": {"peak": next(peaks_gib) * 2**30}}},
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    peaks = Peaks(torch.device("cuda"))
    for name in ("forward", "backward"):
        with peaks.phase(name):
            pass
    assert peaks.take() == {"forward": 3.0, "backward": 5.0, "optimizer": 0.0}
    assert peaks.highest_gib == 5.0 and len(resets) == 5
