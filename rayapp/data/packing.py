"""Pack documents into rows of one fixed length, several to a row, each target exactly once.

>>> def words(*tokens):
...     return Document(np.array(tokens), np.ones(len(tokens), bool), np.ones(len(tokens), int))
>>> packed = pack([words(1, 5, 6, 7, 2), words(1, 8, 2)], seq_len=8)
>>> for name in ("input_ids", "labels", "segments"):
...     packed.rows[name].tolist()
[[1, 5, 6, 7, 1, 8, 0, 0]]
[[5, 6, 7, 2, 8, 2, -100, -100]]
[[1, 1, 1, 1, 2, 2, 0, 0]]
>>> packed.fill, int(packed.rows["target_bytes"][0])
(0.75, 6)

A document of n tokens gives n - 1 (input, label) pairs, where the label is the next token. A
document longer than a row is cut into pieces that divide its pairs, so a cut loses no target.
Pieces are laid into rows by best-fit decreasing: the longest first, each into the open row that it
leaves fullest. No label is the first token of the next document, because pairs are made before
rows. `segments` marks the documents of a row; attention and positions follow it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

IGNORE = -100  # the label that bears no loss: torch.nn.functional.cross_entropy's ignore_index
MAX_SEGMENTS = 2**16 - 1  # segment numbers are uint16, and 0 is padding

# document  what a user wrote: tokens, with BOS and EOS where the tokenizer wants them
# position  one (input, label) pair of a document, or one place of a row
# pair      a chosen and a rejected document end to end, which are packed as one and never cut; or
#           a document whose answer is good or bad, and its prompt with the answer to another one
# piece     at most seq_len positions of one document, laid into a row in one stretch
# segment   the number of a piece within its row: 1, 2, ...; 0 is padding. Of the k-th pair of a
#           row, 2k - 1 is the chosen document and 2k the rejected one
# row       seq_len positions: pieces, then padding
#
# Letters in shapes: S = seq_len, T tokens of all documents, D documents, P pieces, N rows.


class Slices(Protocol):
    """An array [T], in memory or in a file, of which slices can be taken."""

    def __getitem__(self, index: slice, /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class Document:
    """One tokenised document; the three arrays are [n]."""

    tokens: npt.NDArray[Any]  # ids, int32
    loss: npt.NDArray[np.bool_]  # whether the token bears loss when it is the target
    num_bytes: npt.NDArray[Any]  # UTF-8 bytes that the token stands for; 0 for special tokens
    earlier: tuple[Document, ...] = ()
    """Other documents of the same record, which end with earlier answers of its chat."""

    def __iter__(self) -> Iterator[Document]:
        """Yield all documents of the record, each without the others."""
        yield from self.earlier
        yield replace(self, earlier=()) if self.earlier else self

    def __post_init__(self) -> None:
        shapes = self.tokens.shape, self.loss.shape, self.num_bytes.shape
        if not shapes[0] == shapes[1] == shapes[2] or self.tokens.ndim != 1:
            raise ValueError(
                f"tokens, loss, num_bytes of shapes {shapes} are not a document: each token has "
                f"one of each. Set three arrays of one length"
            )


def row_dtype(seq_len: int, columns: int = 0) -> np.dtype[np.void]:
    """Return the layout of a row: packed, little-endian, (10 + 4 * columns) * seq_len + 4 bytes.

    `target_bytes` is the sum of `num_bytes` over the labels that bear loss. `values`, where there
    are columns, has at each position the numbers of its document's record; 0 on padding.

    >>> row_dtype(4096).itemsize
    40964
    """
    if seq_len < 1:
        raise ValueError(
            f"seq_len={seq_len} is out of range: a row needs a position. Set seq_len >= 1"
        )
    return np.dtype(
        [
            ("input_ids", "<i4", (seq_len,)),
            ("labels", "<i4", (seq_len,)),
            ("segments", "<u2", (seq_len,)),
            ("target_bytes", "<u4"),
            *([("values", "<f4", (columns, seq_len))] if columns else []),
        ]
    )


COUNTS = ("num_documents", "num_empty", "num_split", "num_truncated", "cut_tokens", "num_tokens")


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The pieces of documents in the order of rows, and counts of what they were cut from."""

    seq_len: int
    starts: Ints  # first token of each piece in all documents laid end to end, [P]
    lengths: Ints  # positions of each piece, [P]
    row_of: Ints  # row of each piece, ascending, [P]; the pieces of a row ascend too
    values: npt.NDArray[np.float32]  # numbers of each piece's record, [P, columns]
    edges: Ints | None  # of pairs: positions of each piece's chosen document, [P]
    num_rows: int
    num_documents: int  # empty ones included
    num_empty: int  # documents of fewer than 2 tokens, which have no target: no row has them
    num_split: int  # documents that were cut into several pieces
    num_truncated: int  # documents that `truncate` shortened
    cut_tokens: int  # tokens that `truncate` dropped
    num_tokens: int  # used positions, i.e. input tokens


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed rows, and what they were laid out from."""

    rows: npt.NDArray[np.void]
    """Structured array [N] of `row_dtype(seq_len)`."""
    layout: RowLayout

    @property
    def fill(self) -> float:
        """Return the fraction of positions used, 0-1; 0 if there is no row."""
        size = self.rows["input_ids"].size
        return self.layout.num_tokens / size if size else 0.0


def pack(
    documents: Iterable[Document],
    seq_len: int,
    *,
    pad_id: int = 0,
    best_fit: bool = True,
    truncate: bool = False,
    pairs: bool = False,
) -> Packed:
    """Lay documents into rows of `seq_len` positions.

    `best_fit=False` gives each piece a row of its own. `truncate=True` keeps the first piece of a
    long document and drops the rest. Rows are ordered by their first document, and documents ascend
    within a row. The result depends on the arguments only. With `pairs` the documents are chosen
    and rejected ones in turn; pairs that no row can hold are left out.
    """
    docs, edges = list(documents), None
    if pairs:
        every = (joined(*two, seq_len, truncate) for two in zip(docs[::2], docs[1::2], strict=True))
        kept = [pair for pair in every if pair is not None]
        docs, edges = [pair.document for pair in kept], np.array([pair.edge for pair in kept], int)
    lengths = np.array([len(doc.tokens) for doc in docs], dtype=np.int64)  # [D]
    layout = lay_out(lengths, seq_len, best_fit=best_fit, truncate=truncate, edges=edges)
    tokens = np.concatenate([np.empty(0, np.int32), *(doc.tokens for doc in docs)], dtype=np.int32)
    bears_loss = np.concatenate([np.empty(0, np.bool_), *(doc.loss for doc in docs)])  # [T]
    no_bytes = np.empty(0, np.uint8)
    num_bytes = np.concatenate([no_bytes, *(doc.num_bytes for doc in docs)])  # [T]
    rows = filled(layout, 0, layout.num_rows, tokens, bears_loss, num_bytes, pad_id)
    return Packed(rows, layout)


class Pair(NamedTuple):
    """A chosen and a rejected document end to end."""

    document: Document
    edge: int
    """Tokens of the chosen document."""
    cut: int
    """Tokens that were cut off to fit into a row."""


def joined(chosen: Document, rejected: Document, seq_len: int, truncate: bool) -> Pair | None:
    """Join a pair, cut to fit into a row; None if it cannot.

    The tokens that both begin with and that bear no loss, i.e. the prompt, are cut from the left,
    alike in both. With `truncate` the answers are cut from the right where that does not suffice.
    """
    both, least = (chosen, rejected), min(len(chosen.tokens), len(rejected.tokens))
    same = chosen.tokens[:least] == rejected.tokens[:least]  # [least]
    shared = same & ~chosen.loss[:least] & ~rejected.loss[:least]
    prompt = least if shared.all() else int(shared.argmin())
    too_many = sum(len(each.tokens) for each in both) - 1 - seq_len
    first = max(0, min(-(-too_many // 2), prompt - 1))  # a token is left to predict the answer
    last = first + (seq_len + 1) // 2 if truncate and too_many > 2 * first else None
    parts = [
        [getattr(each, name)[first:last] for name in ("tokens", "loss", "num_bytes")]
        for each in both
    ]
    parts[1][1] = parts[1][1].copy()
    parts[1][1][0] = False  # the label of the chosen document's last token
    if any(not loss[1:].any() for _, loss, _ in parts):
        return None
    tokens, loss, num_bytes = map(np.concatenate, zip(*parts, strict=True))
    document = Document(tokens, loss, num_bytes)
    cut = too_many + 1 + seq_len - len(document.tokens)
    return Pair(document, len(parts[0][0]), cut) if len(document.tokens) <= seq_len + 1 else None


def crossed(asked: Document, answered: Document) -> Document:
    """Return the prompt of the first document with the answer of the second."""
    ends = [int(each.loss.argmax()) for each in (asked, answered)]
    names = "tokens", "loss", "num_bytes"
    parts = [(getattr(asked, n)[: ends[0]], getattr(answered, n)[ends[1] :]) for n in names]
    tokens, loss, num_bytes = map(np.concatenate, parts)
    return Document(tokens, loss, num_bytes)


def lay_out(
    num_tokens: Ints,
    seq_len: int,
    *,
    best_fit: bool = True,
    truncate: bool = False,
    firsts: Ints | None = None,
    values: npt.NDArray[np.float32] | None = None,
    edges: Ints | None = None,
) -> RowLayout:
    """Choose the rows of documents of these lengths, [D]; see `pack`.

    `firsts` are the first tokens of the documents, by default those of documents end to end;
    `values` are the numbers of their records, [D, columns]. With `edges`, [D], each document is a
    pair, and its edge is the number of tokens of the chosen one.
    """
    row_dtype(seq_len)  # refuses a length that no row can have
    num_positions = np.maximum(num_tokens - 1, 0)  # [D]
    kept = np.minimum(num_positions, seq_len) if truncate else num_positions  # [D]
    firsts = np.cumsum(num_tokens) - num_tokens if firsts is None else firsts  # [D]
    document, starts, lengths = _cut(firsts, kept, seq_len)  # [P], [P], [P]
    values = np.empty((len(kept), 0), np.float32) if values is None else values  # [D, columns]
    most = MAX_SEGMENTS if edges is None else MAX_SEGMENTS // 2
    row_of = _best_fit(lengths, seq_len, most) if best_fit else np.arange(len(lengths))  # [P]
    by_row = np.argsort(row_of, kind="stable")  # [P], ascending pieces within a row
    return RowLayout(
        seq_len=seq_len,
        starts=starts[by_row],
        lengths=lengths[by_row],
        row_of=row_of[by_row],
        values=values[document[by_row]],
        edges=None if edges is None else edges[document[by_row]],
        num_rows=int(row_of.max(initial=-1)) + 1,
        num_documents=len(num_tokens),
        num_empty=int(np.count_nonzero(num_positions == 0)),
        num_split=int(np.count_nonzero(kept > seq_len)),
        num_truncated=int(np.count_nonzero(kept < num_positions)),
        cut_tokens=int((num_positions - kept).sum()),
        num_tokens=int(kept.sum()),
    )


def in_groups(layouts: Sequence[RowLayout]) -> RowLayout:
    """Put the rows of groups of documents one after another."""
    rows = np.cumsum([0, *(layout.num_rows for layout in layouts)])
    edges = [layout.edges for layout in layouts if layout.edges is not None]
    pairs = zip(layouts, rows[:-1], strict=True)
    return RowLayout(
        seq_len=layouts[0].seq_len,
        starts=np.concatenate([layout.starts for layout in layouts]),
        lengths=np.concatenate([layout.lengths for layout in layouts]),
        row_of=np.concatenate([layout.row_of + first for layout, first in pairs]),
        values=np.concatenate([layout.values for layout in layouts]),
        edges=np.concatenate(edges) if edges else None,
        num_rows=int(rows[-1]),
        **{name: sum(getattr(layout, name) for layout in layouts) for name in COUNTS},
    )


def filled(
    layout: RowLayout,
    first: int,
    last: int,
    tokens: Slices,
    bears_loss: Slices,
    num_bytes: Slices,
    pad_id: int,
) -> npt.NDArray[np.void]:
    """Return the rows [first, last) of a layout.

    Of the tokens of all documents, of whether they bear loss, and of their bytes, each [T], only
    slices are taken, so that they need not be in memory.
    """
    columns = layout.values.shape[1]
    rows = np.zeros(last - first, row_dtype(layout.seq_len, columns))
    shape = rows["input_ids"].shape
    begin, end = np.searchsorted(layout.row_of, (first, last))
    row_of, values = layout.row_of[begin:end] - first, layout.values[begin:end]  # [P], [P, columns]
    starts, lengths = layout.starts[begin:end], layout.lengths[begin:end]  # [P], [P]
    head = np.searchsorted(row_of, row_of)  # [P], the first piece of the same row
    before = np.cumsum(lengths) - lengths
    places = before - before[head]  # [P]
    numbers = np.arange(len(row_of)) - head + 1  # [P]
    input_ids, labels, segments = rows["input_ids"], rows["labels"], rows["segments"]  # [N, S]
    input_ids[...] = pad_id
    bears, counts = np.zeros(shape, np.bool_), np.zeros(shape, num_bytes[:0].dtype)  # [N, S]
    pieces = zip(*(c.tolist() for c in (row_of, places, starts, lengths, numbers)), strict=True)
    for piece, (row, place, start, length, number) in enumerate(pieces):
        here, targets = slice(place, place + length), slice(start + 1, start + 1 + length)
        some = tokens[start : start + length + 1]
        input_ids[row, here], labels[row, here] = some[:-1], some[1:]
        bears[row, here], counts[row, here] = bears_loss[targets], num_bytes[targets]
        segments[row, here] = number
        if columns:
            rows["values"][row, :, here] = values[piece, :, None]
    if layout.edges is not None:
        segments *= 2
        edges = layout.edges[begin:end]
        for row, place, edge in zip(*(c.tolist() for c in (row_of, places, edges)), strict=True):
            segments[row, place : place + edge] -= 1
    labels[~bears] = IGNORE
    rows["target_bytes"] = np.sum(counts, axis=1, dtype=np.int64, where=bears)
    return rows


def position_ids(segments: npt.NDArray[Any]) -> Ints:
    """Return the position within its segment of each place, int64[..., S]; padding counts as one.

    >>> position_ids(np.array([1, 1, 1, 2, 3, 3, 0, 0])).tolist()
    [0, 1, 2, 0, 0, 1, 0, 1]
    """
    index = np.arange(segments.shape[-1])  # [S]
    first = np.zeros(segments.shape, dtype=bool)  # [..., S]
    first[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return index - np.maximum.accumulate(np.where(first, index, 0), axis=-1)


def boundaries(segments: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return where each segment starts in rows laid end to end, and the end: int32[segments + 1].

    >>> boundaries(np.array([[1, 1, 2, 0], [1, 1, 1, 1]])).tolist()
    [0, 2, 3, 4, 8]
    """
    starts = np.flatnonzero(position_ids(segments).reshape(-1) == 0)
    return np.append(starts, segments.size).astype(np.int32)


