"""Assign the positions of a sequence to several sources, by their shares.

Positions are cut into blocks of length B. With W_j the total share of the sources before j, block k
gives source j the slots from  floor(W_j (k+1) B) - floor(W_j k B)  up to the same with W_j+1, and a
permutation of the block gives the position of each slot. The floors telescope: after any number of
whole blocks each source is less than one position away from its exact share. B is at least
1 / share of every source; otherwise a source's count in a block, a difference of two such edges,
could be negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from rayapp.order.bijection import Ints, permute, round_keys

MIN_BLOCK = 1024  # positions over which a mixture has its shares
MAX_BLOCK = 2**20


def mixture(weights: Sequence[float], positions: Ints, seed: int) -> tuple[Ints, Ints]:
    """Return, for positions int64[n], their sources [n] and which item of its source each is [n].

    Weights need not sum to 1. After every block the shares are exact to one position; the order
    within a block is a seeded permutation. The positions of source j, in order, hold its items
    0, 1, 2, ... The cost is proportional to the number of blocks that the positions touch.

    >>> sources, items = mixture([3, 1], np.array([0, 5, 6, 7, 4096]), seed=0)
    >>> sources.tolist(), items.tolist()
    ([0, 0, 1, 0, 0], [0, 5, 0, 6, 3072])
    """
    shares, block = shares_and_block(weights)
    sources, items = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
    blocks, offsets = np.divmod(positions, block)
    for k in np.unique(blocks).tolist():
        here = np.flatnonzero(blocks == k)
        of_block = _block_sources(shares, block, k, seed, np.arange(offsets[here].max() + 1))
        edges = [math.floor(share * k * block) for share in shares]
        for source in np.unique(of_block[offsets[here]]).tolist():
            before = edges[source + 1] - edges[source]
            mine = of_block == source
            slots = here[mine[offsets[here]]]
            sources[slots] = source
            items[slots] = before + np.cumsum(mine)[offsets[slots]] - 1
    return sources, items


def taken(weights: Sequence[float], count: int, seed: int) -> tuple[int, ...]:
    """Return how many of the first `count` positions each source has.

    >>> taken([3, 1], 4097, seed=0)
    (3073, 1024)
    """
    shares, block = shares_and_block(weights)
    blocks, rest = divmod(count, block)
    ends = [math.floor(share * blocks * block) for share in shares]
    begun = _block_sources(shares, block, blocks, seed, np.arange(rest))
    more = np.bincount(begun, minlength=len(weights)).tolist()
    return tuple(end - start + n for start, end, n in zip(ends, ends[1:], more, strict=False))


def _block_sources(shares: list[Fraction], block: int, k: int, seed: int, offsets: Ints) -> Ints:
    """Return the source at each offset of block k: [n] -> [n]."""
    ends = [
        math.floor(share * (k + 1) * block) - math.floor(share * k * block) for share in shares[1:]
    ]
    slots = permute(offsets, block, round_keys("mixture", seed, k))
    return np.searchsorted(ends, slots, side="right").astype(np.int64)


def shares_and_block(weights: Sequence[float]) -> tuple[list[Fraction], int]:
    """Return the cumulative shares, 0 first and 1 last, and the block length."""
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise ValueError(
            f"weights={list(weights)} is not a mixture: each is finite and >= 0, and one is > 0. "
            f"Set one such number per source"
        )
    # Decimals as written: 0.7 and 0.3 give exactly 7 to 3, unlike their binary values.
    exact = [Fraction(repr(float(w))) for w in weights]
    total = sum(exact)
    smallest = min(w for w in exact if w) / total
    if smallest * MAX_BLOCK < 1:
        raise ValueError(
            f"weights={list(weights)} has a share of {float(smallest):.1e}: a source must fill at "
            f"least one position in {MAX_BLOCK}. Set that weight to 0 or higher"
        )
    shares, reached = [Fraction(0)], Fraction(0)
    for w in exact:
        reached += w / total
        shares.append(reached)
    return shares, max(MIN_BLOCK, 1 << (math.ceil(1 / smallest) - 1).bit_length())
