"""Say which row is where: the order of training data as a function of (seed, epoch, step).

>>> order = Order.for_steps(num_rows=10, rows_per_step=4, micro_batch=2, seed=7, num_steps=5)
>>> order.rows(2).tolist()                             # the last 2 of epoch 0, the first 2 of 1
[1, 7, 2, 7]
>>> order.micro_batches(2, rank=1, world=2).tolist()
[[2, 7]]
>>> order.cursor(2, fingerprint="") == Cursor(epoch=0, row=8, seed=7, fingerprint="")
True

The model: a keyed bijection of [0, num_rows) per (seed, epoch), which can be asked at any position
without computing the others. Epochs follow one another in one endless sequence, steps cut it into
equal pieces, micro-batches cut a step, and ranks take micro-batches in turn. Nothing else decides
where a row goes, so the batch of a step is the same for every number of workers and after every
resume, and a resume costs the same at any position.
"""

from __future__ import annotations

from rayapp.order.bijection import permutation
from rayapp.order.digest import combine, differences, fingerprint, row_digest
from rayapp.order.sequence import EMPTY, Cursor, Order
from rayapp.order.shares import mixture

__all__ = [
    "EMPTY",
    "Cursor",
    "Order",
    "combine",
    "differences",
    "fingerprint",
    "mixture",
    "permutation",
    "row_digest",
]
