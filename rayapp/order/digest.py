"""Fingerprints of data sets, digests of rows and batches (proof of what was read), and counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


def fingerprint(parts: Mapping[str, object]) -> str:
    """Return 16 hex digits that change when any part does; parts are plain JSON values.

    >>> fingerprint({"seq_len": 8, "files": ["a"]}) == fingerprint({"files": ("a",), "seq_len": 8})
    True
    """
    return blake2b(_canonical(parts).encode(), digest_size=8).hexdigest()


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Name the parts that differ, sorted; empty if and only if the fingerprints are equal.

    >>> differences({"seq_len": 8, "files": ["a"]}, {"seq_len": 9, "files": ["a"], "template": 0})
    ['seq_len', 'template']
    """
    return [
        name
        for name in sorted({*old, *new})
        if name not in old or name not in new or _canonical(old[name]) != _canonical(new[name])
    ]


def row_digest(position: int, input_ids: npt.ArrayLike) -> int:
    """Return a 64-bit digest of one row at one position of its step.

    It includes the position, so that swapping two rows changes the sum of the digests.
    Source: blake2b over the position as 8 bytes and the ids as int32, both little-endian.
    """
    ids = np.ascontiguousarray(input_ids, dtype="<i4")
    digest = blake2b(int(position).to_bytes(8, "little"), digest_size=8)
    digest.update(ids.tobytes())
    return int.from_bytes(digest.digest(), "little")


def combine(digests: Iterable[int]) -> str:
    """Return the `batch_digest` of a step: the sum of its rows' digests, or of the ranks' sums.

    >>> combine([1, 2**64 - 1, 5]) == combine([6, 2**64 - 1]) == "0000000000000005"
    True
    """
    return f"{sum(digests) % 2**64:016x}"


class StepCounts(NamedTuple):
    """What the batch of a step, or one rank's part of it, holds."""

    weight: int
    """Divides the loss: loss-bearing tokens, pairs of answers, or images."""
    tokens: int = 0
    """Input tokens, without padding."""
    targets: int = 0
    """Loss-bearing tokens."""
    attended_pairs: int = 0
    """(query, key) pairs of tokens: n (n + 1) / 2 of a document of n tokens."""
    target_bytes: int = 0
    """UTF-8 bytes of the loss-bearing tokens."""
    images: int = 0
    weight_by_source: tuple[int, ...] = ()
    """The weight of each source's rows, if there are several."""

    def flat(self) -> list[int]:
        """Return all counts, for a message."""
        return [*self[:-1], *self.weight_by_source]

    @classmethod
    def of_flat(cls, numbers: Sequence[int]) -> StepCounts:
        """Return the counts of a message.

        >>> counts = StepCounts(3, 8, 3, 36, 12, 0, (1, 2))
        >>> StepCounts.of_flat(counts.flat()) == counts
        True
        """
        fixed = len(cls._fields) - 1
        return cls._make([*numbers[:fixed], tuple(numbers[fixed:])])


def _canonical(value: object) -> str:
    """Return JSON with one spelling per value: sorted names, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
