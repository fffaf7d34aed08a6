"""The report of a run, or of several side by side: one HTML file that needs no network.

    write(open_storage("s3://bucket/runs/demo"))        # report.html in the run's folder
    compare([one, another], "comparison.html")

The report reads nothing but the run's folder, and can be written at any time: while the run trains,
or after it has ended, stopped or failed. What is not known is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from rayapp.config import ConfigError
from rayapp.observe.run_folder import REPORT, DamagedFile
from rayapp.report.card import write_card
from rayapp.report.folder import ReportedRun, read
from rayapp.report.render import comparison_page, run_page
from rayapp.storage import Storage, StorageError, open_storage

__all__ = ["compare", "write", "write_card", "write_for"]

logger = logging.getLogger("rayapp.report")


def write(run: Storage, out: str | None = None) -> str:
    """Write the report of a run to its folder, or to the file `out`; return its path or URL.

    Raises:
        NoRun: nothing in this folder is a run's.
        StorageError: it cannot be read or written.
    """
    page = run_page(read(run))
    if out is not None:
        return _save(page, out)
    run.write(REPORT, page)
    return f"{run.url}/{REPORT}"


def compare(runs: Sequence[Storage], out: str) -> str:
    """Write one page of several runs to the file `out`; return its path or URL.

    Raises:
        ConfigError: they are not of one kind.
        NoRun: one of the folders holds no run.
        StorageError: one cannot be read, or the page not be written.
    """
    reported = [read(run) for run in runs]
    kinds = {run.unit.many for run in reported}
    if len(kinds) > 1:
        line = f"RUN is of two kinds: these runs are counted in {' and '.join(sorted(kinds))}. "
        raise ConfigError([f"{line}Compare runs of one kind"])
    return _save(comparison_page(_told_apart(reported)), out)


def write_for(run: Storage) -> None:
    """Write the report of a run that has just ended; log a warning if that fails."""
    try:
        logger.info("report in %s", write(run))
    except (DamagedFile, ImportError, StorageError) as error:  # an older image may lack bokeh
        logger.warning("the report is not written: %s", error)


def _save(page: bytes, out: str) -> str:
    folder, _, name = out.replace("\\", "/").rpartition("/")
    storage = open_storage(folder or ("/" if out.startswith("/") else "."))
    storage.write(name, page)
    return f"{storage.url.rstrip('/')}/{name}"


def _told_apart(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Rename runs of the same name to the last two parts of their folders."""
    names = [run.name for run in runs]
    return [
        replace(run, name="/".join(run.url.rstrip("/").split("/")[-2:]))
        if names.count(run.name) > 1
        else run
        for run in runs
    ]
