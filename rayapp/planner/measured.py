"""What the planner is told of a model that it has no formula for: counts of passes on shapes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What passes through a model's blocks count: bytes and FLOPs for one token of a row.

    They are of all blocks together, in the precision of the run.
    """

    flops: float
    """Forward FLOPs of matrix products and convolutions, without attention's scores."""
    attention_flops: float
    """Those of fused attention, with all pairs of tokens."""
    kept_flops: float
    """FLOPs whose results selective checkpointing keeps."""
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
    traffic: float
    """Bytes that elementwise kernels read and write in the forward pass."""


@dataclass(frozen=True, kw_only=True)
class Measured(Counted):
    """The counts for rows as long as the run's, and what the model's modules say."""

    parameters: int
    largest: int
    """Parameters of the largest block."""
    attention: tuple[tuple[float, int | None], ...]
    """Forward FLOPs for each token that a token attends to, and the sliding window, if any."""
    selective_share: float
    """Share of all products' FLOPs that selective checkpointing does not repeat, 0-1."""
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
