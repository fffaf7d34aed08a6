"""Read the first records of a source before it is prepared: its kind and problems, or a sample.

found = inspect("data.jsonl", find("data.jsonl"), "auto", limit=0.01)
texts = sample_texts(source, found.kind, 16 * 2**20)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rayapp.config.fields import DataKind, RecordKind
from rayapp.data import shapes, sources
from rayapp.data.kinds import messages_of, problem_of, texts_of
from rayapp.data.prepared import reasons
from rayapp.data.sources.formats import is_stream

FIRST_FILES, FIRST_RECORDS, FIRST_BYTES = 16, 64, 2**20  # files; records and bytes of each
NO_COLUMNS: Mapping[str, str] = {}
SAMPLE_BYTES = 64 * 2**10  # least bytes to sample from a unit


@dataclass(frozen=True)
class Inspected:
    """What the first records of a source tell."""

    kind: RecordKind
    unused: tuple[str, ...]
    """Columns that nothing is made of, and `messages.NAME` for fields that rayapp does not know."""
    problems: list[str]


def inspect(
    path: str,
    source: sources.DataSource,
    kind: DataKind,
    limit: float,
    columns: Mapping[str, str] = NO_COLUMNS,
    names: Sequence[str] = (),
) -> Inspected:
    """Read the first records of a few files; return their kind (if `auto`) and their problems.

    The kind is that of most records, `text` if no shape is known.

    Up to 64 records of the first piece of each of up to 16 files are read. `limit`, a share of
    records, decides if these are all the data, or if it is 0 or 1. Other data are refused here only
    if no first record is usable: a wrong column is reported before anything starts. Else `limit`
    decides after preparing. `names` are columns that hold numbers.
    """
    firsts, whole = records(source)
    rows = [shapes.renamed(record.value, columns) for record in firsts if record.problem is None]
    if kind == "auto":
        kinds = Counter[RecordKind | None](
            "text" if isinstance(row, str) else shapes.kind_of(row) for row in rows
        )
        most: RecordKind = next((known for known, _ in kinds.most_common(1) if known), "text")
        kind = most
    if not firsts:
        return Inspected(kind, (), [f"data.path={path} is empty: there is no record in its files"])
    made = [shapes.standardised(record, kind, columns, names) for record in firsts]
    judged = [(record, record.problem or problem_of(record.value, kind)) for record in made]
    wrong = [(record, why) for record, why in judged if why]
    others = (name for row in rows for name in shapes.unused(row, kind))
    unused = dict.fromkeys(name for name in others if name not in names)
    messages = [m for record, why in judged if not why for m in messages_of(record.value, kind)]
    unused |= dict.fromkeys(shapes.unused_fields(messages))
    allowed = limit * len(firsts) if whole or limit in (0, 1) else len(firsts) - 1
    if len(wrong) <= allowed:
        return Inspected(kind, tuple(unused), [])
    there = {
        name for record in firsts if isinstance(record.value, Mapping) for name in record.value
    }
    absent = [repr(name) for name in columns.values() if name not in there]
    if absent:
        has = ", ".join(map(repr, sorted(there))) or "no columns"
        problem = f"no record of {path} has {' or '.join(absent)}, but {has}. Correct the name"
        return Inspected(kind, tuple(unused), [f"data.columns={dict(columns)} is wrong: {problem}"])
    by_reason = {why: record for record, why in reversed(wrong)}
    examples = [(sources.place_of(source, r.file, r.place), why) for why, r in by_reason.items()]
    problem = (
        f"data.path={path} is unusable in {len(wrong)} of the first {len(firsts)} records: "
        f"{reasons(Counter(why for _, why in wrong), examples)}. Correct them, set data.kind or "
        "data.columns, or allow more with data.bad_rows"
    )
    return Inspected(kind, tuple(unused), [problem])


def records(source: sources.DataSource) -> tuple[list[sources.Record], bool]:
    """Return the first records of the first files, and whether these are all the data."""
    if source.format == "hub":
        shard = sources.Piece(source.root, 0, 1, "train")
        return list(islice(sources.read_piece(source, shard), FIRST_RECORDS)), False
    firsts: list[sources.Record] = []
    whole = source.format != "parquet" and len(source.files) <= FIRST_FILES
    for file in source.files[:FIRST_FILES]:
        stream = is_stream(file.name, source.format)
        end = 1 if source.format == "parquet" else min(file.size, FIRST_BYTES)
        end = file.size if stream else end
        piece = source.piece(file, 0, end, "train", stream)
        records = list(islice(sources.read_piece(source, piece), FIRST_RECORDS))
        whole = whole and end == file.size and len(records) < FIRST_RECORDS
        firsts += records
    return firsts, whole


def sample_texts(
    source: sources.DataSource,
    kind: RecordKind,
    max_bytes: int,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> Iterator[str]:
    """Yield about `max_bytes` of training texts, from the beginnings of evenly spaced units.

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
                    for text in texts_of(record.value, kind):
                        yield text[:left]
                        left -= len(text[:left])
                if left <= 0:
                    break
            if left <= 0:
                break
