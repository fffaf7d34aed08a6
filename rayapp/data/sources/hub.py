"""Datasets of the Hugging Face hub, streamed shard by shard: `org/name:config@split#revision`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rayapp.data.sources.parts import Record, SourceError

ID = re.compile(
    r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.+-]+))?"
    r"(#(?P<revision>[\w.-]+))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")


def revision(path: str) -> str:
    """Return the commit that a dataset is at, so that a run reads the same rows all along.

    Raises:
        SourceError: there is no such dataset, or nobody to ask.
    """
    from huggingface_hub import HfApi

    name, _, _, given = _parts(path)
    if COMMIT.fullmatch(given or ""):
        return str(given)
    try:
        sha = HfApi().dataset_info(name, revision=given).sha
    except Exception as error:  # the hub client raises many types; all mean that it cannot be read
        raise _missing(path, error) from error
    assert sha is not None, f"the hub gives {path} no commit"
    return str(sha)


def num_shards(path: str, commit: str) -> int:
    """Return how many shards of a dataset can be read separately.

    Raises:
        SourceError: there is no such dataset, or nobody to ask.
    """
    return int(_dataset(path, commit).num_shards)


def read(path: str, commit: str, shard: int) -> Iterator[Record]:
    """Yield the rows of a shard in order.

    Raises:
        SourceError: as `num_shards`.
    """
    dataset = _dataset(path, commit)
    for row, value in enumerate(dataset.shard(num_shards=dataset.num_shards, index=shard)):
        yield Record(f"{path}[{shard}]", row, value)


def _dataset(path: str, commit: str) -> Any:
    import datasets

    name, config, split, _ = _parts(path)
    how = {"split": split or "train", "revision": commit}
    try:
        return datasets.load_dataset(name, config, streaming=True, **how)
    except Exception as error:  # as above
        raise _missing(path, error) from error


def _parts(path: str) -> tuple[str, str | None, str | None, str | None]:
    parts = ID.fullmatch(path)
    assert parts is not None, f"{path} is no id of the hub"
    return parts["name"], parts["config"], parts["split"], parts["revision"]


def _missing(path: str, error: Exception) -> SourceError:
    first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return SourceError(
        f"data.path={path} cannot be read from the hub: {first}. Give a file or folder that "
        "exists, or org/name:config@split"
    )
