"""Find the checkpoint of another run whose weights a run starts with. Imports no torch.

saved = find(open_storage(origin.run), origin.step)
"""

from __future__ import annotations

from rayapp.observe.run_folder import CHECKPOINTS
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import (
    CheckpointError,
    SavedCheckpoint,
    latest,
    looked_at,
    newest_first,
    order_of,
    run_id,
)


def find(storage: Storage, step: int | None) -> SavedCheckpoint:
    """Return the newest usable checkpoint of a run, or of one of its steps.

    Raises:
        CheckpointError: there is none; the message says why, and does not name the run.
    """
    folder = storage / CHECKPOINTS
    if step is None:
        newest, skipped = latest(storage)
        if newest is None:
            raise CheckpointError(f"{CHECKPOINTS} has none: {'; '.join(skipped) or 'it is empty'}")
        return newest
    names, run, whys = newest_first(folder), run_id(storage), list[str]()
    for name in names:
        if (order_of(name) or (-1,))[0] == step:
            try:
                return looked_at(folder / name, name, run)
            except CheckpointError as problem:
                whys.append(f"{name}: {problem}")
    steps = sorted({order[0] for order in map(order_of, names) if order is not None})
    there = f"there are those of steps {', '.join(map(str, steps)) or 'none'}"
    raise CheckpointError(f"{CHECKPOINTS} has none of step {step}: {'; '.join(whys) or there}")
