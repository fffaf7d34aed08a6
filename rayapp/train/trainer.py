"""The model and optimizers of a rank, as rayapp.train.rank trains them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayapp.observe.records import Outcome
from rayapp.storage import Storage
from rayapp.train import loop
from rayapp.train.checkpoint.marker import Amounts
from rayapp.train.checkpoint.staging import Tensors


class Trainer(ABC):
    """Model and optimizers of one rank, and what only their kind of training knows."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @abstractmethod
    def engine(self, control: Any, losses: list[float]) -> loop.Engine:
        """Return the loop's engine without the times of saving and leaving, which the rank sets.

        `losses` are those of the steps before this attempt, which a spike is compared with.
        """

    @abstractmethod
    def num_parameters(self) -> int:
        """Return the parameters of the whole model."""

    def tensors(self) -> Tensors:
        """Return what a checkpoint holds beside model and optimizers; it is loaded into them."""
        return {}

    def amounts(self, step: int) -> Amounts:
        """Return the tokens or images of so many steps, for a checkpoint's state.json."""
        return {}

    def warm_up(self) -> Outcome:
        """Prepare the first step, e.g. compile; return what the summary says of it."""
        return {}

    @abstractmethod
    def finish(
        self, engine: loop.Engine, storage: Storage, end_phase: Callable[[str], None]
    ) -> Outcome:
        """Evaluate and export the model; `end_phase(name)` takes the seconds since the last one."""
