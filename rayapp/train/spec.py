"""The description of a run that every rank gets: a frozen dataclass, which Ray pickles.

    spec = RunSpec("rayapp.finetune", config, prepared, order, run_url)
    trainer = spec.build(device)

The spec names the package of its kind of run and imports what reads rows and trains when it is
needed, so that Ray's controller, which unpickles a spec too, does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rayapp.config import Config, RunConfig, VisionConfig
from rayapp.data.images.index import Images
from rayapp.data.prepared import Prepared
from rayapp.data.task_items import TaskItems
from rayapp.order import Order
from rayapp.storage import open_storage

if TYPE_CHECKING:
    import torch

    from rayapp.data.stream import Shard, Stream
    from rayapp.train.trainer_interface import Trainer


class BackgroundWork(Protocol):
    """What the driver does beside the training: it prepares the rows of later steps."""

    problem: str | None
    """Why it has failed, so that the workers would wait for ever."""

    def close(self) -> None:
        """Let it end soon."""


TRAINERS = {
    "rayapp.finetune": "rayapp.finetune.trainer",
    "rayapp.vision": "rayapp.vision.classifier_trainer",
}
ConfigType = TypeVar("ConfigType", bound=RunConfig)
DataType = TypeVar("DataType", bound=Prepared | Images)


@dataclass(frozen=True)
class RunSpec(Generic[ConfigType, DataType]):
    """All that a rank needs to know."""

    kind: str
    """The package of this kind of run, a key of TRAINERS."""
    config: ConfigType
    data: DataType
    order: Order
    run_url: str
    tokenizer_url: str = ""
    auto: tuple[str, ...] = ()
    """The fields of train that `auto` chose: micro_batch may be reduced, compile be left out."""
    tasks: tuple[TaskItems, ...] = ()
    """What the model is scored on."""
    system: str = ""
    """The system's message in all chats, if they have the same."""

    def stream(self, first_step: int, world: int) -> Stream:
        """Return the rows from `first_step` on, for `world` workers: blocks dealt out in turn."""
        data: Any = self.data
        section: Any = self.config.data  # each kind has its own
        if isinstance(data, Images):
            from rayapp.data.images import batches

            return batches.stream(data, section, self.order, first_step, world)
        from rayapp.data import stream

        return stream.stream(data, self.order, first_step, world, section.workers)

    def steps(self, shard: Shard, world: int) -> Iterator[Any]:
        """Yield a rank's batch of each step from its part of the stream."""
        order, count = self.order, self.order.num_micro_batches(world)
        if isinstance(self.data, Images):
            from rayapp.data.images import batches

            return batches.steps(shard, order.micro_batch, count)
        from rayapp.data import stream

        data: Any = self.data
        ends, pairs = order.source_ends, data.pairs
        return stream.steps(shard, order.micro_batch, count, ends, pairs)

    def build(self, device: torch.device) -> Trainer:
        """Build the Trainer of one rank: its model and optimizers."""
        trainer: Trainer = importlib.import_module(TRAINERS[self.kind]).build(self, device)
        return trainer

    def first_step(self) -> int:
        """Return the step (from 0) at which the data must start: the newest usable checkpoint's."""
        from rayapp.train.checkpoint.marker import steps_done

        return steps_done(open_storage(self.run_url))

    def alone(self) -> RunSpec[ConfigType, DataType]:
        """Return the spec for a single process: hybrid_shard becomes full_shard, no replicas."""
        parallel: Any = self.config.parallel  # each kind has its own strategies
        strategy = "full_shard" if parallel.strategy == "hybrid_shard" else parallel.strategy
        parallel = parallel.model_copy(update={"strategy": strategy, "replicas": None})
        return replace(self, config=self.config.model_copy(update={"parallel": parallel}))

    def accumulation(self, workers: int) -> str:
        """Return text that says how a step is divided into micro-batches."""
        rows, size = self.order.rows_per_step, self.order.micro_batch
        return (
            f"train.micro_batch={size}: {rows} rows / {size} = {rows // size} micro-batches / "
            f"{workers} workers = {self.order.num_micro_batches(workers)} each"
        )


AnySpec = RunSpec[Any, Any]
LanguageSpec = RunSpec[Config, Prepared]
ImageSpec = RunSpec[VisionConfig, Images]
