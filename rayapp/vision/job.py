"""What a process that trains a classifier is told; light to import, as Ray's controller does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayapp.config import VisionConfig
from rayapp.data.images.augment import Look
from rayapp.data.images.index import Images
from rayapp.observe.records import Summary, Validation
from rayapp.order import Order
from rayapp.train import spec

if TYPE_CHECKING:
    import ray.data
    import torch

    from rayapp.data.images.batches import StepImages
    from rayapp.observe.metrics import StepRecord


@dataclass(frozen=True)
class Job(spec.Job):
    """All that a training process is told."""

    config: VisionConfig
    images: Images
    order: Order
    run_url: str

    @property
    def fingerprint(self) -> str:
        """What the images are."""
        return self.images.fingerprint

    @property
    def parts(self) -> dict[str, object]:
        """What the fingerprint is of, by name."""
        return self.images.parts

    @property
    def held_out(self) -> int:
        """How many images are held out."""
        return self.images.counts["eval"]

    @property
    def look(self) -> Look:
        """What the model sees of an image."""
        return look_of(self.config)

    def stream(self, first_step: int, world: int) -> ray.data.Dataset:
        """Return the rest of the run for so many workers."""
        from rayapp.data.images import stream

        workers = self.config.data.workers
        return stream.stream(self.images, self.look, self.order, first_step, world, workers)

    def steps(self, shard: Any, world: int) -> Iterator[StepImages]:
        """Yield this rank's steps from its shard of the stream."""
        from rayapp.data.images import stream

        return stream.steps(shard, self.order.micro_batch, self.order.num_micro_batches(world))

    def run(
        self,
        device: torch.device,
        open_steps: Callable[[int], Iterator[StepImages]],
        notice: Callable[[], str | None],
        room: Callable[[], int] | None,
        tell: Callable[[StepRecord], None],
    ) -> Summary:
        """Train on this rank."""
        from rayapp.vision import training

        return training.run(self, device, open_steps, notice, room, tell)

    def validate(self, name: str, step: int) -> Validation:
        """Evaluate a checkpoint in this process alone."""
        from rayapp.vision.validation import validate

        return validate(self, name, step)


def look_of(config: VisionConfig) -> Look:
    """Return what the model is to see of an image."""
    data = config.data
    return Look(
        size=data.size,
        eval_crop=data.eval_crop,
        crop_scale=data.crop_scale,
        flip=data.flip,
        layers=data.randaugment.layers if data.randaugment else 0,
        magnitude=data.randaugment.magnitude if data.randaugment else 0,
        mixup=data.mixup,
        cutmix=data.cutmix,
    )
