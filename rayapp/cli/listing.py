"""The runs of a folder or of a cluster, as `rayapp list` and `status --json` print them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NotRequired, TypedDict

from rayapp.config import ConfigError
from rayapp.jobs import JobError
from rayapp.jobs.handle import Job
from rayapp.jobs.remote import runs_of
from rayapp.observe.records import MetricsLine
from rayapp.observe.status import NoRun, Progress, figures, read
from rayapp.observe.words import UNKNOWN
from rayapp.storage import Storage, StorageError, open_storage

UNREADABLE = "unreadable"


class Listed(TypedDict):
    """What --json prints of a run; the second half is there once it has begun."""

    run: str
    status: str
    job: str | None
    updated_s: float | None
    reason: str | None
    figures: dict[str, str]
    step: NotRequired[int]
    num_steps: NotRequired[int | None]
    left_s: NotRequired[float | None]
    goodput: NotRequired[dict[str, float]]
    wall_s: NotRequired[float]
    cost_usd: NotRequired[float | None]
    cost_at_end_usd: NotRequired[float | None]
    line: NotRequired[MetricsLine | None]


def of_storage(storage: str) -> list[Listed]:
    """Return the runs of a folder, whatever clusters they ran on."""
    root = open_storage(storage)
    rows = [_row((root / name).url, partial(_in_folder, root / name)) for name in root.dirs()]
    return sorted(filter(None, rows), key=lambda row: row["updated_s"] or 0.0)


def _in_folder(run: Storage) -> tuple[str, Progress | None]:
    now = read(run)
    return now.status, now


def of_cluster(address: str | None) -> list[Listed]:
    """Return the runs whose jobs a cluster knows of, each with its newest job."""
    from rayapp.jobs import JobsClient

    rows = list[Listed]()
    for url, info in runs_of(JobsClient.at(address, check_version=False).jobs()):
        if url is None:
            values = values_of(info.storage or UNKNOWN, info.status.lower(), None)
            values["reason"] = "its command line does not say which run of this folder it is"
            rows.append({**values, "job": info.submission_id})
            continue
        row = _row(url, partial(_on_cluster, url, address, info.submission_id))
        if row is not None:
            rows.append({**row, "job": info.submission_id})
    return rows


def _on_cluster(url: str, address: str | None, known: str) -> tuple[str, Progress | None]:
    state, now, _ = Job(url, address, known).snapshot()
    return state, now


def _row(url: str, read_status: Callable[[], tuple[str, Progress | None]]) -> Listed | None:
    """Return what is listed of a run, None of a folder without one.

    A run that cannot be read is listed with the reason, whatever that is, and hides no other.
    """
    try:
        return values_of(url, *read_status())
    except NoRun:
        return None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, ConfigError | JobError | StorageError):
            reason = f"{type(error).__name__}: {reason}"
        return {**values_of(url, UNREADABLE, None), "reason": reason}


def values_of(url: str, state: str, now: Progress | None) -> Listed:
    """Return what --json prints of a run."""
    values: Listed = {
        "run": url,
        "status": state,
        "job": None,
        "updated_s": None,
        "reason": None,
        "figures": figures(now) if now is not None else {},
    }
    if now is not None:
        values |= {
            "step": now.step,
            "num_steps": now.num_steps,
            "left_s": now.left_s,
            "updated_s": now.updated_s,
            "reason": now.reason,
            "goodput": now.account.goodput,
            "wall_s": now.account.wall_s,
            "cost_usd": now.account.cost_usd,
            "cost_at_end_usd": now.cost_at_end_usd,
            "line": now.line,
        }
    return values
