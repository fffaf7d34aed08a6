"""The files of a run's folder: their names and how they are read, states of runs, exit codes.

    plan = read(run, PLAN, Plan)                    # None if there is no such file
    line = parsed(text, MetricsLine)

Each file has one type (see rayapp.observe.records). Whoever can write to a storage can put anything
there. What is not of the type is a DamagedFile, which names the file and the reason. A number is
finite and at most MOST, so that code that adds, divides and formats numbers needs no checks of its
own; NaN and infinity are read as None. rayapp.train.checkpoint.marker names the files inside a
checkpoint.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from rayapp import data
from rayapp.config import ConfigError
from rayapp.storage import Storage
from rayapp.storage.base import HIDDEN

# ---- Files of <run.storage>/<run.name> ------------------------------------------------------

CONFIG = "config.yaml"
PLAN = "plan.json"
ASKED = "asked.json"  # both of a command that has not done a step, where the run has some
METRICS = "metrics.jsonl"
METRICS_PARTS = "metrics"  # a folder: on S3, what is not yet in metrics.jsonl
EVENTS = "events.jsonl"
ACTIVITY = "activity.json"  # what the driver does at the moment
RANK_ACTIVITY = "activity-rank-0.json"  # what rank 0 does while it takes no steps
VALIDATIONS = "validation.jsonl"
ITEMS = "items"  # a folder: the items of eval.tasks with their answers, by step
RESULT = "result.json"
REPORT = "report.html"
PROFILES = "profiles"  # a folder: traces of train.profile_steps
LOGS = "logs"  # a folder: what the driver printed, by attempt
SUBMISSION = "submission.json"  # how the run was submitted, to resume it in the same way
LEASE = "LEASE"  # renewed by the driver that works on the run
STOP = "STOP"  # asks the run to save and stop
RUN_ID = "RUN_ID"  # a random id, which the markers of the run's checkpoints also hold
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
MODEL = "model"
ADAPTER = "adapter"  # beside a model that an adapter was merged into
RESERVE = f"{HIDDEN}reserve"  # on a disk, while a command trains: room for the reason of a failure

FILES = (CONFIG, PLAN, ASKED, METRICS, EVENTS, ACTIVITY, RANK_ACTIVITY, VALIDATIONS, RESULT)
OWN = re.compile(
    "|".join(map(re.escape, (*FILES, REPORT, SUBMISSION, LEASE, STOP, RUN_ID)))
    + rf"|({METRICS_PARTS}|{ITEMS})/[0-9]+\.jsonl|{LOGS}/attempt-[0-9]+\.txt"
    + rf"|({TENSORBOARD}|{MODEL}|{ADAPTER}|{PROFILES})/.+"
    + rf"|{CHECKPOINTS}/(.+/)?([^/]+\.distcp|\.metadata|state\.json|COMMITTED|REFUSED)"
)
"""The names that a run writes; no others are removed with it."""


def items_file(step: int) -> str:
    """Return the name of the file of scored items after so many steps."""
    return f"{ITEMS}/{step}.jsonl"


# Beside the runs, shared by all of them.
PREPARED = data.FOLDER
RAY = ".ray"

# ---- How a run stands -----------------------------------------------------------------------

PREPARING, WAITING, RUNNING, STOPPING = LIVE = ("preparing", "waiting", "running", "stopping")
DONE, STOPPED, FAILED = "done", "stopped", "failed"
REJECTED = "rejected"  # all steps are done, and the model does not meet eval.gate
LOST = "lost"  # its driver is gone
MOVED = "moved"  # of an attempt: its workers have left to be started again
INTERRUPTED = "interrupted"  # of a folder without a result
PENDING, STARTING, REFUSED = "pending", "starting", "refused"  # of a job that has no run yet


class Exit(IntEnum):
    """Exit codes of all commands."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    """The command line or the config is not valid; no training worker has been started."""
    STOPPED = 3
    REJECTED = 4
    """The model does not meet eval.gate."""


def refused(error: ConfigError) -> Exit:
    """Print a line for each problem of a command line or config; return the exit code."""
    for problem in error.problems:
        print(problem, file=sys.stderr)
    return Exit.REFUSED


EXIT_CODES = {
    DONE: Exit.DONE,
    FAILED: Exit.FAILED,
    LOST: Exit.FAILED,
    REFUSED: Exit.REFUSED,
    STOPPED: Exit.STOPPED,
    REJECTED: Exit.REJECTED,
}
"""The exit code for each status of a run or job that has ended."""

RETRIED = "RAYAPP_RETRIED"
"""An environment variable: it is set where a job that fails is started again, as KubeRay does."""

# ---- The lease ------------------------------------------------------------------------------

LEASE_RENEWED_S = 10.0  # the driver renews it at this interval
LEASE_LEFT_S = 60.0  # workers that see it unrenewed for this long save and leave
LEASE_STOPPED_S = 75.0  # a driver that has not renewed it for this long ends its workers
LEASE_TAKEN_S = 90.0  # another driver takes over a lease that was not renewed for this long

# ---- Reading ---------------------------------------------------------------------------------

MOST = 1e39
MOST_COUNT = 2**53  # exact as a float too
MOST_TIME = 1e11  # Unix seconds, in the year 5138
Count: TypeAlias = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Number: TypeAlias = Annotated[float, Field(ge=-MOST, le=MOST)]
UnixTime: TypeAlias = Annotated[float, Field(ge=0, le=MOST_TIME)]

REWRITTEN = "Delete the file: the run's next command writes it again"

T = TypeVar("T")


class DamagedFile(ConfigError):
    """A file of a run's folder does not have the content that a run writes."""

    def __init__(self, url: str, why: str, fix: str = REWRITTEN) -> None:
        super().__init__([f"{url} is damaged: {why}. {fix}"])


