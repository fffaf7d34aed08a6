"""Check that a run that was made longer goes on with the rows that it began with.

check_order(run, prepared, order)          # by the digests in metrics.jsonl
"""

from __future__ import annotations

from rayapp.config import ConfigError
from rayapp.data.prepared import Prepared
from rayapp.data.rows import step_rows
from rayapp.driver.growth import refuse_other_data
from rayapp.observe import metrics
from rayapp.observe.run_folder import METRICS
from rayapp.order import Order, combine
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import latest


def check_order(run: Storage, prepared: Prepared, order: Order) -> None:
    """Compare the rows of the last step done with its digest in metrics.jsonl.

    Raises:
        ConfigError: the data are others, or that step would have had other rows.
    """
    refuse_other_data(run, prepared.parts)
    line, (newest, _) = metrics.last(run), latest(run)
    if line is None or newest is None or newest.step != line["step"]:
        return
    rows = step_rows(prepared.rows("train"), order, line["step"] - 1, 0, 1)
    if combine([rows.digest()]) != line["batch_digest"]:
        raise ConfigError(
            [
                f"{run.url}/{METRICS} is of other rows: step {line['step']} had the digest "
                f"{line['batch_digest']} and would have {combine([rows.digest()])}. Set the data "
                "back to what they were, or another run.name"
            ]
        )
