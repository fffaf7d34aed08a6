"""Exact counts of a transformer from its config.json: parameters, FLOPs, bytes; no torch.

shape.py   linear layers, parameters and LoRA's adapters, from a config.json
flops.py   FLOPs per token, of the model and of the hardware; MFU
memory.py  peak bytes on a GPU, term by term (import it from there)

Letters: S seq_len, H hidden size, V vocabulary, C mean number of tokens that a token attends to.
"""

from rayapp.planner.flops import (
    Flops,
    backward_flops,
    forward_flops,
    hardware_flops,
    mean_context,
    mfu,
    model_flops,
    recomputed_flops,
)
from rayapp.planner.shape import Linear, Shape, UnknownShape, lora_parameters, shape_of, targeted

__all__ = [
    "Flops",
    "Linear",
    "Shape",
    "UnknownShape",
    "backward_flops",
    "forward_flops",
    "hardware_flops",
    "lora_parameters",
    "mean_context",
    "mfu",
    "model_flops",
    "recomputed_flops",
    "shape_of",
    "targeted",
]
