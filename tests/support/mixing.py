"""Stand-ins for the kernels of causal-conv1d, flash-linear-attention and mamba-ssm.

    monkeypatch.setitem(sys.modules, ...) for each of packages()

They have the names and parameters of those packages, and compute token by token in PyTorch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Shapes: x [B, C, T], weight [C, width], seq_idx int32 [B, T]."""
    seq_idx = torch.zeros_like(x[:, 0], dtype=torch.int32) if seq_idx is None else seq_idx
    assert seq_idx.dtype == torch.int32
    out = torch.zeros_like(x) if bias is None else bias[:, None].expand(x.shape[1:])[None].clone()
    for back in range(weight.shape[1]):
        same = torch.zeros_like(seq_idx, dtype=torch.bool)
        same[:, back:] = seq_idx[:, back:] == seq_idx[:, : x.shape[2] - back]
        earlier = F.pad(x, (back, 0))[:, :, : x.shape[2]]
        out = out + weight[:, -1 - back, None] * torch.where(same[:, None], earlier, 0)
    return F.silu(out) if activation else out


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Shapes: q, k [1, T, heads, K], v [1, T, value heads, V], g, beta [1, T, value heads]."""
    cu_seqlens = torch.tensor([0, v.shape[1]]) if cu_seqlens is None else cu_seqlens
    assert cu_seqlens.dtype == torch.int64 and len(q) == 1
    q, k = (each.repeat_interleave(v.shape[2] // q.shape[2], 2)[0] for each in (q, k))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    starts, out, state = set(cu_seqlens.tolist()), [], torch.zeros(())
    for t in range(v.shape[1]):
        if t in starts:
            state = v.new_zeros(*v.shape[2:3], k.shape[-1], v.shape[-1])
        state = state * g[0, t].exp()[:, None, None]
        seen = torch.einsum("hk,hkv->hv", k[t], state)
        change = beta[0, t][:, None] * (v[0, t] - seen)
        state = state + k[t][:, :, None] * change[:, None]
        out.append(torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5)
    return torch.stack(out)[None], None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Shapes: x [1, T, heads, P], dt [1, T, heads], B, C [1, T, groups, N], A, D [heads]."""
    seq_idx = torch.zeros_like(x[:, :, 0, 0]) if seq_idx is None else seq_idx
    assert dt_softplus and len(x) == 1
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (B, C))
    out, state = [], x.new_zeros(*x.shape[2:], B.shape[-1])
    for t in range(x.shape[1]):
        if t and seq_idx[0, t] != seq_idx[0, t - 1]:
            state = torch.zeros_like(state)
        decay = (dt[0, t] * A).exp()[:, None, None]
        state = state * decay + torch.einsum("h,hp,hn->hpn", dt[0, t], x[0, t], B[0, t])
        out.append(torch.einsum("hpn,hn->hp", state, C[0, t]) + D[:, None] * x[0, t])
    return torch.stack(out)[None]


def packages() -> dict[str, Any]:
    """Return the packages as modules, by name."""
    parts = {
        "causal_conv1d": causal_conv1d_fn,
        "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
        "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
    }
    made: dict[str, Any] = {}
    for path, function in parts.items():
        names = path.split(".")
        for count in range(1, len(names) + 1):
            name = ".".join(names[:count])
            made.setdefault(name, ModuleType(name))
            if count > 1:
                setattr(made[".".join(names[: count - 1])], names[count - 1], made[name])
        setattr(made[path], function.__name__, function)
    return made
