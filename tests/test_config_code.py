"""Functions of the user's that a config names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayapp.config import ConfigError, load
from rayapp.config.code import CodeError, digest_of, load_code


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def package(folder: Path, name: str) -> Path:
    (folder / name / "deep").mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    (folder / name / "deep" / "__init__.py").write_text("")
    (folder / name / "deep" / "losses.py").write_text(
        "from lab_a import other\ndef f(): return 1\n"
    )
    (folder / name / "other.py").write_text("X = 1\n")
    return folder / name


def test_a_function_is_found_where_the_run_is_started(folder: Path) -> None:
    package(folder, "lab_a")
    assert load_code("train.loss", "lab_a.deep.losses:f")() == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lab_none:f", "cannot be imported: ModuleNotFoundError"),
        ("lab_b:g", "cannot be imported: AttributeError"),
        ("lab_b:X", "is not a function: it is int"),
        ("lab_broken:f", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_named(folder: Path, name: str, why: str) -> None:
    (folder / "lab_b.py").write_text("X = 1\n")
    (folder / "lab_broken.py").write_text("1 / 0\n")
    with pytest.raises(CodeError, match=f"^train.loss={name} {why}"):
        load_code("train.loss", name)


def test_the_digest_is_of_the_whole_package(folder: Path) -> None:
    root = package(folder, "lab_a")
    before = digest_of("train.loss", "lab_a.deep.losses:f")
    assert digest_of("train.loss", "lab_a.deep.losses:f") == before
    (root / "note.txt").write_text("no code")
    assert digest_of("train.loss", "lab_a.deep.losses:f") == before
    (root / "other.py").write_text("X = 2\n")
    assert digest_of("train.loss", "lab_a.deep.losses:f") != before


def test_a_module_alone_is_its_file(folder: Path) -> None:
    (folder / "lab_c.py").write_text("def f(): return 1\n")
    (folder / "lab_d.py").write_text("def f(): return 1\n")
    before = digest_of("train.loss", "lab_c:f")
    (folder / "lab_d.py").write_text("def f(): return 2\n")
    assert digest_of("train.loss", "lab_c:f") == before
    (folder / "lab_c.py").write_text("def f(): return 2\n")
    assert digest_of("train.loss", "lab_c:f") != before


@pytest.mark.parametrize("field", ["train.loss", "eval.metrics", "run.hooks"])
def test_a_name_that_is_no_name_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load(None, {field: "lab/losses.py"})


def test_a_loss_of_ones_own_is_the_objective() -> None:
    given = {"train.loss": "lab:f", "train.z_loss": "0.1"}
    with pytest.raises(ConfigError, match=r"train\.loss=lab:f is in conflict"):
        load(None, given)
