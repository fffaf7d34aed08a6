"""Send a run to a cluster, and keep a note in its folder: address, submission id and options.

Of the note, the id, the driver's CPUs and memory, and the tags are used again. A `working_dir`,
`pip`, `env` or `secrets` of the note, and code that the folder's config names, are never sent again
unless the user names them: whoever can write to the folder could have put anything there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

from pydantic import TypeAdapter, ValidationError

from rayapp.config import ConfigError, RunConfig
from rayapp.config.code import code_in
from rayapp.jobs import JobsClient, SubmitOptions, prepare
from rayapp.observe.run_folder import EVENTS, SUBMISSION, DamagedFile
from rayapp.observe.status import NoRun, read
from rayapp.observe.words import number_of_bytes
from rayapp.storage import Storage, StorageError, open_storage

ID = re.compile(r"\w[\w.:@+=~-]*")  # a submission id; it becomes part of a URL


class Again(TypedDict, total=False):
    """The options that a resume takes from the user only, never from the note."""

    working_dir: str | None
    pip: tuple[str, ...]
    env: Mapping[str, str]
    secrets: Mapping[str, str]


@dataclass(frozen=True)
class Note:
    """The submission.json that `send` writes into a run's folder."""

    address: str
    submission_id: str
    time: float
    """Unix seconds."""
    shipment: SubmitOptions


def send(
    config: RunConfig,
    options: SubmitOptions,
    address: str | None,
    say: Callable[[str], None] = print,
    check_live: bool = True,
) -> tuple[str, str]:
    """Submit a run as a Ray job and write its note; return the URLs of its folder and the cluster.

    `say` is called with a line that names the job, and before it, if a folder is uploaded, with one
    that says how many bytes. `check_live` refuses a run with a live driver.

    Raises:
        ConfigError: it cannot run there as described, or is running already.
        JobError: the cluster cannot or will not.
    """
    order = prepare(config, options)
    run = open_storage(order.run_url)
    if check_live and _is_live(run):
        raise ConfigError(
            [
                f"run.name={config.run.name} is running: a driver is at work on {run.url}. "
                "Stop it, or set another run.name"
            ]
        )
    cluster = JobsClient.at(address)
    if order.package is not None:
        size = number_of_bytes(len(order.package))
        say(f"uploading {options.working_dir} to {cluster.address}: {size} packed")
    submission_id = cluster.submit(order)
    note = Note(cluster.address, submission_id, time.time(), options)
    run.write(SUBMISSION, json.dumps(asdict(note), indent=1).encode())
    say(f"job {submission_id} at {cluster.address}: results in {order.run_url}")
    return order.run_url, cluster.address


def _is_live(run: Storage) -> bool:
    try:
        return read(run).live
    except NoRun:
        return False


def sent(run: Storage) -> Note | None:
    """Return the note of a run; None if there is none, or the storage cannot be read.

    Raises:
        DamagedFile: the note is not as `send` writes it.
    """
    try:
        data = run.read(SUBMISSION)
    except (FileNotFoundError, StorageError):
        return None
    try:
        note = TypeAdapter(Note).validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        why = f"{where}: {first['msg']}" if where else first["msg"]
        fix = f"Delete the file: status and logs then go by {EVENTS}"
        raise DamagedFile(f"{run.url}/{SUBMISSION}", why, fix) from None
    if not ID.fullmatch(note.submission_id):
        raise DamagedFile(f"{run.url}/{SUBMISSION}", "submission_id is no id", "Delete the file")
    return note


def options_again(
    run: Storage, config: RunConfig, code: Collection[str], given: Again
) -> SubmitOptions:
    """Return the options to submit a run with again: those of its note, changed by `given`.

    Of the note, nothing that `Again` lists is used without the user naming it, nor is code that the
    folder's config names and `code` does not.

    Raises:
        ConfigError: the run was sent with something that the user has to name.
    """
    note, named = sent(run), code_in(config.model_dump())
    problems = [
        f"{field}={name} is not run again by itself: anyone who can write to {run.url} could have "
        f"set it. If it is your code, give code={','.join(name for _, name in named)}"
        for field, name in named
        if name not in code
    ]
    if note is None:
        if "working_dir" not in given:
            problems.append(
                f"working_dir is missing: {run.url} was sent by `ray job submit`, which does "
                "not record the folder. Give it, or none to run the code of the image"
            )
    else:
        problems += [
            f"{name}={_as_typed(getattr(note.shipment, name))} is not sent again by itself: anyone "
            f"who can write to {run.url} could have set it. Give {name} again, or {name}=none to "
            "leave it out"
            for name in Again.__annotations__
            if getattr(note.shipment, name) and name not in given
        ]
    if problems:
        raise ConfigError(problems)
    return replace(note.shipment if note else SubmitOptions(), **given)


def _as_typed(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return value if isinstance(value, str) else ",".join(value)
