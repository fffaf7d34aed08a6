"""Images: rayapp's input pipeline against a torch DataLoader, and its loop against bare DDP.

    python bench/vision.py [--rounds 5] [--images 600] [--steps 400]

Pipeline: JPEGs of 500 x 375 pixels are read, decoded, cropped to 224 pixels and mirrored by 2
processes: rayapp's Ray Data tasks in one arm, a DataLoader's workers in the other. Both call the
same function with the same seeds in the same order, and the batches are thrown away; sums of pixels
must be equal. rayapp's arm also checks the bytes of each image and makes the digests. A third arm
does what torchvision does on PIL images: it decodes all of a JPEG, then crops. Per core is images
per second of CPU time of all processes of an arm, Ray's own included, so that other load on the
machine counts little; images per second of wall time are shown beside it. A stream is counted from
its opening to its end, and is long enough that Ray Data's start, 3 CPU seconds, is not what counts.

Loop: 2 ranks of one thread each, batches made before: rayapp's training code, with batch-norm of
its own, records and all, against DistributedDataParallel with torch's SGD, in the same processes.
Arms run in turn, and ratios are taken round by round. Once with ResNet-18, whose steps are nearer
to a real job's, and once with the default job's ResNet, whose steps take some 30 ms.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil

from rayapp.driver.ray_session import ENVIRONMENT
from rayapp.driver.ray_workers import CPU_ENVIRONMENT

ROOT = Path(__file__).parent.parent
ARMS = ("rayapp", "same", "torchvision")
PROCESSES, IMAGES_PER_STEP, MICRO_BATCH = 2, 64, 32
WARM_UP_STEPS = 6  # of either comparison: until all processes are at work
ASPECT = (3 / 4, 4 / 3)
LOOPS = {"resnet18": 112, "resnet-tiny": 64}  # pixels
LOOP_STEPS = {"resnet18": 30, "resnet-tiny": 100}


def draw(folder: Path, count: int) -> None:
    """Write JPEGs of ImageNet's usual size, as smooth as photographs: about 60 KiB each."""
    from PIL import Image

    dice = np.random.default_rng(0)
    for number in range(count):
        coarse = dice.integers(0, 256, (15, 20, 3), np.uint8)
        smooth = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth) + dice.normal(0, 9, (375, 500, 3))
        path = folder / f"class-{number % 10}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(path, quality=90)


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all below it, those that have ended too."""
    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def taken(batches: Iterable[np.ndarray]) -> dict[str, float]:
    """Take all images of a stream; return them per CPU second and per second, and their pixels.

    Seconds are from before it is opened to its end, so that nothing is made before or after.
    """
    images = pixels = 0
    wall, cpu = time.perf_counter(), cpu_s()
    for batch in batches:
        images += IMAGES_PER_STEP
        pixels += int(batch[..., ::16, :, :].sum(dtype=np.int64))
    wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
    return {"per_core": images / cpu, "per_s": images / wall, "pixels": pixels}


def through_ray(folder: str, steps: int) -> dict[str, float]:
    """Stream the steps as a run's workers get them, in processes that have done some before."""
    import ray

    from rayapp.config.vision import ImageDataConfig
    from rayapp.data.images.batches import steps as steps_of
    from rayapp.data.images.batches import stream
    from rayapp.data.images.image_sources import find
    from rayapp.data.images.index import ImageRecipe
    from rayapp.data.images.indexing import prepare
    from rayapp.order import Order
    from rayapp.storage import open_storage

    ray.init(address="local", num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False)
    images = prepare(
        ImageRecipe(find(f"{folder}/data"), None, 0.0), open_storage(f"{folder}/index")
    )

    def batches(count: int) -> Iterator[np.ndarray]:
        order = Order.for_steps(images.counts["train"], IMAGES_PER_STEP, MICRO_BATCH, 0, count)
        (shard,) = stream(images, ImageDataConfig(size=224), order, 0, 1).split()
        for batch in steps_of(shard, MICRO_BATCH, order.num_micro_batches(1)):
            yield batch.images

    taken(batches(4 * WARM_UP_STEPS))
    found = taken(batches(steps))
    ray.shutdown()
    return found


class Pictures:
    """A data set for torch: (image, label) by (number, seed)."""

    def __init__(self, folder: str, whole: bool) -> None:
        from rayapp.config.vision import ImageDataConfig

        self.files = sorted(Path(folder, "data").rglob("*.jpg"))
        self.whole, self.look = whole, ImageDataConfig(size=224)

    def __getitem__(self, key: tuple[int, int]) -> tuple[np.ndarray, int]:
        from rayapp.data.images.augment import augmented

        number, seed = key
        data = self.files[number].read_bytes()
        image = as_torchvision(data, seed) if self.whole else augmented(data, self.look, seed)
        return image, int(self.files[number].parent.name.removeprefix("class-"))


