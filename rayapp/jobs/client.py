"""Ray's Jobs API over HTTP, with errors that say what to do.

The address is the caller's, else RAY_API_SERVER_ADDRESS, else RAY_ADDRESS (each only if it is an
http URL), else port 8265 of this machine. Ray's own client silently prefers the environment
variables to its argument, so they are hidden while it is made.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayapp.config import ConfigError, RunConfig
from rayapp.hardware import GIB
from rayapp.jobs.package import RUN_KEY, STOP_WAIT, Submission
from rayapp.observe.words import last_line

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ANSWER_S = 10.0  # limit of a TCP connection
RAY_STOP_WAIT_S = 3.0  # Ray's own default
HERE, BY_DEFAULT = "http://127.0.0.1:8265", "by default"
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
POLL_S = 1.0
RECONNECT_S = 60.0  # how long `follow` tries to reach a cluster that does not answer
NO_AGENT, AGENT_S = "No available agent", 60.0  # Ray's answer where a cluster has just started

_environment = threading.Lock()  # held while VARIABLES are hidden from Ray's client

logger = logging.getLogger("rayapp.jobs")


class JobError(RuntimeError):
    """The cluster refuses a request or cannot answer it; the message says why and what to do."""


class Unreachable(JobError):
    """Nothing answers at the address."""


@dataclass(frozen=True)
class JobInfo:
    """What the cluster reports about a job."""

    submission_id: str
    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    run_url: str | None
    """The folder that its metadata names, by `submit` or by its driver; None: they name none."""
    stop_wait_s: float
    """Seconds between SIGTERM and SIGKILL when it is stopped: from its runtime environment, else
    Ray's default."""
    message: str
    exit_code: int | None
    started_s: float | None

    @property
    def ended(self) -> bool:
        """Whether the job has succeeded, failed or been stopped."""
        return self.status in ENDED


def address_of(address: str | None = None) -> tuple[str, str]:
    """Return the address of the Jobs API to use, and where it comes from.

    Raises:
        ConfigError: it is no address of a Jobs API.
    """
    if address is not None:
        if "://" in address and not address.startswith(("http://", "https://")):
            why = "rayapp calls it over HTTP"
            fix = "Set http://HOST:8265, the address of the cluster's dashboard"
            raise ConfigError(
                [f"address={address} is not an address of the Jobs API: {why}. {fix}"]
            )
        address = address if "://" in address else f"http://{address}"
        return address.rstrip("/"), "as asked"
    with _environment:
        values = {name: os.environ.get(name, "") for name in VARIABLES}
    for name, value in values.items():
        if value.startswith(("http://", "https://")):
            return value.rstrip("/"), name
    return HERE, BY_DEFAULT


def ray_address(config: RunConfig) -> str:
    """Return the connected cluster's address, else cluster.address, else RAY_ADDRESS, else `local`.

    `local` means that Ray is to be started on this machine.
    """
    import ray

    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    return config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"


def check_answers(address: str) -> None:
    """Refuse a host:port where nothing listens, as Ray itself would keep trying for a minute.

    Addresses of another form, such as `local` or ray://, are not checked.

    Raises:
        ConfigError: naming what to set.
    """
    place = re.fullmatch(r"\[?(.+?)\]?:(\d+)", address)
    if place is None or "://" in address:
        return
    try:
        socket.create_connection((place[1], int(place[2])), timeout=ANSWER_S).close()
    except OSError as error:
        fix = "Set the address of a head node's GCS, e.g. 10.0.0.1:6379, or `local`"
        why = f"{error.strerror or error}. {fix}"
        raise ConfigError([f"cluster.address={address} is not reachable: {why}"]) from None


