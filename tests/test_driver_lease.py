"""One live run per name: who holds a run's lease, and who may take it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S

from rayapp.config import ConfigError
from rayapp.driver import lease
from rayapp.finetune.__main__ import main
from rayapp.observe.result import RunFailed
from rayapp.storage import Storage, StorageError, open_storage


@pytest.fixture
def run(place: str) -> Storage:
    return open_storage(place) / "runs" / "demo"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("LEASE_RENEWED_S", 0.1),
        ("LEASE_STOPPED_S", 1.5),
        ("LEASE_TAKEN_S", 2.0),
        ("POLL_S", 0.05),
    ):
        monkeypatch.setattr(lease, name, seconds)


def wait_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take over after half a second, where nobody lives who would have to renew within it."""
    monkeypatch.setattr(lease, "LEASE_TAKEN_S", 0.5)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be another machine from now on."""
    monkeypatch.setattr(lease, "_machine", lambda: ["elsewhere", "", ""])


def test_a_lease_is_given_back(run: Storage) -> None:
    for _ in range(2):
        with lease.held(run) as mine:
            assert run.exists(lease.LEASE)
            time.sleep(0.3)  # renewed meanwhile
            mine.check()
        assert not run.exists(lease.LEASE)


def test_a_live_run_on_this_machine_is_refused_at_once(run: Storage) -> None:
    before = time.monotonic()
    with (
        lease.held(run),
        pytest.raises(ConfigError, match=r"run\.name=demo is running: .*, process"),
        lease.held(run),
    ):
        pass
    assert time.monotonic() - before < lease.LEASE_TAKEN_S


def test_a_live_run_elsewhere_is_refused_when_it_renews(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with lease.held(run) as theirs:
        elsewhere(monkeypatch)
        with pytest.raises(ConfigError, match="is running"), lease.held(run, said.append):
            pass
        theirs.check()
    assert len(said) == 1 and "still runs" in said[0]
    assert not run.exists(lease.LEASE)


def test_a_lease_that_is_not_renewed_is_taken_over_and_its_holder_told(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine is suspended: it comes back, and must not write on."""
    frozen = lease.Lease.__dict__["_renew"]
    monkeypatch.setattr(lease.Lease, "_renew", lambda self: self._ended.set())
    with lease.held(run) as theirs:
        elsewhere(monkeypatch)
        with lease.held(run) as mine:
            frozen_again = time.monotonic()
            frozen(theirs)  # awake again: one attempt to renew
            assert time.monotonic() - frozen_again < lease.LEASE_TAKEN_S
            with pytest.raises(RunFailed, match="another driver has taken over"):
                theirs.check()
            mine.check()
            theirs.release()
            assert run.exists(lease.LEASE)  # it is mine


def test_a_release_leaves_a_lease_that_another_has_taken(run: Storage) -> None:
    """Its own clock still says that it holds it, and it has not renewed since."""
    with lease.held(run) as mine:
        run.write(lease.LEASE, b'{"id": "another\'s"}')
        mine.release()
        assert b"another's" in run.read(lease.LEASE)


