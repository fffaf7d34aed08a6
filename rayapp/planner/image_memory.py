"""Peak bytes on a GPU while an image classifier trains, term by term.

    peak = image_peak(ImageLayout(image_shape_of(config, 224), shards=1, micro_batch=64))

The peak is at the end of the forward pass, when everything that the backward pass needs is alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.config.language import Precision
from rayapp.config.optimizers import OPTIMIZERS, ImageOptimizerName
from rayapp.config.vision import ImageStrategy
from rayapp.planner.image_shape import ImageShape
from rayapp.planner.memory import FP32, Peak

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
    def tokens(self) -> int:
        """Images in a micro-batch."""
        return self.micro_batch

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

    def peak(self) -> Peak:
        """Return the moment of a step with the most memory."""
        return image_peak(self)

    def checkpoint_bytes(self) -> float:
        """Return the bytes of one checkpoint, all ranks together."""
        moments = OPTIMIZERS[self.optimizer].moment_bytes
        return self.trainable * (FP32 * (1.0 + self.averaged) + moments)

    def model_flops(self, context: float) -> float:
        """Return the model FLOPs per training image; `context` is unused."""
        return self.shape.model_flops


def kept_image_bytes(layout: ImageLayout) -> float:
    """Return the bytes kept per image between forward and backward."""
    kept = layout.shape.kept
    of_norms = FP32 if layout.synchronized else layout.element
    return float(
        layout.element * kept.values + of_norms * kept.norms + 8 * kept.indices + kept.masks
    )


def image_peak(layout: ImageLayout) -> Peak:
    """Return the bytes at the end of the forward pass, without the allocator's fragmentation."""
    parameters, shards = float(layout.shape.parameters), layout.shards
    copies = layout.element * parameters if layout.element < FP32 else 0.0  # autocast's casts
    gathers = 0.0 if layout.strategy == "ddp" else FP32 * parameters
    of_norm = 3 * FP32 if layout.synchronized else 2 * layout.element
    workspace = of_norm * layout.shape.largest * layout.micro_batch
    terms = {
        "parameters": FP32 * parameters / shards,
        "gradients": FP32 * parameters / shards,
        "optimizer": OPTIMIZERS[layout.optimizer].moment_bytes * parameters / shards,
        "average": FP32 * parameters / shards if layout.averaged else 0.0,
        "gathers": copies + gathers,
        "activations": layout.micro_batch * kept_image_bytes(layout),
        "logits": 4.0 * FP32 * layout.micro_batch * layout.shape.classes,
        "working": workspace + (0.0 if layout.on_cpu else WORKSPACE_BYTES),
    }
    return Peak("the end of the forward pass", terms)
