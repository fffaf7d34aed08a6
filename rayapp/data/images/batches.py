"""Decode and augment the images of one rank's steps, here or by Ray Data, and held-out images.

batch = step_images(images.rows("train"), look, order, step, rank=0, world=2)
for batch in held_out_batches(images.rows("eval"), look, micro_batch, rank, world): ...
dataset = stream(images, look, order, first_step, world)       # in the run's exact order
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from rayapp.config.vision import ImageDataConfig
from rayapp.data.images.augment import Pixels, augmented, centred, mix, seed_of
from rayapp.data.images.index import ImageRows, Images
from rayapp.order import EMPTY, Order, StepCounts

if TYPE_CHECKING:
    from rayapp.data.stream import Arrays, Fields, Shard, Stream

DECODERS = 4  # threads per training worker that decode held-out images
# A Ray Data task costs 10 to 30 ms of CPU whatever it does: as much as 16 images of 224 pixels.
BLOCK_BYTES = 64 * 2**20
STORE_SHARE = 1 / 16  # largest share of the object store for one block


@dataclass(frozen=True)
class StepImages:
    """One rank's images of one step: m micro-batches of b images of S x S pixels."""

    step: int
    images: np.ndarray[Any, Any]
    """uint8 [m, b, S, S, 3]"""
    labels: np.ndarray[Any, Any]
    """int32 [m, b]"""
    others: np.ndarray[Any, Any]
    """int32 [m, b], class of the image that is mixed in, else the own class"""
    shares: np.ndarray[Any, Any]
    """float32 [m, b], share of the own class in the target, 0-1"""
    digests: np.ndarray[Any, Any]
    """uint64 [m, b], digest of place, bytes, class and seed; 0 where there is no image"""
    rows: np.ndarray[Any, Any]
    """int64 [m, b], number of the image in the data set, EMPTY where there is none"""

    def counts(self) -> StepCounts:
        """Return the number of this rank's images, which divides the loss."""
        images = int((self.rows != EMPTY).sum())
        return StepCounts(weight=images, images=images)

    def digest(self) -> int:
        return sum(self.digests.ravel().tolist())

    def weights(self) -> np.ndarray[Any, Any]:
        return np.ones(self.rows.shape, np.int64)

    def inputs(self, i: int, rows: slice = slice(None)) -> dict[str, np.ndarray[Any, Any]]:
        """Return the model's inputs for (some rows of) a micro-batch, without empty slots."""
        there = np.flatnonzero(self.rows[i][rows] != EMPTY)
        return {
            "images": self.images[i][rows][there],
            "labels": self.labels[i][rows][there].astype(np.int64),
            "others": self.others[i][rows][there].astype(np.int64),
            "shares": self.shares[i][rows][there],
        }


def step_images(
    rows: ImageRows,
    look: ImageDataConfig,
    order: Order,
    step: int,
    rank: int,
    world: int,
    pixels: Pixels | None = None,
) -> StepImages:
    """Read, decode and augment the images that `rank` of `world` takes in a step.

    The images are written into `pixels` if given: uint8 [m * b, S, S, 3], all zero.
    """
    ids, places = order.micro_batches(step, rank, world), order.places(rank, world)  # [m, b]
    epochs = (step * order.rows_per_step + places) // order.num_rows
    shape, there = ids.shape, np.flatnonzero(ids.ravel() != EMPTY)
    if pixels is None:
        pixels = np.zeros((ids.size, look.size, look.size, 3), np.uint8)
    labels, seeds, digests = (np.zeros(ids.size, kind) for kind in (np.int32, np.uint64, np.uint64))
    wanted = ids.ravel()[there].tolist()
    for slot, row, data in zip(there.tolist(), wanted, rows.read(wanted), strict=True):
        record = rows.records[row]
        seed = seed_of(order.seed, int(epochs.ravel()[slot]), row)
        pixels[slot] = augmented(data, look, seed, rows.as_stored)
        labels[slot], seeds[slot] = record["label"], seed
        place = int(places.ravel()[slot])
        digests[slot] = image_digest(place, int(record["digest"]), int(record["label"]), seed)
    images = pixels.reshape(*shape, *pixels.shape[1:])
    each = zip(images, labels.reshape(shape), seeds.reshape(shape), ids != EMPTY, strict=True)
    mixed = [mix(*micro_batch, look) for micro_batch in each]
    others, shares = (np.stack(part) for part in zip(*mixed, strict=True))
    flat = (labels.reshape(shape), others, shares, digests.reshape(shape))
    return StepImages(step, images, *flat, ids)


