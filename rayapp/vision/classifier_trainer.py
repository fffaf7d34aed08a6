"""The Trainer of an image classifier on one rank; rayapp.train.rank trains with it.

A classifier is evaluated by its loss, top-1, top-5, each class, and the classes it confuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rayapp import model
from rayapp.config.fields import IMAGES
from rayapp.data.images.augment import centred
from rayapp.data.images.batches import StepImages, held_out_batches
from rayapp.model.classifier import (
    Classifier,
    build_classifier,
    distribute,
    forward_flops,
    shape_of_classifier,
    write_processor,
)
from rayapp.model.moving_averages import Average, Settling, batch_norms, discard, use_batch_norm
from rayapp.observe.metrics import HeldOut, MetricsLine, line_of
from rayapp.observe.records import Classes, ExportCheck, FinalFigures
from rayapp.observe.run_folder import MODEL
from rayapp.order import StepCounts
from rayapp.storage import Storage, local_copy
from rayapp.train import loop
from rayapp.train.checkpoint.marker import Amounts
from rayapp.train.checkpoint.staging import Tensors
from rayapp.train.engine import Engine
from rayapp.train.export_check import compared, from_rank_zero, wrong_export
from rayapp.train.optimizer import make_optimizers
from rayapp.train.spec import ImageSpec
from rayapp.train.step_sums import Sums
from rayapp.train.trainer_interface import Trainer, peak_flops

CONFUSIONS = 20  # pairs of classes that are listed
TOP = 5
CHECKED_IMAGES = 4  # of an export
# Largest difference of the logits, as a share of their norm; bf16 keeps 8 bits of a number.
TOLERANCE = {False: 1e-3, True: 5e-2}


class ImageTrainer(Trainer):
    """An image classifier and its optimizer on one rank."""

    spec: ImageSpec

    def __init__(self, spec: ImageSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.model = make_model(spec, device)
        self.ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        self.classifier = cast(Classifier, self.ddp.module if self.ddp else self.model)
        train = spec.config.train
        names = ("lr", "weight_decay", "momentum", "betas")
        given: dict[str, Any] = {name: getattr(train, name) for name in names}
        self.optimizers = make_optimizers(train.optimizer, self.classifier, **given)
        self.average = Average(self.classifier, train.ema) if train.ema else None
        self.batch_norms = batch_norms(self.classifier)
        self._last, self._settling = True, Settling([])
        self._scored: tuple[int, Scores] | None = None  # the last evaluation, with its step
        self.classifier.register_forward_hook(self._forwarded)

    def num_parameters(self) -> int:
        return model.num_parameters(self.classifier)

    def amounts(self, step: int) -> Amounts:
        return {"images": step * self.spec.order.rows_per_step}

    def tensors(self) -> Tensors:
        return {"average": self.average.tensors} if self.average else {}

    def engine(self, control: Any) -> Engine:
        batch_norm = self.spec.config.parallel
        engine = self.common_engine(
            control,
            rows_per_epoch=self.spec.order.num_rows,
            unit=IMAGES,
            record=partial(image_record, mfu_per_image(self.spec, self.device)),
            last_of_step=self._last_of_step,
            updated=self._updated,
            # FSDP gathers inside the classifier, and batch-norm over all workers waits for them.
            blocks=[self.classifier] if self.ddp and not batch_norm.sync_batch_norm else [],
        )
        if self.spec.data.held_out:
            engine.evaluate = partial(self.evaluate, engine)
        return engine

    def evaluate(self, engine: Engine, step: int) -> HeldOut:
        """Classify the held-out images after so many steps."""
        self._scored = step, self.scores(engine)
        return self._scored[1].figures()

    def scores(self, engine: Engine) -> Scores:
        """Classify the held-out images, with the moving average of the weights if there is one."""
        rows, config = self.spec.data.rows("eval"), self.spec.config
        ranks = dist.get_rank(), dist.get_world_size()
        batches = held_out_batches(rows, config.data, config.train.micro_batch, *ranks)
        with self.average.in_place() if self.average else nullcontext():
            return evaluate(engine, batches, len(self.spec.data.classes))

    def finish(
        self, engine: Engine, storage: Storage, at: int, held_out: HeldOut, *, export: bool
    ) -> FinalFigures:
        """Export the model, with the moving average of the weights if there is one."""
        outcome: FinalFigures = {"eval_loss": None, "eval_top1": None, "eval_top5": None}
        outcome = {**outcome, **held_out}
        if self.spec.data.held_out:
            fresh = self._scored is not None and self._scored[0] == at
            scores = self._scored[1] if self._scored and fresh else self.scores(engine)
            outcome["classes"] = scores.table(self.spec.data.classes)
        outcome["model_path"] = None
        if export:
            engine.phases.begin("exporting the model", f"to {storage.url}/{MODEL}")
            folder, control, data = storage / MODEL, engine.control, self.spec.config.data
            with self.average.in_place() if self.average else nullcontext():
                model.export(self.classifier, folder)
                if dist.get_rank() == 0:
                    write_processor(folder, data.size, data.eval_crop, data.mean, data.std)
                check = check_export(self.spec, self.classifier, folder, self.device, control)
            outcome |= {"export_check": check, "model_path": f"{storage.url}/{MODEL}"}
        dist.barrier(group=engine.control)
        engine.phases.end("export")
        return outcome

    def _last_of_step(self, last: bool) -> None:
        """Let DDP sum the gradients over ranks only in the last micro-batch of a step."""
        self._last = last
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = last

    def _forwarded(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Start to sum the batch-norm statistics over ranks after the step's last forward pass.

        The all-reduce overlaps the backward pass.
        """
        if self._last and module.training and torch.is_grad_enabled():
            self._settling = Settling(self.batch_norms)

    def _updated(self, skipped: bool) -> None:
        """Update the batch-norm statistics and the moving average, or discard a skipped step's."""
        if skipped:
            self._settling.forget()
            discard(self.batch_norms)  # of the row-by-row passes that named the bad rows
            return
        self._settling.finish()
        if self.average is not None:
            self.average.update()


