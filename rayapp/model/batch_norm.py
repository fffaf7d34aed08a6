"""Batch-norm whose statistics do not depend on the number of workers, unless they are to.

    use_batch_norm(hf, synchronized=False)       # before sharding
    settle(hf)                                   # after each step, on all ranks together

Each micro-batch is normalised by its own mean and variance; micro-batches are the same for any
number of workers. So are the running statistics: what all micro-batches of a step had is averaged
over all ranks, and taken in once a step. `synchronized` takes the statistics over the micro-batches
that all ranks have at a time, as if they were one: on any device, also with ranks that have none.
PyTorch's own SyncBatchNorm refuses CPU tensors (2.13).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel


class BatchNorm(nn.BatchNorm2d):
    """As nn.BatchNorm2d in its parameters, buffers and names, and on one rank in what it computes.

    A micro-batch without images gives none, and zero gradients.
    """

    synchronized = False
    _sums: Tensor | None = None  # elements per channel, and that times mean and variance: [1 + 2 C]

    def forward(self, input: Tensor) -> Tensor:
        """Shapes: [b, C, H, W] -> the same."""
        if not self.training:
            return super().forward(input)
        if self.synchronized:
            output, count, mean, variance = _Synchronized.apply(
                input, self.weight, self.bias, self.eps
            )
        else:
            output, count, mean, variance = self._local(input)
        with torch.no_grad():
            found = torch.cat([count, count * mean, count * variance])
            self._sums = found if self._sums is None else self._sums + found
        return output

    def _local(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output, and elements per channel, mean and unbiased variance."""
        elements = input.numel() // input.shape[1] if len(input) else 0
        mean, variance = (torch.zeros_like(self.weight, dtype=torch.float32) for _ in range(2))
        if elements > 1:  # with a momentum of 1 the kernel leaves its own statistics in the buffers
            output = nn.functional.batch_norm(
                input, mean, variance, self.weight, self.bias, True, 1.0, self.eps
            )
        else:  # nothing varies
            shape = (1, -1, 1, 1)
            output = (input - input) * self.weight.view(shape) + self.bias.view(shape)
            if elements:
                mean = input.detach().float().flatten()
        return output, mean.new_full((1,), elements), mean, variance


class _Synchronized(torch.autograd.Function):
    """Normalise by the statistics of all ranks' micro-batches, by Chan's merge of their parts."""

    @staticmethod
    def forward(
        context: Any, input: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        values = input.float()
        elements = input.numel() // input.shape[1] if len(input) else 0
        own = values.new_zeros(1 + 2 * input.shape[1])
        if elements:
            own[0] = elements
            variance, mean = torch.var_mean(values, (0, 2, 3), correction=0)
            own[1:] = torch.cat([mean, variance * elements])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        every = torch.stack(parts)  # [ranks, 1 + 2 C]
        counts, (means, squares) = every[:, :1], every[:, 1:].chunk(2, 1)
        count = counts.sum(0).clamp(min=1)
        mean = (counts * means).sum(0) / count
        square = (squares + counts * (means - mean) ** 2).sum(0)
        inverse = torch.rsqrt(square / count + eps)
        shape = (1, -1, 1, 1)
        normal = (values - mean.view(shape)) * inverse.view(shape)
        context.save_for_backward(normal, weight, inverse, count)
        context.mark_non_differentiable(count, mean)
        output = normal * weight.float().view(shape) + bias.float().view(shape)
        return output.to(input.dtype), count, mean, square / (count - 1).clamp(min=1)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        normal, weight, inverse, count = context.saved_tensors
        gradient = gradients[0].float()
        shape = (1, -1, 1, 1)
        of_bias = gradient.sum((0, 2, 3))
        of_weight = (gradient * normal).sum((0, 2, 3))
        whole = torch.cat([of_bias, of_weight])
        dist.all_reduce(whole)
        mean, along = (whole / count).view(2, 1, -1, 1, 1)
        scale = (weight.float() * inverse).view(shape)
        of_input = scale * (gradient - mean - normal * along)
        return of_input.to(gradients[0].dtype), of_weight, of_bias, None


def use_batch_norm(hf: PreTrainedModel, synchronized: bool) -> int:
    """Let every batch-norm of a model be ours, in place; return how many there are."""
    # transformers takes EfficientNet's momentum from its config as TensorFlow means it, where 0.99
    # keeps 99 % of the old; to PyTorch it says to keep 1 %.
    kept = hf.config.model_type == "efficientnet"
    found = [module for module in hf.modules() if type(module) is nn.BatchNorm2d]
    for module in found:
        module.__class__ = BatchNorm
        assert isinstance(module, BatchNorm)
        module.synchronized = synchronized
        if kept and module.momentum is not None and module.momentum > 0.5:
            module.momentum = 1.0 - module.momentum
    return len(found)


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Take what the step's micro-batches had into the running statistics, the same on all ranks."""
    layers = [m for m in model.modules() if isinstance(m, BatchNorm) and m._sums is not None]
    if not layers:
        return
    sums = [layer._sums for layer in layers if layer._sums is not None]
    whole = torch.cat(sums)
    dist.all_reduce(whole)
    for layer, part in zip(layers, whole.split([len(each) for each in sums]), strict=True):
        layer._sums = None
        count, (mean, variance) = part[0], part[1:].chunk(2)
        assert layer.running_mean is not None and layer.running_var is not None
        momentum = 0.1 if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(mean / count, momentum)
        layer.running_var.lerp_(variance / count, momentum)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)


def forget(model: nn.Module) -> None:
    """Leave the running statistics as they are: the step did not count."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module._sums = None
