"""Exact counts of a transformer from its config.json: parameters, FLOPs, bytes; no torch.

shape.py   what a config.json amounts to: linears, parameters, LoRA
flops.py   FLOPs a token, the model's and the hardware's; MFU
memory.py  bytes on a GPU, term by term

Letters: S seq_len, H hidden size, V vocabulary, C tokens that a token attends to on average.
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
