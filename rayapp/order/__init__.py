"""The order of training data as a function of (seed, epoch, step).

>>> order = Order.for_steps(num_rows=10, rows_per_step=4, micro_batch=2, seed=7, num_steps=5)
>>> order.rows(2).tolist()                             # the last 2 of epoch 0, the first 2 of 1
[1, 7, 2, 7]
>>> order.micro_batches(2, rank=1, world=2).tolist()
[[2, 7]]
>>> order.cursor(2, fingerprint="") == Cursor(epoch=0, row=8, seed=7, fingerprint="")
True

Each (seed, epoch) has a keyed bijection of [0, num_rows), which can be evaluated at any position
without computing the others. Epochs follow one another in one endless sequence, steps cut it into
equal parts, micro-batches cut a step, and ranks take micro-batches in turn. Nothing else determines
where a row goes. So the batch of a step is the same for any number of workers and after any resume,
and a resume costs the same at any position. A data set of windows has a first epoch that needs one
window after another (rayapp.order.windows).
"""

from __future__ import annotations

from rayapp.order.bijection import permutation
from rayapp.order.digest import StepCounts, combine, differences, fingerprint, row_digest
from rayapp.order.sequence import EMPTY, SOURCE_ROWS, Cursor, Order
from rayapp.order.shares import mixture, taken
from rayapp.order.windows import shuffled, visits, window_of

__all__ = [
    "EMPTY",
    "SOURCE_ROWS",
    "Cursor",
    "Order",
    "StepCounts",
    "combine",
    "differences",
    "fingerprint",
    "mixture",
    "permutation",
    "row_digest",
    "shuffled",
    "taken",
    "visits",
    "window_of",
]
