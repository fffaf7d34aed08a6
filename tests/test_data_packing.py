"""Test packing: every target once and in order, no label across documents, best fit by an oracle.

Run: python -m pytest tests/test_data_packing.py
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.data import packing
from rayapp.data.packing import IGNORE, Document, Packed, joined, pack, position_ids, row_dtype

PAD = 77_777


def corpus(lengths: list[int], seed: int = 0) -> list[Document]:
    """Make documents of which token i of document d is unique: d * 1000 + i."""
    rng = np.random.default_rng(seed)
    return [
        Document(
            tokens=np.arange(n, dtype=np.int32) + 1000 * d,
            loss=rng.random(n) < 0.7,
            num_bytes=rng.integers(0, 256, n).astype(np.uint8),
        )
        for d, n in enumerate(lengths)
    ]


def pieces_of(packed: Packed) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return the (inputs, labels) of each piece, row by row, and check what lies around them."""
    rows = []
    for row in packed.rows:
        segments = row["segments"].astype(int)
        number = segments.max()
        used = np.count_nonzero(segments)
        # Segments are 1, 2, ... side by side from the left, then padding.
        assert (np.diff(segments[:used]) >= 0).all() and (np.diff(segments[:used]) <= 1).all()
        assert used and segments[0] == 1 and (segments[used:] == 0).all()
        assert (row["input_ids"][used:] == PAD).all()
        assert (row["labels"][used:] == IGNORE).all()
        places = [np.flatnonzero(segments == k) for k in range(1, number + 1)]
        rows.append([(row["input_ids"][p], row["labels"][p]) for p in places])
    return rows


