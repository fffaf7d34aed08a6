"""What the steps of a proof share: where it runs, its commands and its log, and how it waits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rayapp.cluster.prove.account import AwsAccount
from rayapp.observe import status
from rayapp.observe.run_folder import EXIT_CODES
from rayapp.storage import Storage, open_storage

POLL_S = 5.0
FRAME = " \t╷│╵"  # Terraform's, around its errors


class Failed(RuntimeError):
    """A step did not do what it should; the message says what was seen instead."""


@dataclass
class Proof:
    """A proof that is under way."""

    account: AwsAccount
    bucket: str
    config: Path
    """The YAML file of the runs, which the cluster is rendered for."""
    variables: Mapping[str, str]
    """Of `make`, for every target: NAME, REGION and others."""
    log: Path
    """Takes what the commands print."""
    until: float
    """time.monotonic() after which only the way down goes on."""
    taken: list[str] = field(default_factory=list)
    """Ids of the hosts that were taken away."""

    def say(self, line: str) -> None:
        """Tell whoever waits."""
        print(line, flush=True)

    @property
    def storage(self) -> str:
        """What is given as run.storage."""
        return f"s3://{self.bucket}/runs"

    def folder(self, name: str) -> Storage:
        """Return the folder of a run."""
        return open_storage(f"{self.storage}/{name}")

    @property
    def left_s(self) -> float:
        """Seconds until `until`."""
        return max(0.0, self.until - time.monotonic())

    def make(
        self, target: str, more: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> int:
        """Run a target of the Makefile; return its exit code. `more` are further variables."""
        given = {**self.variables, **(more or {})}
        words = [f"{name}={value}" for name, value in given.items() if value]
        return self.command(["make", "--no-print-directory", target, *words], timeout_s)

    def command(self, words: list[str], timeout_s: float | None = None) -> int:
        """Run a command, with its output in the log; return its exit code.

        Ctrl-C is for this program, which then tears down: the command gets SIGINT, by which
        Terraform saves its state, and is waited for.

        Raises:
            Failed: it has not ended after `timeout_s` seconds, and was ended.
        """
        with self.log.open("a", encoding="utf-8") as output:
            output.write(f"\n$ {' '.join(words)}\n")
            output.flush()
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                what = " ".join(words[:3])
                raise Failed(f"`{what}` was ended after {timeout_s:.0f} s: time is over") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait()

    def needs(self, code: int, what: str) -> None:
        """Raise unless a command has returned 0.

        Raises:
            Failed: with the last lines of the log.
        """
        if code:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            ours = ("make", "$ ")  # what was called, not what it said
            words = [line.strip(FRAME) for line in lines if not line.startswith(ours)]
            said = list(filter(None, words))
            raise Failed(f"{what} returned {code}: {' / '.join(said[-3:])[-400:]}")

    def wait(self, run: str, true: Callable[[status.Progress], bool], limit_s: float) -> None:
        """Wait until something is true of a run.

        Raises:
            Failed: the run has ended without it, or time is over.
        """
        until, folder = time.monotonic() + min(limit_s, self.left_s), self.folder(run)
        while True:
            try:
                now = status.read(folder)
            except status.NoRun:
                seen = "it has not begun"
            else:
                if true(now):
                    return
                seen = f"it is {now.status} at step {now.step}"
                if now.status in EXIT_CODES:
                    raise Failed(f"run {run}: {seen}. {now.reason or ''}")
            if time.monotonic() > until:
                raise Failed(f"run {run}: {seen}, and time is over")
            time.sleep(POLL_S)
