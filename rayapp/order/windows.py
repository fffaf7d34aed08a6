"""Windows: parts of a data set that are drawn from distant places, and are shuffled together.

>>> window_of([4, 4, 4, 4, 4, 4], window_size=8).tolist()     # three windows of two parts each
[1, 2, 0, 2, 1, 0]
>>> visits(5, seed=1)                                         # window 0 comes first in every run
[0, 2, 1, 3, 4]
>>> windowed([0, 1, 2, 3, 4], windows=[3, 2], seed=1).tolist()
[2, 0, 1, 4, 3]
>>> packed_in_turn([0, 1, 2, 3, 4], packings=[3, 2], seed=1, turn=0).tolist()  # epochs 0 and 1
[0, 2, 1, 3, 4]
>>> packed_in_turn([0, 1, 2, 3, 4], packings=[3, 2], seed=1, turn=1).tolist()  # epochs 2 and 3
[0, 1, 2, 4, 3]

A data set of n windows is cut into runs of n consecutive parts. Each window takes one part of each
run, by a keyed permutation, so that its parts lie in all places of the data set. The parts of a
window do not depend on the seed of a run, so that its rows are made once for all runs. The seed
decides in which order the windows are visited, and the order of rows within each.

The first epoch visits the windows in turn: where a row of a window comes depends on the sizes of
this window and of those before it, and on nothing else. Later epochs shuffle all rows at once.

In a mixture each source has windows of its own. The weights and the seed decide which source a
position is of, and which item of that source it takes: the n-th, for n = 0, 1, 2, ... on end
(rayapp.order.shares). No window changes that, so each batch has the shares of a mixture without
windows. Item n of a source is place n of its first epoch as long as it has so many rows: its row
depends on the sizes of that source's windows up to this row, and on no other source. A later epoch
needs the size of the source, and so all of its windows. Rows of source j are numbered from
j * 10^12 on, since the sizes of the sources before it may be unknown. So the rows of a step are a
function of the seed, the weights and the sizes of the windows that its items lie in or come after:
neither workers, nor kills, nor the time at which a window is ready are among its arguments.

Packings are several ways in which the documents make rows. With n of them epoch e takes packing
e mod n, in an order of its own: the permutation of its rows by seed and epoch. A turn is n epochs,
one of each packing, so it has as many rows as all packings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rayapp.order.bijection import Ints, outside, permutation, permute, round_keys


def window_of(sizes: Sequence[int], window_size: int) -> Ints:
    """Return the window of each part: [p] -> [p]. Windows have about `window_size` each.

    `sizes` are those of the parts, in any unit, in the order of their places.
    """
    if window_size < 1:
        raise ValueError(outside("window_size", window_size, 1, None))
    count = max(1, min(len(sizes), -(-sum(sizes) // window_size)))
    chosen = np.empty(len(sizes), np.int64)
    for first in range(0, len(sizes), count):
        places = np.arange(min(count, len(sizes) - first))
        chosen[first : first + count] = permute(places, count, round_keys("parts", 0, first))
    return chosen


def shuffled(size: int, window: int, packing: int = 0) -> Ints:
    """Return the documents of a window or unit in the order in which they are packed: [size]."""
    return permute(np.arange(size), size, round_keys("documents", packing, window))


def visits(num_windows: int, seed: int) -> list[int]:
    """Return the windows in the order in which the first epoch visits them.

    The first is window 0, which has the held-out rows.
    """
    if num_windows < 1:
        raise ValueError(outside("num_windows", num_windows, 1, None))
    others = num_windows - 1
    if not others:
        return [0]
    drawn = permute(np.arange(others), others, round_keys("visits", seed, 0))
    return [0, *(drawn + 1).tolist()]


def windowed(places: npt.ArrayLike, windows: Sequence[int], seed: int) -> Ints:
    """Return the row at each place of the first epoch: [n] -> [n].

    `windows` are the rows of each window in the order of the visits; rows are numbered in that
    order too. Windows that come after the last of the places may be left out.
    """
    asked, known = np.asarray(places, np.int64), sum(windows)
    if asked.size and not 0 <= asked.min() <= asked.max() < known:
        raise ValueError(outside("places", int(asked.max()), 0, known - 1))

    def shuffle(inside: Ints, number: int, first: int) -> Ints:
        return permute(inside, windows[number], round_keys("windows", seed, first))

    return _by_part(asked, windows, shuffle)


def packed_in_turn(places: npt.ArrayLike, packings: Sequence[int], seed: int, turn: int) -> Ints:
    """Return the row at each place of a turn: [n] -> [n].

    `packings` are the rows of each packing, which are numbered one packing after another.
    """

    def shuffle(inside: Ints, number: int, first: int) -> Ints:
        return permutation(inside, packings[number], seed, turn * len(packings) + number)

    return _by_part(np.asarray(places, np.int64), packings, shuffle)


def _by_part(places: Ints, sizes: Sequence[int], shuffle: Callable[[Ints, int, int], Ints]) -> Ints:
    """Shuffle each part of [0, sum(sizes)) within itself: [n] -> [n].

    `shuffle` gets places in a part, the part's number, and its first place.
    """
    ends, rows = np.cumsum(np.asarray(sizes, np.int64)), np.empty_like(places)
    part = np.searchsorted(ends, places, side="right")
    for number in np.unique(part).tolist():
        here, first = part == number, int(ends[number]) - sizes[number]
        rows[here] = first + shuffle(places[here] - first, number, first)
    return rows
