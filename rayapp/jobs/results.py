"""Read a run's config and result from its folder."""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.config import ConfigError, RunConfig, from_dict
from rayapp.observe.records import RunResult
from rayapp.observe.run_folder import CONFIG
from rayapp.observe.status import read_result, read_sections
from rayapp.storage import Storage, open_storage


@dataclass(frozen=True)
class Result:
    """The result of a run; `values` is the whole of its result.json."""

    status: str
    steps: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    cost_usd: float | None
    model_path: str | None
    values: RunResult


def result_of(run: Storage) -> Result | None:
    """Return the result of a run; None if there is no result.json.

    Raises:
        DamagedEvents: it is not as a run writes it.
    """
    values = read_result(run)
    if not values:
        return None
    return Result(
        status=values["status"],
        steps=values["steps"],
        loss=values.get("loss"),
        eval_loss=values.get("eval_loss"),
        tokens_per_s=values.get("tokens_per_s"),
        cost_usd=values.get("cost_usd"),
        model_path=values.get("model_path"),
        values=values,
    )


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
    """Return the config of a run, checked to write to the folder that it was read from.

    Raises:
        ConfigError: it names another folder, or is not valid.
    """
    config = config_of(run)
    names = open_storage(f"{config.run.storage}/{config.run.name}").url
    if names != run.url:
        raise ConfigError(
            [
                f"{run.url}/{CONFIG} is of another folder: its run.storage and run.name name "
                f"{names}. Resume that run, or submit the config with this run.storage and run.name"
            ]
        )
    return config
