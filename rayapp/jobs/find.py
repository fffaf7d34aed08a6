"""Find a run by its folder or by its name, or all runs."""

from __future__ import annotations

import os

from rayapp.config import ConfigError, Run
from rayapp.jobs.client import HERE, VARIABLES, JobError, JobsClient
from rayapp.jobs.handle import Job
from rayapp.jobs.remote import find_named, runs_of
from rayapp.observe.figures import figures
from rayapp.observe.plain import escaped
from rayapp.observe.status import NoRun, left_by_a_run
from rayapp.storage import StorageError, open_storage


def job(run: str, *, storage: str | None = None, address: str | None = None) -> Job:
    """Find a run: by its folder, by its name and storage, or by its name among a cluster's jobs.

    Raises:
        ConfigError: there is no such run.
    """
    handle = located(run, storage=storage, address=address)
    try:
        handle.status()
    except NoRun as error:
        line = f"run={handle.run.url} is unknown: {error}. Set the folder of a run"
        raise ConfigError([line]) from None
    return handle


def located(run: str, *, storage: str | None = None, address: str | None = None) -> Job:
    """Return the handle of the folder that `job` names, without a look at what is in it.

    Raises:
        ConfigError: no job of the cluster is of a run with this name.
    """
    known = None
    if storage is not None:
        run = f"{storage.rstrip('/')}/{run}"
    elif "://" not in run and "/" not in run and not os.path.isdir(run):
        folder = None if address else local_storage()
        if folder is None:
            run, known = find_named(run, address)
        elif os.path.isdir(os.path.join(folder, run)):
            run = os.path.join(folder, run)
        else:
            root = open_storage(folder)
            found = sorted(name for name in root.dirs() if left_by_a_run(root / name))
            where = f"{root.url} has {', '.join(found) or 'no run'}"
            raise ConfigError([f"run={run} is unknown: {where}. Set storage, or address={HERE}"])
    return Job(run, address, known)


UNREADABLE = "unreadable"


def reason_of(error: Exception) -> str:
    """Return in one line why a run cannot be read."""
    reason = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, ConfigError | JobError | StorageError)
    return reason if known else f"{type(error).__name__}: {reason}"


class Runs(list[Job]):
    """The runs of a folder or a cluster; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        rows = []
        for each in self:
            try:
                status, now, _ = each.snapshot()
            except Exception as error:  # whatever is wrong with it, it hides no other
                status, now = f"{UNREADABLE}: {reason_of(error)}", None
            shown = figures(now) if now is not None else {}
            cells = (each.name, status, *(shown.get(name, "") for name in ("step", "loss", "cost")))
            rows.append("".join(f"<td>{escaped(cell)}</td>" for cell in cells))
        head = "".join(f"<th>{name}</th>" for name in ("run", "status", "step", "loss", "cost"))
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def runs(*, storage: str | None = None, address: str | None = None) -> Runs:
    """Return the runs of a folder, or those that a cluster's jobs name, in order of their names.

    Without either it is the folder `runs`, if it is there, else the cluster in effect.

    Raises:
        JobError: the cluster does not answer.
    """
    storage = storage or (None if address else local_storage())
    if storage is not None:
        root = open_storage(storage)
        folders = [(root / name) for name in root.dirs() if not name.startswith(".")]
        return Runs(Job(run.url, address) for run in folders if left_by_a_run(run))
    known = runs_of(JobsClient.at(address, check_version=False).jobs())
    return Runs(Job(url, address, info.submission_id) for url, info in known.items())


def local_storage() -> str | None:
    """Return the default folder of runs, if it is in the working folder and no cluster is named."""
    folder = Run().storage
    named = any(os.environ.get(name) for name in VARIABLES)
    return folder if os.path.isdir(folder) and not named else None
