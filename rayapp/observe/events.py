"""Write events.jsonl, the driver's record of commands and attempts (see rayapp.observe.goodput).

A command's first event says who began it, from which git commit, what was typed and in which job.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rayapp import hardware
from rayapp.config import Place, RunConfig
from rayapp.observe import goodput
from rayapp.observe.activity import WAITING_FOR_ROOM, Activity
from rayapp.observe.attempts import Ending
from rayapp.observe.columns import Follower
from rayapp.observe.metrics import MetricsLine
from rayapp.observe.plain import redacted
from rayapp.observe.records import Event, EventFields
from rayapp.observe.run_folder import EVENTS, FAILED, METRICS
from rayapp.planner.question import named_instance, nodes_of, price_of
from rayapp.storage import Storage

USER, COMMIT = "RAYAPP_USER", "RAYAPP_COMMIT"
COMMAND_LENGTH = 4000  # characters of a command line that are kept

logger = logging.getLogger("rayapp.driver")


class Journal:
    """The events of a run, and the steps that the driver has last seen in metrics.jsonl."""

    def __init__(self, run: Storage, nodes: Callable[[], list[Place]] = list) -> None:
        """`nodes` returns the place of each node that is up and says what it is."""
        self.run, self.events, self._nodes = run, goodput.read_events(run), nodes
        self._lines = Follower(run, ("step", "attempt", "step_s", "time"))
        self._lines.poll()
        self._followed = self._attempt()
        self._lost_steps, self._lost_s = 0, 0.0  # not in an event yet
        self.passed: deque[Activity] = deque()
        """Phases to store with the next event; any thread may append."""

    @property
    def attempts(self) -> int:
        """How often workers were started, over all commands."""
        return sum(event["event"] == goodput.WORKERS for event in self.events)

    @property
    def last(self) -> MetricsLine | None:
        """The last line of metrics.jsonl that was read; None if there was none."""
        return self._lines.steps.last

    def _attempt(self) -> int:
        return self.last["attempt"] if self.last else 0

    @contextmanager
    def command(self, config: RunConfig, began: float) -> Iterator[None]:
        """Record the start of a command, and its end if the block raises."""
        seen_until = self.last["time"] if self.last else None
        self.add(
            goodput.STARTED,
            {
                "host": socket.gethostname(),
                "submission_id": submission_id(),
                # A job has the user and the commit of the machine that submitted it.
                "user": os.environ.get(USER) or user_name(),
                "commit": os.environ.get(COMMIT) or git_commit(),
                "command": redacted(shlex.join(map(str, sys.orig_argv[1:])))[:COMMAND_LENGTH],
                "seen_until": seen_until,
                **({"init_from": str(config.origin)} if config.origin else {}),
                **machines(config, config.cluster.min_workers, self._nodes()),
            },
            began,
        )
        try:
            yield
        except BaseException as error:
            reason = str(error) or type(error).__name__
            self.add(goodput.ENDED, {"status": FAILED, "reason": reason, "seconds": {}})
            raise

    def spent(self, now: float) -> tuple[float, float | None]:
        """Return the seconds and USD of all commands up to `now`; USD is None if a price is not
        known."""
        return goodput.spent(list(self.events), self._lines.steps["time"], now)

    def waiting(self) -> None:
        self.add(goodput.PHASE, {"phase": WAITING_FOR_ROOM})

    def attempt(self, config: RunConfig, workers: int) -> None:
        self.add(goodput.WORKERS, {"workers": workers, **machines(config, workers, self._nodes())})

    def saw(self, line: MetricsLine) -> None:
        """Take the last line of metrics.jsonl; record an event if it is the first of an attempt."""
        if line["attempt"] > self._followed:
            try:
                self.catch_up()
            except OSError as error:  # the next line is another chance
                logger.warning("cannot read %s: %s", METRICS, error)

    def catch_up(self) -> MetricsLine | None:
        """Read the new lines of metrics.jsonl, record a `resumed` event if a new attempt has done a
        step, and return the last line.

        Steps that were there before and are not any more count as lost.
        """
        before = self._lines.steps
        known = len(before)
        lost_s = before["step_s"][self._lines.poll() : known]
        self._lost_steps += len(lost_s)
        self._lost_s += float(np.nansum(lost_s))
        steps = self._lines.steps
        if len(lost_s):  # the number of an attempt without lines is used again
            kept = known - len(lost_s)
            newest = int(steps["attempt"][kept - 1]) if kept else 0
            self._followed = min(self._followed, newest)
        if self._attempt() > self._followed:
            first = int(np.argmax(steps["attempt"] > self._followed))
            self._followed = self._attempt()
            self.add(
                goodput.RESUMED,
                {
                    "attempt": int(steps["attempt"][first]),
                    "step": int(steps["step"][first]) - 1,
                    "first_step_s": float(steps["step_s"][first]),
                    "lost_steps": self._lost_steps,
                    "lost_s": self._lost_s,
                },
                float(steps["time"][first]),
            )
            self._lost_steps, self._lost_s = 0, 0.0
        return steps.last

    def interrupted(self, ending: Ending, workers: int) -> None:
        last = self.catch_up()
        self.add(
            goodput.INTERRUPTED,
            {
                "kind": ending.kind,
                "reason": ending.reason,
                "step": ending.step,
                "workers": workers,
                "trained_until": last["time"] if last else None,
            },
        )

    def ended(self, status: str, seconds: dict[str, float], reason: str | None = None) -> None:
        """Record that the command ends, with the seconds of its last phases."""
        self.catch_up()
        self.add(goodput.ENDED, {"status": status, "reason": reason, "seconds": seconds})

    def add(self, event: str, facts: EventFields, at: float | None = None) -> None:
        """Append an event; if it cannot be stored, it is stored with the next one."""
        added: Event = {"event": event, "time": at or time.time(), **facts}
        passed = [self.passed.popleft() for _ in range(len(self.passed))]
        phases = [Event(event=goodput.PHASE, time=each.began, phase=each.phase) for each in passed]
        self.events += [added, *phases] if event == goodput.STARTED else [*phases, added]
        text = "".join(redacted(json.dumps(each)) + "\n" for each in self.events)
        try:
            self.run.write(EVENTS, text.encode())
        except OSError as error:
            logger.warning("events are not stored yet: %s", error)


def machines(config: RunConfig, workers: int, places: Sequence[Place] = ()) -> EventFields:
    """Return the number of machines that the workers need, their instance type and cost, if known.

    The price is the config's, else the on-demand list price in AWS_REGION. Where
    `cluster.instance` is a list, the machines are the first of `places`, in the order of the list.
    """
    choices, left = config.cluster.choices, workers
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    names, prices = list[str](), list[float | None]()
    for choice, each in zip(choices, config.alternatives(), strict=False):
        one = named_instance(each)
        assert one is not None
        nodes = nodes_of(one, left) if left > 0 else 0
        nodes = min(list(places).count(choice.place), nodes) if len(choices) > 1 else nodes
        prices += [price_of(each, one, region or hardware.DEFAULT_REGION)] * nodes
        names += [str(each.cluster.instance) if len(choices) > 1 else one.name] if nodes else []
        left -= nodes * (one.gpus or workers)
    if left > 0:
        return {"nodes": None, "instance": None, "usd_per_hour": None}
    known = [price for price in prices if price is not None]
    return {
        "nodes": len(prices),
        "instance": ", ".join(names),
        "usd_per_hour": sum(known) if len(known) == len(prices) else None,
    }


def job_variables() -> dict[str, str]:
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
