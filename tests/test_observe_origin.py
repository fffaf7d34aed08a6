"""Check what a run says of its origin, and that nothing of the folder is run to find it out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rayapp.observe.origin import git_commit, redacted

WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
WHO |= {"GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": os.devnull}

HUB = f"hf_{'AbCdEfGhIjKlMnOpQrStUvWxYz01234567'}"  # not whole in this file, which is searched


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "protocol.file.allow=always", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | WHO, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def checkout(folder: Path, *options: str) -> Path:
    folder.mkdir()
    git(folder, "init", "-q", "-b", "master", *options)
    (folder / "code").mkdir()
    (folder / "code" / "a.py").write_text("x = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    return folder


@pytest.mark.parametrize("options", [(), ("--object-format=sha256",)])
def test_the_commit_is_gits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """In a branch, a packed one, a worktree, a submodule and without a branch; from any folder."""
    first = checkout(tmp_path / "first", *options)
    git(first, "worktree", "add", "-q", "../second")
    outer = checkout(tmp_path / "outer", *options)
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
