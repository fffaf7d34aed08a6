"""Stream the images to the ranks. Imports no torch (see rayapp.train.spec)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rayapp.config import VisionConfig
from rayapp.data.images.augment import Transform
from rayapp.train.spec import ImageSpec

if TYPE_CHECKING:
    from rayapp.data.images.batches import StepImages
    from rayapp.data.stream import Shard, Stream


def stream(spec: ImageSpec, first_step: int, world: int) -> Stream:
    """Return the images from `first_step` on, for `world` workers; its tasks decode and augment."""
    from rayapp.data.images import stream

    transform, workers = transform_of(spec.config), spec.config.data.workers
    return stream.stream(spec.data, transform, spec.order, first_step, world, workers)


def steps(spec: ImageSpec, shard: Shard, world: int) -> Iterator[StepImages]:
    """Yield a rank's batch of each step from its part of the stream."""
    from rayapp.data.images import stream

    return stream.steps(shard, spec.order.micro_batch, spec.order.num_micro_batches(world))


def transform_of(config: VisionConfig) -> Transform:
    """Return the crop, size and augmentation of the config's images."""
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
