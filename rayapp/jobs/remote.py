"""Send a run to the user's cluster, find its Ray jobs there, and stop them.

`send` leaves a note in the run's folder: address, submission id and options. Of the note, the id,
the driver's CPUs and memory, and the tags are used again. A `working_dir`, `pip`, `env` or
`secrets` of the note, and code that the folder's config names, are never sent again unless the user
names them: whoever can write to the folder could have put anything there. The cluster's address is
the user's too: at another address the cluster's token would be sent to whoever listens there.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict, TypeVar

from rayapp.config import ConfigError, Run, RunConfig
from rayapp.config.code import code_in
from rayapp.jobs import JobError, JobsClient, SubmitOptions, prepare
from rayapp.jobs.client import BY_DEFAULT, JobInfo, Unreachable, address_of
from rayapp.observe import attempts, run_folder
from rayapp.observe.goodput import STARTED, read_events
from rayapp.observe.run_folder import EVENTS, SUBMISSION, DamagedFile
from rayapp.observe.status import NoRun, read
from rayapp.observe.words import number_of_bytes
from rayapp.storage import Storage, StorageError, open_storage

ID = re.compile(r"\w[\w.:@+=~-]*")  # a submission id; it becomes part of a URL
ADDRESS = re.compile(r"https?://[\w.:\[\]-]+")
GRACE_S = 60.0  # a job with less time than this from SIGTERM to SIGKILL is not stopped by Ray

T = TypeVar("T")

logger = logging.getLogger("rayapp.jobs")


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
    with suppress(NoRun):
        if check_live and read(run).live:
            why = f"a driver is at work on {run.url}. Stop it, or set another run.name"
            raise ConfigError([f"run.name={config.run.name} is running: {why}"])
    cluster = JobsClient.at(address)
    if order.package is not None:
        size = number_of_bytes(len(order.package))
        say(f"uploading {options.working_dir} to {cluster.address}: {size} packed")
    submission_id = cluster.submit(order)
    note = Note(cluster.address, submission_id, time.time(), options)
    run.write(SUBMISSION, json.dumps(asdict(note), indent=1).encode())
    say(f"job {submission_id} at {cluster.address}: results in {order.run_url}")
    return order.run_url, cluster.address


def sent(run: Storage) -> Note | None:
    """Return the note of a run; None if there is none, or the storage cannot be read.

    Raises:
        DamagedFile: the note is not as `send` writes it.
    """
    fix = f"Delete the file: status and logs then go by {EVENTS}"
    try:
        note = run_folder.read(run, SUBMISSION, Note, fix)
    except StorageError:
        return None
    if note is not None and not ID.fullmatch(note.submission_id):
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
    shipment = note.shipment if note else SubmitOptions()
    why = f"anyone who can write to {run.url} could have set it"
    codes = ",".join(name for _, name in named)
    problems = [
        f"{field}={name} is not run again by itself: {why}. If it is your code, give code={codes}"
        for field, name in named
        if name not in code
    ]
    if note is None and "working_dir" not in given:
        problems.append(
            f"working_dir is missing: {run.url} was sent by `ray job submit`, which does "
            "not record the folder. Give it, or none to run the code of the image"
        )
    problems += [
        f"{name}={_as_typed(getattr(shipment, name))} is not sent again by itself: {why}. Give "
        f"{name} again, or {name}=none to leave it out"
        for name in Again.__annotations__
        if getattr(shipment, name) and name not in given
    ]
    if problems:
        raise ConfigError(problems)
    return replace(shipment, **given)


def _as_typed(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return value if isinstance(value, str) else ",".join(value)


class RemoteJob:
    """The newest Ray job of a run on the user's cluster."""

    def __init__(self, run: Storage, address: str | None, known: str | None = None) -> None:
        """`known` is a submission id of the run that its folder may not name yet."""
        self.run, self.address, self.known = run, address, known
        self._cluster: JobsClient | None = None

    def started_by(self) -> str | None:
        """Return the submission id of the run's last command; None if that was no Ray job."""
        started = [event for event in read_events(self.run) if event["event"] == STARTED]
        submission_id = started[-1].get("submission_id") if started else None
        return submission_id if submission_id and ID.fullmatch(submission_id) else None

    def ids(self) -> list[str]:
        """Return the run's submission ids: the known one, the last sent, the last started."""
        note = sent(self.run)
        candidates = [self.known, None if note is None else note.submission_id, self.started_by()]
        return list(dict.fromkeys(filter(None, candidates)))

    def info(self) -> JobInfo | None:
        """Return what the cluster reports about the newest job; None if it knows of none.

        Raises:
            Unreachable: the cluster does not answer.
        """
        ids = self.ids()
        try:
            return self._newest(self._connected(), ids) if ids else None
        except Unreachable:
            self._cluster = None
            raise
        except JobError as error:  # e.g. the token is another cluster's
            logger.debug("no job of %s: %s", self.run.url, error)
            return None

    def or_fail(self) -> tuple[JobsClient, JobInfo]:
        """Return the client of the cluster, and what the cluster reports about the newest job.

        Raises:
            JobError: the run is not of a job, or the cluster does not know or tell of it.
        """
        ids = self.ids()
        if not ids:
            raise JobError(f"run {self.run.url} was not submitted: no cluster knows of it")
        cluster = self._connected()
        info = self._newest(cluster, ids)
        if info is None:
            raise JobError(
                f"no job {' or '.join(ids)} of {self.run.url} is known at {cluster.address}: that "
                "is another cluster, or it no longer lists the job."
                f"{self._elsewhere() or ' Set its address'}"
            )
        return cluster, info

    def logs(self, attempt: int | None = None, rank: int | None = None) -> str:
        """Return the driver's output: the cluster's as long as it keeps it, else the folder's log.

        `attempt` chooses a log of the folder, by default the newest; `rank` the error of a rank.

        Raises:
            ConfigError: the folder does not have it, and the run was not submitted.
            JobError: the cluster does not tell, and the folder has no log.
        """
        told = self._ask(lambda at, job: at.logs(job)) if attempt is None and rank is None else None
        return attempts.read_log(self.run, attempt, rank) if told is None else told

    def follow(self, ended: Callable[[], bool]) -> Iterator[str]:
        """Return an iterator of the driver's output until the run ends; see `logs`.

        `ended` says whether the run has ended, which the folder's logs do not tell.

        Raises:
            ConfigError: the run was not submitted, and has ended without a log.
            JobError: the cluster does not tell, and the folder has no log.
        """
        told = self._ask(lambda at, job: at.follow(job))
        return attempts.follow_log(self.run, ended) if told is None else told

    def _ask(self, ask: Callable[[JobsClient, str], T]) -> T | None:
        """Ask the cluster about the newest job; None if it does not tell, and the folder does."""
        try:
            cluster, info = self.or_fail()
            return ask(cluster, info.submission_id)
        except JobError:
            if self.ids() and not attempts.logged(self.run):
                raise
        return None

    def ask_to_stop(self) -> bool:
        """Ask Ray to stop the job, so that the dashboard shows STOPPED; return whether it did ask.

        Ray is not asked where it would kill the job within GRACE_S, before the run can save, nor
        if the job has ended, is not known to be the run's, or the cluster cannot be asked.
        """
        try:
            cluster, info = self.or_fail()
            if info.ended or info.stop_wait_s < GRACE_S or not is_of(info, self.run.url):
                return False
            cluster.stop(info.submission_id)
            return True
        except JobError as error:  # not fatal: the run also reads the file STOP
            logger.debug("the job of %s is not asked to stop: %s", self.run.url, error)
            return False

    def end(self) -> None:
        """Have Ray stop the job, however little time it gives it.

        Raises:
            JobError: there is none, or none that is known to be the run's.
        """
        cluster, info = self.or_fail()
        if not is_of(info, self.run.url):
            raise JobError(
                f"job {info.submission_id} is not stopped: it does not name "
                f"{self.run.url}. If it is a job of this run, run "
                f"`ray job stop {info.submission_id}`"
            )
        cluster.stop(info.submission_id)

    def _connected(self) -> JobsClient:
        if self._cluster is None:
            try:
                self._cluster = JobsClient.at(self.address, check_version=False)
            except Unreachable as error:
                raise Unreachable(f"{error}.{self._elsewhere()}".removesuffix(".")) from error
        return self._cluster

    def _newest(self, cluster: JobsClient, ids: Sequence[str]) -> JobInfo | None:
        infos = []
        for submission_id in ids:
            try:
                info = cluster.info(submission_id)
            except Unreachable:
                raise
            except JobError as error:  # another cluster, or this one has been restarted
                logger.debug("no job %s: %s", submission_id, error)
                continue
            if is_of(info, self.run.url) is not False:
                infos.append(info)
        return max(infos, key=lambda info: info.started_s or 0.0, default=None)

    def _elsewhere(self) -> str:
        """Return a sentence with the address that the run was sent to; empty if it is this one."""
        note, own = sent(self.run), address_of(self.address)[0]
        if note is None or not ADDRESS.fullmatch(note.address) or note.address == own:
            return ""
        return f" The run was sent to {note.address}: set that address if the cluster is yours"


