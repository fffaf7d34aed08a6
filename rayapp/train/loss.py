"""Cross-entropy in chunks, which never holds all logits; it returns sums, not means.

    objective, loss_sum = chunked_cross_entropy(hidden, lm_head.weight, labels, chunk=4096)
    (objective / valid_tokens_of_the_whole_global_batch).backward()

The forward pass computes each chunk's gradient together with its loss, while its logits exist, and
keeps only the gradients of the hidden states and of the weight. So each logit is computed once, and
at most `chunk * vocabulary` exist, in the compute dtype; fp32 copies are of 1 / LOG_PARTS of them.
The idea is Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv 2410.10989). Softmax and
sums are at least fp32 whatever the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayapp.planner.memory import LOG_PARTS, LOSS_WORDS

IGNORE = -100


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int = 4096,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    compiled: bool = False,
    each: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (objective, cross-entropy), sums in nats over labels that are not IGNORE.

    Differentiate the objective. It is the cross-entropy against a target that gives the label
    1 - label_smoothing and spreads the rest evenly over the vocabulary (Szegedy et al. 2016, arXiv
    1512.00567), plus z_loss times the squared log of the softmax's sum (Chowdhery et al. 2022,
    arXiv 2204.02311). With both 0 it equals the cross-entropy, which has no gradient.

    Shapes: hidden [..., H], weight [V, H], labels [...] (already shifted: the label of a position
    is its next token), bias [V] -> fp32 scalars (fp64 for fp64). `chunk` is in tokens; 0 takes all
    at once. Without a weight, `hidden` holds the logits [..., V]. `each`, fp32 [labels], is filled
    with the cross-entropy of each label, 0 where it is IGNORE.
    """
    tokens = labels.numel()
    objective, loss = _ChunkedCrossEntropy.apply(
        hidden.reshape(tokens, hidden.shape[-1]),
        weight,
        labels.reshape(tokens),
        bias,
        chunk or max(tokens, 1),
        partial(_softmax, z_loss=z_loss, smoothing=label_smoothing, compiled=compiled),
        torch.is_grad_enabled(),  # always False inside forward()
        each,
    )
    return objective, loss


