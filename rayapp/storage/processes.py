"""Tell whether a process that left its name in a file still runs, if it is of this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def machine() -> list[str]:
    """Return the host name, the id of the current boot, and the process-id namespace."""
    boot, names = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    booted = boot.read_text().strip() if boot.exists() else ""
    return [socket.gethostname(), booted, os.readlink(names) if names.exists() else ""]


def mark_of(pid: int) -> str | None:
    """Return a mark that differs between processes that reuse a pid; None if there is no process.

    On Linux it is the start time, in ticks since boot; elsewhere only "alive".
    """
    if Path("/proc/self").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return None
        return None if fields[0] == "Z" else fields[19]  # Z: a zombie, which has ended
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    return "alive"