def image_digest(place: int, content: int, label: int, seed: int) -> int:
    """Return a 64-bit digest of one augmented image at one place of its step."""
    numbers = np.array([place, content, label, seed], np.uint64)
    return int.from_bytes(blake2b(numbers.tobytes(), digest_size=8).digest(), "little")


def local_steps(
    rows: ImageRows, look: ImageDataConfig, order: Order, rank: int, world: int, first_step: int
) -> Iterator[StepImages]:
    """Yield the rest of a run's steps for one rank, computed in this process, without Ray."""
    for step in range(first_step, order.num_steps):
        yield step_images(rows, look, order, step, rank, world)


def held_out_batches(
    rows: ImageRows, look: ImageDataConfig, micro_batch: int, rank: int, world: int
) -> Iterator[StepImages]:
    """Yield every image once, in order, one micro-batch at a time; all ranks yield equally often.

    The next micro-batch is decoded while the current one is used.
    """
    count = -(-len(rows) // micro_batch)

    def load(first: int) -> StepImages:
        ids = (first + rank) * micro_batch + np.arange(micro_batch)
        ids = np.where(ids < len(rows), ids, EMPTY)
        there = np.flatnonzero(ids != EMPTY)
        pixels = np.zeros((micro_batch, look.size, look.size, 3), np.uint8)
        labels = np.zeros(micro_batch, np.int32)
        labels[there] = rows.records["label"][ids[there]]
        files = rows.read(ids[there].tolist())
        made = decoders.map(lambda data: centred(data, look, rows.as_stored), files)
        for slot, image in zip(there.tolist(), made, strict=True):
            pixels[slot] = image
        shares, digests = np.ones(micro_batch, np.float32), np.zeros(micro_batch, np.uint64)
        arrays = (pixels, labels, labels, shares, digests, ids)
        return StepImages(first // world, *(array[None] for array in arrays))

    with ThreadPoolExecutor(DECODERS) as decoders, ThreadPoolExecutor(1) as ahead:
        waiting = [ahead.submit(load, first) for first in range(0, count, world)[:1]]
        for first in range(0, count, world):
            batch = waiting.pop().result()
            if first + world < count:
                waiting.append(ahead.submit(load, first + world))
            yield batch


def stream(
    images: Images, look: ImageDataConfig, order: Order, first_step: int, world: int
) -> Stream:
    """Return the rest of the run for `world` workers; its tasks read, decode and augment."""
    import ray

    from rayapp.data.stream import blocks

    def fill(step: int, rank: int, columns: Arrays) -> None:
        pixels = columns.pop("images")
        batch = step_images(images.rows("train"), look, order, step, rank, world, pixels)
        for name, column in columns.items():
            column[:] = getattr(batch, name).ravel()

    dtypes = {"labels": "i4", "others": "i4", "shares": "f4", "digests": "u8", "rows": "i8"}
    fields: Fields = {"images": ((look.size, look.size, 3), np.uint8)}
    fields = {**fields, **{name: ((), np.dtype(dtype)) for name, dtype in dtypes.items()}}
    store = ray.cluster_resources().get("object_store_memory", math.inf)
    block_bytes = int(min(BLOCK_BYTES, store * STORE_SHARE))
    row_bytes = 3 * look.size**2
    return blocks(order, first_step, world, row_bytes, fields, fill, look.workers, block_bytes)


def steps(shard: Shard, micro_batch: int, num_micro_batches: int) -> Iterator[StepImages]:
    """Yield this rank's steps from its part of the stream."""
    from rayapp.data.stream import parts

    for step, arrays, _ in parts(shard, micro_batch, num_micro_batches):
        yield StepImages(step, **arrays)
