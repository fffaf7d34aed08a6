"""The interface of a kind of training: the model and optimizers that rayapp.train.rank trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayapp import hardware
from rayapp.observe.metrics import HeldOut
from rayapp.observe.records import FinalFigures
from rayapp.storage import Storage
from rayapp.train.best import BestSoFar
from rayapp.train.checkpoint.marker import Amounts
from rayapp.train.checkpoint.staging import Tensors
from rayapp.train.engine import Engine
from rayapp.train.loss_spikes import Spikes
from rayapp.train.optimizer import lr_at


class Trainer(ABC):
    """The model and optimizers of one rank, with the methods that differ by kind of training."""

    spec: Any
    """The RunSpec."""
    device: torch.device
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    def common_engine(self, control: Any, **own: Any) -> Engine:
        """Return an engine with the settings that all kinds of training share, and `own` fields."""
        config, order = self.spec.config, self.spec.order
        train, best = config.train, config.checkpoint.best
        schedule = partial(
            lr_at,
            peak=train.lr,
            schedule=train.schedule,
            num_steps=order.num_steps,
            warmup_steps=train.warmup_steps,
            floor=train.min_lr,
            decay=train.decay,
            first=train.schedule_from,
        )
        return Engine(
            model=self.model,
            optimizers=self.optimizers,
            lr_at=schedule,
            device=self.device,
            grad_clip=train.grad_clip,
            control=control,
            rows_per_step=order.rows_per_step,
            spikes=None if train.on_spike == "none" else Spikes(train.spike_sigmas),
            skip_bad=train.on_spike == "skip",
            best=BestSoFar(best, config.evaluated.get(best or "", False), config.eval.patience),
            **own,
        )

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

    def prepare(self, engine: Engine, first_step: int) -> HeldOut:
        """Compute what the steps from `first_step` on need of the model that the run starts with.

        Raises: Interrupted if the ranks agree to leave.
        """
        return {}

    def joined(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Return the steps with what `prepare` has computed."""
        return steps

    def before_first_step(self, engine: Engine) -> HeldOut:
        """Evaluate what the run starts with.

        Raises: Interrupted if the ranks agree to leave.
        """
        return {}

    @abstractmethod
    def finish(
        self, engine: Engine, storage: Storage, at: int, held_out: HeldOut, *, export: bool
    ) -> FinalFigures:
        """Export the model of step `at`, whose figures are `held_out`; say so in the phases."""


def peak_flops(precision: str, device: torch.device) -> float | None:
    """Return the peak FLOP/s of all workers' GPUs; None on CPUs and where no peak is known."""
    if device.type != "cuda":
        return None
    gpu = hardware.gpu_from_device_name(torch.cuda.get_device_name(device))
    peak = None if gpu is None else gpu.flops[precision]
    return None if peak is None else peak * dist.get_world_size()
