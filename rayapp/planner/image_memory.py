"""Peak bytes on a GPU while an image classifier trains, term by term.

The peak is at the end of the forward pass, when everything that the backward pass needs is alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayapp.config import VisionConfig
from rayapp.config.language import Precision
from rayapp.config.optimizers import OPTIMIZERS, ImageOptimizerName
from rayapp.config.vision import ImageStrategy
from rayapp.planner.image_shape import ImageShape, image_shape_of
from rayapp.planner.memory import FP32, Peak
from rayapp.planner.shape import UnknownShape
from rayapp.planner.trained import read_config_json
from rayapp.presets import IMAGE_PRESETS

# Bytes of cuDNN's workspace for its fastest algorithm. Estimate: half a GiB, not measured.
WORKSPACE_BYTES = 2**29


@dataclass(frozen=True)
class ImageLayout:
    """An image classifier with its sharding and its training settings."""

    shape: ImageShape
    shards: int
    """Ranks that each parameter is sharded over: all ranks, those of one replica, or 1."""
    micro_batch: int
    strategy: ImageStrategy = "ddp"
    precision: Precision = "bf16"
    optimizer: ImageOptimizerName = "sgd"
    compiled: bool = False
    averaged: bool = False
    """A moving average of the weights is kept."""
    synchronized: bool = False
    """Batch-norm takes its statistics over all ranks, in fp32."""
    accumulates: bool = False
    """A step has several micro-batches."""
    on_cpu: bool = False

    @property
    def row(self) -> int:
        """Images per row: always 1."""
        return 1

    @property
    def element(self) -> int:
        """Bytes per number in the compute precision."""
        return FP32 if self.precision == "fp32" else 2

    @property
    def trainable(self) -> int:
        """Number of parameters that have a gradient: all of them."""
        return self.shape.parameters

    @property
    def kept_bytes(self) -> float:
        """Bytes kept per image between forward and backward."""
        kept, of_norms = self.shape.kept, FP32 if self.synchronized else self.element
        floats = self.element * kept.values + of_norms * kept.norms
        return float(floats + 8 * kept.indices + kept.masks)

    def peak(self) -> Peak:
        """Return the bytes at the end of the forward pass, without the allocator's fragmentation.

        That is the moment of a step with the most memory.
        """
        parameters, count = float(self.shape.parameters), self.micro_batch
        of_shard = FP32 * parameters / self.shards
        copies = self.element * parameters if self.element < FP32 else 0.0  # autocast's casts
        gathers = 0.0 if self.strategy == "ddp" else FP32 * parameters
        of_norm = 3 * FP32 if self.synchronized else 2 * self.element
        workspace = of_norm * self.shape.largest * count
        terms = {
            "parameters": of_shard,
            "gradients": of_shard,
            "optimizer": of_shard / FP32 * OPTIMIZERS[self.optimizer].moment_bytes,
            "average": of_shard if self.averaged else 0.0,
            "gathers": copies + gathers,
            "activations": count * self.kept_bytes,
            "logits": 4.0 * FP32 * count * self.shape.classes,
            "working": workspace + (0.0 if self.on_cpu else WORKSPACE_BYTES),
        }
        return Peak("the end of the forward pass", terms)

    def checkpoint_bytes(self) -> float:
        """Return the bytes of one checkpoint, all ranks together."""
        moments = OPTIMIZERS[self.optimizer].moment_bytes
        return self.trainable * (FP32 * (1.0 + self.averaged) + moments)

    def model_flops(self) -> float:
        """Return the model FLOPs per training image: a backward pass costs two forward passes."""
        return 6.0 * self.shape.macs


def image_layout(
    config: VisionConfig,
    model: Mapping[str, Any] | None,
    precision: Precision,
    problems: list[str],
) -> ImageLayout | None:
    """Return the layout on one worker; None, with a new problem, if the model is not known.

    `model` is its config.json, overrides included, if the caller has it.
    """
    path, train = config.model.path, config.train
    preset = IMAGE_PRESETS.get(path)
    if model is None and preset is not None:
        model = {"model_type": preset.model_type, **preset.fields, **config.model.overrides}
    elif model is None:
        values = read_config_json(path, IMAGE_PRESETS, problems)
        if values is None:
            return None
        model = {**values, **config.model.overrides}
    try:
        shape = image_shape_of(model, config.data.size)
    except UnknownShape as error:
        problems.append(f"model.path={path} is not known: {error}")
        return None
    return ImageLayout(
        shape=shape,
        shards=1,
        micro_batch=train.micro_batch,
        strategy=config.parallel.strategy,
        precision=precision,
        optimizer=train.optimizer,
        compiled=train.compile,
        averaged=train.ema > 0,
        synchronized=config.parallel.sync_batch_norm,
    )