def as_torchvision(data: bytes, seed: int) -> np.ndarray:
    """Do as RandomResizedCrop(224) and RandomHorizontalFlip do on a PIL image."""
    import math
    import random

    from PIL import Image, ImageOps

    dice = random.Random(seed)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    for _ in range(10):
        area = image.width * image.height * dice.uniform(0.08, 1.0)
        aspect = math.exp(dice.uniform(*map(math.log, ASPECT)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= image.width and 0 < h <= image.height:
            left, top = dice.randint(0, image.width - w), dice.randint(0, image.height - h)
            image = image.crop((left, top, left + w, top + h))
            break
    image = image.resize((224, 224), Image.Resampling.BILINEAR)
    return np.asarray(ImageOps.mirror(image) if dice.random() < 0.5 else image)


def through_loader(folder: str, steps: int, whole: bool) -> dict[str, float]:
    """Load the same images in the same order with torch's own loader."""
    import torch
    from torch.utils.data import DataLoader

    from rayapp.data.images.augment import seed_of
    from rayapp.order import Order

    pictures = Pictures(folder, whole)
    torch.set_num_threads(1)

    def batches(count: int) -> Iterator[np.ndarray]:
        order = Order.for_steps(len(pictures.files), IMAGES_PER_STEP, MICRO_BATCH, 0, count)
        keys = []
        for step in range(count):
            ids = order.micro_batches(step, 0, 1).ravel().tolist()
            places = range(step * IMAGES_PER_STEP, (step + 1) * IMAGES_PER_STEP)
            keys += [
                (n, seed_of(0, at // order.num_rows, n)) for n, at in zip(ids, places, strict=True)
            ]
        loader = DataLoader(
            pictures,
            sampler=keys,
            batch_size=IMAGES_PER_STEP,
            num_workers=PROCESSES,
            multiprocessing_context="fork",
            collate_fn=stacked,
        )
        for images, _ in loader:
            yield images.numpy()

    taken(batches(WARM_UP_STEPS))
    return taken(batches(steps))


def stacked(samples: list) -> tuple:
    """Make tensors of a batch's images and labels, without a copy that default_collate makes."""
    import torch

    images, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


# ---- Side by side ------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen:
    """Start this file in another role, one thread to a process."""
    environment = {**os.environ, **ENVIRONMENT, **CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT)}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, __file__, "--role", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def answer(process: subprocess.Popen) -> list[dict[str, float]]:
    """Wait for it; return the lines of JSON that it prints."""
    text, _ = process.communicate()
    assert process.returncode == 0, f"{process.args} ended with {process.returncode}"
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def show(label: str, ratios: list[float], target: str) -> None:
    low, high = min(ratios), max(ratios)
    middle = statistics.median(ratios)
    print(f"{label}: median {middle:.3f} ({low:.3f}-{high:.3f}) of {len(ratios)}; {target}")


def pipelines(folder: str, rounds: int, steps: int) -> None:
    """Compare the arms of the input pipeline."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for number in range(rounds):
        for name in ARMS if number % 2 else reversed(ARMS):
            found[name] += answer(start(name, folder, str(steps)))
        latest = {name: results[-1] for name, results in found.items()}
        assert latest["rayapp"]["pixels"] == latest["same"]["pixels"], "the images differ"
        shown = ", ".join(
            f"{name} {one['per_core']:.0f} (wall {one['per_s']:.0f})"
            for name, one in latest.items()
        )
        print(f"round {number + 1}: images per CPU second (per second): {shown}", flush=True)
    for other, target in (("same", "at least 1.0 is wanted"), ("torchvision", "no target")):
        for key, what in (("per_core", "per core"), ("per_s", "by the clock")):
            pairs = zip(found["rayapp"], found[other], strict=True)
            ratios = [ours[key] / theirs[key] for ours, theirs in pairs]
            show(f"pipeline / DataLoader ({other}), {what}", ratios, target)


def play(role: str, folder: str, *words: str) -> None:
    """Do what a process that this file has started is for."""
    numbers = [int(word) for word in words if word.isdigit()]
    if role == "loop":
        from vision_loop import loops

        rank, rounds, steps = numbers
        loops(rank, folder, rounds, steps, words[-1])
    elif role == "rayapp":
        print(json.dumps(through_ray(folder, *numbers)))
    else:
        print(json.dumps(through_loader(folder, *numbers, whole=role == "torchvision")))


def compare(model: str, results: list[dict[str, float]]) -> None:
    """Print what the two loops have come to."""
    for number, one in enumerate(results, 1):
        print(
            f"round {number}, {model}: images/s of rayapp's loop {one['rayapp']:.0f}, bare DDP "
            f"{one['bare']:.0f}"
        )
    ratios = [one["rayapp"] / one["bare"] for one in results]
    show(f"rayapp's loop / bare DDP, {model}", ratios, "at least 0.97 is wanted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--role", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(*options.role)
        return
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder, "data"), options.images)
        pipelines(folder, options.rounds, options.steps)
        for model in LOOPS:
            numbers = (str(options.rounds), str(LOOP_STEPS[model]), model)
            ranks = [start("loop", folder, rank, *numbers) for rank in ("0", "1")]
            results, _ = map(answer, ranks)
            compare(model, results)


if __name__ == "__main__":
    main()
