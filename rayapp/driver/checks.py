"""What can be known to be wrong with any run before Ray starts."""

from __future__ import annotations

import json
import os

from rayapp import config as configs
from rayapp.config import ConfigError, Run, RunConfig, parse_yaml
from rayapp.observe import trackers
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import CONFIG, INTERRUPTED, PREPARED, RAY, RESULT
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.train.checkpoint.marker import NoneUsable, resume_point

MAX_WORKERS_PER_CORE = 4  # of training on CPUs, where more only trade time


def absolute_path(path: str | None) -> str | None:
    """Return a local path that is there, or a glob, made absolute; anything else as it is."""
    if path is None or "://" in path:
        return path
    expanded = os.path.expanduser(path)
    marked = any(mark in path for mark in "*?[")
    return os.path.abspath(expanded) if marked or os.path.exists(expanded) else path


def absolute_run(run: Run) -> Run:
    """Return the section with an absolute storage, whether it is there yet or not."""
    if "://" in run.storage:
        return run
    storage = os.path.abspath(os.path.expanduser(run.storage))
    return run.model_copy(update={"storage": storage})


def shared_problems(config: RunConfig, local_cores: int | None, local_gpus: int) -> list[str]:
    """Look at trackers, storage and size; `local_cores` None means a running cluster."""
    problems = trackers.problems(config)
    try:
        for folder in _written(config):
            folder.check_writable()
    except StorageError as error:
        problems.append(f"run.storage={config.run.storage} is not writable: {error}")
    if local_cores is not None:
        problems += _placement(config, local_cores, local_gpus)
    return problems


def _written(config: RunConfig) -> list[Storage]:
    """Return the folders that a run writes to; on a disk some may be another user's."""
    root = open_storage(config.run.storage)
    if root.local_path() is None:
        return [root]
    own = [root / config.run.name, root / RAY / config.run.name]
    mine = [folder for folder in own if os.path.isdir(folder.local_path() or "")]
    return [root, root / PREPARED, root / RAY, *mine]


def same_run(run: Storage, config: RunConfig) -> str | None:
    """Compare with what the run's folder was started with; return its status (None: new).

    Raises:
        ConfigError: the folder belongs to a run with another config.
    """
    if not run.exists(CONFIG):
        return None
    before = configs.from_dict(parse_yaml(run.read(CONFIG).decode()))
    changed = configs.differences(before, config)
    if changed:
        raise ConfigError(
            [
                f"run.name={config.run.name} is taken: {run.url} holds a run with another config "
                f"({'; '.join(changed)}). Set another run.name, or use the same config to resume"
            ]
        )
    if not run.exists(RESULT):
        return INTERRUPTED
    return str(json.loads(run.read(RESULT))["status"])


def check_resumable(run: Storage) -> None:
    """Refuse to train from step 1 over what a run has done.

    Raises:
        RunFailed: checkpoints were committed, and none can be used.
    """
    try:
        resume_point(run)
    except NoneUsable as error:
        raise RunFailed(str(error)) from error


def _placement(config: RunConfig, cores: int, gpus: int) -> list[str]:
    """Say whether this machine can hold the workers; a running cluster is asked by the driver."""
    workers = config.cluster.min_workers
    if config.cluster.gpu == "true" or (config.cluster.gpu == "auto" and gpus):
        limit, what = gpus, f"{gpus} GPUs"
    else:
        limit, what = (
            MAX_WORKERS_PER_CORE * cores,
            f"{cores} cores (at most {MAX_WORKERS_PER_CORE} workers each)",
        )
    if workers <= limit:
        return []
    return [
        f"cluster.workers={config.cluster.workers} is more than this machine can place: it has "
        f"{what}. Set cluster.workers={max(limit, 1)} or less, "
        "or cluster.address to a larger cluster"
    ]
