"""rayapp list and status: what runs there are, and how one is getting on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any

from rayapp.cli.jobs import WHERE, command, handle_of, or_none
from rayapp.config import Run, arguments
from rayapp.config.fields import comma_list
from rayapp.config.text import shown
from rayapp.jobs.find import UNREADABLE, local_storage, reason_of
from rayapp.jobs.handle import Job
from rayapp.jobs.remote import runs_of
from rayapp.observe.figures import FIGURES, figures, label
from rayapp.observe.metrics import OWN_LOSS
from rayapp.observe.run_folder import EXIT_CODES, DamagedFile, Exit
from rayapp.observe.status import NoRun, Progress, read_sections, summary
from rayapp.observe.words import UNKNOWN, clock, moment
from rayapp.storage import Storage, StorageError, open_storage

BEGIN = "Start one: rayapp finetune tiny_cpu. Find others by --storage=URL or --address=URL"
WIDEST = 1000  # columns of characters
READS_AT_ONCE = 16  # runs of a folder that `list` reads at the same time


LIST = """\
rayapp list [--storage=URL | --address=URL] [--fields=A,B] [--filter=N=V] [--sort=NAME] [--json]

  --fields=A,B   columns with these fields of each run's config, e.g. train.lr,model.path
  --filter=N=V   only the runs with this value of a field, a figure or a name of --json
  --sort=NAME    by a field, a figure (eval_loss, a task) or a name of --json; what lacks it last
