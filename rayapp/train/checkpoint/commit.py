"""Claim a checkpoint's folder, commit it, and delete those that are no longer kept. No torch.

name = claim(run, step, state)
...                                   # write the shards to run/checkpoints/<name>/
commit(run, name, step, state, files)
sweep(run, name, keep=2)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict

from rayapp.observe.run_folder import CHECKPOINTS
from rayapp.storage import Storage
from rayapp.train.checkpoint import marker

logger = logging.getLogger("rayapp.train.checkpoint")


def claim(run: Storage, step: int, state: bytes) -> str:
    """Claim a new folder that sorts after all earlier ones of the same step; return its name.

    Only one process can create state.json, and that is the claim. So a rank of a dead attempt that
    still uploads shards writes to another folder, even if its files were not visible yet.
    """
    folder = run / CHECKPOINTS
    orders = filter(None, map(marker.order_of, folder.dirs()))
    number = max((number + 1 for other, number in orders if other == step), default=0)
    while True:
        name = marker.name_of(step, number)
        if folder.create(f"{name}/{marker.STATE}", state):
            return name
        number += 1


def commit(
    run: Storage, name: str, step: int, state: bytes, files: Mapping[str, marker.SavedFile]
) -> None:
    """Write the marker of a checkpoint whose other files (by their names) are all stored."""
    digest = marker.Digest()
    digest.update(state)
    saved = {**files, marker.STATE: digest.file()}
    content = asdict(marker.Marker(marker.claim_run_id(run), name, step, saved))
    (run / CHECKPOINTS).write(f"{name}/{marker.MARKER}", json.dumps(content, indent=1).encode())


def sweep(run: Storage, newest: str, keep: int, pinned: int | None = None) -> None:
    """Delete all checkpoints before `newest`, except the `keep - 1` newest usable ones.

    Those of the step `pinned` stay beside them.
    """
    folder, run_id, kept = run / CHECKPOINTS, marker.claim_run_id(run), 1
    names = marker.newest_first(folder)
    for name in names[names.index(newest) + 1 :]:
        if (marker.order_of(name) or (None,))[0] == pinned:
            continue
        if kept < keep and _is_usable(folder, name, run_id):
            kept += 1
            continue
        # The marker first, so that a sweep that is interrupted leaves no partial checkpoint.
        folder.delete(f"{name}/{marker.MARKER}")
        folder.delete_tree(name)


def _is_usable(folder: Storage, name: str, run_id: str) -> bool:
    try:
        marker.looked_at(folder / name, name, run_id)
    except marker.CheckpointError as problem:
        logger.debug("%s is not kept: %s", name, problem)
        return False
    return True
