"""The names of the files in a run's folder, of a run's states, and the exit codes of commands.

rayapp.train.checkpoint.marker names the files inside a checkpoint.
"""

from __future__ import annotations

import re
from enum import IntEnum

from rayapp import data
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
    + rf"|({TENSORBOARD}|{MODEL}|{ADAPTER})/.+"
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


EXIT_CODES = {
    DONE: Exit.DONE,
    FAILED: Exit.FAILED,
    LOST: Exit.FAILED,
    REFUSED: Exit.REFUSED,
    STOPPED: Exit.STOPPED,
}
"""The exit code for each status of a run or job that has ended."""

RETRIED = "RAYAPP_RETRIED"
"""An environment variable: it is set where a job that fails is started again, as KubeRay does."""

# ---- The lease ------------------------------------------------------------------------------

LEASE_RENEWED_S = 10.0  # the driver renews it at this interval
LEASE_LEFT_S = 60.0  # workers that see it unrenewed for this long save and leave
LEASE_STOPPED_S = 75.0  # a driver that has not renewed it for this long ends its workers
LEASE_TAKEN_S = 90.0  # another driver takes over a lease that was not renewed for this long
