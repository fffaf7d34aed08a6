"""Plan a run of any model: the planner's formulas, and for other families the model itself.

    found = plan(rayapp.load("configs/llama3_8b_sft.yaml"))

torch is imported only for a model that the planner has no formula for, and to read a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rayapp import planner
from rayapp.config import Config, ConfigError, Lora, VisionConfig
from rayapp.planner.measured import Frozen
from rayapp.planner.shape import Shape
from rayapp.planner.trained import with_overrides


def plan(config: Config | VisionConfig, **more: Any) -> planner.Answer:
    """Plan a run; `more` goes to `planner.plan`: region, usd_per_hour, steps, model.

    Raises: ConfigError: the config cannot be planned; with every problem.
    """
    if isinstance(config, Config):
        more |= {"read": read, "count": _frozen}
        if more.get("model") is None and (values := _gguf_values(config)) is not None:
            more["model"] = with_overrides(values, config.model.overrides)
    return planner.plan(config, **more)


def forecast(config: Config | VisionConfig, shape: Any, **known: Any) -> planner.Answer | None:
    """Plan a run from the shape of its model (a transformers config).

    `known` says what the config does not: steps, images, or the machine (see `planner.ask`).
    Returns None if the planner has no formula for the architecture and it cannot be read.

    Raises: ConfigError: the instance is unknown, or cannot compute in this precision.
    """
    try:
        return plan(config, model=shape.to_dict(), **known)
    except planner.UnknownModel:
        return None


def _gguf_values(config: Config) -> Mapping[str, Any] | None:
    """Return the config.json of a local GGUF file that model.path names; None if it names none."""
    path = Path(config.model.path).expanduser()
    if path.suffix != ".gguf" and not any(path.glob("*.gguf")):
        return None
    from rayapp.model.gguf import config_values

    try:
        return config_values(config.model.path)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def read(config: Mapping[str, Any], *, seq_len: int, fp32: bool, lora: Lora | None) -> Shape:
    """Return the shape of a model by running its blocks on shapes (see `train.model_reading.read`).

    It takes seconds, so the last ones are kept: a run asks several times before it starts.

    Raises: UnknownShape: transformers cannot build it, or it cannot run on shapes alone.
    """
    return _read(json.dumps(dict(config), sort_keys=True), seq_len, fp32, lora)


def _frozen(config: Mapping[str, Any], patterns: tuple[str, ...]) -> Frozen:
    from rayapp.train import model_reading

    return model_reading.count(config, patterns)


@lru_cache(maxsize=8)
def _read(config: str, seq_len: int, fp32: bool, lora: Lora | None) -> Shape:
    from rayapp.train import model_reading

    return model_reading.read(json.loads(config), seq_len=seq_len, fp32=fp32, lora=lora)
