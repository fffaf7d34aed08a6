"""One live run per name: a lease in the run's folder that its driver renews.

    with held(run) as lease:
        ...                  # lease.check() raises once another driver has taken over
        lease.is_fresh()     # False: end the workers, another driver may take over soon
        lease.fence(run).write(name, data)       # checks the lease before it writes

The driver that holds the lease rewrites the file every LEASE_RENEWED_S seconds. A second driver
that finds the file watches it. If the file changes, the second driver gives up; if it does not
change for LEASE_TAKEN_S seconds, the second driver takes the lease over by compare-and-swap. Clocks
of two machines are never compared. If the holder is a process of the same machine, there is no
wait: the driver looks up whether that process still exists.

A holder counts too, from the moment at which it sent its last successful renewal. After
LEASE_STOPPED_S without another it ends its workers, whatever its requests wait for, and goes on
once it has renewed. It knows its own lease by the holder's id in the file, since a storage may
carry out a renewal after the client has given up on it.

A process may be suspended between a check of its lease and a write. So a file is written only if it
is as this driver has last seen it; if it is not, the lease in the storage is read again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from typing_extensions import TypedDict

from rayapp.config import ConfigError
from rayapp.observe import run_folder
from rayapp.observe.clock import CLOCK, Clock
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import (
    LEASE,
    LEASE_RENEWED_S,
    LEASE_STOPPED_S,
    LEASE_TAKEN_S,
    STOP,
    Count,
)
from rayapp.storage import Storage
from rayapp.storage.base import FULL
from rayapp.storage.processes import machine as _machine
from rayapp.storage.processes import mark_of as _process

POLL_S = 1.0
NOTE_EVERY_S = 60.0
ROOM_S = 3 * LEASE_RENEWED_S  # after which a disk that is still full refuses a write

logger = logging.getLogger("rayapp.driver")


class Holder(TypedDict, total=False):
    """The process that holds a run's lease."""

    id: str
    """Differs between holders, also of one process."""
    host: str
    pid: Count
    process: str | None
    """What distinguishes it from an earlier process with the same pid."""
    machine: list[str]
    renewed: int


def _of_inner(name: str, *, checked: bool) -> Any:
    def method(self: Fenced, *args: object, **named: object) -> object:
        if checked:
            self.check()
        return getattr(self.inner, name)(*args, **named)

    return method


@dataclass(frozen=True)
class Fenced(Storage):
    """A storage that reads for everybody, and writes and deletes only while the lease is held."""

    inner: Storage
    check: Callable[[], None]
    """Wait until the lease is renewed; raise if it is lost."""
    verify: Callable[[], None]
    """Raise unless the lease in the storage is this driver's."""
    _etags: dict[str, str | None] = field(default_factory=dict)
    """Of the files that this driver has written or looked at; None: absent."""

    read, stat, dirs, list, local_path, check_writable = (
        _of_inner(name, checked=False)
        for name in ("read", "stat", "dirs", "list", "local_path", "check_writable")
    )
    create, replace_if, delete, delete_if, delete_tree = (
        _of_inner(name, checked=True)
        for name in ("create", "replace_if", "delete", "delete_if", "delete_tree")
    )

    def child(self, name: str) -> Storage:
        inner = self.inner.child(name)
        return Fenced(inner.url, inner, self.check, self.verify)

    __truediv__ = child

    def write(self, name: str, data: bytes) -> None:
        """Write a file if it is as this driver has last seen it, else after `verify`."""
        self.check()
        if name not in self._etags:
            self._etags[name] = self._look(name)
        while True:
            etag = self._etags[name]
            if etag is None:
                new = self.inner.create(name, data)
            else:
                new = self.inner.replace_if(name, data, etag)
            if new is None:
                self.verify()  # changed by someone else, or by our own request before this one
                self._etags[name] = self._look(name)
                continue
            self._etags[name] = new
            return

    def _look(self, name: str) -> str | None:
        entry = self.inner.stat(name)
        return entry.etag if entry else None

    @contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        self.check()
        with self.inner.open_write(name) as out:
            yield out
            self.check()  # an error here discards what was written


