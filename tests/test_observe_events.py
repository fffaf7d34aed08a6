"""Check that what happens to a run is written down as it happens, through kills of the driver."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rayapp.config import Config, load
from rayapp.observe.attempts import FAILURE, Ending
from rayapp.observe.columns import Columns
from rayapp.observe.events import Journal, git_commit, machines
from rayapp.observe.goodput import account, read_events
from rayapp.observe.plain import redacted
from rayapp.storage import Storage, StorageError, open_storage

IDLE = {"data_wait_s": 0.0, "checkpoint_stall_s": 0.0, "eval_s": 0.0}


def train(run: Storage, lines: list[dict[str, Any]]) -> None:
    run.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())


def test_steps_lost_by_a_failure_and_by_a_killed_driver(tmp_path: Path) -> None:
    run, now = open_storage(str(tmp_path)), time.time()

    def line(step: int, attempt: int) -> dict[str, Any]:
        at = {"step": step, "attempt": attempt, "time": now + 10 * attempt + step, "step_s": 1.0}
        return IDLE | at

    def follow(journal: Journal, lines: list[dict[str, Any]]) -> None:
        train(run, lines)
        journal.saw(lines[-1])

    first = [line(n, 1) for n in (1, 2, 3, 4)]
    second = [*first[:2], line(3, 2), line(4, 2), line(5, 2)]
    third = [*second[:3], line(4, 3)]
    journal = Journal(run)
    with journal.command(Config(), now):
        journal.attempt(Config(), 2)
        follow(journal, first[:1])
        follow(journal, first)
        journal.interrupted(Ending(FAILURE, "rank 1 died", 4, True), 2)
        journal.attempt(Config(), 2)
        follow(journal, second[:3])
        follow(journal, second)  # and here the driver dies
    again = Journal(run)
    assert again.events == journal.events
    with again.command(Config(), now + 100.0):
        again.attempt(Config(), 2)
        follow(again, third)
        again.ended("done", {})
    events = read_events(run)
    assert [event["event"] for event in events] == [
        "started", "workers", "resumed", "interrupted", "workers", "resumed",
        "started", "workers", "resumed", "ended",
    ]  # fmt: skip
    begun = [event for event in events if event["event"] == "resumed"]
    assert [(e["step"], e["lost_steps"], e["lost_s"]) for e in begun] == [
        (0, 0, 0), (2, 2, 2.0), (3, 2, 2.0),
    ]  # fmt: skip
    assert events[6]["seen_until"] == second[-1]["time"]
    found = account(events, Columns.of(third))
    assert found.lost_steps == 4
    (broken,) = found.interruptions
    assert (broken["reason"], broken["lost_steps"]) == ("rank 1 died", 2)


def test_an_error_ends_the_command(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    with pytest.raises(StorageError), Journal(run).command(Config(), time.time()):
        raise StorageError("read", "s3://a/b", "the bucket is gone")
    last = read_events(run)[-1]
    assert (last["event"], last["status"]) == ("ended", "failed")
    assert last["reason"] == "cannot read s3://a/b: the bucket is gone."


def test_a_password_in_a_command_line_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, word = open_storage(str(tmp_path)), "wJalr/K7M"
    data = f"--data.path=https://ada:{word}@host/a.jsonl"
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "rayapp.finetune", data])
    with pytest.raises(StorageError), Journal(run).command(Config(), time.time()):
        raise StorageError("read", f"https://ada:{word}@host/a.jsonl", "it is gone")
    assert word not in run.read("events.jsonl").decode()
    first, *_, last = read_events(run)
    assert first["command"] == "-m rayapp.finetune --data.path=https://***@host/a.jsonl"
    assert last["reason"] == "cannot read https://***@host/a.jsonl: it is gone."


def test_an_event_that_cannot_be_stored_is_stored_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_storage(str(tmp_path / "run"))
    journal = Journal(run)
    with journal.command(Config(), time.time()):
        (tmp_path / "run").rename(tmp_path / "away")
        (tmp_path / "run").write_text("in the way")
        with caplog.at_level(logging.WARNING):
            journal.attempt(Config(), 2)
        assert "events are not stored yet" in caplog.text
        (tmp_path / "run").unlink()
        (tmp_path / "away").rename(tmp_path / "run")
        journal.ended("stopped", {})
    assert [event["event"] for event in read_events(run)] == ["started", "workers", "ended"]


def test_what_machines_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    unknown = {"nodes": None, "instance": None, "usd_per_hour": None}
    assert machines(Config(), 8) == unknown
    one = load(None, {"cluster.instance": "p5.48xlarge", "cluster.usd_per_hour": "20.5"})
    cores = load(None, {"cluster.instance": "m5.xlarge", "cluster.usd_per_hour": "0.2"})
    assert machines(cores, 2) == {"nodes": 1, "instance": "m5.xlarge", "usd_per_hour": 0.2}
    assert machines(one, 9) == {"nodes": 2, "instance": "p5.48xlarge", "usd_per_hour": 41.0}
    listed = load(None, {"cluster.instance": "p5.48xlarge"})
    found = machines(listed, 8)["usd_per_hour"]
    assert found is not None and found > 20.0
    monkeypatch.setenv("AWS_REGION", "mars-north-1")
    assert machines(listed, 8)["usd_per_hour"] is None


P5, P4D = ("p5.48xlarge", "on-demand"), ("p4d.24xlarge", "spot")


def test_a_list_costs_what_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    text = "p5.48xlarge@50,p4d.24xlarge:spot@10,g5.12xlarge:spot"
    config = load(None, {"cluster.instance": text})
    unknown = {"nodes": None, "instance": None, "usd_per_hour": None}
    spot = "p4d.24xlarge:spot@10"
    assert machines(config, 16, [P4D, P4D]) == {"nodes": 2, "instance": spot, "usd_per_hour": 20.0}
    assert machines(config, 8, [P4D, P4D]) == {"nodes": 1, "instance": spot, "usd_per_hour": 10.0}
    mixed = {"nodes": 2, "instance": f"p5.48xlarge@50, {spot}", "usd_per_hour": 60.0}
    assert machines(config, 16, [P4D, P5]) == mixed
    assert machines(config, 16, [P5]) == unknown  # one node for 8 of 16
    assert machines(config, 8) == machines(config, 8, [("g6e.48xlarge", "spot")]) == unknown
    unpriced = {"nodes": 2, "instance": "g5.12xlarge:spot", "usd_per_hour": None}
    assert machines(config, 8, [("g5.12xlarge", "spot")] * 2) == unpriced
    alone = load(None, {"cluster.instance": "p4d.24xlarge:spot"})
    assert machines(alone, 8)["usd_per_hour"] is None  # not the list price


def test_an_attempt_on_other_nodes_has_their_price(tmp_path: Path) -> None:
    up, now = [P5], time.time()
    run = open_storage(str(tmp_path))
    journal = Journal(run, lambda: up)
    config = load(None, {"cluster.instance": "p5.48xlarge@50,p4d.24xlarge:spot@10"})
    with journal.command(config, now):
        journal.attempt(config, 8)
        up[:] = [P4D]
        journal.attempt(config, 8)
        journal.ended("done", {})
    told = [(e["instance"], e["usd_per_hour"]) for e in read_events(run) if "instance" in e]
    assert told == [("p5.48xlarge@50", 50.0)] * 2 + [("p4d.24xlarge:spot@10", 10.0)]


def test_an_attempt_with_a_number_that_was_used_before_is_followed(tmp_path: Path) -> None:
    """Attempt 3 cuts the lines of attempt 2 and dies; the next one begins after attempt 1's."""
    run, now = open_storage(str(tmp_path)), time.time()

    def line(step: int, attempt: int, at: float) -> dict[str, Any]:
        return IDLE | {"step": step, "attempt": attempt, "time": now + at, "step_s": 1.0}

    kept = [line(1, 1, 1.0)]
    journal = Journal(run)
    with journal.command(Config(), now):
        train(run, [*kept, line(2, 2, 2.0), line(3, 2, 3.0)])
        journal.saw(line(3, 2, 3.0))
        train(run, kept)
        journal.interrupted(Ending(FAILURE, "rank 1 died", 3, False), 2)
        train(run, [*kept, line(2, 2, 5.0)])
        journal.saw(line(2, 2, 5.0))
        journal.ended("done", {})
    begun = [event for event in read_events(run) if event["event"] == "resumed"]
    assert [(e["attempt"], e["step"], e["lost_steps"]) for e in begun] == [(1, 0, 0), (2, 1, 2)]


