"""Read the heads of a source before it is prepared: find its kind and problems, or a sample.

head = inspect("data.jsonl", find("data.jsonl"), "auto", limit=0.01)
texts = sample_texts(source, head.kind, 16 * 2**20)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rayapp.data import shapes, sources
from rayapp.data.messages import said_by
from rayapp.data.prepared import reasons
from rayapp.data.problems import problem_of
from rayapp.data.sources.formats import is_stream

HEAD_FILES, HEAD_RECORDS, HEAD_BYTES = 16, 64, 2**20  # limits of the heads
SPREAD_PIECES, SPREAD_RECORDS = 16, 4  # looked at where no record of the heads is usable
NO_COLUMNS: Mapping[str, str] = {}
SAMPLE_BYTES = 64 * 2**10  # least bytes to sample from a unit


@dataclass(frozen=True)
class SourceHead:
    """What the first records of a source tell."""

    kind: str
    """text, prompt or chat."""
    unused: tuple[str, ...]
    """Columns that nothing is made of, and `messages.NAME` for fields that rayapp does not know."""
    problems: list[str]


def inspect(
    path: str,
    source: sources.DataSource,
    kind: str,
    limit: float,
    columns: Mapping[str, str] = NO_COLUMNS,
    names: Sequence[str] = (),
) -> SourceHead:
    """Read the head of a few files, and tell the kind (resolved from `auto`) and the problems.

    A head is the first 64 records of a file's first piece, for up to 16 files. `limit` decides if
    the heads are all the data, or if it is 0. Other data are refused here only if no record of the
    heads is usable, and none of a few that are spread over the files; so that a wrong column is
    reported before anything starts, and else `limit` decides after preparing. `names` are columns
    that hold numbers.
    """
    heads, whole = records(source)
    rows = [shapes.renamed(record.value, columns) for record in heads if record.problem is None]
    if kind == "auto":
        kinds = Counter("text" if isinstance(row, str) else shapes.kind_of(row) for row in rows)
        kind = next((k for k, _ in kinds.most_common(1) if k), "text")
    if not heads:
        return SourceHead(kind, (), [f"data.path={path} is empty: there is no record in its files"])
    judged = _judged(heads, kind, columns, names)
    wrong = [(record, why) for record, why in judged if why]
    others = (name for row in rows for name in shapes.unused(row, kind))
    unused = dict.fromkeys(name for name in others if name not in names)
    if kind == "chat":
        chats = [record.value for record, why in judged if not why]
        unused |= dict.fromkeys(name for chat in chats for name in shapes.unused_fields(chat))
    refused = len(wrong) > limit * len(heads) if whole or not limit else len(wrong) == len(heads)
    if refused and limit and not whole:
        spread = _spread(source)
        refused = limit < 1 and all(why for _, why in _judged(spread, kind, columns, names))
    if not refused:
        return SourceHead(kind, tuple(unused), [])
    firsts = {why: record for record, why in reversed(wrong)}
    examples = [(sources.place_of(source, r.file, r.place), why) for why, r in firsts.items()]
    problem = (
        f"data.path={path} is unusable in {len(wrong)} of the first {len(heads)} records: "
        f"{reasons(Counter(why for _, why in wrong), examples)}. Correct them, set data.kind or "
        "data.columns, or allow more with data.bad_rows"
    )
    return SourceHead(kind, tuple(unused), [problem])


def _judged(
    records: list[sources.Record], kind: str, columns: Mapping[str, str], names: Sequence[str]
) -> list[tuple[sources.Record, str | None]]:
    """Return the records as standard ones, each with why it is unusable, or None."""
    made = [shapes.standardised(record, kind, columns, names) for record in records]
    return [(record, record.problem or problem_of(record.value, kind)) for record in made]


def _spread(source: sources.DataSource) -> list[sources.Record]:
    """Return records of pieces that are spread evenly over the source; of streams, their heads."""
    if source.format == "hub":
        return []
    pieces = [piece for unit in sources.units(source, 0.0) for piece in unit.pieces]
    chosen = [pieces[n * len(pieces) // SPREAD_PIECES] for n in range(SPREAD_PIECES)]
    return [
        record
        for piece in dict.fromkeys(chosen)
        for record in islice(sources.read_piece(source, _short(source, piece)), SPREAD_RECORDS)
    ]


def _short(source: sources.DataSource, piece: sources.Piece) -> sources.Piece:
    """Return the beginning of a piece, as far as a piece has one."""
    if piece.is_stream or source.format not in ("text", "jsonl"):
        return piece
    return replace(piece, end=min(piece.end, piece.start + SAMPLE_BYTES))


def records(source: sources.DataSource) -> tuple[list[sources.Record], bool]:
    """Return the first records of the first files, and whether these are all the data."""
    if source.format == "hub":
        shard = sources.Piece(source.root, 0, 1, "train")
        return list(islice(sources.read_piece(source, shard), HEAD_RECORDS)), False
    heads: list[sources.Record] = []
    whole = source.format != "parquet" and len(source.files) <= HEAD_FILES
    for file in source.files[:HEAD_FILES]:
        stream = is_stream(file.name, source.format)
        end = 1 if source.format == "parquet" else min(file.size, HEAD_BYTES)
        end = file.size if stream else end
        head = source.piece(file, 0, end, "train", stream)
        records = list(islice(sources.read_piece(source, head), HEAD_RECORDS))
        whole = whole and end == file.size and len(records) < HEAD_RECORDS
        heads += records
    return heads, whole


def sample_texts(
    source: sources.DataSource,
    kind: str,
    max_bytes: int,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> Iterator[str]:
    """Yield about `max_bytes` of training texts, from the heads of evenly spaced units.

    It reads about as much as it yields, so that training a tokenizer need not read a whole corpus.
    """
    units = sources.units(source, 0.0)
    count = min(len(units), max(max_bytes // SAMPLE_BYTES, 1))
    for place in range(count):
        left = max(max_bytes // count, SAMPLE_BYTES)
        for piece in units[place * len(units) // count].pieces:
            if source.format in ("text", "jsonl") and not piece.is_stream:
                piece = replace(piece, end=min(piece.end, piece.start + left))
            for record in shapes.read_records(source, piece, kind, columns):
                if record.problem is None and problem_of(record.value, kind) is None:
                    for text in _texts(record.value, kind):
                        yield text[:left]
                        left -= len(text[:left])
                if left <= 0:
                    break
            if left <= 0:
                break


def _texts(value: Any, kind: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if kind == "chat":
        return [said_by(message) for message in value["messages"]]
    return [value[name] for name in shapes.COLUMNS[kind]]
