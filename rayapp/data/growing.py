"""Read the rows of windows of which some are still being prepared.

growing = GrowingRows(prepared, order)
rows, order = growing.at(step)              # waits for the windows that the step needs
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache

from rayapp.data.prepared import Prepared, account_of, rows_of_windows, unit_name
from rayapp.data.report import UnitSummary
from rayapp.data.rows import TokenRows
from rayapp.order import Order, visits
from rayapp.storage import open_storage

POLL_S = 0.5


class GrowingRows:
    """The training rows that are known, which become more."""

    def __init__(self, prepared: Prepared, order: Order) -> None:
        self.prepared, self.order = prepared, order
        self.rows, self.known = prepared.rows("train"), list(prepared.known)
        self._shards = prepared.shards_of_windows

    def at(self, step: int) -> tuple[TokenRows, Order]:
        """Return rows and order that have a step; they are longer from call to call."""
        if self.order.more:
            known = sum(self.known)
            for source, rows in enumerate(self.order.needed(step)):
                self._extend(source, rows)
            if sum(self.known) > known:
                self._renew()
        return self.rows, self.order

    def _extend(self, source: int, rows: int) -> None:
        """Wait until the windows of a source have so many rows, or are all known."""
        folder = f"{self.prepared.places[source]}/" if self.prepared.places else ""
        windows, shards = self.prepared.windows[source], self._shards[source]
        while self.known[source] < windows and sum(count for _, count in shards) < rows:
            index = visits(windows, self.order.seed)[self.known[source]]
            shard = _shard_of(f"{self.prepared.url}/{folder}".rstrip("/"), index)
            self.known[source] += 1
            if shard is not None:
                name, count = shard
                shards.append((folder + name, count))

    def _renew(self) -> None:
        windows = tuple(tuple(count for _, count in shards) for shards in self._shards)
        sizes = tuple(map(sum, windows))
        pairs = zip(self.known, self.prepared.windows, strict=True)
        self.order = replace(
            self.order,
            num_rows=sum(sizes),
            sizes=sizes if self.order.sizes else (),
            windows=windows,
            follow=tuple(known < count for known, count in pairs),
        )
        rows = self.rows
        self.rows = rows_of_windows(rows.storage, self._shards, rows.seq_len, rows.columns)


@lru_cache(maxsize=2**16)
def _shard_of(url: str, index: int) -> tuple[str, int] | None:
    """Wait for a window; return its training shard with its number of rows, None if it has none."""
    storage, name = open_storage(url), unit_name(index)
    while (unit := account_of(storage, name, UnitSummary)) is None:
        time.sleep(POLL_S)
    shard = unit["shards"].get("train")
    return None if shard is None else (shard, unit["counts"]["train"]["rows"])
