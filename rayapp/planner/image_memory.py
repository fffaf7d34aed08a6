"""Bytes on a GPU while an image classifier trains, term by term, when a step holds most.

    peak = image_peak(ImageLayout(image_shape_of(config, 224), shards=1, micro_batch=64))

That moment is the end of the forward pass, when all is there that the backward pass wants.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.planner.image_shape import ImageShape
from rayapp.planner.memory import FP32, Peak

# fp32 states of a parameter in the optimizer.
STATES = {"sgd": 1, "lars": 1, "adamw": 2}
# What cuDNN works in, where the algorithm that is fastest wants room.
WORKSPACE_BYTES = 2**29


@dataclass(frozen=True)
class ImageLayout:
    """A classifier, how it is laid out over ranks, and how it is trained."""

    shape: ImageShape
    shards: int
    """Ranks that hold a part of each parameter: all, those of a replica, or 1."""
    micro_batch: int
    strategy: str = "ddp"
    precision: str = "bf16"
    optimizer: str = "sgd"
    compiled: bool = False
    averaged: bool = False
    """A moving average of the weights is kept."""
    synchronized: bool = False
    """Batch-norm over all ranks, in fp32."""
    accumulates: bool = False
    """More than one micro-batch a step."""
    on_cpu: bool = False

    @property
    def tokens(self) -> int:
        """Images of a micro-batch."""
        return self.micro_batch

    @property
    def row(self) -> int:
        """Images of a row: it is one."""
        return 1

    @property
    def element(self) -> int:
        """Bytes of a number in compute."""
        return FP32 if self.precision == "fp32" else 2

    @property
    def trainable(self) -> int:
        """Parameters that have a gradient: all."""
        return self.shape.parameters

    def peak(self) -> Peak:
        """Return the moment of a step that holds most."""
        return image_peak(self)

    def checkpoint_bytes(self) -> float:
        """Return the bytes of a checkpoint of all ranks."""
        return FP32 * self.trainable * (1.0 + STATES[self.optimizer] + self.averaged)

    def model_flops(self, context: float) -> float:
        """Return the FLOPs that training on an image needs."""
        return self.shape.model_flops


def kept_image_bytes(layout: ImageLayout) -> float:
    """Return what is kept of one image between forward and backward."""
    kept = layout.shape.kept
    of_norms = FP32 if layout.synchronized else layout.element
    return float(
        layout.element * kept.values + of_norms * kept.norms + 8 * kept.indices + kept.masks
    )


def image_peak(layout: ImageLayout) -> Peak:
    """Return the moment of a step that holds most, without the allocator's own."""
    parameters, shards = float(layout.shape.parameters), layout.shards
    copies = layout.element * parameters if layout.element < FP32 else 0.0  # autocast's
    gathers = 0.0 if layout.strategy == "ddp" else FP32 * parameters
    of_norm = 3 * FP32 if layout.synchronized else 2 * layout.element
    working = of_norm * layout.shape.largest * layout.micro_batch
    terms = {
        "parameters": FP32 * parameters / shards,
        "gradients": FP32 * parameters / shards,
        "optimizer": FP32 * STATES[layout.optimizer] * parameters / shards,
        "average": FP32 * parameters / shards if layout.averaged else 0.0,
        "gathers": copies + gathers,
        "activations": layout.micro_batch * kept_image_bytes(layout),
        "logits": 4.0 * FP32 * layout.micro_batch * layout.shape.classes,
        "working": working + (0.0 if layout.on_cpu else WORKSPACE_BYTES),
    }
    return Peak("the end of the forward pass", terms)