def is_of(info: JobInfo, run_url: str) -> bool | None:
    """Say whether a job belongs to a run; None: the job does not tell."""
    if info.run_url is None:
        return None
    try:
        return open_storage(info.run_url).url == open_storage(run_url).url
    except StorageError:
        return False


def runs_of(jobs: Sequence[JobInfo]) -> dict[str, JobInfo]:
    """Return {folder of a run: its newest job}; `jobs` are in the order of their starts."""
    return {info.run_url: info for info in jobs if info.run_url is not None}


def find_named(name: str, address: str | None) -> tuple[str, str]:
    """Return the folder and the submission id of the newest run of a cluster with this name.

    Raises:
        ConfigError: no job of the cluster is of such a run.
    """
    cluster, origin = address_of(address)
    try:
        runs = runs_of(JobsClient.at(address).jobs())
    except Unreachable as error:
        if origin != BY_DEFAULT:
            raise
        where = f"there is no folder {Run().storage} here, and no cluster at {cluster}"
        raise ConfigError([f"run={name} is unknown: {where}. Set storage or address"]) from error
    named = [(url, info) for url, info in runs.items() if url.rpartition("/")[2] == name]
    if not named:
        why = "no job of the cluster has that name. Set storage too"
        raise ConfigError([f"run={name} is unknown: {why}"])
    url, newest = max(named, key=lambda run: run[1].started_s or 0.0)
    return url, newest.submission_id