def test_a_lease_that_is_taken_right_after_a_renewal_is_not_adopted(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = type(run).replace_if

    def then_taken(self: Storage, name: str, data: bytes, etag: str) -> str | None:
        new = replace(self, name, data, etag)
        monkeypatch.setattr(type(run), "replace_if", replace)
        self.write(name, b'{"id": "another\'s"}')
        return new

    with lease.held(run) as mine:
        monkeypatch.setattr(type(run), "replace_if", then_taken)
        assert mine._ended.wait(PATIENCE_S)
        with pytest.raises(RunFailed, match="another driver has taken over"):
            mine.check()
    assert b"another's" in run.read(lease.LEASE)


def test_of_two_that_wait_one_takes_the_lease(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other, which was a moment later, sees that it is alive."""
    wait_briefly(monkeypatch)
    replace = type(run).replace_if
    gone = {"host": "gone", "pid": 1, "process": "1", "machine": ["gone", "", ""]}
    run.write(lease.LEASE, json.dumps(gone).encode())

    def then_late(self: Storage, name: str, data: bytes, etag: str) -> str | None:
        monkeypatch.setattr(type(run), "replace_if", replace)
        self.write(name, json.dumps({**gone, "host": "faster"}).encode())
        return replace(self, name, data, etag)

    monkeypatch.setattr(type(run), "replace_if", then_late)
    with pytest.raises(ConfigError, match="is running: faster, process 1"), lease.held(run):
        pass
    assert json.loads(run.read(lease.LEASE))["host"] == "faster"


def test_a_renewal_that_fails_is_tried_again(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, asked = type(run).replace_if, list[str]()

    def failing(self: Storage, name: str, data: bytes, etag: str) -> str | None:
        asked.append(name)
        if len(asked) < 3:
            raise StorageError("write", name, "no answer")
        return replace(self, name, data, etag)

    with lease.held(run) as mine:
        monkeypatch.setattr(type(run), "replace_if", failing)
        while len(asked) < 4:
            assert not mine._ended.is_set(), "it is not renewed any more"
            time.sleep(0.01)
        mine.check()


def test_a_process_that_has_the_number_of_a_dead_one_holds_nothing(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = {"host": "here", "pid": os.getpid(), "process": "1", "machine": lease._machine()}
    run.write(lease.LEASE, json.dumps(dead).encode())
    monkeypatch.setattr(lease, "LEASE_TAKEN_S", 1000.0)
    with lease.held(run) as mine:
        mine.check()


def test_a_run_that_died_here_is_not_waited_for(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import os, sys; from rayapp.driver import lease; from rayapp.storage import *;"
        "lease._acquire(open_storage(sys.argv[1]), print, lease.CLOCK); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", script, run.url])
    assert done.returncode == 9 and run.exists(lease.LEASE)
    monkeypatch.setattr(lease, "LEASE_TAKEN_S", 1000.0)
    with lease.held(run) as mine:
        mine.check()


def test_a_renewal_that_was_carried_out_late_is_its_own(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gives up, the storage does it all the same: the etag is one it never saw."""
    replace = type(run).replace_if

    def late(self: Storage, name: str, data: bytes, etag: str) -> str | None:
        monkeypatch.setattr(type(run), "replace_if", replace)
        replace(self, name, data, etag)
        raise StorageError("write", self.url, "no answer")

    with lease.held(run) as mine:
        before = mine._etag
        monkeypatch.setattr(type(run), "replace_if", late)
        deadline = time.monotonic() + PATIENCE_S
        while mine._etag == before and time.monotonic() < deadline:
            time.sleep(0.05)
        mine.check()
        assert mine._etag != before


def test_a_holder_whose_requests_hang_counts_by_its_own_clock(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    with lease.held(run) as mine:
        replace = type(run).replace_if

        def hang(*options: object) -> str | None:
            hangs.wait(PATIENCE_S)
            return replace(*options)  # type: ignore[arg-type]

        assert mine.is_fresh()
        monkeypatch.setattr(type(run), "replace_if", hang)
        began = time.monotonic()
        while mine.is_fresh():
            assert time.monotonic() - began < PATIENCE_S
            time.sleep(0.05)
        assert time.monotonic() - began < lease.LEASE_TAKEN_S
        mine.check()  # not lost: nobody has taken it
        hangs.set()
        mine.wait_until_fresh()
        assert mine.is_fresh()


def test_an_unknown_error_of_the_thread_ends_the_run(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lease.held(run) as mine:
        monkeypatch.setattr(type(run), "replace_if", lambda *options: 1 // 0)
        assert mine._ended.wait(PATIENCE_S)
        with pytest.raises(RunFailed, match="cannot be renewed: ZeroDivisionError"):
            mine.check()
        monkeypatch.undo()


def test_a_driver_without_its_lease_writes_nothing(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended between its look at the lease and the write."""
    with lease.held(run) as mine:
        fenced = mine.fence(run)
        fenced.write("events.jsonl", b"mine\n")
        fenced.write("events.jsonl", b"mine again\n")
        run.write("events.jsonl", b"edited by hand\n")
        fenced.write("events.jsonl", b"mine after all\n")
        assert run.read("events.jsonl") == b"mine after all\n"
        run.write(lease.LEASE, json.dumps(lease.this_process()).encode())
        run.write("events.jsonl", b"the other's\n")
        with pytest.raises(RunFailed, match="another driver has taken over"):
            fenced.write("events.jsonl", b"mine\n")
        for refused in (
            lambda: fenced.delete("events.jsonl"),
            lambda: (fenced / "checkpoints").delete_tree("step-1"),
            lambda: fenced.create("x", b""),
        ):
            with pytest.raises(RunFailed, match="another driver has taken over"):
                refused()
        assert run.read("events.jsonl") == b"the other's\n"
    assert run.exists(lease.LEASE)  # it is the other's


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"pid": 1}'])
def test_a_lease_that_is_not_readable_is_waited_for(
    run: Storage, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_briefly(monkeypatch)
    run.write(lease.LEASE, content)
    began = time.monotonic()
    with lease.held(run) as mine:
        assert time.monotonic() - began >= lease.LEASE_TAKEN_S
        mine.check()


def test_the_command_refuses_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    (tmp_path / "text.txt").write_text("some words\n" * 500)
    with lease.held(open_storage(str(tmp_path)) / "demo"):
        code = main(
            [f"--run.storage={tmp_path}", "--run.name=demo", f"--data.path={tmp_path}/text.txt"]
        )
    assert code == 2 and "run.name=demo is running" in capsys.readouterr().err
    assert not ray.is_initialized()
