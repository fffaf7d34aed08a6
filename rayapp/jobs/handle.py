"""The handle of a run.

It reads the run's folder. It asks the cluster only for whole logs, for the status before there is a
folder, and for whether a job whose driver no longer renews its lease has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rayapp.config import ConfigError, RunConfig, load
from rayapp.jobs import JobError, SubmitOptions, results
from rayapp.jobs.client import Unreachable
from rayapp.jobs.remote import Again, RemoteJob, options_again, send
from rayapp.observe.columns import ACCOUNTED, Columns, Follower
from rayapp.observe.run_folder import (
    DONE,
    EXIT_CODES,
    FAILED,
    LEASE_RENEWED_S,
    LOST,
    PENDING,
    REFUSED,
    STARTING,
    STOP,
    STOPPED,
)
from rayapp.observe.status import LIVE_S, VANISHED, NoRun, Progress, read, read_result, until_exit
from rayapp.storage import Storage, open_storage

if TYPE_CHECKING:
    import pandas

POLL_S = 2.0
SILENCE_S = 60.0  # `wait` takes a cluster that has not answered for this long to be gone
QUIET_S = LEASE_RENEWED_S + 5.0  # age of a lease from which the cluster is asked too
STOPPED_EARLY = "its job was stopped before it had saved. Resume it: it continues where it was"
CURVES = ("loss", "eval_loss", "tokens_per_s", "images_per_s", "peak_gib", "grad_norm")  # of a page

logger = logging.getLogger("rayapp.jobs")


def submit(
    config: RunConfig | str | Path | Mapping[str, Any],
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

    `config` is a Config, the path of a YAML file, or a mapping of sections; `sections` change its
    fields: `run={"name": "demo"}`. `say` prints the line that names the job. The other arguments
    are the fields of `rayapp.jobs.SubmitOptions`.

    Raises:
        ConfigError: it cannot run there as described; with every problem.
        JobError: the cluster cannot or will not.
    """
    if isinstance(pip, str):
        raise ConfigError([f"pip={pip} is text: a list of them is expected. Set pip=[{pip!r}]"])
    pip, env, secrets, tags = tuple(pip), env or {}, secrets or {}, tags or {}
    options = SubmitOptions(working_dir, pip, env, secrets, driver_cpus, driver_memory_gib, tags)
    return Job.send(load(config, None, None, **sections), options, address, say)