def liger_cross_entropy(
    hidden: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    each: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same with liger-kernel's fused kernel, which chooses its own chunks.

    It needs that package and a GPU (or Triton's interpreter); sums over chunks are fp32. Without a
    weight there is nothing to fuse, and chunked_cross_entropy computes the loss. The kernel gives
    no loss of a label: `each` is filled with NaN.
    """
    if weight is None:
        return chunked_cross_entropy(hidden, None, labels, each=each)
    if each is not None:
        each.fill_(torch.nan)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    tokens, none = labels.numel(), None
    flat = (hidden.reshape(tokens, weight.shape[1]), weight, labels.reshape(tokens), bias)
    # class weights, IGNORE, z-loss, smoothing, reduction, cap, z-loss apart, dtype of sums
    options = (none, IGNORE, 0.0, 0.0, "sum", none, False, torch.float32)
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(*flat, *options)
    return loss, loss.detach()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        bias: Tensor | None,
        chunk: int,
        softmax: Callable[..., tuple[Tensor, ...]],
        grad_enabled: bool,
        each: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # Sums over chunks are fp32: bf16 would lose what each further chunk adds.
        sums = torch.promote_types(hidden.dtype, torch.float32)
        of_hidden, of_weight, _, of_bias = (grad_enabled and n for n in ctx.needs_input_grad[:4])
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight = None
        if of_weight and weight is not None:
            grad_weight = torch.zeros_like(weight, dtype=sums)
        grad_bias = torch.zeros_like(bias, dtype=sums) if of_bias and bias is not None else None
        total, added = hidden.new_zeros(2, dtype=sums)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            valid = (labels[part] != IGNORE).unsqueeze(1)  # [c, 1]
            target = torch.where(valid, labels[part].unsqueeze(1), 0)
            of_part = None if grad_hidden is None else grad_hidden[part]
            logits, gradient = hidden[part], of_part  # [c, V], of the caller's logits
            if weight is not None:  # the gradient overwrites the logits
                logits = torch.nn.functional.linear(hidden[part], weight, bias)
                gradient = logits if of_hidden or of_weight or of_bias else None
            log_p, *extras = softmax(logits, target, gradient)
            of_labels = torch.where(valid, log_p, 0)
            total -= of_labels.sum()
            if each is not None:
                each[part] = -of_labels.squeeze(1)
            for extra in extras:
                added += torch.where(valid, extra, 0).sum()
            # Ignored rows are zeroed in the [c, H] products, not in [c, V].
            if gradient is not None and weight is None:
                gradient.mul_(valid)
            elif gradient is not None and weight is not None:
                if of_part is not None:
                    torch.mm(gradient, weight, out=of_part).mul_(valid)
                if grad_weight is not None:
                    _add_product(grad_weight, gradient.T, hidden[part] * valid)
                if grad_bias is not None:
                    grad_bias += gradient.mul_(valid).sum(0, dtype=sums)
            del logits, gradient  # before the next chunk's exist
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        ctx.mark_non_differentiable(total)
        return total + added, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, _ = gradients
        # fp32 sums are scaled in place, so autograd's own check refuses a second backward pass.
        # bf16 gradients are scaled in fp32, as 1 / valid_tokens in bf16 has only 8 bits.
        hidden, weight, bias = (
            None if saved is None else saved.to(gradient.dtype).mul_(gradient).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, weight, None, bias, *[None] * 4


def _softmax(
    logits: Tensor,
    target: Tensor,
    out: Tensor | None,
    z_loss: float,
    smoothing: float,
    compiled: bool,
) -> tuple[Tensor, ...]:
    """Return the targets' log-probabilities and what z-loss and smoothing add, if any: each [c, 1].

    Write d loss / d logits, softmax - one-hot of the target, into `out`, which may be the
    logits [c, V]. Eager operations copy their rows to fp32, so the rows go in parts.
    """
    if compiled:
        torch._dynamo.maybe_mark_dynamic(logits, 0)
        torch._dynamo.maybe_mark_dynamic(target, 0)
        found = [_compiled()(logits, target, out, z_loss, smoothing)]
    else:
        outs = [None] * LOG_PARTS if out is None else out.chunk(LOG_PARTS)
        parts = zip(logits.chunk(LOG_PARTS), target.chunk(LOG_PARTS), outs, strict=False)
        found = [_softmax_of_rows(*part, z_loss, smoothing) for part in parts]
    log_p, *more = (torch.cat(each) for each in zip(*found, strict=True))  # [c, 1]
    at_target, extra = log_p.expm1(), []  # rounded once: p - 1 in bf16 would be lost near 0
    if more:
        log_z, mean = more
        slope, share = 1 + 2 * z_loss * log_z, smoothing / logits.shape[1]
        at_target = at_target * slope + (slope - 1) + smoothing - share
        extra = [smoothing * (log_p - mean) + z_loss * log_z**2]
    if out is not None:
        rows = torch.arange(len(out), device=out.device)  # scatter_ would copy bf16 to fp32 on CPUs
        out[rows, target[:, 0]] = at_target[:, 0].to(out.dtype)
    return log_p, *extra


@cache
def _compiled() -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(_softmax_of_rows)


def _softmax_of_rows(
    logits: Tensor, target: Tensor, out: Tensor | None, z_loss: float, smoothing: float
) -> tuple[Tensor, ...]:
    """Write d loss / d logits into `out`, but for the targets: the compiler would copy [r, V].

    Returns the targets' log-probabilities and, with z-loss or smoothing, the log of the softmax's
    sum and the mean log-probability.
    """
    sums = torch.promote_types(logits.dtype, torch.float32)
    logit_target = logits.gather(1, target).to(sums)
    log_p = torch.log_softmax(logits.to(sums), 1)
    log_p_target = log_p.gather(1, target)
    if not (z_loss or smoothing):
        if out is not None:
            torch.exp(log_p, out=out)
        return (log_p_target,)
    log_z, mean = logit_target - log_p_target, log_p.mean(1, keepdim=True)
    if out is not None:
        out.copy_(log_p.exp_().mul_(1 + 2 * z_loss * log_z).sub_(smoothing / log_p.shape[1]))
    return log_p_target, log_z, mean


@cache
def _sums_in_fp32(device: torch.device) -> bool:
    """Say whether a GPU adds bf16 products to an fp32 sum in one kernel."""
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = one.float()
    try:
        torch.addmm(total, one, one, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
        return
    if total.is_cuda and _sums_in_fp32(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    for part, rows in zip(total.split(LOSS_WORDS), a.split(LOSS_WORDS), strict=True):
        part += rows @ b  # in parts: the whole product would be as large as the head's weight
