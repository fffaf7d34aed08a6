"""Read the heads of a source before it is prepared: find its kind and problems, or a sample.

kind, wrong = problems("data.jsonl", find("data.jsonl"), "auto", limit=0.01)
texts = sample_texts(source, kind, 16 * 2**20)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from rayapp.data import sources
from rayapp.data.chat import said_by
from rayapp.data.documents import COLUMNS, kind_of, problem_of
from rayapp.data.prepared import reasons
from rayapp.data.sources.formats import is_stream

HEAD_FILES, HEAD_RECORDS, HEAD_BYTES = 16, 64, 2**20  # limits of the heads
HEAD_LIMIT = 0.5  # share of unusable records above which heads are refused
SAMPLE_BYTES = 64 * 2**10  # least bytes to sample from a unit


def problems(
    path: str, source: sources.DataSource, kind: str, limit: float
) -> tuple[str, list[str]]:
    """Read the head of a few files; return the kind (resolved from `auto`) and the problems.

    A head is the first 64 records of a file's first piece, for up to 16 files, so that a wrong
    column or a broken file is reported before anything starts. Heads are refused if more than half
    of their records are unusable (or more than `limit`, if that is larger); `limit` itself applies
    if the heads are all the data, or if it is 0. Other data are judged after preparing.
    """
    heads, whole = _heads(source)
    if kind == "auto":
        kinds = Counter(
            "text" if isinstance(r.value, str) else kind_of(r.value)
            for r in heads
            if r.problem is None
        )
        kind = next((k for k, _ in kinds.most_common(1) if k), "text")
    bad = [(r, r.problem or problem_of(r.value, kind)) for r in heads]
    wrong = [(record, why) for record, why in bad if why]
    if not heads:
        return kind, [f"data.path={path} is empty: there is no record in its files"]
    allowed = limit if whole or not limit else max(limit, HEAD_LIMIT)
    if len(wrong) <= allowed * len(heads):
        return kind, []
    firsts = {why: record for record, why in reversed(wrong)}
    examples = [(sources.place_of(source, r.file, r.place), why) for why, r in firsts.items()]
    return kind, [
        f"data.path={path} is unusable in {len(wrong)} of the first {len(heads)} records: "
        f"{reasons(Counter(why for _, why in wrong), examples)}. Mend them, set data.kind, or "
        "allow more with data.bad_rows"
    ]


def _heads(source: sources.DataSource) -> tuple[list[sources.Record], bool]:
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
        head = sources.Piece(file.name, 0, end, "train", file.size, stream)
        found = list(islice(sources.read_piece(source, head), HEAD_RECORDS))
        whole = whole and end == file.size and len(found) < HEAD_RECORDS
        heads += found
    return heads, whole


def sample_texts(source: sources.DataSource, kind: str, max_bytes: int) -> Iterator[str]:
    """Yield about `max_bytes` of training texts, from the heads of evenly spaced units.

    It reads about as much as it yields, so that training a tokenizer need not read a whole corpus.
    """
    found = sources.units(source, 0.0)
    count = min(len(found), max(max_bytes // SAMPLE_BYTES, 1))
    for place in range(count):
        left = max(max_bytes // count, SAMPLE_BYTES)
        for piece in found[place * len(found) // count].pieces:
            if source.format in ("text", "jsonl") and not piece.is_stream:
                piece = replace(piece, end=min(piece.end, piece.start + left))
            for record in sources.read_piece(source, piece):
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
    return [value[name] for name in COLUMNS[kind]]
