"""Sending a run to a cluster, and the note in its folder of where it went, and with what."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from rayapp.config import ConfigError, RunConfig, load
from rayapp.jobs import Cluster, Shipment, prepare
from rayapp.jobs.package import as_dict
from rayapp.progress import NoRun, read
from rayapp.storage import Storage, StorageError, open_storage

FILE = "submission.json"


def send(
    config: RunConfig, shipment: Shipment, address: str | None, say: Callable[[str], None] = print
) -> str:
    """Send a run to a cluster as a Ray job; return the URL of its folder.

    Raises:
        ConfigError: it cannot run there as described, or is running already.
        JobError: the cluster cannot or will not.
    """
    order = prepare(config, shipment)
    run = open_storage(order.run_url)
    try:
        now = read(run)
    except NoRun:
        pass
    else:
        if now.live:
            raise ConfigError(
                [
                    f"run.name={config.run.name} is running: a driver is at work on {run.url}. "
                    "Stop it, or set another run.name"
                ]
            )
    cluster = Cluster.at(address)
    submission_id = cluster.submit(order)
    note = {"address": cluster.address, "submission_id": submission_id, "time": time.time()}
    note["shipment"] = as_dict(shipment)
    run.write(FILE, json.dumps(note, indent=1).encode())
    say(f"job {submission_id} at {cluster.address}: results in {order.run_url}")
    return order.run_url


def sent(run: Storage) -> dict[str, Any] | None:
    """Return what `send` noted of a run: address, submission_id, time (seconds since 1970) and
    shipment; None for a run that was not sent, or whose storage does not say.
    """
    try:
        return dict(json.loads(run.read(FILE)))
    except (FileNotFoundError, StorageError):
        return None


def changed(config: RunConfig | str, sections: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Return a config, or a YAML file's, with other values: `{"train": {"lr": 1e-3}}`."""
    overrides = {}
    for section, fields in sections.items():
        for name, value in fields.items():
            text = value if isinstance(value, str) else json.dumps(value)
            overrides[f"{section}.{name}"] = text
    if isinstance(config, str):
        return load(config, overrides)
    return load(None, {**config.to_overrides(), **overrides})
