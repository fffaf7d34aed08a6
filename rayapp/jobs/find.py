"""Find a run by its folder or by its name."""

from __future__ import annotations

import os

from rayapp.config import ConfigError, Run
from rayapp.jobs.client import VARIABLES
from rayapp.jobs.handle import Job
from rayapp.jobs.remote import find_named
from rayapp.observe.status import NoRun


def job(run: str, *, storage: str | None = None, address: str | None = None) -> Job:
    """Find a run: by its folder, by its name and storage, or by its name among a cluster's jobs.

    Raises:
        ConfigError: there is no such run.
    """
    known = None
    if storage is not None:
        run = f"{storage.rstrip('/')}/{run}"
    elif "://" not in run and "/" not in run and not os.path.isdir(run):
        folder = None if address else local_storage()
        if folder is not None and os.path.isdir(os.path.join(folder, run)):
            run = os.path.join(folder, run)
        else:
            run, known = find_named(run, address)
    handle = Job(run, address, known)
    try:
        handle.status()
    except NoRun as error:
        raise ConfigError([f"run={run} is unknown: {error}. Set the folder of a run"]) from None
    return handle


def local_storage() -> str | None:
    """Return the default folder of runs, if it is in the working folder and no cluster is named."""
    folder = Run().storage
    named = any(os.environ.get(name) for name in VARIABLES)
    return folder if os.path.isdir(folder) and not named else None
