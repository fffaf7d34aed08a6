"""Check that a block of tokens is made once, whoever asks for it and whatever ends its making."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rayapp.data import token_store
from rayapp.data.packing import Document
from rayapp.data.token_sections import TokenisedRecord, TokenSection, sections
from rayapp.data.token_store import CLAIM, TokenStore, name_of
from rayapp.storage import Storage, open_storage

KEY = "ab" + 30 * "0"


class Maker:
    """Makes three sections of one document each, and counts how often."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.begun, self.pause_s = 0, pause_s

    def __call__(self) -> Iterator[TokenSection]:
        self.begun += 1
        for number in range(3):
            time.sleep(self.pause_s)
            tokens = np.arange(number * 50, number * 50 + 50, dtype=np.int32)
            document = Document(tokens, np.ones(50, bool), np.ones(50, np.uint16))
            yield from sections([TokenisedRecord(0, number, document, None, number)])


def tokens_of(found: Iterator[TokenSection]) -> list[list[int]]:
    return [section.tokens.tolist() for section in found]


EXPECTED = tokens_of(Maker()())


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest) -> Storage:
    if request.param == "folder":
        return open_storage(str(request.getfixturevalue("tmp_path")))
    return open_storage(f"s3://{request.getfixturevalue('s3_bucket')}/tokens")


def names(storage: Storage) -> list[str]:
    return [entry.name for entry in storage.list()]


def test_a_block_is_made_once_and_read_afterwards(storage: Storage) -> None:
    make = Maker()
    for _ in range(3):
        assert tokens_of(TokenStore(storage).sections(KEY, make)) == EXPECTED
    assert make.begun == 1 and names(storage) == [name_of(KEY)]


def test_two_that_want_a_block_make_it_once(storage: Storage) -> None:
    make, found = Maker(0.05), list[list[list[int]]]()

    def want() -> None:
        found.append(tokens_of(TokenStore(storage).sections(KEY, make)))

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.begun == 1 and found == [EXPECTED] * 4 and names(storage) == [name_of(KEY)]


def test_making_that_ends_early_leaves_nothing(storage: Storage) -> None:
    making = TokenStore(storage).sections(KEY, Maker())
    next(making)
    making.close()  # type: ignore[attr-defined]
    assert names(storage) == []
    assert tokens_of(TokenStore(storage).sections(KEY, Maker())) == EXPECTED


@pytest.mark.parametrize("how", ["changed", "cut"])
def test_a_damaged_block_is_made_again(storage: Storage, how: str) -> None:
    """The sections before the damage are yielded once."""
    store = TokenStore(storage)
    list(store.sections(KEY, Maker()))
    whole = storage.read(name_of(KEY))
    middle = len(whole) // 2
    bad = {"changed": whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]}
    bad["cut"] = whole[:middle]
    storage.write(name_of(KEY), bad[how])
    make = Maker()
    assert tokens_of(store.sections(KEY, make)) == EXPECTED
    assert make.begun == 1 and storage.read(name_of(KEY)) == whole


def test_the_claim_of_a_process_that_was_killed_is_taken_at_once(storage: Storage) -> None:
    code = "from rayapp.data.token_store import _claim; print(_claim().decode())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    storage.write(name_of(KEY) + CLAIM, dead.stdout.encode())
    start = time.monotonic()
    assert tokens_of(TokenStore(storage).sections(KEY, Maker())) == EXPECTED
    assert time.monotonic() - start < token_store.CLAIM_TAKEN_S / 2
    assert names(storage) == [name_of(KEY)]


def test_a_claim_from_elsewhere_is_taken_when_it_is_not_renewed(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "CLAIM_TAKEN_S", 1.0)
    claim = {**json.loads(token_store._claim()), "machine": ["elsewhere", "", ""]}
    storage.write(name_of(KEY) + CLAIM, json.dumps(claim).encode())
    ended = threading.Event()

    def renew() -> None:
        for number in range(8):
            storage.write(name_of(KEY) + CLAIM, json.dumps({**claim, "id": number}).encode())
            time.sleep(0.25)
        ended.set()

    renewing = threading.Thread(target=renew)
    renewing.start()
    make = Maker()
    assert tokens_of(TokenStore(storage).sections(KEY, make)) == EXPECTED
    assert ended.is_set() and make.begun == 1 and names(storage) == [name_of(KEY)]
    renewing.join()


def test_a_claim_is_renewed_while_a_block_is_made(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "CLAIM_RENEWED_S", 0.05)
    making = TokenStore(storage).sections(KEY, Maker())
    next(making)
    claim = name_of(KEY) + CLAIM
    first = storage.stat(claim)
    assert first is not None
    until = time.monotonic() + 60
    while (now := storage.stat(claim)) is None or now.etag == first.etag:
        assert time.monotonic() < until, "the claim was not renewed"
        time.sleep(0.05)
    next(making)
    assert len(list(making)) == 1 and names(storage) == [name_of(KEY)]