class JobsClient:
    """One cluster's Jobs API."""

    def __init__(self, address: str, client: JobSubmissionClient) -> None:
        self.address, self._client = address, client

    @classmethod
    def at(cls, address: str | None = None, check_version: bool = True) -> JobsClient:
        """Connect to the Jobs API at `address`, or at the default of `address_of`.

        Raises:
            JobError: nothing answers, the token is not accepted, or another Ray answers.
        """
        import ray
        from ray.job_submission import JobSubmissionClient

        address, origin = address_of(address)
        with _said(address, origin), _environment:
            names = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
            try:
                client = JobSubmissionClient(address)
            finally:
                os.environ.update(names)
        theirs = getattr(client, "_server_ray_version", None)
        if check_version and theirs != ray.__version__:
            raise JobError(
                f"the cluster at {address} runs Ray {theirs}, and this rayapp runs "
                f"Ray {ray.__version__}: both must be the same. Build the cluster's image from "
                "this version of rayapp, or install the cluster's version of Ray"
            )
        return cls(address, client)

    def submit(self, order: Submission) -> str:
        """Start a submission as a Ray job; return its submission id.

        The id is the submission's name, or `name-2`, `name-3` and so on where that is taken.
        A cluster that has just started and has no agent for jobs yet is asked for AGENT_S seconds.

        Raises:
            ConfigError: a job of this run is live.
            JobError: the cluster refuses.
        """
        jobs = self.jobs()
        for job in jobs:
            if order.is_run and job.run_url == order.run_url and not job.ended:
                why = f"job {job.submission_id} at {self.address} is at work on {order.run_url}"
                fix = "Stop it, or set another run.name"
                raise ConfigError([f"run.name={order.name} is running: {why}. {fix}"])
        taken, number = {job.submission_id for job in jobs}, 1
        while (submission_id := order.name + (f"-{number}" if number > 1 else "")) in taken:
            number += 1
        until = time.monotonic() + AGENT_S
        while True:
            try:
                return self._submit(order, submission_id)
            except JobError as error:
                if NO_AGENT not in str(error) or time.monotonic() > until:
                    raise
            time.sleep(POLL_S)

    def _submit(self, order: Submission, submission_id: str) -> str:
        options = order.options
        with tempfile.TemporaryDirectory() as folder, _said(self.address):
            return str(
                self._client.submit_job(
                    entrypoint=order.entrypoint,
                    submission_id=submission_id,
                    runtime_env=order.runtime_env(folder),
                    metadata=order.metadata(),
                    entrypoint_num_cpus=options.driver_cpus or None,
                    entrypoint_memory=int(options.driver_memory_gib * GIB) or None,
                )
            )

    def jobs(self) -> list[JobInfo]:
        """Return all jobs that have a submission id, the oldest first."""
        with _said(self.address):
            details = self._client.list_jobs()
        jobs = [_info(job) for job in details if job.submission_id]
        return sorted(jobs, key=lambda job: job.started_s or 0.0)

    def info(self, submission_id: str) -> JobInfo:
        """Return what the cluster reports about a job.

        Raises:
            JobError: it knows of none.
        """
        with _said(self.address):
            return _info(self._client.get_job_info(submission_id))

    def logs(self, submission_id: str) -> str:
        """Return what a job's driver has printed so far."""
        with _said(self.address):
            return str(self._client.get_job_logs(submission_id))

    def follow(self, submission_id: str) -> Iterator[str]:
        """Yield a job's output from its first line until it ends; reconnect when cut off.

        Raises:
            JobError: the cluster has not answered for RECONNECT_S seconds.
        """
        shown, silent_since = 0, None
        while True:
            try:
                for text in _chunks(self._client, submission_id, skip=shown):
                    shown, silent_since = shown + len(text), None
                    yield text
                if self.info(submission_id).ended:
                    yield from filter(None, [self.logs(submission_id)[shown:]])
                    return
                silent_since = None
            except (RuntimeError, OSError) as error:  # includes aiohttp's, on a lost connection
                now = time.monotonic()
                silent_since = silent_since or now
                if now - silent_since > RECONNECT_S:
                    raise JobError(
                        f"{self.address} has not answered for {RECONNECT_S:.0f} s while the logs "
                        f"of {submission_id} were followed: {error}. The run goes on if its "
                        "cluster does"
                    ) from error
                logger.debug("following %s again: %s", submission_id, error)
            time.sleep(POLL_S)

    def wait(self, submission_id: str) -> JobInfo:
        """Wait until a job has ended; return what the cluster then reports about it."""
        while not (info := self.info(submission_id)).ended:
            time.sleep(POLL_S)
        return info

    def stop(self, submission_id: str) -> None:
        """Stop a job: Ray sends SIGTERM, on which the driver saves, and SIGKILL after stop_wait_s.

        Returns at once.
        """
        with _said(self.address):
            self._client.stop_job(submission_id)


def _chunks(client: JobSubmissionClient, submission_id: str, skip: int) -> Iterator[str]:
    """Yield a job's output from the websocket, without the first `skip` characters."""
    # At INFO, Ray's client logs that the websocket was closed.
    logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)
    loop = asyncio.new_event_loop()
    chunks: Any = client.tail_job_logs(submission_id)
    try:
        while True:
            try:
                text = loop.run_until_complete(anext(chunks))
            except StopAsyncIteration:
                return
            fresh, skip = text[skip:], max(0, skip - len(text))
            if fresh:
                yield fresh
    finally:
        loop.run_until_complete(chunks.aclose())
        loop.close()


def _info(job: Any) -> JobInfo:
    metadata = job.metadata or {}
    variables = (job.runtime_env or {}).get("env_vars") or {}
    wait_s = str(variables.get(STOP_WAIT, ""))
    return JobInfo(
        submission_id=job.submission_id,
        status=str(getattr(job.status, "value", job.status)),
        run_url=metadata.get(RUN_KEY),
        stop_wait_s=float(wait_s) if wait_s.isdecimal() else RAY_STOP_WAIT_S,
        message=job.message or "",
        exit_code=job.driver_exit_code,
        started_s=None if job.start_time is None else job.start_time / 1000.0,
    )


@contextmanager
def _said(address: str, origin: str = "") -> Iterator[None]:
    """Turn exceptions of Ray's client into a JobError with a message of one line."""
    import requests
    from ray.exceptions import AuthenticationError

    where = f"{address} ({origin})" if origin else address
    try:
        yield
    except AuthenticationError as error:
        raise JobError(
            f"the cluster at {where} does not accept the token. Set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH to a file with the cluster's, as `rayapp connect` prints"
        ) from error
    except (ConnectionError, requests.exceptions.ConnectionError, requests.Timeout) as error:
        raise Unreachable(
            f"no Ray cluster answers at {where} ({last_line(error)}). Start one, forward its port "
            "with `rayapp connect`, or set RAY_API_SERVER_ADDRESS"
        ) from error
    except (RuntimeError, requests.RequestException) as error:
        raise JobError(f"the cluster at {where} refuses: {last_line(error)}") from error
