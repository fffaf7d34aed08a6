"""Store frozen linear layers in 4 bits (NF4 of QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

    layer = Linear4bit(linear, torch.bfloat16)     # no memory yet
    layer.to_empty(device="cuda").fill(weight)

bitsandbytes quantizes and dequantizes blocks of 64 values within a row, so that each row can be
sharded, loaded and quantized on its own. FSDP casts parameters to the compute dtype, which would
destroy packed bytes. The bytes are therefore stored as tensors of that dtype, which FSDP leaves as
they are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

BLOCK = 64  # values per fp32 scale


class Linear4bit(nn.Module):
    """A frozen linear layer whose weight [out, in] takes 4.5 bits per value, scales included."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.dtype, self.bias = dtype, linear.bias

        def empty(num_bytes: int) -> nn.Parameter:
            shape = (self.out_features, num_bytes // dtype.itemsize)
            return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)

        self.packed = empty(self.in_features // 2)
        self.scales = empty(self.in_features // BLOCK * 4)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [..., in] -> [..., out]."""
        out: Tensor = _Product.apply(x, self.packed, self.scales, self.in_features)
        return out if self.bias is None else out + self.bias

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, [out, in]."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, [out, in] in the compute dtype, inside a forward pass."""
        return _dequantized(self.packed, self.scales, self.in_features, self.dtype).detach()

    def fill(self, rows: Tensor) -> None:
        """Quantize this rank's rows [rows, in] of the weight, and store them."""
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(rows.contiguous(), blocksize=BLOCK, quant_type="nf4")
        for parameter, values in ((self.packed, packed), (self.scales, state.absmax)):
            data = parameter.detach()
            part = data.to_local() if isinstance(data, DTensor) else data
            part.copy_(values.reshape(-1).view(part.dtype).view(part.shape))

    def whole(self) -> Tensor:
        """Return the dequantized weight, [out, in] in fp32, on all ranks; collective."""
        parts = (self.packed.detach(), self.scales.detach())
        packed, scales = (
            cast(DTensor, p.to(p.device_mesh.device_type)).full_tensor()
            if isinstance(p, DTensor)
            else p
            for p in parts
        )
        return _dequantized(packed, scales, self.in_features, torch.float32)


class _Product(torch.autograd.Function):
    """x @ weight.T; the weight is dequantized in the forward and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, in_features: int) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.in_features = in_features
        return nn.functional.linear(x, _dequantized(packed, scales, in_features, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        packed, scales = ctx.saved_tensors
        weight = _dequantized(packed, scales, ctx.in_features, gradient.dtype)
        return gradient @ weight, None, None, None


def _dequantized(packed: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    codes = packed.contiguous().view(torch.uint8).reshape(-1, 1)
    state = QuantState(
        absmax=scales.contiguous().view(torch.float32).reshape(-1),
        shape=torch.Size((packed.shape[0], in_features)),
        code=get_4bit_type("nf4", device=packed.device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    return dequantize_4bit(codes, state)
