"""What a training process is told, whatever it trains; light to import, as Ray's controller does.

fit(MyJob(config, order, run_url), ...)      # see rayapp.driver.supervise
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rayapp.config import RunConfig
from rayapp.observe.records import Summary, Validation
from rayapp.order import Order
from rayapp.storage import open_storage

if TYPE_CHECKING:
    import ray.data
    import torch

    from rayapp.observe.metrics import StepRecord


class Job(ABC):
    """All that a training process is told."""

    config: RunConfig
    order: Order
    run_url: str

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """What the rows were made from."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, object]:
        """What the fingerprint is of, by name, so that what has changed can be named."""

    @property
    @abstractmethod
    def held_out(self) -> int:
        """How many rows are held out."""

    @abstractmethod
    def stream(self, first_step: int, world: int) -> ray.data.Dataset:
        """Return the rest of the run for so many workers: blocks that are dealt out in turn."""

    @abstractmethod
    def steps(self, shard: Any, world: int) -> Iterator[Any]:
        """Yield this rank's steps from its shard of the stream."""

    @abstractmethod
    def run(
        self,
        device: torch.device,
        open_steps: Callable[[int], Iterator[Any]],
        notice: Callable[[], str | None],
        room: Callable[[], int] | None,
        tell: Callable[[StepRecord], None],
    ) -> Summary:
        """Train on this rank: see rayapp.train.rank."""

    @abstractmethod
    def validate(self, name: str, step: int) -> Validation:
        """Evaluate a checkpoint in this process alone; return a line of validation.jsonl."""

    def after_failure(self, error: Summary | Exception) -> Job | None:
        """Return the job in a form that what ended it may not end again; None: there is none."""
        return None

    def cut(self, workers: int) -> str:
        """Say how a step is cut into micro-batches."""
        rows, size = self.order.rows_per_step, self.order.micro_batch
        return (
            f"train.micro_batch={size}: {rows} rows / {size} = {rows // size} micro-batches / "
            f"{workers} workers = {self.order.num_micro_batches(workers)} each"
        )


def first_step(job: Job) -> int:
    """Return the step at which the data must start: that of the newest whole checkpoint."""
    from rayapp.train.checkpoint.marker import latest

    found, _ = latest(open_storage(job.run_url))
    return found.step if found else 0
