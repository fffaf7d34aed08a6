"""Read a run's config, steps and result from its folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayapp.config import ConfigError, RunConfig, from_dict, parse_yaml
from rayapp.config.fields import IMAGES, TOKENS
from rayapp.observe import metrics
from rayapp.observe.columns import Follower
from rayapp.observe.metrics import MetricsLine, columns_of
from rayapp.observe.plain import escaped
from rayapp.observe.run_folder import CHECKPOINTS, CONFIG, EXIT_CODES
from rayapp.observe.status import read_asked, read_sections
from rayapp.storage import Storage, open_storage

if TYPE_CHECKING:
    import pandas

STEPS_AT_ONCE = 500  # lines of metrics.jsonl
SHOWN = ("status", "steps", "loss", "eval_loss", "eval_metrics", "wall_s", "cost_usd", "model_path")


@dataclass(frozen=True)
class CheckpointPath:
    """A committed checkpoint."""

    path: str
    """Its folder or s3:// URL."""
    step: int


class Result(dict[str, Any]):
    """The content of a run's result.json, with the names of Ray's Result as attributes.

    `result["loss"]` and `result.loss` are the same. `metrics`, `metrics_dataframe`, `checkpoint`
    and `path` are read from the run's folder when they are asked for.
    """

    status: str
    """done, stopped or failed."""
    steps: int
    """Optimizer steps done."""
    loss: float | None
    """Nats per token or image of the last step."""
    eval_loss: float | None
    """Nats per held-out token or image."""
    tokens_per_s: float | None
    """Input tokens per second of all workers."""
    cost_usd: float | None
    """Cost of the run's machines; None if a price is not known."""
    model_path: str | None
    """Folder or s3:// URL of the exported model."""
    path: str | None
    """The run's folder or s3:// URL."""
    error: str | None
    """Why the run failed."""

    def __getattr__(self, name: str) -> Any:
        if name not in Result.__annotations__:
            raise AttributeError(f"a result has no {name!r}", name=name, obj=self)
        return self.get({"path": "run", "error": "reason"}.get(name, name))

    @property
    def metrics(self) -> MetricsLine | None:
        """The last line of metrics.jsonl."""
        return metrics.last(self._folder())

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """metrics.jsonl as a DataFrame, one row per step."""
        return dataframe_of(self._folder())

    @property
    def checkpoint(self) -> CheckpointPath | None:
        """The newest committed checkpoint; `result["checkpoint"]` is what checkpoints cost."""
        from rayapp.train.checkpoint.marker import newest_committed

        newest = newest_committed(self._folder())
        if newest is None:
            return None
        return CheckpointPath(f"{self._folder().url}/{CHECKPOINTS}/{newest.name}", newest.step)

    def _folder(self) -> Storage:
        if self.path is None:
            raise ConfigError(["this result names no folder: the run failed before it had one"])
        return open_storage(self.path)

    def _repr_html_(self) -> str:
        known = [(name, str(self[name])) for name in SHOWN if self.get(name) is not None]
        rows = (f"<tr><td>{name}</td><td>{escaped(value)}</td></tr>" for name, value in known)
        return f"<table>{''.join(rows)}</table>"


class LiveSteps:
    """Iterate over the lines of metrics.jsonl until the run has ended.

    Steps that a recovery does again come again. Each iteration begins with the first step.
    """

    def __init__(self, run: Storage, status: Callable[[], str], every_s: float) -> None:
        self._run, self._status, self._every_s = run, status, every_s

    def __iter__(self) -> Iterator[MetricsLine]:
        followed, done = Follower(self._run), 0
        while True:
            ended = self._status() in EXIT_CODES  # asked before the lines are read
            done = min(done, followed.poll())
            stop = min(len(followed.steps), done + STEPS_AT_ONCE)
            if stop > done:
                yield from followed.lines(done, stop)
            elif ended:
                return
            else:
                time.sleep(self._every_s)
            done = stop

    async def __aiter__(self) -> AsyncIterator[MetricsLine]:
        steps = iter(self)
        while (line := await asyncio.to_thread(next, steps, None)) is not None:
            yield line


def dataframe_of(run: Storage) -> pandas.DataFrame:
    """Return metrics.jsonl as a DataFrame, one row per step; before the first step, its columns."""
    import pandas

    lines = metrics.read(run)
    if lines:
        return pandas.DataFrame(lines)
    task: object = (read_sections(run) or {}).get("task")
    columns = columns_of(IMAGES if task == "vision" else TOKENS)
    return pandas.DataFrame(columns=columns, dtype=float)


def config_of(run: Storage) -> RunConfig:
    """Return the config of a run, from its config.yaml.

    Raises:
        ConfigError: the run has not begun, or its config.yaml is not valid.
    """
    tree = read_sections(run)
    if tree is None:
        line = f"{run.url}/{CONFIG} is missing: the run has not begun. Submit it again"
        raise ConfigError([line])
    return from_dict(tree)


def own_config_of(run: Storage) -> RunConfig:
    """Return the config that a run was last asked for, checked to write to the folder it is in.

    Raises:
        ConfigError: it names another folder, or is not valid.
    """
    asked = read_asked(run)
    config = from_dict(parse_yaml(asked["config"])) if asked else config_of(run)
    names = open_storage(f"{config.run.storage}/{config.run.name}").url
    if names != run.url:
        why = f"its run.storage and run.name name {names}"
        fix = "Resume that run, or submit the config with this run.storage and run.name"
        raise ConfigError([f"{run.url}/{CONFIG} is of another folder: {why}. {fix}"])
    return config
