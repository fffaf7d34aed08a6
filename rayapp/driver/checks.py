"""The checks that every kind of run shares; most of them run before Ray starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rayapp import config as configs
from rayapp import planner
from rayapp.config import ConfigError, Described, Run, RunConfig
from rayapp.config.text import user_folder
from rayapp.driver.growth import growth_problem
from rayapp.driver.stop import budget_problems
from rayapp.observe import trackers
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import DONE, INTERRUPTED, PREPARED, RAY
from rayapp.observe.status import read_plan, read_result, read_sections
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.train.best import is_enough
from rayapp.train.checkpoint.marker import NoneUsable, resume_point

MAX_WORKERS_PER_CORE = 4  # when training on CPUs: more workers would only share the same cores


def absolute_path(path: str | None) -> str | None:
    """Make a local path absolute if it exists or is a glob; return anything else unchanged."""
    if path is None or "://" in path:
        return path
    expanded = os.path.join(user_folder(), os.path.expanduser(path))
    marked = any(mark in path for mark in "*?[")
    return os.path.abspath(expanded) if marked or os.path.exists(expanded) else path


def absolute(config: Described, names: Mapping[str, Collection[str]]) -> Described:
    """Make local paths absolute, because the workers have another working folder.

    `names` are values of a field that are no paths, even if a folder here has such a name.
    """
    sections: dict[str, Any] = {"run": absolute_run(config.run)}
    for path in config.PATH_FIELDS:
        section, _, field = path.partition(".")
        before = sections.get(section, getattr(config, section))
        if (value := getattr(before, field)) not in names.get(path, ()):
            before = before.model_copy(update={field: absolute_path(value)})
        sections[section] = before
    return config.model_copy(update=sections)


def absolute_run(run: Run) -> Run:
    """Make `run.storage` absolute, whether the folder exists or not; leave a URL unchanged."""
    if "://" in run.storage:
        return run
    storage = os.path.abspath(os.path.join(user_folder(), os.path.expanduser(run.storage)))
    return run.model_copy(update={"storage": storage})


def shared_problems(config: RunConfig, local_cores: int | None, local_gpus: int) -> list[str]:
    """Return what is wrong with the trackers, the storage and the number of workers.

    `local_cores` is None where the workers run on a running cluster: its size is not checked here.
    """
    problems = [*trackers.problems(config), *budget_problems(config)]
    try:
        for folder in _written(config):
            folder.check_writable()
    except StorageError as error:
        problems.append(f"run.storage={config.run.storage} is not writable: {error}")
    if local_cores is not None:
        problems += _placement(config, local_cores, local_gpus)
    return problems


def _written(config: RunConfig) -> list[Storage]:
    """Return the folders that must be writable.

    In an object store that is the root alone. On a disk, folders below it may belong to another
    user, so each is checked; the run's own folders only where they exist.
    """
    root = open_storage(config.run.storage)
    if root.local_path() is None:
        return [root]
    own = [root / config.run.name, root / RAY / config.run.name]
    mine = [folder for folder in own if os.path.isdir(folder.local_path() or "")]
    return [root, root / PREPARED, root / RAY, *mine]


def source_problem(error: Exception, path: str, field: str) -> str:
    """Return the problem of a config whose `field` names data at `path` that cannot be read."""
    text = str(error)
    if not text.startswith(("data.path=", "data.format=")):
        text = f"data.path={path} is not readable: {text}"
    return text.replace("data.path=", f"{field}=", 1)


def plan_problem(config: RunConfig, forecast: Callable[[Any], planner.Answer | None]) -> str | None:
    """Return a problem if the run does not fit cluster.instance; None with cluster.ignore_plan.

    It must fit each instance type of a list.
    """
    if config.cluster.ignore_plan:
        return None
    found = (planner.size_problem(forecast(each)) for each in config.alternatives())
    return next(filter(None, found), None)


def same_run(run: Storage, config: RunConfig, settled: bool = True) -> str | None:
    """Compare the config with the one in the run's folder; return the run's status (None: new).

    Before the config is `settled`, fields at `auto` are not compared.

    Raises:
        ConfigError: the folder belongs to a run with another config, or a file of it is damaged.
    """
    sections = read_sections(run)
    if sections is None:
        return None
    before = configs.from_dict(sections)
    changed = configs.differences(before, config, settled)
    if changed and all(line.partition(":")[0] in config.EXTENSION_FIELDS for line in changed):
        if problem := growth_problem(run, before, config, "; ".join(changed)):
            raise ConfigError([problem])
        return INTERRUPTED
    if changed:
        name, how = config.run.name, f"({'; '.join(changed)})"
        what = f"run.name={name} is taken: {run.url} holds a run with another config {how}"
        fix = "Set another run.name, or use the same config to resume"
        raise ConfigError([f"{what}. {fix}"])
    result = read_result(run)
    best, status = result.get("best"), result.get("status", INTERRUPTED)
    ended = status != DONE or (best and is_enough(best, config.eval.patience))
    if not ended and result["steps"] < (read_plan(run).get("steps") or 0):
        return INTERRUPTED  # the result is of a shorter run
    return status


def check_resumable(run: Storage) -> None:
    """Refuse to train from step 1 where a run has committed checkpoints.

    Raises:
        RunFailed: checkpoints were committed, and none can be used.
    """
    try:
        resume_point(run)
    except NoneUsable as error:
        raise RunFailed(str(error)) from error


def _placement(config: RunConfig, cores: int, gpus: int) -> list[str]:
    """Return a problem if this machine has too few cores or GPUs for the smallest worker count."""
    workers = config.cluster.min_workers
    if config.cluster.gpu == "true" or (config.cluster.gpu == "auto" and gpus):
        limit, what = gpus, f"{gpus} GPUs"
    else:
        limit = MAX_WORKERS_PER_CORE * cores
        what = f"{cores} cores (at most {MAX_WORKERS_PER_CORE} workers each)"
    if workers <= limit:
        return []
    fix = f"Set cluster.workers={max(limit, 1)} or less, or cluster.address to a larger cluster"
    asked = config.cluster.workers
    return [f"cluster.workers={asked} is more than this machine can place: it has {what}. {fix}"]
