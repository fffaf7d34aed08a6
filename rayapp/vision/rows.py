"""Images on their way to the ranks. It imports no torch: see train.spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rayapp.config import VisionConfig
from rayapp.data.images.augment import Transform
from rayapp.train.spec import ImageSpec

if TYPE_CHECKING:
    import ray.data

    from rayapp.data.images.batches import StepImages


def stream(spec: ImageSpec, first_step: int, world: int) -> ray.data.Dataset:
    """Return the rest of the run for so many workers; its tasks decode and augment."""
    from rayapp.data.images import stream

    look, workers = transform_of(spec.config), spec.config.data.workers
    return stream.stream(spec.data, look, spec.order, first_step, world, workers)


def steps(spec: ImageSpec, shard: Any, world: int) -> Iterator[StepImages]:
    """Yield a rank's steps from its shard of the stream."""
    from rayapp.data.images import stream

    return stream.steps(shard, spec.order.micro_batch, spec.order.num_micro_batches(world))


def transform_of(config: VisionConfig) -> Transform:
    """Return what the model is to see of an image."""
    data = config.data
    return Transform(
        size=data.size,
        eval_crop=data.eval_crop,
        crop_scale=data.crop_scale,
        flip=data.flip,
        layers=data.randaugment.layers if data.randaugment else 0,
        magnitude=data.randaugment.magnitude if data.randaugment else 0,
        mixup=data.mixup,
        cutmix=data.cutmix,
    )
