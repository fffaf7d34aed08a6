"""Read a run's config and result from its folder."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from rayapp.config import ConfigError, RunConfig, from_dict, parse_yaml
from rayapp.observe.goodput import DamagedEvents
from rayapp.observe.records import RunResult
from rayapp.observe.run_folder import CONFIG, RESULT
from rayapp.observe.status import REWRITTEN, read_result
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
    if not {"status", "steps"} <= set(values):
        raise DamagedEvents(f"{run.url}/{RESULT}", "it has no status or steps", REWRITTEN)
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
    url = f"{run.url}/{CONFIG}"
    try:
        tree = parse_yaml(run.read(CONFIG).decode())
    except FileNotFoundError:
        line = f"{url} is missing: the run has not begun. Submit it again"
        raise ConfigError([line]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        tree, why = None, " ".join(str(error).split())
    else:
        why = "it holds no mapping"
    if not isinstance(tree, dict):
        raise DamagedEvents(url, why, "Restore it, or submit the run again under another name")
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
