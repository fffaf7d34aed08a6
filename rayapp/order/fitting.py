"""Refuse sizes of an order that do not fit together, and say which would."""

from __future__ import annotations

import math

from rayapp.order.shares import shares_and_block


def check_mixture(
    sizes: tuple[int, ...], weights: tuple[float, ...], num_rows: int, total_rows: int | None
) -> None:
    """Refuse sources of a mixture that do not fit its rows."""
    shares_and_block(weights)
    if len(sizes) != len(weights) or sum(sizes) != num_rows:
        raise ValueError(
            f"sizes={sizes} are not those of a mixture of num_rows={num_rows} and "
            f"weights={weights}: each source has one of both. Set sizes that sum to it"
        )
    for size, weight in zip(sizes, weights, strict=True):
        if weight and not size:
            raise ValueError(
                f"sizes={sizes} leave a source without rows, and weights={weights} "
                "ask for some of it. Set that weight to 0"
            )
    if total_rows is not None:
        raise ValueError(
            f"total_rows={total_rows} is not for a mixture, whose sources end at "
            "different times. Set total_rows=None"
        )


def check_windows(
    windows: tuple[tuple[int, ...], ...],
    follow: tuple[bool, ...],
    sizes: tuple[int, ...],
    total_rows: int | None,
) -> None:
    """Refuse windows that are not of sources of these sizes."""
    if windows and tuple(map(sum, windows)) != sizes:
        raise ValueError(
            f"windows={windows} are not those of {sizes} rows: each source has windows of "
            "all its rows. Set windows that sum to them"
        )
    if any(follow) and (len(windows) != len(follow) or total_rows is not None):
        raise ValueError(
            f"follow={follow} is in conflict with windows={windows}, "
            f"total_rows={total_rows}: each source has windows, and steps end the run. "
            "Set follow=()"
        )


def check_packings(
    packings: tuple[int, ...], sizes: tuple[int, ...], windows: tuple[tuple[int, ...], ...]
) -> None:
    """Refuse packings that are not of all rows of one source, or that are windows too."""
    if packings and (sizes != (sum(packings),) or windows):
        raise ValueError(
            f"packings={packings} are not those of {sizes} rows with windows={windows}: one source "
            "without windows has packings, of all its rows. Set packings that sum to them"
        )


def not_a_divisor(micro_batch: int, rows_per_step: int) -> str:
    """Return the error text for micro-batches that do not fill a step."""
    small = [d for d in range(1, math.isqrt(rows_per_step) + 1) if rows_per_step % d == 0]
    divisors = sorted({*small, *(rows_per_step // d for d in small)})
    below = [d for d in divisors if d < micro_batch][-1:]
    above = [d for d in divisors if d > micro_batch][:1]
    lower = rows_per_step // micro_batch * micro_batch
    multiples = [rows for rows in (lower, lower + micro_batch) if rows]
    return (
        f"micro_batch={micro_batch} is illegal: rows_per_step={rows_per_step} is not a multiple of "
        f"it. Set micro_batch={_either(below + above)}, or rows_per_step={_either(multiples)}"
    )


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))