class Job:
    """The handle of one run, by its folder, wherever it trains or has trained."""

    def __init__(
        self, run_url: str, address: str | None = None, submission_id: str | None = None
    ) -> None:
        """`submission_id` is of a job known to be the run's, even if its folder names none."""
        self.run: Storage = open_storage(run_url)
        self._remote = RemoteJob(self.run, address, submission_id)
        self._sent: tuple[RunConfig, SubmitOptions] | None = None  # by this process
        self._followed = Follower(self.run, (*ACCOUNTED, *CURVES))

    @classmethod
    def send(
        cls,
        config: RunConfig,
        options: SubmitOptions,
        address: str | None = None,
        say: Callable[[str], None] = print,
        check_live: bool = True,
    ) -> Job:
        """Send a run to a cluster and return its handle; see `submit`."""
        handle = cls(*send(config, options, address, say, check_live))
        handle._sent = (config, options)
        return handle

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.run.url.rpartition("/")[2]

    def __repr__(self) -> str:
        return f"Job({self.run.url!r})"

    def progress(self) -> Progress:
        """Return the run's progress: status, step, last metrics line, time and cost.

        Raises:
            NoRun: it has not begun to write.
        """
        self._followed.poll()
        return read(self.run, self._followed.steps)

    def status(self) -> str:
        """Return the run's status.

        Until its command has exited: pending, starting, preparing, waiting (for room), running or
        stopping. Then: done, stopped, failed, lost (its driver is gone) or refused (the config is
        not valid there).
        """
        return self.snapshot()[0]

    def snapshot(self) -> tuple[str, Progress | None, Columns]:
        """Return the status, the progress if there is any, and the steps of metrics.jsonl.

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
        if now is not None and status != now.status:
            reason = {STOPPED: STOPPED_EARLY, LOST: VANISHED}.get(status)
            now = replace(now, status=status, reason=reason, left_s=None)
        return status, now, self._followed.steps

    def _now(self) -> Progress | None:
        with suppress(NoRun):
            return self.progress()
        return None

    def _status(self, now: Progress | None) -> str:
        if now is not None and now.live and (now.quiet_s or 0.0) < QUIET_S:
            return now.status
        info = self._remote.info()
        if now is not None:
            if info is not None and self._remote.started_by() == info.submission_id:
                alive = not info.ended
            else:  # the folder's last command is no job, or another than the newest
                held = now.quiet_s is not None and now.quiet_s < LIVE_S
                alive = held and (now.live or info is None or info.ended)
            if alive:
                return until_exit(now.status)
        if info is None:
            if now is None:
                raise NoRun(f"{self.run.url} holds no run, and the cluster knows no job of it")
            return now.status
        if not info.ended:
            return PENDING if info.status == "PENDING" else STARTING
        stopped = info.status == "STOPPED"
        if now is not None and (now.updated_s or 0.0) >= (info.started_s or 0.0):
            if now.status in EXIT_CODES and now.status != LOST:
                return now.status
            return STOPPED if stopped else LOST
        if stopped:
            return STOPPED
        return next((s for s, code in EXIT_CODES.items() if code == info.exit_code), FAILED)

    def reason(self) -> str | None:
        """Return why the run ended, from its folder; if it failed without, the end of its log."""
        status, now, _ = self.snapshot()
        unwritten = STOPPED_EARLY if status == STOPPED else None
        reason = unwritten if now is None else now.reason
        if reason is None and status in (FAILED, REFUSED):
            return self.logs().strip()[-2000:]
        return reason

    def metrics(self) -> pandas.DataFrame:
        """Return metrics.jsonl as a DataFrame, one row per step; before the first, no row."""
        return results.dataframe_of(self.run)

    def logs(self, attempt: int | None = None, rank: int | None = None) -> str:
        """Return the driver's output, or of a kept attempt its log or one rank's error."""
        return self._remote.logs(attempt, rank)

    def follow(self) -> Iterator[str]:
        """Yield the driver's output until the run ends, from the cluster or the run's folder."""
        return self._remote.follow(lambda: self.status() in EXIT_CODES)

    def stop(self, wait_s: float = 600.0) -> str:
        """Ask the run to save and exit, wait up to `wait_s` seconds, then have Ray end its job.

        Returns the status. `wait_s=0` asks and does not wait. Ray is asked to stop the job from
        the start, if it gives the job at least a minute to save (`submit` sets 600 s).
        A job that is pending or starting has nothing to save, and its driver would take the file
        STOP for an older one: Ray ends it at once, and a wait for that has no limit.
        """
        before = self.status()
        if before in EXIT_CODES:
            if before == LOST:  # KubeRay starts a lost driver again, which then finds the file
                self.run.write(STOP, b"asked\n")
            return before
        if before in (PENDING, STARTING):
            self._remote.end()
            return self.wait() if wait_s else self.status()
        self.run.write(STOP, b"asked\n")
        asked = self._remote.ask_to_stop()
        if wait_s == 0:
            return self.status()
        try:
            return self.wait(wait_s)
        except TimeoutError:
            if not asked:
                logger.warning("%s runs on after %.0f s: Ray ends its job", self.name, wait_s)
                self._remote.end()
            return self.wait()

    def resume(
        self,
        address: str | None = None,
        say: Callable[[str], None] = print,
        code: Collection[str] = (),
        **given: Unpack[Again],
    ) -> Job:
        """Submit the same run again; it continues from its newest checkpoint.

        If another process submitted it with a `working_dir`, `pip`, `env` or `secrets`, these must
        be given again, or given as empty, and `code` must list the functions of yours that the
        config names: others may be able to write to the run's folder, which is not believed.

        Raises:
            ConfigError: it is live or done already, was never submitted, or lacks such a name.
        """
        status = self.status()
        if status == DONE or status not in EXIT_CODES:
            raise ConfigError([f"run {self.run.url} is {status}: there is nothing to resume"])
        if not self._remote.ids():
            problem = "was not submitted: no note or event in its folder names a job"
            raise ConfigError([f"run {self.run.url} {problem}. Run its first command again"])
        if self._sent is not None:
            config, options = self._sent[0], replace(self._sent[1], **given)
        else:
            config = results.own_config_of(self.run)
            options = options_again(self.run, config, code, given)
        return Job.send(config, options, address or self._remote.address, say, check_live=False)

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended; return its status.

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

    def config(self) -> RunConfig:
        """Return the run's config.

        Raises:
            ConfigError: the run has not begun, or its config.yaml is not valid.
        """
        return results.config_of(self.run)

    def result(self) -> results.Result:
        """Return the result of a run that has ended.

        Raises:
            JobError: it has not ended, or ended before there was a result.
        """
        status = self.status()
        if status not in EXIT_CODES:
            raise JobError(f"run {self.name} is {status}: it has no result yet")
        if not (values := read_result(self.run)):
            raise JobError(f"run {self.name} is {status}: {self.reason()}")
        return results.Result({"run": self.run.url, **values})

    def watch(self, every_s: float = POLL_S, block: bool = False) -> str | None:
        """Show the run until it ends, redrawn every `every_s` seconds.

        In a terminal this returns the status at the end. In a notebook it returns None at once and
        a thread goes on drawing; with `block` it waits for the end as in a terminal.
        KeyboardInterrupt ends the wait, not the run, and is raised again, so that a notebook runs
        no further cell.
        """
        from rayapp.jobs import notebook, terminal

        if not notebook.in_notebook():
            return terminal.show(self, every_s)
        thread = notebook.show_on(self._again, every_s)
        if not block:
            return None
        thread.join()
        return self.status()

    def _again(self) -> Job:
        return Job(self.run.url, self._remote.address, self._remote.known)

    def steps(self, every_s: float = POLL_S) -> results.LiveSteps:
        """Return the lines of metrics.jsonl as they come, for `for` and `async for`."""
        job = self._again()
        return results.LiveSteps(job.run, job.status, every_s)

    def __await__(self) -> Generator[Any, None, str]:
        """`await job` waits until the run has ended and returns its status."""
        return asyncio.to_thread(self._again().wait).__await__()

    def report(self, out: str | None = None) -> str:
        """Write the report into the run's folder, or to the file `out`; return its path or URL."""
        from rayapp import report

        return report.write(self.run, out)

    def _repr_html_(self) -> str:
        from rayapp.jobs import notebook

        return notebook.drawn(self)[1]
