"""What a training process is told; light to import, since Ray's controller reads it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayapp.config import Config
from rayapp.data.prepared import Prepared
from rayapp.order import Order
from rayapp.storage import open_storage


@dataclass(frozen=True)
class Job:
    """All that a training process is told."""

    config: Config
    prepared: Prepared
    tokenizer_url: str
    order: Order
    run_url: str
    auto_micro_batch: bool = False
    """The number of rows in a micro-batch was chosen for the user, and may be halved."""


def first_step(job: Job) -> int:
    """Return the step at which the data must start: that of the newest whole checkpoint."""
    from rayapp.checkpoint.marker import latest

    found, _ = latest(open_storage(job.run_url))
    return found.step if found else 0


def train(job: Job) -> dict[str, Any]:
    """Train as one of Ray Train's workers, which alone import torch for it."""
    from rayapp.finetune.worker import work

    return work(job)
