"""Keep an exponential moving average of a model's weights and statistics, sharded alike.

average = Average(model, decay=0.9999)
average.update()                   # after each step
with average.in_place(): evaluate, export
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rayapp.model.init import local_part
from rayapp.model.sharding import reshard


class Average:
    """The moving average; it starts at the current weights.

    The decay of update n is at most (1 + n) / (10 + n), as in TensorFlow's, so that the starting
    values fade quickly.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._live = _values(model)
        self.tensors: dict[str, torch.Tensor] = {
            name: tensor.detach().clone() for name, tensor in self._live.items()
        }
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


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the floating-point buffers, by name."""
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return dict(model.named_parameters()) | buffers