build = ImageTrainer  # which fills the weights too


def make_model(spec: ImageSpec, device: torch.device) -> nn.Module:
    """Build the model, distribute it over ranks, and fill its weights."""
    config, parallel = spec.config, spec.config.parallel
    model_config, classes = config.model, spec.data.classes
    shape, source = shape_of_classifier(model_config.path, model_config.overrides, classes)
    classifier = build_classifier(
        shape,
        mean=config.data.mean,
        std=config.data.std,
        label_smoothing=config.train.label_smoothing,
        compute=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        channels_last=config.train.channels_last,
    )
    use_batch_norm(classifier.hf, parallel.sync_batch_norm)
    if config.train.compile:
        classifier.hf.compile()
    hybrid = parallel.strategy == "hybrid_shard"
    replicas = (parallel.replicas or model.num_nodes()) if hybrid else 1
    weights = None if config.model.from_scratch else source
    seed = config.run.seed
    return distribute(classifier, parallel.strategy, weights, seed, device, replicas).train()


def image_record(
    mfu_per_image: float | None,
    facts: dict[str, Any],
    counts: StepCounts,
    losses: Sums,
    busy_s: float,
) -> MetricsLine:
    """Make a step's line from the loop's fields and the counts of the batch.

    `mfu_per_image` is the MFU, 0-1, at one image per second. `busy_s` is the step's seconds without
    checkpoint stalls and evaluation.
    """
    images_per_s = counts.images / busy_s
    figures: dict[str, object] = {
        "images": counts.images,
        "images_per_s": images_per_s,
        "images_per_s_per_gpu": images_per_s / facts["workers"],
        "mfu": None if mfu_per_image is None else images_per_s * mfu_per_image,
    }
    return line_of(IMAGES, facts, figures)


def mfu_per_image(spec: ImageSpec, device: torch.device) -> float | None:
    """Return the MFU, 0-1, at one image per second; None on CPUs and where no peak is known.

    MFU is model FLOP/s over the peak of all workers' GPUs; a backward pass counts as twice the
    FLOPs of the forward pass.
    """
    config = spec.config
    peak = peak_flops(config.train.precision, device)
    if peak is None:
        return None
    shape, _ = shape_of_classifier(config.model.path, config.model.overrides, ())
    return 3 * forward_flops(shape, config.data.size) / peak


@dataclass(frozen=True)
class Scores:
    """Sums over all held-out images."""

    loss: float
    top5: int
    confusion: torch.Tensor
    """int64 [classes, classes]: number of images by true class (row) and predicted one (column)."""

    def figures(self) -> HeldOut:
        """Return the fields of a step's record: mean loss in nats, top-1 and top-5, 0-1."""
        images, right = int(self.confusion.sum()), int(self.confusion.diagonal().sum())
        loss, top1, top5 = (total / images for total in (self.loss, right, self.top5))
        return {"eval_loss": loss, "eval_top1": top1, "eval_top5": top5}

    def table(self, classes: Sequence[str]) -> Classes:
        """Return the images and correct ones of each class, and the pairs most often confused."""
        counts, right = self.confusion.sum(1).tolist(), self.confusion.diagonal().tolist()
        wrong = self.confusion.clone().fill_diagonal_(0)
        confused, places = wrong.flatten().sort(descending=True, stable=True)
        most = zip(confused[:CONFUSIONS].tolist(), places[:CONFUSIONS].tolist(), strict=True)
        pairs = [
            (classes[place // len(classes)], classes[place % len(classes)], count)
            for count, place in most
            if count
        ]
        return {"each": list(zip(classes, counts, right, strict=True)), "confused": pairs}


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


@torch.no_grad()
def check_export(
    spec: ImageSpec, classifier: Classifier, folder: Storage, device: torch.device, control: Any
) -> ExportCheck:
    """Compare the exported folder with the model that the ranks hold; all ranks call it.

    Rank 0 opens the folder and its image processor on its CPUs, and compares the logits.

    Raises:
        WrongExport: on all ranks: it does not open, or is another model.
        RuntimeError: on all ranks: the storage has failed.
    """
    rows, look = spec.data.rows("train"), spec.config.data
    files = rows.read(range(min(CHECKED_IMAGES, len(rows))))
    images = np.stack([centred(data, look, rows.as_stored) for data in files])
    pixels = torch.from_numpy(images).to(device)
    labels = torch.zeros(len(images), dtype=torch.int64, device=device)
    classifier.eval()
    try:
        trained = classifier(pixels, labels, labels, labels.float())[2].float().cpu()
    finally:
        classifier.train()
    tolerance = TOLERANCE[classifier.mixed]
    return from_rank_zero(folder, control, lambda: _compared(folder, images, trained, tolerance))


def _compared(folder: Storage, images: Any, trained: Tensor, tolerance: float) -> ExportCheck:
    import transformers

    with ExitStack() as stack:
        path = local_copy(folder, stack)
        hf, report = transformers.AutoModelForImageClassification.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        processor = transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    if names := [*report["missing_keys"], *report["mismatched_keys"]]:
        raise wrong_export(folder, f"is not the model that was trained: it lacks {names[0]}")
    cropped = {"do_resize": False, "do_center_crop": False}  # they are already
    inputs = processor(images=list(images), **cropped, return_tensors="pt")
    logits = hf.eval()(**inputs).logits
    return compared(folder, logits, trained, len(images), "images", tolerance)
