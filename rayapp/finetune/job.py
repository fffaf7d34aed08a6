"""What a process that fine-tunes is told; light to import, since Ray's controller reads it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayapp.config import Config
from rayapp.data.prepared import Prepared
from rayapp.observe.records import Summary, Validation
from rayapp.order import Order
from rayapp.train import spec

if TYPE_CHECKING:
    import ray.data
    import torch

    from rayapp.data.rows import StepRows
    from rayapp.observe.metrics import StepRecord


@dataclass(frozen=True)
class Job(spec.Job):
    """All that a training process is told."""

    config: Config
    prepared: Prepared
    tokenizer_url: str
    order: Order
    run_url: str
    auto_micro_batch: bool = False
    """The number of rows in a micro-batch was chosen for the user, and may be halved."""

    @property
    def fingerprint(self) -> str:
        """What the rows were made from."""
        return self.prepared.fingerprint

    @property
    def parts(self) -> dict[str, object]:
        """What the fingerprint is of, by name."""
        return self.prepared.parts

    @property
    def held_out(self) -> int:
        """How many rows are held out."""
        return self.prepared.num_rows("eval")

    def stream(self, first_step: int, world: int) -> ray.data.Dataset:
        """Return the rest of the run for so many workers."""
        from rayapp.data import stream

        workers = self.config.data.workers
        return stream.stream(self.prepared, self.order, first_step, world, workers)

    def steps(self, shard: Any, world: int) -> Iterator[StepRows]:
        """Yield this rank's steps from its shard of the stream."""
        from rayapp.data import stream

        return stream.steps(shard, self.order.micro_batch, self.order.num_micro_batches(world))

    def run(
        self,
        device: torch.device,
        open_steps: Callable[[int], Iterator[StepRows]],
        notice: Callable[[], str | None],
        room: Callable[[], int] | None,
        tell: Callable[[StepRecord], None],
    ) -> Summary:
        """Train on this rank."""
        from rayapp.finetune import training

        return training.run(self, device, open_steps, notice, room, tell)

    def validate(self, name: str, step: int) -> Validation:
        """Evaluate a checkpoint in this process alone."""
        from rayapp.finetune.validation import validate

        return validate(self, name, step)

    def after_failure(self, error: Summary | Exception) -> Job | None:
        """Return the job with half the rows in a micro-batch, where memory ended it."""
        from rayapp.finetune.micro_batch import after_failure

        return after_failure(self, error)
