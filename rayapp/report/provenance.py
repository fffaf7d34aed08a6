"""Where a run came from: its machines, versions and commands, and how to repeat it."""

from __future__ import annotations

import shlex
from typing import cast

from rayapp.config.fields import IMAGES
from rayapp.observe import words
from rayapp.observe.goodput import ENDED, WORKERS
from rayapp.observe.records import EventFields
from rayapp.observe.run_folder import CONFIG
from rayapp.observe.words import UNKNOWN
from rayapp.report.comparison import started
from rayapp.report.folder import ReportedRun
from rayapp.report.tables import instance_of


def environment(run: ReportedRun) -> list[tuple[str, str]]:
    """Return the run's folder, versions, machines, price and times, by label, if known."""
    first = cast(EventFields, run.events[0] if run.events else {})
    began = run.events[0]["time"] if run.events else None
    last: EventFields = next(
        (e for e in reversed(run.events) if e["event"] == WORKERS), cast(EventFields, {})
    )
    attempts = int(run.last("attempt") or 0)
    rate = run.account.usd_per_hour if run.account else None
    command = started(run).get("command")
    ended = [event["time"] for event in run.events if event["event"] == ENDED]
    rows = [
        ("folder", run.url),
        *((name, text) for name, text in run.versions.items()),
        ("instance", instance_of(run) or UNKNOWN),
        ("nodes", words.number(last.get("nodes"), 12)),
        ("workers", words.number(run.last("workers"), 12)),
        ("attempts", words.number(attempts or None, 12)),
        ("price", UNKNOWN if rate is None else f"{words.dollars(rate)} per hour"),
        ("git commit", str(started(run).get("commit") or UNKNOWN)),
        ("command", f"python {command}" if command else UNKNOWN),
        ("started by", str(started(run).get("user") or UNKNOWN)),
        ("first command on", str(first.get("host") or UNKNOWN)),
        ("first command at", words.moment(began)),
        ("ended at", words.moment(ended[-1] if ended and run.result else None)),
        ("data fingerprint", str(run.plan.get("fingerprint", UNKNOWN))),
    ]
    return [(label, text) for label, text in rows if text != UNKNOWN]


def repeat(run: ReportedRun) -> list[str]:
    """Return the commands that repeat a run with the config in its folder; empty without one."""
    if run.config_yaml is None:
        return []
    commit = started(run).get("commit")
    module = "rayapp.vision" if run.unit is IMAGES else "rayapp.finetune"
    config = shlex.quote(f"{run.url}/{CONFIG}")
    fetch = [f"aws s3 cp {config} {CONFIG}"] if run.url.startswith("s3://") else []
    name = shlex.quote(f"--run.name={run.name}-again")
    return [
        *([f"git checkout {commit.removesuffix('+')}"] if commit else []),
        *fetch,
        f"python -m {module} {CONFIG if fetch else config} {name}",
    ]
