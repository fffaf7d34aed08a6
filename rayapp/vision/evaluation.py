"""Evaluate a classifier on held-out images: loss, top-1, top-5, each class, and confusions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayapp.data.images.batches import StepImages
from rayapp.observe.metrics import HeldOut
from rayapp.observe.records import Classes
from rayapp.train import loop
from rayapp.train.engine import Engine

CONFUSIONS = 20  # pairs of classes that are listed
TOP = 5


@dataclass(frozen=True)
class Scores:
    """Sums over all held-out images."""

    loss: float
    top5: int
    confusion: torch.Tensor
    """int64 [classes, classes]: number of images by true class (row) and predicted one (column)."""

    @property
    def images(self) -> int:
        """The number of held-out images."""
        return int(self.confusion.sum())

    def figures(self) -> HeldOut:
        """Return the fields of a step's record: mean loss in nats, top-1 and top-5, 0-1."""
        right = int(self.confusion.diagonal().sum())
        return {
            "eval_loss": self.loss / self.images,
            "eval_top1": right / self.images,
            "eval_top5": self.top5 / self.images,
        }

    def table(self, classes: Sequence[str]) -> Classes:
        """Return the images and correct ones of each class, and the pairs most often confused."""
        counts, right = self.confusion.sum(1).tolist(), self.confusion.diagonal().tolist()
        wrong = self.confusion.clone().fill_diagonal_(0)
        confused, places = wrong.flatten().sort(descending=True, stable=True)
        pairs = [
            (classes[place // len(classes)], classes[place % len(classes)], count)
            for count, place in zip(
                confused[:CONFUSIONS].tolist(), places[:CONFUSIONS].tolist(), strict=True
            )
            if count
        ]
        each = zip(classes, counts, right, strict=True)
        return {"each": list(each), "confused": pairs}


def evaluate(engine: Engine, batches: Iterable[StepImages], classes: int) -> Scores:
    """Classify this rank's batches; return the scores over all ranks, which call it together."""
    confusion = torch.zeros(classes, classes, dtype=torch.int64)

    def measure(batch: StepImages, i: int, output: tuple[torch.Tensor, ...]) -> dict[str, float]:
        _, loss, logits = output
        labels = torch.from_numpy(batch.inputs(i)["labels"])
        likely = logits.topk(min(TOP, classes), -1).indices.cpu()
        places = labels * classes + likely[:, 0]
        confusion.view(-1).add_(torch.bincount(places, minlength=classes**2))
        return {"loss": float(loss), "top5": float((likely == labels[:, None]).sum())}

    sums = loop.evaluate(engine, batches, measure)
    dist.all_reduce(confusion, group=engine.control)
    return Scores(sums["loss"], round(sums["top5"]), confusion)
