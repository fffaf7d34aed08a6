"""The Trainer of an image classifier on one rank; rayapp.train.rank trains with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayapp import hardware, model
from rayapp.config.fields import IMAGES
from rayapp.data.images.batches import held_out_batches
from rayapp.model.average import Average
from rayapp.model.batch_norm import Settling, batch_norms, discard, use_batch_norm
from rayapp.model.classifier import (
    Classifier,
    build_classifier,
    distribute,
    forward_flops,
    shape_of_classifier,
    write_processor,
)
from rayapp.observe.activity import Phases
from rayapp.observe.metrics import MetricsLine, line_of
from rayapp.observe.records import ExportCheck, FinalFigures
from rayapp.observe.run_folder import MODEL
from rayapp.order import StepCounts
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import Amounts
from rayapp.train.checkpoint.staging import Tensors
from rayapp.train.engine import Engine
from rayapp.train.loss_spikes import Spikes
from rayapp.train.optimizer import lr_at, make_image_optimizer
from rayapp.train.spec import ImageSpec
from rayapp.train.step_sums import Sums
from rayapp.train.trainer import Trainer
from rayapp.vision.evaluation import Scores, evaluate
from rayapp.vision.exported import check_export
from rayapp.vision.rows import transform_of


def build(spec: ImageSpec, device: torch.device) -> ImageTrainer:
    """Build the model, distribute it over ranks, fill its weights and make the optimizer."""
    return ImageTrainer(spec, device)


class ImageTrainer(Trainer):
    """An image classifier and its optimizer on one rank."""

    def __init__(self, spec: ImageSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.model = make_model(spec, device)
        self.ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        self.classifier = cast(Classifier, self.ddp.module if self.ddp else self.model)
        train = spec.config.train
        optimizer = make_image_optimizer(
            train.optimizer,
            self.classifier,
            lr=train.lr,
            weight_decay=train.weight_decay,
            momentum=train.momentum,
            betas=train.betas,
        )
        self.optimizers = [optimizer]
        self.average = Average(self.classifier, train.ema) if train.ema else None
        self.batch_norms = batch_norms(self.classifier)
        self._last, self._settling = True, Settling([])
        self.classifier.register_forward_hook(self._forwarded)

    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return model.num_parameters(self.classifier)

    def amounts(self, step: int) -> Amounts:
        """Return the number of images of so many steps."""
        return {"images": step * self.spec.order.rows_per_step}

    def tensors(self) -> Tensors:
        """Return the moving average of the weights, if there is one."""
        return {"average": self.average.tensors} if self.average else {}

    def engine(self, control: Any) -> Engine:
        """Return the loop's engine for a classifier."""
        spec, train = self.spec, self.spec.config.train
        engine = Engine(
            model=self.model,
            optimizers=self.optimizers,
            lr_at=partial(
                lr_at,
                peak=train.lr,
                schedule=train.schedule,
                num_steps=spec.order.num_steps,
                warmup_steps=train.warmup_steps,
                floor=train.min_lr,
                decay=train.decay,
                first=train.schedule_from,
            ),
            device=self.device,
            grad_clip=train.grad_clip,
            control=control,
            rows_per_epoch=spec.order.num_rows,
            rows_per_step=spec.order.rows_per_step,
            spikes=Spikes(train.spike_sigmas) if train.on_spike != "none" else None,
            unit=IMAGES,
            record=partial(image_record, mfu_of(spec, self.device)),
            skip_bad=train.on_spike == "skip",
            last_of_step=self._last_of_step,
            updated=self._updated,
        )
        if spec.data.held_out:
            engine.evaluate = lambda step: self.scores(engine).figures()
        return engine

    def scores(self, engine: Engine) -> Scores:
        """Classify the held-out images, with the moving average of the weights if there is one."""
        rows = self.spec.data.rows("eval")
        micro_batch, transform = self.spec.config.train.micro_batch, transform_of(self.spec.config)
        batches = held_out_batches(
            rows, transform, micro_batch, dist.get_rank(), dist.get_world_size()
        )
        with self.average.in_place() if self.average else nullcontext():
            return evaluate(engine, batches, len(self.spec.data.classes))

    def finish(self, engine: Engine, storage: Storage, phases: Phases) -> FinalFigures:
        """Evaluate and export the model, with the moving average of the weights if there is one."""
        outcome: FinalFigures = {"eval_loss": None, "eval_top1": None, "eval_top5": None}
        if self.spec.data.held_out:
            scores = self.scores(engine)
            table = scores.table(self.spec.data.classes)
            outcome = {**outcome, **scores.figures(), "classes": table}
        phases.end("evaluation")
        phases.begin("exporting the model", f"to {storage.url}/{MODEL}")
        outcome["model_path"] = None
        if self.spec.config.checkpoint.export:
            with self.average.in_place() if self.average else nullcontext():
                outcome["export_check"] = self._export(storage / MODEL, engine.control)
            outcome["model_path"] = f"{storage.url}/model"
        dist.barrier(group=engine.control)
        phases.end("export")
        return outcome

    def _export(self, folder: Storage, control: Any) -> ExportCheck:
        """Export the model as it is, and check that it opens."""
        model.export(self.classifier, folder)
        if dist.get_rank() == 0:
            data = self.spec.config.data
            write_processor(folder, data.size, data.eval_crop, data.mean, data.std)
        return check_export(self.spec, self.classifier, folder, self.device, control)

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


