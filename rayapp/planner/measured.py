"""What the planner asks of a model that it has no formula for, and what it is told.

    def read(config, *, seq_len, fp32, lora) -> Shape: ...     # rayapp.model.reading.read

The caller gives the function (`ask(config, read=read)`), so that the planner imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rayapp.config.lora import Lora

if TYPE_CHECKING:
    from rayapp.planner.shape import Shape


@dataclass(frozen=True)
class Measured:
    """What running a model's blocks on shapes has counted. Bytes and FLOPs are for one token.

    They are of all blocks together, of one row of so many tokens as the run has, in its precision.
    """

    parameters: int
    largest: int
    """Parameters of the largest block."""
    flops: float
    """Forward FLOPs of matrix products and convolutions, without attention's scores."""
    attention: tuple[tuple[float, int | None], ...]
    """Forward FLOPs for each token that a token attends to, and the sliding window, if any."""
    kept: float
    """Bytes for the backward pass, without checkpointing."""
    kept_selective: float
    """The same with selective checkpointing: blocks' inputs and the results that it keeps."""
    kept_outside: float
    """Bytes that are kept outside the blocks, such as inputs that every block takes."""
    largest_kept: float
    """Bytes of the block that keeps the most."""
    in_flight: float
    """Bytes of gradients and other values beside the kept ones at the peak of a backward pass."""
    largest_backward: float
    """Both together, of the block where they are the most."""
    forward: float
    """Bytes at the peak of a block's forward pass beside those that it keeps."""
    forward_alone: float
    """Bytes at the peak of a forward pass that keeps nothing, its input left out."""
    results: float
    """Bytes of the results of matrix products and attention."""
    products: float
    """The same with what the products take, weights left out: what compiled blocks keep."""
    selective_share: float
    """Share of `flops` that selective checkpointing does not repeat, 0-1."""
    traffic: float
    """Bytes that elementwise kernels read and write in the forward pass."""
    kernels: int
    """Kernels of the forward pass."""
    adapted: bool
    """The run's adapters were in place."""
    kernel_packages: tuple[str, ...]
    """Packages with kernels for layers that mix along the sequence without attention."""
    whole_logits: bool
    """The model computes all logits at once, because it changes them after the head."""


@dataclass(frozen=True)
class Frozen:
    """How many parameters train.freeze names."""

    parameters: int = 0
    matrices: int = 0
    """Of hidden linear layers, which Muon trains."""
    tables: int = 0
    """Of embeddings."""
    head: bool = False
    """The output layer has no gradient."""


class ReadModel(Protocol):
    """Read the shape of a model that has no formula here from what transformers builds of it."""

    def __call__(
        self, config: Mapping[str, Any], *, seq_len: int, fp32: bool, lora: Lora | None
    ) -> Shape:
        """Return the shape that a config.json describes.

        Raises:
            UnknownShape: transformers cannot build it, or it cannot run on shapes alone.
        """
