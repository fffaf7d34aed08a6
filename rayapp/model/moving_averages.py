"""What a classifier keeps as moving averages: batch-norm's statistics, and averaged weights.

    use_batch_norm(hf, synchronized=False)       # before sharding
    settling = Settling(batch_norms(hf))         # after a step's last forward pass, on all ranks
    settling.finish()                            # once it is known that the step counts
    average = Average(model, decay=0.9999)
    average.update()                             # after each step
    with average.in_place(): evaluate, export

Batch-norm's statistics do not depend on the number of workers, unless `synchronized`.
Each micro-batch is normalised by its own mean and variance, and micro-batches are the same for any
number of workers. So are the running statistics: once per step they are updated with the mean over
all micro-batches of all ranks. `synchronized` normalises the micro-batches that the ranks process
at the same time by their joint statistics. It works on any device, also if some ranks have no
images; PyTorch's own SyncBatchNorm refuses CPU tensors (2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rayapp.model.init import local_part
from rayapp.model.sharding import reshard


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d with the same parameters, buffers and names, and on one rank the same output.

    A micro-batch without images gives an empty output and zero gradients.
    """

    synchronized = False
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    _sums: Tensor | None = None  # sums of elements * (1, mean, variance), per channel: [1 + 2 C]

    def forward(self, input: Tensor) -> Tensor:
        """Shapes: [b, C, H, W] -> the same."""
        if not self.training:
            return super().forward(input)
        if self.synchronized:
            output, statistics = _Synchronized.apply(input, self.weight, self.bias, self.eps)
        else:
            output, statistics = self._local(input)
        # Synchronized or not, each rank weights the statistics by its own elements per channel.
        statistics = statistics * (input.numel() // input.shape[1])
        self._sums = statistics if self._sums is None else self._sums + statistics
        return output

    def _local(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and (1, mean, unbiased variance) as one tensor [1 + 2 C]."""
        channels = input.shape[1]
        statistics = torch.ones(1 + 2 * channels, dtype=torch.float32, device=input.device)
        mean, variance = statistics[1 : 1 + channels], statistics[1 + channels :]
        elements = input.numel() // channels
        if elements > 1:  # momentum 1: the kernel writes the batch's statistics to the buffers
            output = nn.functional.batch_norm(
                input, mean, variance, self.weight, self.bias, True, 1.0, self.eps
            )
        else:  # one element per channel has no variance
            shape = (1, -1, 1, 1)
            output = (input - input) * self.weight.view(shape) + self.bias.view(shape)
            variance.zero_()
            if elements:
                mean.copy_(input.detach().flatten())
        return output, statistics


class _Synchronized(torch.autograd.Function):
    """Normalise by the joint statistics of all ranks' micro-batches, merged by Chan's formula."""

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
        statistics = torch.cat([torch.ones_like(count), mean, square / (count - 1).clamp(min=1)])
        context.mark_non_differentiable(statistics)
        output = normal * weight.float().view(shape) + bias.float().view(shape)
        return output.to(input.dtype), statistics

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
    """Replace every nn.BatchNorm2d of a model by `BatchNorm`, in place; return how many."""
    # transformers hands EfficientNet's momentum of 0.99 to PyTorch unchanged. The config means it
    # as TensorFlow does, to keep 99 % of the old value; PyTorch would keep 1 %.
    kept = hf.config.model_type == "efficientnet"
    norms = [module for module in hf.modules() if type(module) is nn.BatchNorm2d]
    for module in norms:
        module.__class__ = BatchNorm
        assert isinstance(module, BatchNorm)
        module.synchronized = synchronized
        if kept and module.momentum is not None and module.momentum > 0.5:
            module.momentum = 1.0 - module.momentum
    return len(norms)


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Return a model's layers of class `BatchNorm`."""
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


class Settling:
    """The batch-norm statistics of one step while they are summed over all ranks."""

    @torch.no_grad()
    def __init__(self, layers: Sequence[BatchNorm]) -> None:
        """Start an asynchronous all-reduce; all ranks call it together."""
        found = [(layer, layer._sums) for layer in layers if layer._sums is not None]
        self._layers = [layer for layer, _ in found]
        self._work: Any = None
        if found:
            self._whole = torch.cat([sums for _, sums in found])
            self._work = dist.all_reduce(self._whole, async_op=True)
        discard(layers)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, then update the running statistics, equally on all ranks."""
        if self._work is None:
            return
        self._work.wait()
        sizes = [size for layer in self._layers for size in (1, *[layer.num_features] * 2)]
        parts = self._whole.split(sizes)
        counts, moments = parts[::3], [*parts[1::3], *parts[2::3]]
        torch._foreach_div_(moments, [*counts, *counts])
        running = [layer.running_mean for layer in self._layers]
        running += [layer.running_var for layer in self._layers]
        momenta = [0.1 if layer.momentum is None else layer.momentum for layer in self._layers]
        torch._foreach_lerp_(running, moments, [*momenta, *momenta])
        torch._foreach_add_([layer.num_batches_tracked for layer in self._layers], 1)

    def forget(self) -> None:
        """Wait, and leave the running statistics as they are."""
        if self._work is not None:
            self._work.wait()


def discard(layers: Sequence[BatchNorm]) -> None:
    """Drop the statistics of forward passes that must not count."""
    for layer in layers:
        layer._sums = None


class Average:
    """An exponential moving average of a model's weights and statistics, sharded like them.

    It starts at the current values.

    The decay of update n is at most (1 + n) / (10 + n), as in TensorFlow's, so that the starting
    values fade quickly.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        self._live: dict[str, Tensor] = dict(model.named_parameters()) | buffers  # tied ones once
        self.tensors = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        self.tensors["updates"] = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights, once per step."""
        updates = self.tensors["updates"]
        updates += 1
        decay = min(self._decay, (1 + int(updates)) / (10 + int(updates)))
        own = [local_part(self.tensors[name]) for name in self._live]
        live = [local_part(tensor.detach()) for tensor in self._live.values()]
        torch._foreach_lerp_(own, live, 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights inside the `with` block, its own ones after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self._model)  # gathered parameters would keep their old values
        for name, tensor in self._live.items():
            live, own = local_part(tensor.detach()), local_part(self.tensors[name])
            kept = live.clone()
            live.copy_(own)
            own.copy_(kept)
