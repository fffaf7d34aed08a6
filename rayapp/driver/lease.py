"""One live run per name: a lease in the run's folder that its driver renews.

    with held(run) as lease:
        ...                  # lease.check() raises once another driver has taken over

The driver that holds the lease rewrites the file every LEASE_RENEWED_S seconds. A second driver
that finds the file watches it. If the file changes, the second driver gives up; if it does not
change for LEASE_TAKEN_S seconds, the second driver takes the lease over by compare-and-swap. Clocks
of two machines are never compared. If the holder is a process of the same machine, there is no
wait: the driver looks up whether that process still exists.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rayapp.config import ConfigError
from rayapp.observe.records import Holder
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import LEASE, LEASE_RENEWED_S, LEASE_TAKEN_S, STOP
from rayapp.storage import Storage

POLL_S = 1.0

logger = logging.getLogger("rayapp.driver")


class Lease:
    """The right to write to a run's folder; a thread renews it until `release`."""

    def __init__(self, run: Storage, holder: Holder, etag: str) -> None:
        self._run, self._holder, self._etag = run, holder, etag
        self._lost, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RunFailed if another driver has taken the run over."""
        if self._lost.is_set():
            raise RunFailed(
                f"another driver has taken over {self._run.url}: this one could not renew its "
                f"lease for {LEASE_TAKEN_S:.0f} s. Nothing that was committed is lost"
            )

    def release(self) -> None:
        """Stop renewing, and delete the lease unless another driver holds it by now."""
        self._closed.set()
        self._thread.join()
        entry = self._run.stat(LEASE)
        if entry is not None and entry.etag == self._etag:
            self._run.delete(LEASE)

    def _renew(self) -> None:
        count = 0
        while not self._closed.wait(LEASE_RENEWED_S):
            count += 1
            try:
                renewed = json.dumps({**self._holder, "renewed": count}).encode()
                etag = self._run.replace_if(LEASE, renewed, self._etag)
            except OSError as error:
                logger.warning("cannot renew the lease, will try again: %s", error)
                continue
            if etag is None:
                self._lost.set()
                return
            self._etag = etag


@contextmanager
def held(run: Storage, say: Callable[[str], None] = lambda text: None) -> Iterator[Lease]:
    """Hold the lease of a run's folder inside the block.

    Raises:
        ConfigError: another driver is at work on this run.
    """
    lease = Lease(run, *_acquire(run, say))
    try:
        yield lease
    finally:
        lease.release()


def _acquire(run: Storage, say: Callable[[str], None]) -> tuple[Holder, str]:
    mine = Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        process=_process(os.getpid()),
        machine=_machine(),
    )
    seen, since = None, time.monotonic()
    while True:
        entry = run.stat(LEASE)
        if entry is None:
            etag = run.create(LEASE, json.dumps(mine).encode())
            if etag is not None:
                return mine, etag
            continue
        try:
            other: Holder = json.loads(run.read(LEASE))
        except FileNotFoundError:
            continue
        if seen is None:
            seen = entry.etag
            if other["machine"] != _machine():
                say(f"waiting to see whether {other['host']}, process {other['pid']}, still runs")
        here = other["machine"] == _machine() and not _ended(other)
        if here or entry.etag != seen:
            raise ConfigError(
                [
                    f"run.name={run.url.rpartition('/')[2]} is running: {other['host']}, process "
                    f"{other['pid']}, is at work in {run.url}. Stop it (Ctrl-C there, or a file "
                    f"named {STOP} in that folder), or set another run.name"
                ]
            )
        if _ended(other) or time.monotonic() - since > LEASE_TAKEN_S:
            etag = run.replace_if(LEASE, json.dumps(mine).encode(), entry.etag)
            if etag is not None:
                return mine, etag
            seen = ""  # another driver was faster, and is alive
            continue
        time.sleep(POLL_S)


def _ended(holder: Holder) -> bool:
    """Say whether the holder was a process of this machine that no longer exists."""
    return holder["machine"] == _machine() and holder["process"] != _process(holder["pid"])


def _machine() -> list[str]:
    """Return the host name, the id of the current boot, and the process-id namespace."""
    boot, names = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return [
        socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        os.readlink(names) if names.exists() else "",
    ]


def _process(pid: int) -> str | None:
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
