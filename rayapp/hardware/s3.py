"""What checkpoints cost in S3 under the lifecycle rules of infra/modules/storage."""

from __future__ import annotations

from collections.abc import Sequence

# S3 Standard, the first 50 TB of an account, us-east-1 and us-west-2, in USD per 2**30 bytes (the
# unit that S3 bills) and month; requests are not counted. https://aws.amazon.com/s3/pricing, 2025.
USD_PER_GIB_MONTH = 0.023
MONTH_HOURS = 730.0
# Hours in which a deleted checkpoint still takes room: versions in runs/ are kept for a day.
DELETED_HOURS = 24.0


def usd_of_checkpoints(
    committed: Sequence[float], keep: int, until: float, gib_each: float
) -> float:
    """Return what a run's checkpoints cost until the hour `until`, in USD.

    A checkpoint takes room from its commit until `keep` newer ones are committed, and for
    DELETED_HOURS more, also after `until`. Those that are kept are counted until `until`.

    Args:
        committed: the hour of each commit, ascending.
        keep: how many the run keeps.
        until: the hour when the run ends, on the same clock.
        gib_each: the size of one.

    >>> round(usd_of_checkpoints([0.0, 10.0], keep=1, until=30.0, gib_each=730.0), 3)
    1.242
    """
    hours = sum(
        committed[n + keep] + DELETED_HOURS - start if n + keep < len(committed) else until - start
        for n, start in enumerate(committed)
    )
    return gib_each * hours * USD_PER_GIB_MONTH / MONTH_HOURS
