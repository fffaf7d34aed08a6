"""A real S3 server on this machine: Ceph's object gateway over one monitor and one store in memory.

    with Ceph() as server:
        server.url, server.user("run", policy)

Debian's packages: radosgw ceph-mon ceph-osd. It needs no root, and its data end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patience import PATIENCE_S
from ports import free_port

COMMANDS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool")
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}  # of one who may do all
STARTS = 6

CONFIG = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{monitor}
public addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = true
run dir = {folder}
log file = {folder}/$name.log
admin socket =
pid file =
mon data = {folder}/mon
mon data avail crit = 0
mon pg warn min per osd = 0
mon max pg per osd = 1000
mon allow pool size one = true
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
osd max object name len = 460
osd max object namespace len = 64
[client.rgw]
rgw data = {folder}/rgw
rgw thread pool size = 32
"""


def missing() -> list[str]:
    """Return the commands of Ceph that this machine lacks."""
    return [command for command in COMMANDS if shutil.which(command) is None]


class Ceph:
    """A gateway that runs until `end`, or until the process that started it ends."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Start it; a start whose store stays down, as about one in seven does, is made anew.

        `host` is this machine's address at which its clients find it.
        """
        self._running = list[subprocess.Popen[bytes]]()
        self._folder = Path(tempfile.mkdtemp(prefix="ceph-"))
        try:
            starts = range(1, STARTS + 1)
            if not any(self._store_comes_up(10.0 * number) for number in starts):
                why = self._tail("ceph-mon") + self._tail("ceph-osd")
                raise RuntimeError(f"Ceph's store did not come up in {STARTS} starts: {why}")
            self._admin(
                *("user", "create", "--uid=testing", "--display-name=testing"),
                *("--access-key=testing", "--secret=testing", "--caps=user-policy=*"),
            )
            where = f"{host}:{free_port()}"
            self.url = f"http://{where}"
            self._daemon("radosgw", "-n", "client.rgw", f"--rgw-frontends=beast endpoint={where}")
            if not self._wait(self._answers, PATIENCE_S):
                raise RuntimeError(f"Ceph's gateway does not answer: {self._tail('radosgw')}")
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Ceph:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def user(self, name: str, policy: dict[str, Any]) -> dict[str, str]:
        """Create a user who may do what the policy says; return the AWS_ variables of its keys."""
        import boto3

        made = self._admin("user", "create", f"--uid={name}", f"--display-name={name}")
        key = json.loads(made)["keys"][0]
        iam = boto3.client(
            "iam",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )
        document = json.dumps(policy)
        iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=document)
        return {
            "AWS_ACCESS_KEY_ID": key["access_key"],
            "AWS_SECRET_ACCESS_KEY": key["secret_key"],
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the gateway accept connections and answer nothing inside the block."""
        gateway = self._running[-1]
        gateway.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            gateway.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Stop all of it and delete its folder."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _store_comes_up(self, seconds: float) -> bool:
        """Start a new monitor and a new store; say whether the store is up in time."""
        self._kill()
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir()
        cluster, store, monitor = str(uuid.uuid4()), str(uuid.uuid4()), free_port()
        text = CONFIG.format(fsid=cluster, monitor=monitor, folder=self._folder)
        (self._folder / "ceph.conf").write_text(text)
        monitors = str(self._folder / "monmap")
        where = ("--addv", "a", f"[v1:127.0.0.1:{monitor}]")
        self._run("monmaptool", "--create", "--clobber", "--fsid", cluster, *where, monitors)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors)
        self._daemon("ceph-mon", "-i", "a")
        if not self._wait(lambda: self._asked("status") is not None, 2 * seconds):
            return False
        if self._asked("osd", "new", store) is None:
            return False
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", store)
        self._daemon("ceph-osd", "-i", "0")
        return self._wait(lambda: " 1 up" in (self._asked("osd", "stat") or ""), seconds)

    def _answers(self) -> bool:
        assert self._running[-1].poll() is None, self._tail("radosgw")
        try:
            urllib.request.urlopen(self.url, timeout=10).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def _asked(self, *question: str) -> str | None:
        """Return what the monitor answers, None if it does not within seconds."""
        command = ("ceph", "--connect-timeout", "5", *question)
        try:
            return self._run(*command, timeout=30.0)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None

    def _admin(self, *arguments: str) -> str:
        return self._run("radosgw-admin", *arguments, timeout=PATIENCE_S)

    def _run(self, command: str, *arguments: str, timeout: float = PATIENCE_S) -> str:
        done = subprocess.run(
            [command, "-c", str(self._folder / "ceph.conf"), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout,
        )
        return done.stdout

    def _daemon(self, command: str, *arguments: str) -> None:
        with (self._folder / f"{command}.out").open("wb") as output:
            self._running.append(
                subprocess.Popen(
                    [command, "-c", str(self._folder / "ceph.conf"), "-f", *arguments],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=end_with_parent,
                )
            )

    def _tail(self, command: str) -> str:
        """Return the end of what a daemon has said."""
        path = self._folder / f"{command}.out"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def _kill(self) -> None:
        while self._running:
            process = self._running.pop()
            process.kill()
            process.wait()


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let a child process get a signal when this one ends."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
