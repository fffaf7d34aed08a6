"""The interface of a kind of training: the model and optimizers that rayapp.train.rank trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from rayapp.observe.activity import Phases
from rayapp.observe.metrics import HeldOut
from rayapp.observe.records import FinalFigures
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import Amounts
from rayapp.train.checkpoint.staging import Tensors
from rayapp.train.engine import Engine


class Trainer(ABC):
    """The model and optimizers of one rank, with the methods that differ by kind of training."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @abstractmethod
    def engine(self, control: Any) -> Engine:
        """Return the loop's engine; `rank.schedule` sets how and when it saves and leaves."""

    @abstractmethod
    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model."""

    def tensors(self) -> Tensors:
        """Return further tensors of a checkpoint; a restore loads into them in place."""
        return {}

    def amounts(self, step: int) -> Amounts:
        """Return how many tokens or images so many steps are, for a checkpoint's state.json."""
        return {}

    def warm_up(self) -> FinalFigures:
        """Prepare the first step, e.g. compile; return fields for the summary."""
        return {}

    def before_first_step(self, engine: Engine) -> HeldOut:
        """Evaluate what the run starts with.

        Raises: Interrupted if the ranks agree to leave.
        """
        return {}

    @abstractmethod
    def finish(self, engine: Engine, storage: Storage, phases: Phases) -> FinalFigures:
        """Evaluate and export the model, and say so in `phases`."""