def attended_pairs(segments: npt.NDArray[Any]) -> int:
    """Count the (query, key) pairs of tokens that attend: causal, within documents.

    >>> attended_pairs(np.array([[1, 1, 2, 0], [1, 1, 1, 1]]))   # 3 + 1, and 10
    14
    """
    return int((position_ids(segments) + 1)[segments != 0].sum())


def _cut(offsets: Ints, num_positions: Ints, seq_len: int) -> tuple[Ints, Ints, Ints]:
    """Cut documents into pieces: [D], [D] -> document, first token, positions of each, [P] each."""
    num_pieces = -(-num_positions // seq_len)  # [D]
    document = np.repeat(np.arange(len(offsets)), num_pieces)  # [P]
    first_piece = np.cumsum(num_pieces) - num_pieces  # [D]
    done = (np.arange(len(document)) - first_piece[document]) * seq_len  # [P]
    return document, offsets[document] + done, np.minimum(num_positions[document] - done, seq_len)


def _best_fit(lengths: Ints, seq_len: int, most: int) -> Ints:
    """Choose a row for each of at most `most` pieces to a row by best-fit decreasing: [P] -> [P].

    Pieces are placed from the longest down, equal ones in their own order, each into the open row
    with the least free space that still holds it; among equals, into the row opened first. The
    integer `sizes` is a bit set of the free sizes that exist (bit i: some row has i free), so that
    a shift finds the smallest one that fits.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    rows_with: dict[int, list[int]] = {}  # free positions -> heap of rows
    sizes = 0
    chosen, held = array("q"), array("q")  # the row of each piece, and the pieces in each row
    for length in array("q", lengths[longest_first].tobytes()):
        fits = sizes >> length
        if fits:
            free = length + (fits & -fits).bit_length() - 1
            row = heappop(rows_with[free])
            if not rows_with[free]:
                sizes ^= 1 << free
            held[row] += 1
        else:
            free, row = seq_len, len(held)
            held.append(1)
        chosen.append(row)
        free -= length
        if free and held[row] < most:
            heappush(rows_with.setdefault(free, []), row)
            sizes |= 1 << free
    row_of = np.empty(len(lengths), dtype=np.int64)
    row_of[longest_first] = chosen
    _, first_piece = np.unique(row_of, return_index=True)  # [N]
    rank = np.empty_like(first_piece)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    return rank[row_of].astype(np.int64)
