"""Cross-entropy that never holds all logits, summed so that one division normalises it.

    loss_sum = chunked_cross_entropy(hidden, lm_head.weight, labels, chunk=4096)
    (loss_sum / valid_tokens_of_the_whole_global_batch).backward()

The gradient of a chunk is computed with its loss, while its logits exist, and only the gradients
of the hidden states and of the weight are kept: each logit is computed once, and at most
`chunk * vocabulary` of them exist. (The idea is Liger's fused linear cross-entropy, Hsu et al. 2024,
arXiv 2410.10989.) Softmax and sums are fp32 whatever the compute dtype.
"""

from __future__ import annotations

from typing import Any

import torch

IGNORE = -100


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chunk: int = 4096,
) -> torch.Tensor:
    """Return the sum of cross-entropies in nats over labels that are not IGNORE: fp32 scalar.

    Shapes: hidden [..., H], weight [V, H], labels [...] (aligned: labels are the next tokens),
    bias [V]. `chunk` is in tokens; 0 takes all at once.
    """
    tokens = labels.numel()
    size = tokens if chunk == 0 else chunk
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(
        hidden.reshape(tokens, -1), weight, labels.reshape(tokens), bias, size
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        chunk: int,
    ) -> torch.Tensor:
        wanted = any(ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if wanted else None
        # Sums over chunks are fp32: bf16 would lose what each further chunk adds.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        grad_bias = None
        if wanted and bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], max(chunk, 1)):
            part = slice(start, start + chunk)
            logits = torch.nn.functional.linear(hidden[part], weight, bias).float()  # [c, V]
            target = labels[part].clamp(min=0).unsqueeze(1)  # [c, 1]
            valid = (labels[part] != IGNORE).unsqueeze(1)
            log_sum = logits.logsumexp(1, keepdim=True)
            losses = log_sum - logits.gather(1, target)
            total += torch.where(valid, losses, 0.0).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # d loss / d logits = softmax - one-hot of the target
            gradient = logits.sub_(log_sum).exp_()
            gradient.scatter_add_(1, target, torch.full_like(losses, -1.0))
            gradient = torch.where(valid, gradient, 0.0).to(hidden.dtype)
            torch.mm(gradient, weight, out=grad_hidden[part])
            grad_weight += gradient.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        grad_bias = None if grad_bias is None else (grad_bias * gradient).to(bias_dtype)
        return grad_hidden * gradient, (grad_weight * gradient).to(weight_dtype), None, grad_bias, None
