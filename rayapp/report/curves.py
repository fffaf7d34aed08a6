"""Turn a run's steps into curves small enough for a page: smoothing, thinning.

    columns = Columns.read(run, NAMES).columns()
    kept = thin([columns["loss"]], buckets=600)
    means([columns["loss"]], [columns["step"]], buckets=600)

A long run is drawn as the lowest and the highest point of each bucket of steps, which keeps spikes,
with the means of the buckets, which the page smooths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rayapp.observe.columns import Array
from rayapp.observe.metrics import FIELDS

BUCKETS = 600  # about one for each 2 pixels of a wide screen
SMOOTH_SHARE = 0.02  # width of the smoothing window, as a share of the steps
TEXTS = ("batch_digest", "eval_samples")
NAMES = tuple(
    name
    for name, shown in FIELDS.items()
    if name not in TEXTS and shown.tag in ("", "rank")  # not of several figures
)


def thin(columns: Sequence[Array], buckets: int = BUCKETS) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the indices to draw: in each bucket, where each column is lowest and highest.

    The first and the last index are always among them; at up to 2 x `buckets` values, all are.

    >>> thin([np.array([3.0, 1.0, 2.0, 9.0, 4.0, 4.0, 5.0, 5.0])], buckets=2).tolist()
    [0, 1, 3, 4, 6, 7]
    """
    count = len(columns[0])
    if count <= 2 * buckets:
        return np.arange(count)
    kept = {0, count - 1}
    edges = np.linspace(0, count, buckets + 1).astype(int)
    for column in columns:
        for start, end in pairwise(edges):
            part = column[start:end]
            if not np.isnan(part).all():
                kept |= {int(start + np.nanargmin(part)), int(start + np.nanargmax(part))}
    return np.array(sorted(kept), np.intp)


def means(
    averaged: Sequence[Array], placed: Sequence[Array], buckets: int = BUCKETS
) -> tuple[list[Array], list[Array]]:
    """Return the mean of each bucket of the columns `averaged`, and of `placed` the middle value.

    At up to 2 x `buckets` values each is a bucket. A bucket without a known value is NaN.

    >>> values = np.array([1.0, np.nan, 3.0, 4.0, 6.0, np.nan])
    >>> [each.tolist() for each, in means([values], [np.arange(6.0)], buckets=2)]
    [[2.0, 5.0], [1.0, 4.0]]
    """
    count = len(placed[0])
    if count <= 2 * buckets:
        return list(averaged), list(placed)
    edges = np.linspace(0, count, buckets + 1).astype(int)
    averages = []
    for column in averaged:
        known = ~np.isnan(column)
        sums = np.add.reduceat(np.where(known, column, 0.0), edges[:-1])
        counts = np.add.reduceat(known.astype(np.float64), edges[:-1])
        with np.errstate(invalid="ignore"):
            averages.append(sums / counts)
    middles = (edges[:-1] + edges[1:] - 1) // 2
    return averages, [column[middles] for column in placed]


def window_of(count: int) -> int:
    """Return the width of the smoothing window for so many steps; it is odd.

    >>> [window_of(count) for count in (1, 30, 150, 10_000)]
    [1, 1, 5, 201]
    """
    return 2 * round(count * SMOOTH_SHARE / 2) + 1


def smooth(values: Array, window: int | None = None) -> Array:
    """Return the mean of the window around each value; the window is cut at the ends, NaN skipped.

    >>> smooth(np.array([1.0, np.nan, 5.0, 3.0]), window=3).tolist()
    [1.0, 3.0, 4.0, 4.0]
    """
    half = (window or window_of(len(values))) // 2
    known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(values))
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def plain(values: Array) -> list[float | int | None]:
    """Return values for JSON: 6 significant digits, whole numbers as int, None if not finite.

    >>> plain(np.array([1.23456789, 3.0, np.nan]))
    [1.23457, 3, None]
    """
    numbers: list[float | int | None] = []
    for value in values.tolist():
        if not np.isfinite(value):
            numbers.append(None)
        else:
            numbers.append(int(value) if value == int(value) else float(f"{value:.6g}"))
    return numbers
