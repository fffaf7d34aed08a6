"""Stream augmented images to the training workers through Ray Data, in the run's exact order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import ray

from rayapp.data.images.augment import Transform
from rayapp.data.images.batches import StepImages, step_images
from rayapp.data.images.index import Images
from rayapp.data.stream import Arrays, Fields, Shard, Stream, blocks, parts
from rayapp.order import Order

# A Ray Data task costs 10 to 30 ms of CPU whatever it does: as much as 16 images of 224 pixels.
BLOCK_BYTES = 64 * 2**20
STORE_SHARE = 1 / 16  # largest share of the object store for one block
FIELDS = ("images", "labels", "others", "shares", "digests", "rows")


def stream(
    images: Images,
    transform: Transform,
    order: Order,
    first_step: int,
    world: int,
    concurrency: int | None = None,
) -> Stream:
    """Return the rest of the run for `world` workers; its tasks read, decode and augment."""
    pixels = (transform.size, transform.size, 3)
    fields: Fields = {
        "images": (pixels, np.uint8),
        "labels": ((), np.int32),
        "others": ((), np.int32),
        "shares": ((), np.float32),
        "digests": ((), np.uint64),
        "rows": ((), np.int64),
    }

    def fill(step: int, rank: int, columns: Arrays) -> None:
        pixels = columns.pop("images")
        batch = step_images(images.rows("train"), transform, order, step, rank, world, pixels)
        for name, column in columns.items():
            column[:] = getattr(batch, name).ravel()

    row_bytes = int(np.prod(pixels))
    store = ray.cluster_resources().get("object_store_memory", math.inf)
    block_bytes = int(min(BLOCK_BYTES, store * STORE_SHARE))
    return blocks(order, first_step, world, row_bytes, fields, fill, concurrency, block_bytes)


def steps(shard: Shard, micro_batch: int, num_micro_batches: int) -> Iterator[StepImages]:
    """Yield this rank's steps from its part of the stream."""
    for step, arrays in parts(shard, FIELDS, micro_batch, num_micro_batches):
        yield StepImages(step, **arrays)