def expected_pieces(
    docs: list[Document], seq_len: int, truncate: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut documents by the definition."""
    pieces = []
    for doc in docs:
        labels = np.where(doc.loss, doc.tokens, IGNORE)[1:]
        inputs = doc.tokens[:-1]
        starts = range(0, len(inputs), seq_len)
        for start in starts[:1] if truncate else starts:
            pieces.append((inputs[start : start + seq_len], labels[start : start + seq_len]))
    return pieces


def oracle_best_fit(lengths: list[int], seq_len: int, most: int) -> list[list[int]]:
    """Lay pieces by best-fit decreasing, by search: rows of piece numbers, by first piece."""
    rows: list[list[int]] = []
    for piece in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        best = None
        for number, row in enumerate(rows):
            free = seq_len - sum(lengths[i] for i in row)
            if free >= lengths[piece] and len(row) < most and (best is None or free < best[0]):
                best = (free, number)
        if best is None:
            rows.append([piece])
        else:
            rows[best[1]].append(piece)
    return sorted(map(sorted, rows))


def same_pieces(one: list, other: list) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


lengths_and_size = st.integers(1, 24).flatmap(
    lambda s: st.tuples(st.lists(st.integers(0, 3 * s + 2), max_size=40), st.just(s))
)


@given(lengths_and_size, st.booleans(), st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_pair_of_every_document_once_and_in_order(
    drawn: tuple[list[int], int], best_fit: bool, truncate: bool
) -> None:
    lengths, seq_len = drawn
    docs = corpus(lengths)
    packed = pack(docs, seq_len, pad_id=PAD, best_fit=best_fit, truncate=truncate)
    rows = pieces_of(packed)
    pieces = expected_pieces(docs, seq_len, truncate)
    found = [piece for row in rows for piece in row]
    # The first input is unique to a piece and ascends with documents and within them.
    assert same_pieces(sorted(found, key=lambda piece: piece[0][0]), pieces)
    for row in rows:
        firsts = [inputs[0] for inputs, _ in row]
        assert all(a < b for a, b in itertools.pairwise(firsts))
    firsts = [row[0][0][0] for row in rows]
    assert all(a < b for a, b in itertools.pairwise(firsts))
    for inputs, labels in found:
        # A label is the token after its input, so of the same document.
        assert ((labels == inputs + 1) | (labels == IGNORE)).all()
    if not best_fit:
        assert same_pieces([row[0] for row in rows], pieces) and len(found) == len(rows)


@given(lengths_and_size, st.sampled_from([1, 2, 3, 2**16 - 1]))
@settings(deadline=None, max_examples=200)
def test_best_fit_equals_a_search(drawn: tuple[list[int], int], most: int) -> None:
    lengths, seq_len = drawn
    docs = corpus(lengths)
    pieces = expected_pieces(docs, seq_len)
    expected = oracle_best_fit([len(inputs) for inputs, _ in pieces], seq_len, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MAX_SEGMENTS", most)
        rows = pieces_of(pack(docs, seq_len, pad_id=PAD))
    number_of = {int(inputs[0]): number for number, (inputs, _) in enumerate(pieces)}
    assert [[number_of[int(inputs[0])] for inputs, _ in row] for row in rows] == expected


def test_best_fit_equals_a_search_on_many_documents() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(3, 1, 400).astype(int), 1, 900).tolist()
    docs = corpus(lengths)
    pieces = expected_pieces(docs, 128)
    expected = oracle_best_fit([len(inputs) for inputs, _ in pieces], 128, 2**16 - 1)
    packed = pack(docs, 128, pad_id=PAD)
    number_of = {int(inputs[0]): number for number, (inputs, _) in enumerate(pieces)}
    found = [[number_of[int(i[0])] for i, _ in row] for row in pieces_of(packed)]
    assert found == expected
    assert packed.fill > 0.99


@given(lengths_and_size, st.booleans(), st.booleans())
@settings(deadline=None, max_examples=100)
def test_the_account_adds_up(drawn: tuple[list[int], int], best_fit: bool, truncate: bool) -> None:
    lengths, seq_len = drawn
    docs = corpus(lengths, seed=1)
    packed = pack(docs, seq_len, pad_id=PAD, best_fit=best_fit, truncate=truncate)
    long = sum(n - 1 > seq_len for n in lengths)
    cut = sum(max(n - 1 - seq_len, 0) for n in lengths)
    counts = packed.layout
    assert counts.num_documents == len(lengths)
    assert counts.num_empty == sum(n < 2 for n in lengths)
    assert (counts.num_split, counts.num_truncated) == ((0, long) if truncate else (long, 0))
    assert counts.cut_tokens == (cut if truncate else 0)
    assert counts.num_tokens == sum(max(n - 1, 0) for n in lengths) - counts.cut_tokens
    assert counts.num_tokens == np.count_nonzero(packed.rows["segments"])
    kept = [doc.loss[1 : seq_len + 1 if truncate else None] for doc in docs]
    assert np.count_nonzero(packed.rows["labels"] != IGNORE) == sum(
        int(loss.sum()) for loss in kept
    )
    num_bytes = [doc.num_bytes[1 : seq_len + 1 if truncate else None] for doc in docs]
    assert packed.rows["target_bytes"].sum() == sum(
        int(b[loss].sum()) for b, loss in zip(num_bytes, kept, strict=True)
    )
    size = len(packed.rows) * seq_len
    assert packed.fill == (counts.num_tokens / size if size else 0.0)


def test_target_bytes_belong_to_the_row() -> None:
    docs = corpus([9, 3, 20, 5, 2, 7], seed=2)
    bytes_of = {
        int(t): int(b) for doc in docs for t, b in zip(doc.tokens, doc.num_bytes, strict=True)
    }
    packed = pack(docs, 8)
    for row in packed.rows:
        targets = row["labels"][row["labels"] != IGNORE]
        assert row["target_bytes"] == sum(bytes_of[int(t)] for t in targets)


def test_golden_rows() -> None:
    """Pin the rows: a change here changes every fingerprinted data set."""
    docs = [
        Document(np.array(t), np.array(t) > 1, np.array(t))
        for t in ([1, 2, 3], [1], [1, 4, 5, 6, 7, 8, 9], [1, 2], [1, 3, 4])
    ]
    packed = pack(docs, 4, pad_id=99)
    assert packed.rows["input_ids"].tolist() == [[1, 2, 7, 8], [1, 4, 5, 6], [1, 1, 3, 99]]
    assert packed.rows["labels"].tolist() == [[2, 3, 8, 9], [4, 5, 6, 7], [2, 3, 4, IGNORE]]
    assert packed.rows["segments"].tolist() == [[1, 1, 2, 2], [1, 1, 1, 1], [1, 2, 2, 0]]
    assert packed.rows["target_bytes"].tolist() == [22, 22, 9]


def test_prompt_tokens_bear_no_loss_but_are_seen() -> None:
    doc = Document(
        np.array([1, 10, 11, 20, 21, 2], np.int32),
        np.array([False, False, False, True, True, True]),
        np.array([0, 1, 1, 2, 2, 0], np.uint8),
    )
    row = pack([doc], 6).rows[0]
    assert row["input_ids"].tolist() == [1, 10, 11, 20, 21, 0]
    assert row["labels"].tolist() == [IGNORE, IGNORE, 20, 21, 2, IGNORE]
    assert row["target_bytes"] == 4


def test_no_target_is_lost_at_a_cut() -> None:
    (doc,) = corpus([11])
    rows = pack([Document(doc.tokens, np.ones(11, bool), doc.num_bytes)], 5).rows
    assert rows["input_ids"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert rows["labels"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


def test_nothing_in_nothing_out() -> None:
    for docs in ([], corpus([0, 1, 1])):
        packed = pack(docs, 4)
        assert packed.rows.shape == (0,) and packed.rows.dtype == row_dtype(4)
        assert packed.layout.num_empty == packed.layout.num_documents == len(docs)
        assert packed.fill == 0.0


@pytest.mark.parametrize("seq_len", [1, 2, 7, 2048])
def test_row_layout(seq_len: int) -> None:
    """Rows are read back from bytes elsewhere: no gaps, little-endian."""
    dtype = row_dtype(seq_len)
    assert dtype.itemsize == 10 * seq_len + 4
    assert [dtype.fields[name][1] for name in dtype.names] == [
        0,
        4 * seq_len,
        8 * seq_len,
        10 * seq_len,
    ]
    packed = pack(corpus([5, 9, 2, 30]), seq_len)
    assert packed.rows.dtype == dtype
    assert np.array_equal(np.frombuffer(packed.rows.tobytes(), dtype), packed.rows)


def test_iterators_and_repeats() -> None:
    docs = corpus([5, 9, 2, 30, 17])
    assert pack(iter(docs), 8).rows.tobytes() == pack(docs, 8).rows.tobytes()


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4))
def test_position_ids_equal_a_loop(segments: list[list[int]]) -> None:
    expected = []
    for row in segments:
        count, ids = 0, []
        for i, segment in enumerate(row):
            count = count + 1 if i and row[i - 1] == segment else 0
            ids.append(count)
        expected.append(ids)
    array = np.array(segments, np.uint16)
    assert position_ids(array).tolist() == expected
    assert position_ids(array[None])[0].tolist() == expected
    assert position_ids(array[0]).tolist() == expected[0]


def test_positions_of_packed_rows_are_those_in_the_piece() -> None:
    rows = pack(corpus([5, 9, 2, 30, 17]), 8, pad_id=PAD).rows
    used = rows["segments"] > 0
    # Token i of a document is d * 1000 + i, so its place in its piece is i mod 8.
    assert (position_ids(rows["segments"])[used] == rows["input_ids"][used] % 1000 % 8).all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"seq_len=0 is out of range: .* Set seq_len >= 1"):
        pack([], 0)
    three, two = np.zeros(3, np.int32), np.zeros(2, bool)
    with pytest.raises(ValueError, match=r"\(3,\), \(2,\), \(3,\)\) are not a document"):
        Document(three, two, three)
    with pytest.raises(ValueError, match="are not a document"):
        Document(three[None], three[None] > 0, three[None])


# ---- Pairs of answers --------------------------------------------------------------------------


def answer(prompt: list[int], *said: int) -> Document:
    tokens = np.array([*prompt, *said], np.int32)
    loss = np.arange(len(tokens)) >= len(prompt)
    return Document(tokens, loss, np.ones(len(tokens), np.uint16))


def test_a_pair_is_one_piece_whose_documents_are_segments() -> None:
    one = [answer([1, 9], 5, 2), answer([1, 9], 6, 7, 2)]
    two = [answer([1], 8, 2), answer([1], 3, 2)]
    rows = pack([*one, *two], 16, pairs=True).rows
    assert rows["input_ids"].tolist() == [[1, 9, 5, 2, 1, 9, 6, 7, 1, 8, 2, 1, 3, 0, 0, 0]]
    assert rows["segments"].tolist() == [[1] * 4 + [2] * 4 + [3] * 3 + [4] * 2 + [0] * 3]
    assert rows["labels"].tolist() == [
        [-100, 5, 2, -100, -100, 6, 7, 2, 8, 2, -100, 3, 2, -100, -100, -100]
    ]


@given(
    prompt=st.integers(1, 12),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8),
    seq_len=st.integers(4, 24),
    truncate=st.booleans(),
)
def test_pairs_are_whole_or_left_out(
    prompt: int, sizes: list[tuple[int, int]], seq_len: int, truncate: bool
) -> None:
    """Prompts are cut from the left alike; answers are whole, unless `truncate` cuts their ends."""
    shared = list(range(100, 100 + prompt))
    documents = [
        answer(shared, *range(1000 * (n + 1), 1000 * (n + 1) + size))
        for n, size in enumerate(itertools.chain(*sizes))
    ]
    packed = pack(documents, seq_len, pairs=True, truncate=truncate)
    found = []
    for row in packed.rows:
        assert row["segments"].max() % 2 == 0
        for segment in range(1, row["segments"].max() + 1):
            here = row["segments"] == segment
            labels = row["labels"][here]
            found.append((row["input_ids"][here], labels[labels != IGNORE].tolist()))
    kept = 0
    for chosen, rejected in zip(documents[::2], documents[1::2], strict=True):
        pair = joined(chosen, rejected, seq_len, truncate)
        answers = [each.tokens[each.loss].tolist() for each in (chosen, rejected)]
        least = sum(map(len, answers)) + 2  # a token of the prompt before each
        assert (pair is None) == (not truncate and least > seq_len + 1)
        if pair is None:
            continue
        (ids, first), (others, second) = (
            next(part for part in found if part[1][0] == each[0]) for each in answers
        )
        for said, whole in ((first, answers[0]), (second, answers[1])):
            assert said == whole[: len(said)] and (truncate or said == whole)
        prompts = [[token for token in part.tolist() if token < 1000] for part in (ids, others)]
        assert prompts[0] == prompts[1] and prompts[0] == shared[-len(prompts[0]) :]
        kept += 1
    assert len(found) == 2 * kept
