"""Keep the tokens of blocks beside the runs, and make each block once, whoever asks for it.

    store = TokenStore(storage / ".prepared" / "tokens" / key_of_the_tokenizer)
    for section in store.sections(key_of_the_content, make): ...

A block is one object, which appears when it is whole. Who makes one writes a claim beside it and
renews that; others wait for the object. A claim whose process has ended, or that was not renewed
for CLAIM_TAKEN_S of the waiting process's own clock, is taken over. Two that make a block all the
same write the same sections: a claim saves work, and nothing depends on it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from rayapp.data import token_sections
from rayapp.data.token_rows import seed_of
from rayapp.data.token_sections import DamagedTokens, TokenSection
from rayapp.storage import Storage
from rayapp.storage.processes import machine, mark_of

FOLDER = "tokens"
CLAIM = ".claim"  # after the name of a block
CLAIM_RENEWED_S, CLAIM_TAKEN_S = 10.0, 45.0
POLL_S = 0.2


def name_of(key: str) -> str:
    """Return the name of a block's object, in one of 256 folders: S3's limits are by prefix."""
    return f"{key[:2]}/{key}"


class TokenStore:
    """The blocks of one tokenizer and kind of record."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def sections(
        self, key: str, make: Callable[[], Iterator[TokenSection]]
    ) -> Iterator[TokenSection]:
        """Yield the sections of a block: those that are stored, or made and stored meanwhile.

        `make` yields the same sections at each call.
        """
        name, done = name_of(key), 0
        seed = seed_of(f"{self.storage.url}/{key}")
        while True:
            try:
                with self.storage.open_read(name) as file:
                    for section in islice(token_sections.read(file, seed), done, None):
                        done += 1
                        yield section
                return
            except FileNotFoundError:  # or it was removed while it was read
                pass
            except DamagedTokens:
                self.storage.delete(name)
            with self._claimed(name) as ours:
                if not ours:
                    continue
                with self.storage.open_write(name) as out:
                    count = 0
                    for count, section in enumerate(make(), 1):
                        out.writelines(token_sections.encoded(section, seed, count - 1))
                        if count > done:
                            yield section
                    out.write(token_sections.end_of(seed, count))
                return

    def make(self, key: str, make: Callable[[], Iterator[TokenSection]]) -> None:
        """Make and store a block that is missing."""
        if not self.storage.exists(name_of(key)):
            for _ in self.sections(key, make):
                pass

    @contextmanager
    def _claimed(self, name: str) -> Iterator[bool]:
        """Claim a block; False if another has made it, or has let go of it, meanwhile."""
        mine = _claim()
        if self.storage.exists(name):
            yield False
        elif self.storage.create(name + CLAIM, mine) is None:
            self._wait(name)
            yield False
        else:
            ended = threading.Event()
            renewing = threading.Thread(target=self._renew, args=(name, ended), daemon=True)
            renewing.start()
            try:
                yield True
            finally:
                ended.set()
                renewing.join()
                self.storage.delete(name + CLAIM)

    def _renew(self, name: str, ended: threading.Event) -> None:
        while not ended.wait(CLAIM_RENEWED_S):
            self.storage.write(name + CLAIM, _claim())

    def _wait(self, name: str) -> None:
        """Wait until a claim is gone; remove it if nobody holds it any more."""
        seen, since = "", time.monotonic()
        while (entry := self.storage.stat(name + CLAIM)) is not None:
            if entry.etag != seen:
                seen, since = entry.etag, time.monotonic()
                if self._has_ended(name):
                    self.storage.delete_if(name + CLAIM, seen)
            elif time.monotonic() - since > CLAIM_TAKEN_S:
                self.storage.delete_if(name + CLAIM, seen)
            time.sleep(POLL_S)

    def _has_ended(self, name: str) -> bool:
        """Return whether the process that holds a claim was of this machine and is gone."""
        try:
            claim = self.storage.read(name + CLAIM)
        except FileNotFoundError:
            return False
        try:
            holder = json.loads(claim)
            where, pid, process = holder["machine"], int(holder["pid"]), holder["process"]
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return True  # claims are written whole: this one is damaged, and nobody's
        return bool(where == machine() and mark_of(pid) != process)


def _claim() -> bytes:
    """Return the text of a claim of this process; no two are equal."""
    pid = os.getpid()
    values = {"machine": machine(), "pid": pid, "process": mark_of(pid), "id": uuid.uuid4().hex}
    return json.dumps(values).encode()
