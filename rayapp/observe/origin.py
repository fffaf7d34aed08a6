"""Who began a command of a run, from which git commit, what was typed, and in which Ray job."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import subprocess
import sys
from typing import Any

from rayapp.observe.records import EventFields

USER, COMMIT = "RAYAPP_USER", "RAYAPP_COMMIT"
COMMAND_LENGTH = 4000  # characters of a command line that are kept


def origin() -> EventFields:
    """Return who began this command, from which git commit, and its command line.

    A job has the user and the commit of the machine that submitted it.
    """
    return {
        "user": os.environ.get(USER) or user_name(),
        "commit": os.environ.get(COMMIT) or git_commit(),
        "command": shlex.join(map(str, sys.orig_argv[1:]))[:COMMAND_LENGTH],
    }


def variables() -> dict[str, str]:
    """Return the environment variables that tell a job who submitted it, from which commit."""
    values = {USER: user_name(), COMMIT: git_commit()}
    return {name: value for name, value in values.items() if value}


def job_config() -> dict[str, Any]:
    """Return what the Ray job whose driver this process is was submitted with; {} without a job."""
    return dict(json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}"))


def submission_id() -> str | None:
    """Return the submission id of the Ray job whose driver this process is, None without a job."""
    return (job_config().get("metadata") or {}).get("job_submission_id")


def user_name() -> str | None:
    """Return the name of this process's user, None if it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return None


def git_commit() -> str | None:
    """Return the commit of the working folder's checkout, `+` behind it if files have changed."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
