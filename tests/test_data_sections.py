"""Check that stored tokens are read as they were written, or not at all."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.data import sections
from rayapp.data.packing import Document
from rayapp.data.sections import DamagedTokens, TokenisedRecord

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
    return record.piece, record.place, arrays, record.problem, record.drawn, record.goes_on


@settings(deadline=None)
@given(st.lists(records(), max_size=12), st.integers(1, 9))
def test_sections_give_back_their_records(given_records: list[TokenisedRecord], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "SECTION_TOKENS", most)
        patch.setattr(sections, "SECTION_RECORDS", 5)
        made = list(sections.sections(given_records))
    stored = b"".join(part for section in made for part in sections.encoded(section))
    file = io.BytesIO(stored + sections.END)
    found = [plain(record) for section in sections.read(file) for record in section.records()]
    assert found == [plain(record) for record in given_records]
    assert all(len(section.lengths) <= 5 for section in made)


def some() -> bytes:
    document = Document(np.arange(300, dtype=np.int32), np.ones(300, bool), np.ones(300, np.uint16))
    (section,) = sections.sections([TokenisedRecord(0, 7, document, None, 3)])
    return b"".join(sections.encoded(section) * 2) + sections.END


@given(st.data())
@settings(deadline=None)
def test_no_changed_bit_is_read_as_tokens(data: st.DataObject) -> None:
    whole = bytearray(some())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedTokens):
        list(sections.read(io.BytesIO(whole)))


@given(st.data())
@settings(deadline=None)
def test_what_is_cut_off_is_damaged(data: st.DataObject) -> None:
    whole = some()
    lengths = st.sampled_from([0, len(whole) - len(sections.END)]) | st.integers(0, len(whole) - 1)
    end = data.draw(lengths)
    with pytest.raises(DamagedTokens):
        list(sections.read(io.BytesIO(whole[:end])))


def test_a_token_of_a_small_vocabulary_takes_two_bytes_at_most() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2**16, 10_000).astype(np.int32)
    document = Document(tokens, np.ones(10_000, bool), np.full(10_000, 4, np.uint16))
    (section,) = sections.sections([TokenisedRecord(0, 0, document, None, 0)])
    assert sum(len(part) for part in sections.encoded(section)) < 2.05 * 10_000
