"""Packings: several ways in which the documents make rows, which epochs take in turn.

>>> packed_in_turn(range(5), packings=[3, 2], seed=1, turn=0).tolist()     # epochs 0 and 1
[0, 2, 1, 3, 4]
>>> packed_in_turn(range(5), packings=[3, 2], seed=1, turn=1).tolist()     # epochs 2 and 3
[0, 1, 2, 4, 3]

With n packings epoch e takes packing e mod n, in an order of its own: the permutation of its rows
by seed and epoch. A turn is n epochs, one of each packing, so it has as many rows as all packings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rayapp.order.bijection import Ints, permutation


def packed_in_turn(places: npt.ArrayLike, packings: Sequence[int], seed: int, turn: int) -> Ints:
    """Return the row at each place of a turn: [n] -> [n].

    `packings` are the rows of each packing, which are numbered one packing after another.
    """
    asked = np.asarray(places, np.int64)
    ends = np.cumsum(np.asarray(packings, np.int64))
    packing = np.searchsorted(ends, asked, side="right")
    rows = np.empty_like(asked)
    for number in np.unique(packing).tolist():
        here, size = packing == number, packings[number]
        first, epoch = int(ends[number]) - size, turn * len(packings) + number
        rows[here] = first + permutation(asked[here] - first, size, seed, epoch)
    return rows
