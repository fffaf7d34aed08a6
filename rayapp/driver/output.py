"""Keep the end of what a command prints, and write it into the run's folder by attempt."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import IO, Any, cast

from rayapp.jobs.package import LOOKS_SECRET
from rayapp.observe import attempts
from rayapp.observe.attempts import tracebacks
from rayapp.observe.clock import CLOCK, Clock
from rayapp.observe.events import Journal
from rayapp.observe.plain import Through, plain_text
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import RESERVE
from rayapp.observe.words import moment
from rayapp.storage import Storage
from rayapp.storage.base import explained

TAIL_BYTES = 200_000
RESERVE_BYTES = 2**20  # a log of an attempt takes up to 520 kB, the rest some 10
KEPT = 20  # logs; a crash loop must not fill the storage
# While it prepares and trains: for `rayapp logs --follow`, and in case the driver is killed.
STORE_EVERY_S, STORE_EVERY_S3_S = 5.0, 60.0
SECRET_LENGTH = 8  # shorter values, such as "false", are no secrets

logger = logging.getLogger("rayapp.driver")


class Tail:
    """The last lines that were printed, TAIL_BYTES at most.

    A line that is redrawn, as a progress bar is, counts once, as it was last.
    """

    def __init__(self) -> None:
        self.added = 0
        """Number of lines since the beginning."""
        self._lines: deque[str] = deque()
        self._bytes = 0
        self._open: dict[str, str] = {}  # the line that each stream has not ended yet
        self._lock = threading.Lock()

    def add(self, stream: str, text: str) -> None:
        with self._lock:
            *lines, rest = (self._open.get(stream, "") + text).split("\n")
            for line in lines:
                self._append(plain_text(_redrawn(line.rstrip("\r"))) + "\n")
            self._open[stream] = _redrawn(rest)[-TAIL_BYTES:]

    def _append(self, line: str) -> None:
        line = line.encode(errors="replace")[-TAIL_BYTES:].decode(errors="replace")
        self._lines.append(line)
        self._bytes += len(line.encode())
        self.added += 1
        while self._bytes > TAIL_BYTES:
            self._bytes -= len(self._lines.popleft().encode())

    def text(self) -> str:
        with self._lock:
            return "".join(self._lines)

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()
            self._bytes = 0


def _redrawn(line: str) -> str:
    """Return what is left of a line after its carriage returns; one at its end stays."""
    shown = line.rstrip("\r")
    return shown.rpartition("\r")[2] + ("\r" if shown != line else "")


class Tee(Through):
    """A text stream that also adds what is written to a Tail; in all else it is the stream."""

    def __init__(self, stream: Any, name: str, tail: Tail) -> None:
        self.stream, self._name, self._tail = stream, name, tail

    def write(self, text: str) -> int:
        self._tail.add(self._name, text)
        written: int = self.stream.write(text)
        return written


@contextmanager
def captured() -> Iterator[Tail]:
    """Keep the end of what is written to sys.stdout and sys.stderr inside the block.

    They are replaced in Python, not by file descriptor: a notebook's streams have none. Ray, rich
    and logging look them up when they write.
    """
    tail = Tail()
    with ExitStack() as stack:
        for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
            if (stream := getattr(sys, name)) is not None:
                stack.enter_context(redirect(cast(IO[str], Tee(stream, name, tail))))
        yield tail


class AttemptLogs:
    """Write logs/attempt-N.txt; an error of the storage is a warning, as a log is no result."""

    def __init__(self, run: Storage, journal: Journal, tail: Tail, clock: Clock = CLOCK) -> None:
        self._run, self._journal, self._tail, self._clock = run, journal, tail, clock
        self.number = journal.attempts + 1
        self._errors: dict[str, str] = {}
        self._stored_at, self._stored = clock.monotonic(), tail.added

    def begin_attempt(self) -> None:
        """Take what is printed from now on as of the attempt that the journal has just noted."""
        self.number = self._journal.attempts

    def keep_errors(self, error: Exception) -> None:
        """Keep the errors of the workers for the log of this attempt."""
        self._errors = tracebacks(error)

    def refresh(self) -> None:
        """Store the log as it is, if its interval has passed and something was printed."""
        now = self._clock.monotonic()
        every_s = STORE_EVERY_S if self._run.local_path() else STORE_EVERY_S3_S
        if now - self._stored_at >= every_s and self._tail.added > self._stored:
            self._store(attempts.GOES_ON)

    def end_attempt(self, ending: str) -> None:
        """Store the log of this attempt and begin that of the next."""
        self._store(ending)
        self._tail.clear()
        self._errors = {}
        self.number = self._journal.attempts + 1

    def close(self, ending: str) -> str | None:
        """Store the last log of the command; return its URL, None if it could not be stored."""
        try:
            return self._store(ending)
        except RunFailed as error:  # the lease is lost: the folder is another driver's
            logger.warning("%s is not stored: %s", attempts.log_name(self.number), error)
            return None

    def _store(self, ending: str) -> str | None:
        name, now = attempts.log_name(self.number), self._clock.time()
        head = f"attempt {self.number} of {self._run.url}, written {moment(now)}"
        text = attempts.render_log(head, self._tail.text(), self._errors, ending)
        self._stored_at, self._stored = self._clock.monotonic(), self._tail.added
        try:
            self._run.write(name, _without_secrets(text).encode(errors="replace"))
            for number in attempts.logged(self._run):
                if number <= self.number - KEPT:
                    self._run.delete(attempts.log_name(number))
        except OSError as error:
            logger.warning("%s is not stored: %s", name, error)
            return None
        return f"{self._run.url}/{name}"


def _without_secrets(text: str) -> str:
    """Replace the values of variables that look secret: more people read the folder than a log."""
    for name, value in os.environ.items():
        if LOOKS_SECRET.search(name) and len(value) >= SECRET_LENGTH:
            text = text.replace(value, f"[{name}]")
    return text


class Reserve:
    """Some bytes of the run's disk for the reason of a failure: taken inside the block.

    A disk that becomes full refuses result.json and events.jsonl too. The bytes are given back
    before the end of the command is recorded; by then the workers, which would use them up, have
    ended. They are random and synced: compression, sparse files and delayed allocation would save
    others, and posix_fallocate is not everywhere. In object stores there is no reserve.
    """

    def __init__(self, run: Storage) -> None:
        folder = run.local_path()
        self._path = None if folder is None else f"{folder}/{RESERVE}"

    def __enter__(self) -> Reserve:
        """Raises: StorageError: there is no such room."""
        if self._path is not None:
            try:
                with explained("write", self._path), open(self._path, "wb") as file:
                    file.write(os.urandom(RESERVE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                self.free()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        if self._path is not None:
            with explained("delete", self._path), suppress(FileNotFoundError):
                os.unlink(self._path)
