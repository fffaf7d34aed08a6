"""What can be known to be wrong with any run before Ray starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayapp.config import Config, ConfigError, load
from rayapp.driver.checks import absolute_path, absolute_run, shared_problems
from rayapp.observe.run_folder import PREPARED, RAY
from rayapp.storage import open_storage

NOBODY = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everyone may write to, below folders that everyone may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Be one who may not write to a folder: another user if we may be, else its owner denied."""
    mode = folder.stat().st_mode
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    else:
        folder.chmod(0o555)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        folder.chmod(mode)


@pytest.mark.parametrize("name", [PREPARED, RAY, "demo", f"{RAY}/demo"])
def test_a_folder_of_another_user_is_named_at_start(shared: Path, name: str) -> None:
    config = load(None, {"run.storage": str(shared), "run.name": "demo"})
    theirs = shared / name
    for folder in (*reversed([p for p in theirs.parents if p.is_relative_to(shared)]), theirs):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    theirs.chmod(0o755)
    with another_user(theirs):
        (problem,) = shared_problems(config, None, 0)
    assert f"run.storage={shared} is not writable: cannot write {theirs}: permission" in problem
    assert "\n" not in problem and problem.endswith("fix its mode.")


def test_a_second_user_may_train_in_a_shared_folder(shared: Path, tmp_path: Path) -> None:
    """The first one's start makes the folders; the second's starts with the usual umask too."""
    config = load(None, {"run.storage": str(shared), "run.name": "first"})
    before = os.umask(0o022)
    try:
        assert shared_problems(config, None, 0) == []
        other = load(None, {"run.storage": str(shared), "run.name": "second"})
        with another_user(tmp_path):
            assert shared_problems(other, None, 0) == []
            open_storage(str(shared)).write(f"{PREPARED}/rows/part", b"1")
    finally:
        os.umask(before)


def test_a_trial_of_ray_tune_works_in_its_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, own = tmp_path / "users", tmp_path / "trial"
    users.mkdir()
    own.mkdir()
    (users / "mine.yaml").write_text("train: {lr: 0.5}\ndata: {path: text.txt}\n")
    (users / "text.txt").write_text("a")
    monkeypatch.chdir(own)
    with pytest.raises(ConfigError, match=r"mine\.yaml is not readable"):
        load("mine.yaml")
    monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(users))
    config = load("mine.yaml", {}, Config)
    assert config.train.lr == 0.5 and absolute_path(config.data.path) == str(users / "text.txt")
    assert absolute_run(config.run).storage == str(users / "runs")
    for storage in ("s3://bucket/runs", str(own)):
        assert absolute_run(config.run.model_copy(update={"storage": storage})).storage == storage
    monkeypatch.chdir(users)  # as with RAY_CHDIR_TO_TRIAL_DIR=0
    assert absolute_run(config.run).storage == str(users / "runs")
