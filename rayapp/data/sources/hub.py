"""Datasets of the Hugging Face hub, streamed shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayapp.data.sources.records import Record, SourceError


def num_shards(name: str) -> int:
    """Return how many shards of a dataset can be read separately.

    Raises:
        SourceError: there is no such dataset, or nobody to ask.
    """
    return int(_dataset(name).num_shards)


def read(name: str, shard: int) -> Iterator[Record]:
    """Yield the rows of a shard in order.

    Raises:
        SourceError: as `num_shards`.
    """
    dataset = _dataset(name)
    for row, value in enumerate(dataset.shard(num_shards=dataset.num_shards, index=shard)):
        yield Record(f"{name}[{shard}]", row, value)


def _dataset(name: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:  # the hub client raises many types; all mean "not to be had"
        raise SourceError(f"data.path={name} is not to be had from the hub: {error}") from error
