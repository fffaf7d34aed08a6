"""Read the rows of windows of which some are still being prepared.

growing = GrowingRows(prepared, order)
rows, order = growing.at(step)              # waits for the windows that the step needs
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import lru_cache

from rayapp.data.prepared import Prepared, unit_name
from rayapp.data.rows import TokenRows
from rayapp.order import Order, visits
from rayapp.storage import open_storage

POLL_S = 0.5


class GrowingRows:
    """The training rows that are known, which become more."""

    def __init__(self, prepared: Prepared, order: Order) -> None:
        self.prepared, self.order = prepared, order
        self.rows, self.known = prepared.rows("train"), prepared.known

    def at(self, step: int) -> tuple[TokenRows, Order]:
        """Return rows and order that have a step; they are longer from call to call."""
        needed, shards = (step + 1) * self.order.rows_per_step, list(self.rows.shards)
        while self.order.more and self.order.num_rows < needed:
            index = visits(self.prepared.windows, self.order.seed)[self.known]
            self.known += 1
            count = 0
            if (shard := _shard_of(self.prepared.url, index)) is not None:
                shards.append(shard)
                count = shard[1]
            self.order = replace(
                self.order,
                num_rows=self.order.num_rows + count,
                windows=((*self.order.windows[0], count),),
                more=self.known < self.prepared.windows,
            )
        if len(shards) > len(self.rows.shards):
            self.rows = TokenRows(self.rows.storage, shards, self.rows.seq_len)
        return self.rows, self.order


@lru_cache(maxsize=2**16)
def _shard_of(url: str, index: int) -> tuple[str, int] | None:
    """Wait for a window; return its training shard with its number of rows, None if it has none."""
    storage, name = open_storage(url), unit_name(index)
    while not storage.exists(name):
        time.sleep(POLL_S)
    unit = json.loads(storage.read(name))
    shard = unit["shards"].get("train")
    return None if shard is None else (shard, unit["counts"]["train"]["rows"])
