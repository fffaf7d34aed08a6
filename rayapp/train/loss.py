"""Cross-entropy in chunks, which never holds all logits; it returns sums, not means.

    objective, loss_sum = chunked_cross_entropy(hidden, lm_head.weight, labels, chunk=4096)
    (objective / valid_tokens_of_the_whole_global_batch).backward()

The forward pass computes each chunk's gradient together with its loss, while its logits exist, and
keeps only the gradients of the hidden states and of the weight. So each logit is computed once, and
at most `chunk * vocabulary` exist (in the compute dtype, and as fp32 log-probabilities).
The idea is Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv 2410.10989). Softmax and
sums are at least fp32 whatever the compute dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rayapp.planner.memory import LOG_PARTS, LOSS_WORDS

IGNORE = -100


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chunk: int = 4096,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    each: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
        z_loss,
        label_smoothing,
        torch.is_grad_enabled(),  # always False inside forward()
        each,
    )
    return objective, loss


def liger_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    each: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        chunk: int,
        z_loss: float,
        smoothing: float,
        grad_enabled: bool,
        each: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
            logits = hidden[part]  # [c, V]
            if weight is not None:
                logits = torch.nn.functional.linear(logits, weight, bias)
            logit_target = logits.gather(1, target).to(sums)
            log_p = _log_softmax(logits, sums)  # [c, V]
            log_p_target = log_p.gather(1, target)
            of_labels = torch.where(valid, log_p_target, 0)
            total -= of_labels.sum()
            if each is not None:
                each[part] = -of_labels.squeeze(1)
            log_z = logit_target - log_p_target  # [c, 1]
            if z_loss or smoothing:
                extra = smoothing * (log_p_target - log_p.mean(1, keepdim=True))
                added += torch.where(valid, extra + z_loss * log_z**2, 0).sum()
            if not (of_hidden or of_weight or of_bias):
                continue
            # The gradient overwrites the logits, unless they are the caller's. Ignored rows are
            # zeroed in the [c, H] products, not in [c, V].
            buffer = logits if weight is not None or grad_hidden is None else grad_hidden[part]
            gradient = _softmax_less_target(buffer, log_p, target, log_z, z_loss, smoothing)
            del log_p
            if weight is None:
                gradient.mul_(valid)
                continue
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
                grad_hidden[part].mul_(valid)
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, hidden[part] * valid)
            if grad_bias is not None:
                grad_bias += gradient.mul_(valid).sum(0, dtype=sums)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        ctx.mark_non_differentiable(total)
        return total + added, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, _ = gradients
        # fp32 sums are scaled in place, so autograd's own check refuses a second backward pass.
        # bf16 gradients are scaled in fp32, as 1 / valid_tokens in bf16 has only 8 bits.
        hidden, weight, bias = (
            None if saved is None else saved.to(gradient.dtype).mul_(gradient).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, weight, None, bias, *[None] * 5


def _log_softmax(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return log-probabilities in `dtype`; [c, V] -> [c, V].

    PyTorch takes no bf16 logits for it. Parts of them are copied, one at a time.
    """
    if logits.dtype == dtype:
        return torch.log_softmax(logits, 1)
    log_p = torch.empty_like(logits, dtype=dtype)
    for some, out in zip(logits.chunk(LOG_PARTS), log_p.chunk(LOG_PARTS), strict=True):
        torch.log_softmax(some.to(dtype), 1, out=out)
    return log_p


def _softmax_less_target(
    buffer: torch.Tensor,
    log_p: torch.Tensor,
    target: torch.Tensor,
    log_z: torch.Tensor,
    z_loss: float,
    smoothing: float,
) -> torch.Tensor:
    """Write d loss / d logits = softmax - one-hot of the target into `buffer`; return it: [c, V].

    At the target it is expm1(log_p), rounded once: p - 1 in bf16 would be lost near 0. `log_p`
    [c, V] is overwritten.
    """
    at_target = log_p.gather(1, target).expm1()
    if z_loss or smoothing:
        slope, share = 1 + 2 * z_loss * log_z, smoothing / log_p.shape[1]
        at_target = at_target * slope + (slope - 1) + smoothing - share
        gradient = buffer.copy_(log_p.exp_().mul_(slope).sub_(share))
    else:
        gradient = torch.exp(log_p, out=buffer)
    return gradient.scatter_(1, target, at_target.to(gradient.dtype))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
        return
    for part, rows in zip(total.split(LOSS_WORDS), a.split(LOSS_WORDS), strict=True):
        part += rows @ b  # in parts: the whole product would be as large as the head's weight
