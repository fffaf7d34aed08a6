"""What is told of data before they are trained on: a part of plan.json, and of the manifests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypedDict


class Counts(TypedDict):
    """What was seen and made of the documents of a split; the counts of its parts add up."""

    documents: int
    empty: int
    split: int
    truncated: int
    cut_tokens: int
    tokens: int
    target_tokens: int
    target_bytes: int
    rows: int
    lengths: dict[str, int]
    """Documents by length: `2^k` counts those of [2^k, 2^(k+1)) tokens."""


class UnitSummary(TypedDict):
    """What is written of a unit beside its shards."""

    counts: dict[str, Counts]
    """By split."""
    shards: dict[str, str]
    """File of the rows by split; none of a split without rows."""
    bad: dict[str, int]
    examples: list[tuple[str, str]]
    records: int


class Manifest(TypedDict):
    """What makes a data set finished: see Prepared."""

    url: str
    fingerprint: str
    parts: dict[str, object]
    seq_len: int
    shards: dict[str, list[tuple[str, int]]]
    counts: dict[str, Counts]
    bad: dict[str, int]
    examples: list[tuple[str, str]]
    records: int
    duplicates: float


class DataReport(TypedDict, total=False):
    """The figures that a person checks before training."""

    records: int
    """Of a user's files, or files of images, that were looked at."""
    bad: dict[str, int]
    """Unusable ones by reason."""
    examples: list[tuple[str, str]]
    """(place, reason) of the first few of them."""
    duplicates: float
    """Share of the training documents or images that repeat an earlier one, 0-1."""

    # Of text.
    train: Counts
    eval: Counts
    fill: float
    """Share of the rows that is no padding, 0-1."""
    loss_share: float
    """Share of the tokens that bear loss, 0-1."""
    sources: dict[str, DataReport]
    """Of a mixture, by path."""

    # Of images.
    images: dict[str, int]
    """By split."""
    classes: int
    class_counts: dict[str, int]
    bytes: int


def summed(parts: Iterable[Counts]) -> Counts:
    """Add counts up."""
    every = list(parts)
    lengths: Counter[str] = Counter()
    for part in every:
        lengths.update(part["lengths"])
    return Counts(
        documents=sum(part["documents"] for part in every),
        empty=sum(part["empty"] for part in every),
        split=sum(part["split"] for part in every),
        truncated=sum(part["truncated"] for part in every),
        cut_tokens=sum(part["cut_tokens"] for part in every),
        tokens=sum(part["tokens"] for part in every),
        target_tokens=sum(part["target_tokens"] for part in every),
        target_bytes=sum(part["target_bytes"] for part in every),
        rows=sum(part["rows"] for part in every),
        lengths=dict(lengths),
    )
