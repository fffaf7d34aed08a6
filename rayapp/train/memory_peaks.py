"""The most memory that this process held in each phase of a step.

    peaks = Peaks(device)
    with peaks.phase("forward"): ...
    peaks.take()                     # {"forward": 1.3, "backward": 2.1, "optimizer": 1.9} GiB

On a GPU it is what tensors take (the allocator's cache apart), elsewhere resident memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayapp.hardware import GIB

STATUS_BYTES = 8192  # of /proc/self/status, which has some 1,500
PHASES = ("forward", "backward", "optimizer")


class Peaks:
    """Peaks by phase, and of all."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.highest_gib = 0.0
        """Of the whole time so far, what came before the first phase too."""
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._resident = None if device.type == "cuda" else _Resident()
        self._note(None)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase; the peaks of several passes through it are one."""
        self._note(None)
        yield
        self._note(name)

    def take(self) -> dict[str, float]:
        """Return GiB by phase since the last call."""
        taken, self._phases = self._phases, dict.fromkeys(PHASES, 0.0)
        return taken

    def _note(self, phase: str | None) -> None:
        """Book the peak since the last call on a phase, and begin anew."""
        if self._resident is None:
            peak_gib = torch.cuda.max_memory_allocated(self.device) / GIB
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            peak_gib = self._resident.peak_gib()
        self.highest_gib = max(self.highest_gib, peak_gib)
        if phase:
            self._phases[phase] = max(self._phases[phase], peak_gib)


class _Resident:
    """This process's resident memory, from files that stay open: several reads a step."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def __del__(self) -> None:
        os.close(self._status)
        os.close(self._clear)

    def peak_gib(self) -> float:
        """Return the peak since the last call."""
        text = os.pread(self._status, STATUS_BYTES, 0)
        kib = int(text[text.index(b"VmHWM:") + 6 :].split(None, 1)[0])
        os.pwrite(self._clear, b"5", 0)  # the peak becomes what is resident now: proc(5)
        return kib * 1024 / GIB
