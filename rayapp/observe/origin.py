"""Who began a command of a run, from which git commit, what was typed, and in which Ray job."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayapp.observe.records import EventFields

USER, COMMIT = "RAYAPP_USER", "RAYAPP_COMMIT"
COMMAND_LENGTH = 4000  # characters of a command line that are kept
# Forms of tokens. Source: the rules of gitleaks 8 (MIT, github.com/gitleaks/gitleaks), 2026-11.
TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|sk-[A-Za-z0-9]{20,}|sk-(ant|proj|svcacct)-[\w-]{20,}"
    r"|xox[abeoprs]-[\w-]{10,}|npm_[A-Za-z0-9]{36}|pypi-AgEI[\w-]{20,}|dapi[0-9a-f]{32}|hvs\.\w{20,})"
)
# user:password@ of a URL; a password may hold slashes, and a port before a path is none.
USER_INFO = re.compile(r"(?<=://)[^\s/:@\[\"']*:(?!\d{1,5}([/,?]|$))[^\s@\"']+(@[^\s@/\"']+)*(?=@)")


def redacted(text: str) -> str:
    """Return a text without the tokens in it and without the passwords of URLs.

    >>> redacted("--data.path=https://ada:secret@host/a --tags='{a: s3://bucket:80/b@c}'")
    "--data.path=https://***@host/a --tags='{a: s3://bucket:80/b@c}'"
    """
    return TOKEN.sub("***", USER_INFO.sub("***", text))


def origin() -> EventFields:
    """Return who began this command, from which git commit, and its command line.

    A job has the user and the commit of the machine that submitted it.
    """
    return {
        "user": os.environ.get(USER) or user_name(),
        "commit": os.environ.get(COMMIT) or git_commit(),
        "command": redacted(shlex.join(map(str, sys.orig_argv[1:])))[:COMMAND_LENGTH],
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
    """Return the commit of the working folder's checkout, `+` behind it if files have changed.

    To compare files, git runs commands that `.git/config` names (fsmonitor, hooks, filters). So
    it does that with an empty folder in place of `.git`, of which it gets the index and objects.
    """
    wanted = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir", "HEAD")
    try:
        top, git, shared, commit = _git(os.environ, "rev-parse", *wanted).splitlines()
        with tempfile.TemporaryDirectory() as empty:
            if len(commit) > 40:
                form = "[core]\nrepositoryFormatVersion=1\n[extensions]\nobjectFormat=sha256\n"
                Path(empty, "config").write_text(form)
            Path(empty, "HEAD").write_text(commit)
            Path(empty, "refs").mkdir()
            own = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
            own |= {"GIT_DIR": empty, "GIT_WORK_TREE": top, "GIT_INDEX_FILE": f"{git}/index"}
            own |= {"GIT_OBJECT_DIRECTORY": os.path.abspath(f"{shared}/objects")}
            own |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
            what = ("--porcelain", "--untracked-files=no", "--ignore-submodules=all")
            changed = _git(own, "--no-optional-locks", "status", *what)
        return commit[:12] + ("+" if changed else "")
    except (OSError, ValueError, subprocess.SubprocessError):  # no git, or no checkout
        return None


def _git(environment: Mapping[str, str], *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "core.fileMode=false", *arguments],
        env=environment, capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    return done.stdout.strip()