def read(run: Storage, name: str, kind: type[T], fix: str = REWRITTEN) -> T | None:
    """Return the content of a JSON file in a run's folder, None if there is no such file.

    Raises: DamagedFile: it is not of this kind.
    """
    try:
        content: T = parsed(run.read(name), kind)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedFile(f"{run.url}/{name}", str(error), fix) from None
    return content


def read_lines(run: Storage, name: str, line_of: Callable[[bytes], T], fix: str) -> list[T]:
    """Return the lines of a file by `line_of`, [] without a file; an unfinished last one is left.

    Raises: DamagedFile: `line_of` has raised a ValueError.
    """
    lines = list[T]()
    try:
        for line in run.read(name).splitlines(keepends=True):
            lines += [line_of(line)] if line.endswith(b"\n") else []
    except FileNotFoundError:
        return []
    except ValueError as error:
        why = f"line {len(lines) + 1}: {error}"
        raise DamagedFile(f"{run.url}/{name}", why, fix) from None
    return lines


def parsed(text: bytes, kind: Any) -> Any:
    """Return the value of a JSON text.

    Raises: ValueError: it is not of this kind; the message is one line.
    """
    try:
        value = json.loads(
            text, parse_int=_whole, parse_float=_number, parse_constant=lambda _: None
        )
        # UTF-8 has no halves of surrogate pairs: they become `?`.
        plain = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        return schema(kind).validate_json(plain, strict=True, extra="allow")
    except ValidationError as error:
        raise ValueError(reason_of(error)) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def reason_of(error: ValidationError) -> str:
    """Return where the first problem is, and what it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return " ".join(f"{where}: {first['msg']}".removeprefix(": ").split())


@cache
def schema(kind: Any) -> TypeAdapter[Any]:
    """Return what checks values of a kind; it takes milliseconds to make."""
    return TypeAdapter(kind)


def _number(text: str) -> float:
    value = float(text)
    if not -MOST <= value <= MOST:
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _whole(text: str) -> int:
    _number(text)
    return int(text)
