"""Train an image classifier as its config says, by PyTorch, transformers and PIL alone."""

from __future__ import annotations

import io
import json
import math
import random
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import processes
import torch
import torch.nn.functional as F
from pictures import indexed
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageClassification

from rayapp.config import VisionConfig, load
from rayapp.data.images.batches import local_steps
from rayapp.storage import open_storage
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import ImageSpec
from rayapp.vision.classifier_run import order_of
from reference import plain

BASE: dict[str, Any] = {
    "run.trackers": "none",
    "checkpoint.every_s": "none",
    "data.eval_fraction": 0.25,
    "train.precision": "fp32",
    "train.images_per_step": 12,
    "train.micro_batch": 4,
    "train.max_steps": 6,
    "train.warmup_steps": 2,
}


def run(root: Path, world: int, fields: dict[str, Any]) -> ImageSpec:
    """Index and train as `rayapp vision` does, in plain processes of a gloo group."""
    paths = {"run.name": "images", "run.storage": f"{root}/runs", "data.path": f"{root}/data"}
    texts = {name: str(value) for name, value in {**BASE, **paths, **fields}.items()}
    config = load(None, texts, VisionConfig)
    images = indexed(root / "data", open_storage(f"{root}/runs/.prepared"), 0.25)
    url = f"{root}/runs/{config.run.name}"
    spec = ImageSpec("rayapp.vision", config, images, order_of(config, images), url)
    processes.spawn(_train, world, str(root / f"meet-{config.run.name}"), spec)
    return spec


def _train(rank: int, world: int, spec: ImageSpec) -> None:
    rows, look = spec.data.rows("train"), spec.config.data
    context = RankContext(
        torch.device("cpu"), lambda first: local_steps(rows, look, spec.order, rank, world, first)
    )
    summary = train_rank(spec, context)
    if rank == 0:
        Path(spec.run_url, "summary.json").write_text(json.dumps(summary, default=str))


def train(spec: ImageSpec) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return the losses, the gradients' norms, and the moving average of the weights."""
    config = spec.config
    settings = config.train.model_dump() | {"optimizer": "adamw", "decay": 0.2}
    model = AutoModelForImageClassification.from_pretrained(config.model.path).train()
    optimizer, average = plain.Optimizer(model, settings), dict(model.state_dict())
    average = {name: value.clone() for name, value in average.items()}
    found, norms, order, rows = [], [], spec.order, spec.data.rows("train")
    for step in range(order.num_steps):
        ids, total = order.rows(step).tolist(), 0.0
        for start in range(0, len(ids), order.micro_batch):
            part = range(start, min(start + order.micro_batch, len(ids)))
            epochs = [(step * order.rows_per_step + place) // order.num_rows for place in part]
            numbers = [ids[place] for place in part]
            labels = torch.tensor([int(rows.records[number]["label"]) for number in numbers])
            seeds = [seed_of(order.seed, e, n) for e, n in zip(epochs, numbers, strict=True)]
            files = rows.read(numbers)
            seen = [pixels(f, s, config.data) for f, s in zip(files, seeds, strict=True)]
            targets = mixed(seen, F.one_hot(labels, model.num_labels).float(), seeds, config.data)
            shown = (torch.from_numpy(np.stack(seen)).permute(0, 3, 1, 2) / 255).float()
            mean, std = (torch.tensor(v).view(3, 1, 1) for v in (config.data.mean, config.data.std))
            log_p = torch.log_softmax(model(pixel_values=(shown - mean) / std).logits, -1)
            smooth = config.train.label_smoothing
            smoothed = (1 - smooth) * targets + smooth / model.num_labels
            (-(smoothed * log_p).sum() / len(ids)).backward()
            total += float(-(targets * log_p).sum())
        found.append(total / len(ids))
        norms.append(plain.clip(model, config.train.grad_clip))
        optimizer.step(plain.rate(step, order.num_steps, settings))
        share = min(config.train.ema or 0.0, (step + 2) / (step + 11))
        for name, value in model.state_dict().items():
            average[name] = share * average[name] + (1 - share) * value
    return found, norms, average


def seed_of(seed: int, epoch: int, image: int) -> int:
    text = f"augment {seed} {epoch} {image}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def pixels(data: bytes, seed: int, settings: Any) -> np.ndarray[Any, Any]:
    """Crop by area and aspect as torchvision's RandomResizedCrop, and mirror."""
    draw, image = random.Random(seed), Image.open(io.BytesIO(data)).convert("RGB")
    low, high = settings.crop_scale
    box = None
    for _ in range(10):
        area = image.width * image.height * (low + (high - low) * draw.random())
        aspect = (3 / 4) * (16 / 9) ** draw.random()
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= image.width and 0 < h <= image.height:
            left = int(draw.random() * (image.width - w + 1))
            top = int(draw.random() * (image.height - h + 1))
            box = (left, top, left + w, top + h)
            break
    assert box is not None, "these images have room for the crops"
    image = image.resize((settings.size, settings.size), Image.Resampling.BILINEAR, box=box)
    if draw.random() < settings.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(image)


def mixed(seen: list[Any], targets: Tensor, seeds: list[int], settings: Any) -> Tensor:
    """Mix image j with the j-th from the end, by mixup or CutMix; return the mixed targets."""
    found, size = targets.clone(), settings.size
    for j in range(len(seen) // 2):
        k = len(seen) - 1 - j
        draw = random.Random(seeds[j] ^ seeds[k])
        cuts = draw.random() < 0.5
        alpha = settings.cutmix if cuts else settings.mixup
        share = draw.betavariate(alpha, alpha)
        one, other = seen[j].copy(), seen[k].copy()
        if cuts:
            side, kept = math.sqrt(1 - share) * size, np.ones((size, size), bool)
            y, x = draw.random() * size, draw.random() * size
            edges = [round(min(max(m + s * side / 2, 0), size)) for m in (y, x) for s in (-1, 1)]
            kept[edges[0] : edges[1], edges[2] : edges[3]] = False
            seen[j][~kept], seen[k][~kept] = other[~kept], one[~kept]
            share = float(kept.mean())
        else:
            pairs = ((j, one, other), (k, other, one))
            for place, own, added in pairs:
                blend = share * own.astype(float) + (1 - share) * added
                seen[place] = np.rint(blend).astype(np.uint8)
        found[j] = share * targets[j] + (1 - share) * targets[k]
        found[k] = share * targets[k] + (1 - share) * targets[j]
    return found
