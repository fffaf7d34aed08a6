"""Check a classifier's run before Ray starts, and report all problems in one message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rayapp import planner
from rayapp.config import ConfigError, VisionConfig
from rayapp.data.images import shapes, sources
from rayapp.data.sources import SourceError
from rayapp.driver import checks, command
from rayapp.driver.growth import schedule_problem
from rayapp.driver.ray_session import gpus_have_bf16
from rayapp.model.classifier import classifier_problems, shape_of_classifier
from rayapp.observe.run_folder import PREPARED
from rayapp.planner.image_shape import image_shape_of
from rayapp.planner.shape import UnknownShape
from rayapp.presets import IMAGE_PRESETS
from rayapp.storage import StorageError, open_storage


@dataclass(frozen=True)
class CheckedImageRun(command.CheckedRun):
    """What the checks read and resolved."""

    config: VisionConfig
    source: sources.ImageSource
    eval_source: sources.ImageSource | None

    @property
    def parts(self) -> dict[str, object]:
        held_out = self.eval_source
        return {
            "files": self.source.digest(),
            "eval_files": held_out.digest() if held_out is not None else None,
        }


def absolute(config: VisionConfig) -> VisionConfig:
    """Make local paths absolute, because the workers have another working folder."""
    local = checks.absolute_path
    paths = {"path": local(config.data.path), "eval_path": local(config.data.eval_path)}
    changes = {
        "run": checks.absolute_run(config.run),
        "data": config.data.model_copy(update=paths),
        "model": config.model.model_copy(update={"path": local(config.model.path)}),
    }
    if config.model.path in IMAGE_PRESETS:  # even if a folder here has the preset's name
        del changes["model"]
    return config.model_copy(update=changes)


def check(config: VisionConfig, local_cores: int | None, local_gpus: int) -> CheckedImageRun:
    """Check storage, data, model and number of workers, and whether the planned memory fits.

    `local_cores` is None where the workers run on a running cluster. It draws the images of
    data.path=shapes, if nothing was wrong until then.

    Raises:
        ConfigError: with every problem found.
    """
    config = absolute(config)
    problems = checks.shared_problems(config, local_cores, local_gpus)
    path = config.data.path
    if path == shapes.NAME and not problems:
        path = shapes.draw(open_storage(config.run.storage) / PREPARED)
    source = _source(path, config.data.format, "data.path", problems)
    eval_source = None
    if config.data.eval_path is not None:
        eval_source = _source(config.data.eval_path, config.data.format, "data.eval_path", problems)
    problems += _model_problems(config)
    if problems:
        raise ConfigError(problems)
    assert source is not None
    fields = {"format": source.format}
    config = config.model_copy(update={"data": config.data.model_copy(update=fields)})
    shape, _ = shape_of_classifier(config.model.path, config.model.overrides, ())
    found = (planner.size_problem(forecast(each, shape)) for each in config.alternatives())
    problem = next(filter(None, found), None)
    if problem and not config.cluster.ignore_plan:
        raise ConfigError([problem])
    run = open_storage(config.run.storage) / config.run.name
    if problem := schedule_problem(config, run):
        raise ConfigError([problem])
    return CheckedImageRun(config, run, source, eval_source)


def settle(ready: CheckedImageRun, gpus: bool) -> CheckedImageRun:
    """Replace train.precision=auto: bf16 on GPUs that have it, else fp32.

    Convolutions in bf16 are no faster on CPUs.
    """
    train = ready.config.train
    if train.precision != "auto":
        return ready
    fields = {"precision": "bf16" if gpus and gpus_have_bf16() else "fp32"}
    train = train.model_copy(update=fields)
    return replace(ready, config=ready.config.model_copy(update={"train": train}))


def forecast(
    config: VisionConfig, shape: Any, classes: int | None = None, **known: Any
) -> planner.Answer | None:
    """Plan a run from the shape of its model (a transformers config).

    `classes` is the number of classes in the data, if known; for `known` see `planner.ask`.
    Returns None if the planner has no formula for the architecture.

    Raises:
        ConfigError: the instance is unknown, or cannot compute in this precision.
    """
    values = shape.to_dict()
    if classes is not None:
        values["num_labels"] = classes
    try:
        image_shape_of(values, config.data.size)
    except UnknownShape:
        return None
    return planner.plan(config, model=values, **known)


def _source(path: str, format: str, field: str, problems: list[str]) -> sources.ImageSource | None:
    try:
        return sources.find(path, format)
    except (SourceError, StorageError) as error:
        text = str(error)
        if not text.startswith("data.path="):
            text = f"data.path={path} is not readable: {text}"
        problems.append(text.replace("data.path=", f"{field}=", 1))
        return None


def _model_problems(config: VisionConfig) -> list[str]:
    path = config.model.path
    try:
        shape, source = shape_of_classifier(path, config.model.overrides, ())
    except (ValueError, StorageError) as error:
        return [str(error)]
    weights = None if config.model.from_scratch else source
    return classifier_problems(path, weights, shape)