"""


@command(LIST)
def runs(argv: list[str]) -> int:
    """List the runs of a folder or of a cluster; without either, those in `runs` if it is there."""
    argv = arguments.flags(argv, {"json"})
    more = {"json": "false", "fields": "", "filter": "", "sort": ""}
    _, asked = arguments.read_plain(argv, "", {**WHERE, **more})
    rows, where = _listed(or_none(asked["storage"]), or_none(asked["address"]))
    chosen, (name, _, wanted) = comma_list(asked["fields"]), asked["filter"].partition("=")
    if fields := {each for each in (*chosen, name, asked["sort"]) if "." in each}:
        for row in rows:
            row["fields"] = _fields(row["run"], sorted(fields))
    if name:
        rows = [row for row in rows if shown(_value(row, name)) == wanted]
    if asked["sort"]:
        values = [(_value(row, asked["sort"]), row) for row in rows]
        values.sort(key=lambda each: (each[0] is None, isinstance(each[0], str), each[0] or 0))
        rows = [row for _, row in values]
    if asked["json"] == "true":
        print(json.dumps(rows, indent=2))
        return Exit.DONE
    if not rows:
        print(f"no runs in {where}. {BEGIN}")
    else:
        _show(rows, chosen)
    return Exit.DONE


def _listed(storage: str | None, address: str | None) -> tuple[list[dict[str, Any]], str]:
    """Return the runs, and where they were looked for.

    If neither is named, there may be no `runs` in this folder, and no cluster on this machine.
    """
    if storage is None and address is None:
        storage = local_storage()
    if storage is not None:
        return _of_storage(root := open_storage(storage)), root.url
    from rayapp.jobs.client import BY_DEFAULT, Unreachable, address_of

    cluster, origin = address_of(address)
    try:
        return _of_cluster(address), cluster
    except Unreachable:
        if origin != BY_DEFAULT:
            raise
        return [], f"{os.getcwd()}/{Run().storage}, and no cluster at {cluster}"


def _fields(url: str, names: list[str]) -> dict[str, Any]:
    try:
        sections: Any = read_sections(open_storage(url)) or {}
    except (StorageError, DamagedFile, ValueError):
        return {}
    each = ((name, name.split(".")) for name in names)
    return {
        name: reduce(lambda at, key: (at or {}).get(key), keys, sections) for name, keys in each
    }


def _value(row: dict[str, Any], name: str) -> Any:
    held = row.get("held_out") or {}
    places = (row.get("fields"), held.get("eval_metrics"), held, row, row.get("line"))
    return next((place[name] for place in places if place and place.get(name) is not None), None)


def _show(rows: list[dict[str, Any]], fields: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from rayapp.observe.plain import Console

    table = Table(box=None, pad_edge=False)
    every = dict.fromkeys(name for row in rows for name in row["figures"])
    usual = {"step", *(shown for name, (shown, _) in FIGURES.items() if name != OWN_LOSS)}
    usual -= {label("eval_loss"), label("eval_top1")}
    names = ["step", "loss", *(name for name in every if name not in usual), "cost"]
    costs = {row["figures"].get("cost", UNKNOWN) for row in rows}
    names = [name for name in names if name != "cost" or costs != {UNKNOWN}]
    for name in ("run", "status", *names, *fields, "started", "seen", "by"):
        table.add_column(name.removesuffix(" loss"), no_wrap=True)
    for row in rows:
        seen = row["updated_s"]
        cells = (
            row["run"].rpartition("/")[2],
            row["status"],
            *(row["figures"].get(name, UNKNOWN) for name in names),
            *(shown(row["fields"].get(name)) for name in fields),
            moment(row["started_s"])[5:10],
            UNKNOWN if seen is None else f"{clock(max(0.0, time.time() - seen))} ago",
            " ".join(filter(None, (row["user"], row["commit"]))),
        )
        table.add_row(*map(Text, cells))
    Console(width=WIDEST).print(table)  # a terminal wraps what is wider than it
    for folder in dict.fromkeys(row["run"].rpartition("/")[0] for row in rows):
        print(f"in {folder}")
    for row in rows:
        if row["updated_s"] is None and row["reason"]:  # its folder has told nothing
            print(f"{row['run']}: {row['reason']}")


@command("rayapp status RUN [--storage=URL] [--address=URL] [--json]")
def status(argv: list[str]) -> int:
    """Say how a run is getting on; 0 while it is, else what it returned."""
    handle, asked = handle_of(arguments.flags(argv, {"json"}), {"json": "false"})
    state, now, lines = handle.snapshot()
    if asked["json"] == "true":
        print(json.dumps(_values(handle.run.url, state, now), indent=2))
    else:
        from rayapp.jobs.terminal import render
        from rayapp.observe.plain import Console

        Console().print(render(handle.name, state, now, lines))
        if now is None and (reason := handle.reason()):
            print(reason)
    return EXIT_CODES.get(state, Exit.DONE)


def _of_storage(root: Storage) -> list[dict[str, Any]]:
    def row(run: Storage) -> dict[str, Any] | None:
        return _row(run.url, lambda: ((now := summary(run)).status, now))

    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        rows = list(pool.map(row, [root / name for name in root.dirs()]))
    return sorted(filter(None, rows), key=lambda row: row["updated_s"] or 0.0)


def _of_cluster(address: str | None) -> list[dict[str, Any]]:
    from rayapp.jobs import JobsClient

    rows: list[dict[str, Any]] = []
    for url, info in runs_of(JobsClient.at(address, check_version=False).jobs()).items():
        row = _row(url, partial(_on_cluster, url, address, info.submission_id))
        if row is not None:
            rows.append({**row, "job": info.submission_id})
    return rows


def _on_cluster(url: str, address: str | None, job: str) -> tuple[str, Progress | None]:
    return Job(url, address, job).snapshot()[:2]


def _row(url: str, read_status: Callable[[], tuple[str, Progress | None]]) -> dict[str, Any] | None:
    """Return what is listed of a run, None of a folder without one.

    A run that cannot be read is listed with the reason, whatever that is, and hides no other.
    """
    try:
        return _values(url, *read_status())
    except NoRun:
        return None
    except Exception as error:
        return {**_values(url, UNREADABLE, None), "reason": reason_of(error)}


def _values(url: str, state: str, now: Progress | None) -> dict[str, Any]:
    """Return what --json prints of a run; the second half is there once it has begun."""
    values: dict[str, Any] = {"run": url, "status": state}
    if now is None:
        empty = dict.fromkeys(("job", "started_s", "updated_s", "reason", "user", "commit"))
        return values | empty | {"figures": {}}
    of_now = "started_s updated_s reason user commit held_out step num_steps left_s"
    values |= {"job": None, "figures": figures(now)}
    values |= {name: getattr(now, name) for name in of_now.split()}
    values |= {name: getattr(now.account, name) for name in ("goodput", "wall_s", "cost_usd")}
    activity = now.activity.text(time.time()) if now.activity else None
    return values | {
        "cost_at_end_usd": now.cost_at_end_usd,
        "line": now.line,
        "activity": activity,
    }
