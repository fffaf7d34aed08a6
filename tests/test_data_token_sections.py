"""Check that stored tokens are read as they were written, or not at all."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.data import token_sections as sections
from rayapp.data.packing import Document
from rayapp.data.token_sections import DamagedTokens, TokenisedRecord, TokenSection

SEED = 2**64 - 1  # of the block's file
TOKEN = st.tuples(st.sampled_from([0, 1, 255, 256, 65535, 65536, 2**31 - 1]), st.booleans())


@st.composite
def records(draw: st.DrawFn) -> TokenisedRecord:
    tokens = draw(st.none() | st.lists(TOKEN, max_size=8))
    problem = draw(st.none() | st.sampled_from(["is bad", "é\ud800"]))
    document = None
    if tokens is not None:
        sizes = draw(
            st.lists(st.integers(0, 2**16 - 1), min_size=len(tokens), max_size=len(tokens))
        )
        document = Document(
            np.array([token for token, _ in tokens], np.int32),
            np.array([bears for _, bears in tokens], np.bool_),
            np.array(sizes, np.uint16),
        )
    place = draw(st.integers(0, 2**40))
    piece, drawn = draw(st.integers(0, 2**31)), draw(st.integers(0, 2**64 - 1))
    return TokenisedRecord(piece, place, document, problem, drawn, draw(st.booleans()))


def plain(record: TokenisedRecord) -> tuple[Any, ...]:
    document = record.document
    arrays = document and tuple(
        (a.dtype.str, a.tolist()) for a in (document.tokens, document.loss, document.num_bytes)
    )
    return record.piece, record.place, arrays, record.problem, record.drawn, record.more


@settings(deadline=None)
@given(st.lists(records(), max_size=12), st.integers(1, 9))
def test_sections_give_back_their_records(given_records: list[TokenisedRecord], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "SECTION_TOKENS", most)
        patch.setattr(sections, "SECTION_RECORDS", 5)
        made = list(sections.sections(given_records))
    stored = b"".join(encoded(made))
    file = io.BytesIO(stored + sections.end_of(SEED, len(made)))
    read = sections.read(file, SEED)
    found = [plain(record) for section in read for record in section.records()]
    assert found == [plain(record) for record in given_records]
    assert all(len(section.lengths) <= 5 for section in made)


def test_the_numbers_of_records_come_back_exactly() -> None:
    document = Document(np.arange(3, dtype=np.int32), np.ones(3, bool), np.ones(3, np.uint16))
    values = (0.1, -3e38)
    given_records = [
        TokenisedRecord(0, 1, document, None, 3, True, values=values),
        TokenisedRecord(0, 1, document, None, 3, values=values),
        TokenisedRecord(0, 2, None, "is bad", 0),
        TokenisedRecord(0, 3, document, None, 4, values=(2.0, 0.0)),
    ]
    stored = b"".join(encoded(list(sections.sections(given_records)))) + sections.end_of(SEED, 1)
    (section,) = sections.read(io.BytesIO(stored), SEED)
    found = [record.values for record in section.records()]
    assert found == [record.values for record in given_records]


def encoded(made: list[TokenSection], seed: int = SEED) -> list[bytes]:
    """Return each section as it is stored."""
    every = (sections.encoded(each, seed, number) for number, each in enumerate(made))
    return [b"".join(map(bytes, parts)) for parts in every]


def parts() -> list[bytes]:
    """Return two alike sections as they are stored, and the end."""
    document = Document(np.arange(300, dtype=np.int32), np.ones(300, bool), np.ones(300, np.uint16))
    made = list(sections.sections([TokenisedRecord(0, 7, document, None, 3)])) * 2
    return [*encoded(made), sections.end_of(SEED, 2)]


def some() -> bytes:
    return b"".join(parts())


@given(st.data())
@settings(deadline=None)
def test_no_changed_bit_is_read_as_tokens(data: st.DataObject) -> None:
    whole = bytearray(some())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedTokens):
        list(sections.read(io.BytesIO(whole), SEED))


@given(st.data())
@settings(deadline=None)
def test_what_is_cut_off_is_damaged(data: st.DataObject) -> None:
    whole = some()
    last = len(whole) - sections.HEADER.size
    lengths = st.sampled_from([0, last]) | st.integers(0, len(whole) - 1)
    end = data.draw(lengths)
    with pytest.raises(DamagedTokens):
        list(sections.read(io.BytesIO(whole[:end]), SEED))


@pytest.mark.parametrize("order", ["102", "02", "12", "2", "0012", "002", "112", "012 elsewhere"])
def test_sections_that_were_moved_are_damaged(order: str) -> None:
    """Swapped, dropped or repeated, up to the end alone; or the file of another block."""
    each, (numbers, _, elsewhere) = parts(), order.partition(" ")
    file = io.BytesIO(b"".join(each[int(number)] for number in numbers))
    with pytest.raises(DamagedTokens):
        list(sections.read(file, SEED + 10 if elsewhere else SEED))


def test_a_long_document_in_parts_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier version stored it, in several records."""
    dumps = json.dumps
    monkeypatch.setattr(sections.json, "dumps", lambda head: dumps({**head, "going_on": [0]}))
    with pytest.raises(DamagedTokens, match="in parts"):
        list(sections.read(io.BytesIO(some()), SEED))


def test_a_token_of_a_small_vocabulary_takes_two_bytes_at_most() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2**16, 10_000).astype(np.int32)
    document = Document(tokens, np.ones(10_000, bool), np.full(10_000, 4, np.uint16))
    (section,) = sections.sections([TokenisedRecord(0, 0, document, None, 0)])
    assert len(encoded([section])[0]) < 2.05 * 10_000