# ---- From which commit ----

WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
WHO |= {"GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": os.devnull}

HUB = f"hf_{'AbCdEfGhIjKlMnOpQrStUvWxYz01234567'}"  # not whole in this file, which is searched


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "protocol.file.allow=always", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | WHO, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def checkout(folder: Path) -> Path:
    folder.mkdir()
    git(folder, "init", "-q", "-b", "master")
    (folder / "code").mkdir()
    (folder / "code" / "a.py").write_text("x = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    return folder


def test_the_commit_is_gits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a branch, a packed one, a worktree, a submodule and without a branch; from any folder."""
    first = checkout(tmp_path / "first")
    git(first, "worktree", "add", "-q", "../second")
    outer = checkout(tmp_path / "outer")
    git(outer, "submodule", "add", "-q", "../first", "third")
    for folder in (first, tmp_path / "second", outer / "third"):
        monkeypatch.chdir(folder / "code")
        commit = git(folder, "rev-parse", "HEAD")[:12]
        for step in ((), ("pack-refs", "--all"), ("checkout", "-q", "--detach")):
            git(folder, *step or ("status",))
            assert git_commit() == commit, step
        (folder / "new.py").write_text("not in git\n")
        assert git_commit() == commit
        (folder / "code" / "a.py").write_text("x = 2\n")
        assert git_commit() == f"{commit}+"
        git(folder, "add", "code")
        assert git_commit() == f"{commit}+", "staged"


def test_no_program_of_the_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marks = checkout(tmp_path / "folder"), tmp_path / "marks"
    git(folder, "submodule", "add", "-q", str(checkout(tmp_path / "other")), "part")
    git(folder, "commit", "-qm", "two")
    marks.mkdir()
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\nmkdir -p {marks}/$PPID\nexit 1\n")
    script.chmod(0o755)
    (folder / ".gitattributes").write_text("*.py filter=mine diff=mine\n")
    (folder / ".git" / "info" / "attributes").write_text("*.py filter=mine diff=mine\n")
    (folder / ".git" / "hooks" / "post-index-change").symlink_to(script)
    (tmp_path / "more").write_text(f'[filter "mine"]\n\tprocess = {script}\n')
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "post-index-change").symlink_to(script)
    for name, value in {
        "include.path": str(tmp_path / "more"),
        "core.fsmonitor": str(script),
        "core.hooksPath": str(hooks),
        "core.pager": str(script),
        "core.editor": str(script),
        "core.sshCommand": str(script),
        "core.alternateRefsCommand": str(script),
        "filter.mine.clean": str(script),
        "filter.mine.smudge": str(script),
        "diff.external": str(script),
        "diff.mine.textconv": str(script),
        "diff.mine.command": str(script),
        "pager.status": str(script),
        "alias.status": f"!{script}",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{script}",
        "protocol.ext.allow": "always",
    }.items():
        git(folder, "config", name, value)
        git(folder / "part", "config", name, value)
    os.utime(folder / "code" / "a.py", (1, 1))  # git compares its content, through its filters
    os.utime(folder / "part" / "code" / "a.py", (1, 1))
    monkeypatch.chdir(folder)
    commit = (folder / ".git" / "refs" / "heads" / "master").read_text()[:12]
    found = git_commit()
    (folder / "code" / "a.py").write_text("x = 3\n")
    changed = git_commit()
    (folder / ".git" / "HEAD").write_text("f" * 40)  # an object that a partial clone would fetch
    git_commit()
    assert list(marks.iterdir()) == []
    assert (found, changed) == (commit, f"{commit}+")


@pytest.mark.parametrize(
    "head", ["", "ref: refs/heads/absent", "ref: ../../secret", "words", "f" * 40]
)
def test_what_is_no_checkout_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "code" / ".git").mkdir(parents=True)
    (tmp_path / "code" / ".git" / "HEAD").write_text(head)
    monkeypatch.chdir(tmp_path / "code")
    assert git_commit() is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://AKIAIOSFODNN7EXAMPLE:wJalr/K7M+Y@bucket/runs", "s3://***@bucket/runs"),
        ("x=postgres://ada:p@ss@host/db y", "x=postgres://***@host/db y"),
        ("redis://:word@host", "redis://***@host"),
        ("a=https://u:p@h b=https://u:q@h", "a=https://***@h b=https://***@h"),
        (f"git+https://{HUB}@github.com/a/b", None),
        (f"--x={HUB}", "--x=***"),
        ("http://localhost:8265/a@b git@github.com:a/b.git s3://bucket/a@1:b@c", None),
        ("org/model@main:train hf_transfer sk-learn a@b.c 10:20@30", None),
    ],
)
def test_what_is_a_secret_is_not_shown(text: str, shown: str | None) -> None:
    kept = text.replace(HUB, "***")
    assert redacted(text) == (shown or kept)