def make_model(spec: ImageSpec, device: torch.device) -> nn.Module:
    """Build the model, distribute it over ranks, and fill its weights."""
    config = spec.config
    shape, source = shape_of_classifier(
        config.model.path, config.model.overrides, spec.data.classes
    )
    classifier = build_classifier(
        shape,
        mean=config.data.mean,
        std=config.data.std,
        label_smoothing=config.train.label_smoothing,
        compute=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        channels_last=config.train.channels_last,
    )
    use_batch_norm(classifier.hf, config.parallel.sync_batch_norm)
    if config.train.compile:
        classifier.hf.compile()
    hybrid = config.parallel.strategy == "hybrid_shard"
    replicas = (config.parallel.replicas or model.num_nodes()) if hybrid else 1
    weights = None if config.model.from_scratch else source
    made = distribute(
        classifier, config.parallel.strategy, weights, config.run.seed, device, replicas
    )
    return made.train()


def image_record(
    mfu: Callable[[int, float], float | None],
    facts: dict[str, Any],
    counts: StepCounts,
    losses: Sums,
    busy_s: float,
) -> MetricsLine:
    """Make a step's line from the loop's fields and the counts of the batch.

    `busy_s` is the step's seconds without checkpoint stalls and evaluation.
    """
    figures: dict[str, object] = {
        "images": counts.images,
        "images_per_s": counts.images / busy_s,
        "images_per_s_per_gpu": counts.images / busy_s / facts["workers"],
        "mfu": mfu(counts.images, busy_s),
    }
    return line_of(IMAGES, facts, figures)


def mfu_of(spec: ImageSpec, device: torch.device) -> Callable[[int, float], float | None]:
    """Return a function of (images, seconds) that computes the MFU, 0-1.

    MFU is model FLOP/s over the peak of all workers' GPUs; a backward pass counts as twice the
    FLOPs of the forward pass. The function returns None on CPUs and where no peak is known.
    """
    if device.type != "cuda":
        return lambda images, seconds: None
    gpu = hardware.gpu_from_device_name(torch.cuda.get_device_name(device))
    peak = None if gpu is None else gpu.flops[spec.config.train.precision]
    if peak is None:
        return lambda images, seconds: None
    shape, _ = shape_of_classifier(spec.config.model.path, spec.config.model.overrides, ())
    of_image = 3 * forward_flops(shape, spec.config.data.size)
    all_of_them = peak * dist.get_world_size()
    return lambda images, seconds: images * of_image / seconds / all_of_them