class Lease:
    """The right to write to a run's folder; a thread renews it until `release`."""

    def __init__(
        self, run: Storage, holder: Holder, etag: str, sent_at: float, clock: Clock = CLOCK
    ) -> None:
        """Renew a lease that was taken by a request sent at `sent_at` of the clock's seconds."""
        self._run, self._holder, self._etag, self._clock = run, holder, etag, clock
        self._renewed_at = sent_at
        self._lost: str | None = None
        self.full: OSError | None = None
        """The error of the last renewal, if the disk had no room for it."""
        self._closed, self._ended = clock.event(), clock.event()
        clock.thread(self._renew, "lease")

    def check(self) -> None:
        """Raise RunFailed if another driver has taken the run over, or nothing renews the lease."""
        if self._lost is not None:
            raise RunFailed(f"{self._lost}. Nothing that was committed is lost")

    def is_fresh(self) -> bool:
        """Say whether no other driver can take over within LEASE_TAKEN_S - LEASE_STOPPED_S."""
        age_s = self._clock.monotonic() - self._renewed_at
        return self._lost is None and age_s < LEASE_STOPPED_S

    def wait_until_fresh(
        self,
        note: Callable[[str], None] = lambda text: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until the lease is renewed; raise RunFailed if it is lost.

        `check` is called every POLL_S seconds and may end the wait by raising.
        """
        noted: float | None = None
        self.check()
        while not self.is_fresh():
            check()
            now = self._clock.monotonic()
            if noted is None or now - noted >= NOTE_EVERY_S:
                noted = now
                note(f"waiting for {self._run.url} to answer, to renew the lease of this run")
            self._clock.sleep(POLL_S)
            self.check()

    def _wait_to_write(self) -> None:
        """Wait until the lease is renewed; raise OSError if a full disk keeps it from that."""
        until = self._clock.monotonic() + ROOM_S

        def check() -> None:
            if self.full is not None and self._clock.monotonic() > until:
                raise self.full

        self.wait_until_fresh(check=check)

    def verify(self) -> None:
        """Read the lease; raise RunFailed if another driver holds it."""
        holder = _read(self._run)
        if holder is None or holder["id"] != self._holder["id"]:
            self._lose(holder)
        self.check()

    def fence(self, storage: Storage) -> Storage:
        """Return a storage that writes and deletes only while this lease is held."""
        return Fenced(storage.url, storage, self._wait_to_write, self.verify)

    def release(self) -> None:
        """Stop renewing, and delete the lease unless another driver holds it by now."""
        self._closed.set()
        self._ended.wait()
        if self.is_fresh():
            self._run.delete_if(LEASE, self._etag)

    def _renew(self) -> None:
        try:
            count = 0
            while self._lost is None and not self._closed.wait(LEASE_RENEWED_S):
                count += 1
                try:
                    self._renew_once(count)
                    self.full = None
                except OSError as error:
                    self.full = error if error.errno in FULL else None
                    logger.warning("cannot renew the lease, will try again: %s", error)
        except BaseException as error:  # of any kind: without renewals the run must end
            self._lost = f"the lease of {self._run.url} cannot be renewed: {error!r}"
        finally:
            self._ended.set()

    def _renew_once(self, count: int) -> None:
        sent_at = self._clock.monotonic()
        etag = self._run.replace_if(LEASE, _text({**self._holder, "renewed": count}), self._etag)
        if etag is not None:
            self._etag, self._renewed_at = etag, sent_at
            return
        entry, holder = self._run.stat(LEASE), _read(self._run)
        if entry is None or holder is None or holder["id"] != self._holder["id"]:
            self._lose(holder)
        else:  # our own request, which the storage carried out late
            self._etag = entry.etag

    def _lose(self, holder: Holder | None) -> None:
        by = f": {holder['host']}, process {holder['pid']}" if holder else ""
        self._lost = (
            f"another driver has taken over {self._run.url}{by}. This one had not renewed its "
            f"lease for {LEASE_TAKEN_S:.0f} s, or its {LEASE} was deleted"
        )


@contextmanager
def held(
    run: Storage, say: Callable[[str], None] = lambda text: None, clock: Clock = CLOCK
) -> Iterator[Lease]:
    """Hold the lease of a run's folder inside the block.

    Raises:
        ConfigError: another driver is at work on this run.
    """
    lease = Lease(run, *_acquire(run, say, clock), clock)
    try:
        yield lease
    finally:
        lease.release()


def _acquire(run: Storage, say: Callable[[str], None], clock: Clock) -> tuple[Holder, str, float]:
    """Take the lease; return the holder, the file's etag and when the request was sent."""
    mine = this_process()
    seen: str | None = None
    since, tried_at = 0.0, None
    while True:
        entry, now = run.stat(LEASE), clock.monotonic()
        if entry is None:
            tried_at = tried_at or now
            etag = run.create(LEASE, _text(mine))
            if etag is not None:
                return mine, etag, now
            continue
        other = _read(run)
        if other is None:
            continue
        if other["id"] == mine["id"]:  # our own request, which the storage carried out late
            return mine, entry.etag, tried_at or now
        here = other["machine"] == mine["machine"]
        if seen is None:
            seen, since = entry.etag, now  # read after the file: it was written before
            if not here:
                say(f"waiting to see whether {other['host']}, process {other['pid']}, still runs")
        ended = here and other["process"] != _process(other["pid"])
        if (here and not ended) or entry.etag != seen:
            name, host, pid = run.url.rpartition("/")[2], other["host"], other["pid"]
            what = f"run.name={name} is running: {host}, process {pid}, is at work in {run.url}"
            fix = f"Stop it (Ctrl-C there, or a file named {STOP} in that folder)"
            raise ConfigError([f"{what}. {fix}, or set another run.name"])
        if ended or now - since > LEASE_TAKEN_S:
            tried_at = tried_at or now
            etag = run.replace_if(LEASE, _text(mine), entry.etag)
            if etag is not None:
                return mine, etag, now
            seen = ""  # another driver was faster, and is alive
            continue
        clock.sleep(POLL_S)


def this_process() -> Holder:
    """Describe this process as the holder of a lease, with a new id."""
    pid = os.getpid()
    own = {"pid": pid, "process": _process(pid), "machine": _machine()}
    return cast(Holder, {"id": uuid.uuid4().hex, "host": socket.gethostname(), **own})


def _text(holder: Holder) -> bytes:
    return json.dumps(holder).encode()


def _read(run: Storage) -> Holder | None:
    """Return the holder that the file names; None if the file is gone.

    A file that is not readable is of an unknown holder elsewhere, and is waited for as any other.
    """
    unknown = Holder(id="", host="an unknown machine", pid=0, process=None, machine=[])
    try:
        holder = run_folder.read(run, LEASE, Holder)
    except run_folder.DamagedFile:
        return unknown
    return None if holder is None else {**unknown, **holder}
