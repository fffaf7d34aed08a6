"""Let every save of this process copy its tensors as late as it may: when somebody waits for it."""

from __future__ import annotations

import threading
from typing import Any

from patience import PATIENCE_S

from rayapp.train.checkpoint.saver import Checkpointer
from rayapp.train.checkpoint.staging import HostCopy


def copy_late() -> None:
    """Hold back `HostCopy.take` until `settle`, `wait` or `close`; without one it fails."""
    due = threading.Event()
    follow, take = HostCopy.follow, HostCopy.take
    settle, join = Checkpointer.settle, Checkpointer._join

    def followed(self: HostCopy) -> None:
        due.clear()
        follow(self)

    def taken(self: HostCopy, state: dict[str, Any]) -> dict[str, Any]:
        assert due.wait(PATIENCE_S), "nobody waits for the copy"
        return take(self, state)

    def settled(self: Checkpointer) -> None:
        due.set()
        settle(self)

    def joined(self: Checkpointer) -> None:
        due.set()
        join(self)

    HostCopy.follow, HostCopy.take = followed, taken  # type: ignore[method-assign]
    Checkpointer.settle, Checkpointer._join = settled, joined  # type: ignore[method-assign]
