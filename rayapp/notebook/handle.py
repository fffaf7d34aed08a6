"""A run's handle. What it tells comes from the run's folder; the cluster is asked for logs alone,
and for what happens before there is a folder.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayapp import metrics
from rayapp.config import ConfigError, RunConfig, load
from rayapp.jobs import Cluster, JobError, Shipment
from rayapp.jobs.client import JobInfo, Unreachable
from rayapp.jobs.package import from_dict
from rayapp.notebook.submission import FILE, changed, send, sent
from rayapp.progress import (
    DONE,
    EXIT_CODES,
    FAILED,
    PENDING,
    REFUSED,
    STARTING,
    STOP_FILE,
    NoRun,
    Progress,
    read,
)
from rayapp.storage import Storage, open_storage

if TYPE_CHECKING:
    import pandas

POLL_S = 2.0
SILENCE_S = 60.0  # a cluster that is not heard of for so long is believed to be gone

logger = logging.getLogger("rayapp.jobs")


@dataclass(frozen=True)
class Result:
    """What came out of a run; `values` is all of its result.json."""

    status: str
    steps: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    cost_usd: float | None
    model_path: str | None
    values: dict[str, Any]


def submit(
    config: RunConfig | str,
    *,
    address: str | None = None,
    say: Callable[[str], None] = print,
    working_dir: str | None = None,
    pip: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    driver_cpus: float = 0.0,
    driver_memory_gib: float = 0.0,
    tags: Mapping[str, str] | None = None,
    **sections: Mapping[str, Any],
) -> Job:
    """Send a run to a cluster as a Ray job.

    `config` is a Config or a YAML file; `sections` change fields of it: `run={"name": "demo"}`.
    The rest is what `rayapp.jobs.Shipment` says.

    Raises:
        ConfigError: it cannot run there as described; with every problem.
        JobError: the cluster cannot or will not.
    """
    shipment = Shipment(
        working_dir, tuple(pip), env or {}, secrets or {}, driver_cpus, driver_memory_gib,
        tags or {},
    )  # fmt: skip
    return Job(send(changed(config, sections), shipment, address, say))


def job(run: str, *, storage: str | None = None, address: str | None = None) -> Job:
    """Find a run again: by its folder, by its name and storage, or by its name on a cluster.

    Raises:
        ConfigError: there is no such run.
    """
    if storage is not None:
        run = f"{storage.rstrip('/')}/{run}"
    elif "://" not in run and "/" not in run and not os.path.isdir(run):
        jobs = Cluster.at(address).jobs()
        found = [job.run_url for job in jobs if (job.run_url or "").rpartition("/")[2] == run]
        if not found:
            raise ConfigError(
                [f"run={run} is unknown: no job of the cluster has that name. Set storage too"]
            )
        run = str(found[-1])
    handle = Job(run, address)
    try:
        handle.status()
    except NoRun as error:
        raise ConfigError([f"run={run} is unknown: {error}. Set the folder of a run"]) from None
    return handle


class Job:
    """One run, wherever it trains or has trained."""

    def __init__(self, run_url: str, address: str | None = None) -> None:
        self.run: Storage = open_storage(run_url)
        self._address = address
        self._cluster: Cluster | None = None
        self._followed = metrics.Follower(self.run)

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.run.url.rpartition("/")[2]

    def __repr__(self) -> str:
        return f"Job({self.run.url!r})"

    # ---- What it is doing -----------------------------------------------------------------

    def progress(self) -> Progress:
        """Return how far it is, at what pace and cost.

        Raises:
            NoRun: it has not begun to write.
        """
        self._followed.poll()
        return read(self.run, self._followed.lines)

    def status(self) -> str:
        """Return pending, starting, preparing, running, stopping, or how it ended: done, stopped,
        failed, lost, or refused (a config that the cluster cannot run).
        """
        return self.snapshot()[0]

    def snapshot(self) -> tuple[str, Progress | None, list[dict[str, Any]]]:
        """Return the status, the progress if there is any, and the lines of metrics.jsonl.

        Raises:
            NoRun: neither the folder nor a cluster knows of a run.
            Unreachable: the cluster does not answer, and nothing is in the folder yet.
        """
        now = self._now()
        try:
            status = self._status(now)
        except Unreachable:
            if now is None:
                raise
            status = now.status
        return status, now, self._followed.lines

    def _now(self) -> Progress | None:
        try:
            return self.progress()
        except NoRun:
            return None

    def _status(self, now: Progress | None) -> str:
        if now is not None and now.live:
            return now.status
        info = self._info()
        if info is None:
            if now is None:
                raise NoRun(f"{self.run.url} holds no run, and no job of it is known")
            return now.status
        if not info.ended:
            return PENDING if info.status == "PENDING" else STARTING
        if now is not None and (now.updated_s or 0.0) >= (info.started_s or 0.0):
            return now.status
        return next((s for s, code in EXIT_CODES.items() if code == info.exit_code), FAILED)

    def reason(self) -> str | None:
        """Return why it failed, or was refused."""
        status, now, _ = self.snapshot()
        found = None if now is None else now.reason
        if found is None and status in (FAILED, REFUSED):
            info = self._info()
            found = None if info is None else self._cluster_or_fail().logs(info.submission_id)
            found = None if found is None else found.strip()[-2000:]
        return found

    def metrics(self) -> pandas.DataFrame:
        """Return metrics.jsonl, one row per step."""
        import pandas

        self._followed.poll()
        return pandas.DataFrame(self._followed.lines)

    def logs(self) -> str:
        """Return what the driver has printed, while the cluster keeps it."""
        return self._cluster_or_fail().logs(self._submission_id())

    def follow(self) -> Iterator[str]:
        """Yield what the driver prints, until it ends; a connection that breaks is made again."""
        return self._cluster_or_fail().follow(self._submission_id())

    # ---- What is done to it ---------------------------------------------------------------

    def stop(self, wait_s: float = 600.0, hard: bool = True) -> str:
        """Ask the run to save and leave, wait for it, and end its job if it does not.

        Returns the status. `wait_s=0` only asks.
        """
        before = self.status()
        if before in EXIT_CODES:
            return before
        if before == PENDING:
            self._cluster_or_fail().stop(self._submission_id())
            return self.wait()
        self.run.write(STOP_FILE, b"asked\n")
        if wait_s == 0:
            return self.status()
        try:
            return self.wait(wait_s)
        except TimeoutError:
            if not hard:
                raise
            logger.warning("%s has not left after %.0f s: its job is ended", self.name, wait_s)
            self._cluster_or_fail().stop(self._submission_id())
            return self.wait()

    def resume(self, address: str | None = None, say: Callable[[str], None] = print) -> Job:
        """Send the same run again; it goes on from its newest checkpoint.

        Raises:
            ConfigError: it is live or done already, or was never submitted.
        """
        status = self.status()
        if status == DONE or status not in EXIT_CODES:
            raise ConfigError([f"run {self.run.url} is {status}: there is nothing to resume"])
        found = sent(self.run)
        if found is None:
            raise ConfigError(
                [
                    f"run {self.run.url} was not submitted: no {FILE} says how. Start it as it was "
                    "started before"
                ]
            )
        config = self.config()
        address = address or self._address_of(found)
        return Job(send(config, from_dict(found["shipment"]), address, say))

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until it has ended; return the status.

        Raises:
            TimeoutError: it has not, in time.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        silent_since = None
        while True:
            now = self._now()
            try:
                status, silent_since = self._status(now), None
            except Unreachable:
                silent_since = silent_since or time.monotonic()
                gone = time.monotonic() - silent_since > SILENCE_S
                if gone and now is None:
                    raise
                status = now.status if gone and now is not None else STARTING
            if status in EXIT_CODES:
                return status
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"run {self.name} is still {status} after {timeout_s:.0f} s")
            time.sleep(POLL_S)

    # ---- What came of it ------------------------------------------------------------------

    def config(self) -> RunConfig:
        """Return what was asked."""
        import tempfile

        with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
            file.write(self.run.read("config.yaml"))
            file.flush()
            return load(file.name)

    def result(self) -> Result:
        """Return what came out, once it has ended.

        Raises:
            JobError: it has not ended, or ended before there was a result.
        """
        status = self.status()
        if status not in EXIT_CODES:
            raise JobError(f"run {self.name} is {status}: it has no result yet")
        try:
            values = json.loads(self.run.read("result.json"))
        except FileNotFoundError:
            raise JobError(f"run {self.name} is {status}: {self.reason()}") from None
        return Result(
            status=values["status"],
            steps=values["steps"],
            loss=values.get("loss"),
            eval_loss=values.get("eval_loss"),
            tokens_per_s=values.get("tokens_per_s"),
            cost_usd=values.get("cost_usd"),
            model_path=values.get("model_path"),
            values=values,
        )

    def watch(self, every_s: float = POLL_S) -> str:
        """Show the run until it ends, in the notebook or the terminal; return the status.

        Interrupting stops the watching, never the run.
        """
        from rayapp.notebook import page, terminal

        show = page.show if page.in_notebook() else terminal.show
        return show(self, every_s)

    # ---- The cluster ----------------------------------------------------------------------

    def _address_of(self, found: Mapping[str, Any]) -> str:
        return self._address or str(found["address"])

    def _submission_id(self) -> str:
        found = sent(self.run)
        if found is None:
            raise JobError(f"run {self.run.url} was not submitted: no cluster has its logs")
        return str(found["submission_id"])

    def _cluster_or_fail(self) -> Cluster:
        found = sent(self.run)
        if found is None:
            raise JobError(f"run {self.run.url} was not submitted: no cluster knows of it")
        if self._cluster is None:
            self._cluster = Cluster.at(self._address_of(found), check_version=False)
        return self._cluster

    def _info(self) -> JobInfo | None:
        """Return what the cluster knows of the last job; None for a run that was not submitted.

        Raises:
            Unreachable: the cluster does not answer.
        """
        found = sent(self.run)
        if found is None:
            return None
        try:
            return self._cluster_or_fail().info(str(found["submission_id"]))
        except Unreachable:
            self._cluster = None
            raise
        except JobError as error:  # another cluster by now, or one that was started anew
            logger.debug("no job %s: %s", found["submission_id"], error)
            return None
