"""What a rank is told, whatever it trains: one frozen description, pickled by Ray.

    spec = RunSpec("rayapp.finetune", config, prepared, order, run_url)
    trainer = spec.build(device)

The functions of a kind of run are found by the name of their package, so that Ray's controller,
which unpickles a spec too, does not import torch for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rayapp.config import Config, RunConfig, VisionConfig
from rayapp.data.images.index import Images
from rayapp.data.prepared import Prepared
from rayapp.order import Order
from rayapp.storage import open_storage

if TYPE_CHECKING:
    import ray.data
    import torch

    from rayapp.train.trainer import Trainer


class TrainingData(Protocol):
    """Rows that have been made or indexed, as a run of any kind sees them."""

    @property
    def fingerprint(self) -> str:
        """What the rows were made from."""

    @property
    def parts(self) -> dict[str, object]:
        """What the fingerprint is of, by name, so that what has changed can be named."""

    @property
    def held_out(self) -> int:
        """How many rows are held out."""


ConfigType = TypeVar("ConfigType", bound=RunConfig)
DataType = TypeVar("DataType", bound=TrainingData)


@dataclass(frozen=True)
class RunSpec(Generic[ConfigType, DataType]):
    """All that a rank is told."""

    kind: str
    """The package whose `rows` and `trainer` modules train this kind of run."""
    config: ConfigType
    data: DataType
    order: Order
    run_url: str
    tokenizer_url: str = ""
    auto_micro_batch: bool = False
    """The number of rows in a micro-batch was chosen for the user, and may be halved."""

    def stream(self, first_step: int, world: int) -> ray.data.Dataset:
        """Return the rest of the run for so many workers: blocks that are dealt out in turn."""
        dataset: ray.data.Dataset = self._module("rows").stream(self, first_step, world)
        return dataset

    def steps(self, shard: Any, world: int) -> Iterator[Any]:
        """Yield a rank's steps from its shard of the stream."""
        steps: Iterator[Any] = self._module("rows").steps(self, shard, world)
        return steps

    def build(self, device: torch.device) -> Trainer:
        """Return the model and optimizers of one rank, and what only their kind knows."""
        trainer: Trainer = self._module("trainer").build(self, device)
        return trainer

    def first_step(self) -> int:
        """Return the step at which the data must start: that of the newest whole checkpoint."""
        from rayapp.train.checkpoint.marker import steps_done

        return steps_done(open_storage(self.run_url))

    def alone(self) -> RunSpec[ConfigType, DataType]:
        """Return the spec for one process, which has no replicas."""
        parallel: Any = self.config.parallel  # each kind has its own strategies
        strategy = "full_shard" if parallel.strategy == "hybrid_shard" else parallel.strategy
        parallel = parallel.model_copy(update={"strategy": strategy, "replicas": None})
        return replace(self, config=self.config.model_copy(update={"parallel": parallel}))

    def accumulation(self, workers: int) -> str:
        """Say how a step is divided into micro-batches."""
        rows, size = self.order.rows_per_step, self.order.micro_batch
        return (
            f"train.micro_batch={size}: {rows} rows / {size} = {rows // size} micro-batches / "
            f"{workers} workers = {self.order.num_micro_batches(workers)} each"
        )

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self.kind}.{name}")


AnySpec = RunSpec[Any, Any]
LanguageSpec = RunSpec[Config, Prepared]
ImageSpec = RunSpec[VisionConfig, Images]
