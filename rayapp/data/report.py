"""Statistics of prepared data, which plan.json and the manifests contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, cast

from pydantic import Field
from typing_extensions import TypedDict


class Counts(TypedDict, total=False):
    """Counts of a split's documents, tokens and rows; those of its units add up."""

    documents: int
    empty: int
    split: int
    truncated: int
    cut_tokens: int
    tokens: int
    target_tokens: int
    target_bytes: int
    rows: int
    lengths: dict[Annotated[str, Field(pattern=r"^2\^[0-9]{1,2}$")], int]
    """Number of documents by length: key `2^k` is for [2^k, 2^(k+1)) tokens."""


class UnitSummary(TypedDict):
    """The summary of a unit, written beside its shards."""

    counts: dict[str, Counts]
    """Counts by split."""
    shards: dict[str, str]
    """Shard file by split; a split without rows has none."""
    bad: dict[str, int]
    examples: list[tuple[str, str]]
    records: int
    notes: dict[str, int]
    """Records that are used, but of which something is left out, by what it is."""
    blocks: list[str]
    """Names of the blocks of tokens that the rows were made of."""


class DataReport(TypedDict, total=False):
    """The statistics to check before training."""

    records: int
    """Records in the user's files, or image files, that were read."""
    bad: dict[str, int]
    """Unusable records by reason."""
    examples: list[tuple[str, str]]
    """(place, reason) of the first record of each reason."""
    notes: dict[str, int]
    """Records that are used, but of which something is left out, by what it is."""
    duplicates: float
    """Share of the training documents or images that repeat an earlier one, 0-1."""

    # For text.
    train: Counts
    eval: Counts
    fill: float
    """Share of the rows' positions that are not padding, 0-1."""
    loss_share: float
    """Share of the tokens that bear loss, 0-1."""
    sources: dict[str, DataReport]
    """Reports of a mixture's sources, by path."""

    # For images.
    images: dict[str, int]
    """Number of images by split."""
    classes: int
    class_counts: dict[str, int]
    bytes: int


def added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of numbers of records by reason."""
    sums = Counter[str]()
    for part in parts:
        sums.update(part)
    return dict(sums)


def summed(parts: Iterable[Counts]) -> Counts:
    """Return the sums of all counts."""
    sums, lengths = Counter[str](), Counter[str]()
    for part in parts:
        lengths.update(part["lengths"])
        sums.update({name: count for name, count in part.items() if isinstance(count, int)})
    whole = {name: sums[name] for name in Counts.__annotations__} | {"lengths": dict(lengths)}
    return cast(Counts, whole)
