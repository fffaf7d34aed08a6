"""Check what a run leaves on a disk that has become full, on a real file system of 4 MiB."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from disks import fill, small_disk
from rich.console import Console

from rayapp.config import Config, from_dict
from rayapp.driver import lease as leases
from rayapp.driver import supervise
from rayapp.driver.lease import held
from rayapp.driver.output import RESERVE_BYTES, Reserve
from rayapp.driver.stop import Stop
from rayapp.driver.supervise import Command, fit
from rayapp.observe.events import Journal
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import RESERVE
from rayapp.observe.status import read
from rayapp.order import Order
from rayapp.storage import StorageError, open_storage

pytestmark = pytest.mark.timeout(45)  # a fault here is to wait for ever
CONFIG: Config = from_dict(
    {"run": {"name": "demo"}, "eval": {"checkpoints": False}, "cluster": {"max_failures": 0}}
)


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(4) as folder:
        yield folder


def train(folder: Path, attempt: Any) -> None:
    """Do what driver/command.py does with workers that are a stand-in."""
    run, spec = open_storage(str(folder)), SimpleNamespace(config=CONFIG)
    spec.order = Order.for_steps(64, 4, 2, 3, 9)
    with held(run) as lease:
        fenced = lease.fence(run)
        command = Command(fenced, lease, Stop(run), Journal(fenced))
        workers: Any = SimpleNamespace(
            asked_for=nullcontext,
            wait_for_room=lambda note, check: 1,
            start=lambda spec, workers: attempt,
        )
        try:
            with command.journal.command(CONFIG, time.time()), command.reserve:
                quiet = Console(quiet=True)
                fit(command, spec, workers, quiet, lambda *ended: None)  # type: ignore[arg-type]
        except RunFailed as error:
            command.logs.close(f"failed: {error}")
            raise


def test_the_reason_is_written_to_a_full_disk(disk: Path) -> None:
    """Not the error of writing it."""
    why = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoint")

    def wait(seconds: float) -> bool:
        assert (disk / RESERVE).stat().st_size == RESERVE_BYTES
        fill(disk)
        return True

    attempt = SimpleNamespace(wait=wait, outcome=lambda: why, end=lambda: None)
    with pytest.raises(RunFailed, match=r"No space left on device.*Mend that and run the same"):
        train(disk, attempt)
    assert not (disk / RESERVE).exists()
    result = json.loads((disk / "result.json").read_text())
    assert result["status"] == "failed" and "No space left on device" in result["reason"]
    now = read(open_storage(str(disk)))
    assert now.status == "failed" and now.reason == result["reason"]
    log = (disk / "logs" / "attempt-1.txt").read_text()
    assert log.endswith(f"==== end\nfailed: {result['reason']}\n")


def test_a_lease_that_a_full_disk_keeps_from_being_renewed_ends_the_run(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers take steps all the same; with nobody to make room, a wait would have no end."""
    monkeypatch.setattr(leases, "LEASE_RENEWED_S", 0.1)
    monkeypatch.setattr(leases, "POLL_S", 0.05)
    monkeypatch.setattr(leases, "LEASE_STOPPED_S", 1.0)
    monkeypatch.setattr(supervise, "POLL_S", 0.01)
    ended = threading.Event()

    def wait(seconds: float) -> bool:
        if not (disk / "filler").exists():
            fill(disk)
        return ended.wait(seconds)

    died = RuntimeError("the actor died")
    attempt = SimpleNamespace(wait=wait, outcome=lambda: died, end=ended.set)
    with pytest.raises(RunFailed, match=r"cannot write .*LEASE: the disk is full\. Free some"):
        train(disk, attempt)
    assert "LEASE: the disk is full" in json.loads((disk / "result.json").read_text())["reason"]
    assert read(open_storage(str(disk))).status == "failed"


def test_the_reason_is_raised_where_nothing_can_be_written(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has used up the room that was given back."""
    monkeypatch.setattr(leases, "LEASE_RENEWED_S", 0.1)
    monkeypatch.setattr(leases, "POLL_S", 0.05)
    monkeypatch.setattr(leases, "LEASE_STOPPED_S", 0.5)
    monkeypatch.setattr(leases, "ROOM_S", 0.5)
    free = Reserve.free

    def free_and_fill(self: Reserve) -> None:
        free(self)
        fill(disk)
        time.sleep(1.0)

    monkeypatch.setattr(Reserve, "free", free_and_fill)
    attempt = SimpleNamespace(
        wait=lambda seconds: True, outcome=lambda: ValueError("a bug"), end=lambda: None
    )
    with pytest.raises(RunFailed, match=r"^a bug$"):
        train(disk, attempt)


def test_no_room_at_the_start_is_refused(disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(7 * 2**19))
    with pytest.raises(StorageError, match="the disk is full"), Reserve(open_storage(str(disk))):
        raise AssertionError("begun without a reserve")
    assert not (disk / RESERVE).exists()


def test_a_reserve_is_no_file_of_the_run(tmp_path: Path) -> None:
    """Also one that a killed driver has left, which the next takes over."""
    (tmp_path / RESERVE).write_bytes(b"left")
    run = open_storage(str(tmp_path))
    with Reserve(run):
        assert (tmp_path / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES
        assert run.list() == []
    assert not list(tmp_path.iterdir())


def test_an_object_store_has_none(s3_bucket: str) -> None:
    run = open_storage(f"s3://{s3_bucket}/runs/demo")
    with Reserve(run) as reserve:
        reserve.free()
        assert run.list() == []
