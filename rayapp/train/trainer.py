"""What a rank trains, as the shell around the loop sees it (rayapp.train.rank)."""

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


class Trainee(ABC):
    """Model and optimizers on one rank, and what only their kind of training knows."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @abstractmethod
    def engine(self, control: Any, losses: list[float]) -> loop.Engine:
        """Tell the loop what it needs of this kind; when to save and leave it is told elsewhere.

        `losses` are those that a spike is compared with, of the steps before this attempt.
        """

    @abstractmethod
    def num_parameters(self) -> int:
        """Return the parameters of the whole model."""

    def tensors(self) -> Tensors:
        """Return the tensors that a checkpoint holds, and is read into, beside the usual ones."""
        return {}

    def amounts(self, step: int) -> Amounts:
        """Return what so many steps amount to, for the checkpoint's state.json."""
        return {}

    def warm_up(self) -> Outcome:
        """Do what comes before the first step; return what the run's summary says of it."""
        return {}

    @abstractmethod
    def finish(self, engine: loop.Engine, storage: Storage, lap: Callable[[str], None]) -> Outcome:
        """Evaluate and export what was trained; `lap(phase)` ends a phase on the clock."""
