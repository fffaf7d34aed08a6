"""Measure the most memory that this process held in each phase of a step, in GiB.

    peaks = Peaks(device)
    with peaks.phase("forward"): ...
    peaks.take()                     # {"forward": 1.3, "backward": 2.1, "optimizer": 1.9} GiB

On a GPU this is the memory of tensors, without the allocator's cache; elsewhere it is the resident
memory of the process, without what it shares with others (Ray's object store).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayapp.hardware import GIB

STATUS_BYTES = 8192  # to read of /proc/self/status, which has some 1,500
PHASES = ("forward", "backward", "optimizer")


class Peaks:
    """The peak of each phase, and of the whole time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.highest_gib = 0.0
        """Of the whole time so far, including the time before the first phase."""
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._resident = None if device.type == "cuda" else _Resident()
        self._note(None)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase; if a step enters it several times, the highest peak counts."""
        self._note(None)
        yield
        self._note(name)

    def take(self) -> dict[str, float]:
        """Return the peaks since the last call, in GiB by phase."""
        taken, self._phases = self._phases, dict.fromkeys(PHASES, 0.0)
        return taken

    def _note(self, phase: str | None) -> None:
        """Record the peak since the last call, for a phase if one is named, and reset it."""
        if self._resident is None:
            # torch.cuda.max_memory_allocated sorts some 130 figures first: 55 of 60 us.
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            peak_gib = stats["allocated_bytes"]["all"]["peak"] / GIB
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            peak_gib = self._resident.peak_gib()
        self.highest_gib = max(self.highest_gib, peak_gib)
        if phase:
            self._phases[phase] = max(self._phases[phase], peak_gib)


class _Resident:
    """This process's resident memory; its files stay open, as a step reads them several times."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def __del__(self) -> None:
        os.close(self._status)
        os.close(self._clear)

    def peak_gib(self) -> float:
        """Return the peak since the last call, in GiB, without what is shared at its end.

        Ray's object store is shared: its pages become resident as they are read, all run long.
        """
        text = os.pread(self._status, STATUS_BYTES, 0)
        highest, shared = (
            int(text[text.index(name) + len(name) :].split(None, 1)[0])
            for name in (b"VmHWM:", b"RssShmem:")
        )
        kib = highest - shared
        os.pwrite(self._clear, b"5", 0)  # the peak becomes what is resident now: proc(5)
        return kib * 1024 / GIB
