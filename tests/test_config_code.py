"""Functions of the user's that a config names."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayapp.__main__ import main
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
        if name.startswith("lab"):
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


# ---- Whose code it may be --------------------------------------------------------------------


def refusal(name: str) -> str:
    """Return why a name is refused by all that reads a config."""
    with pytest.raises(CodeError) as refused:
        load_code("run.hooks", name)
    with pytest.raises(CodeError) as other:
        digest_of("run.hooks", name)
    assert str(refused.value) == str(other.value)
    return str(refused.value)


LIBRARY = [
    "os:system",
    "os.path:exists",
    "builtins:exec",
    "subprocess:run",
    "runpy:run_path",
    "this:c",
]
LIBRARY += [
    "pathlib:Path",
    "importlib:import_module",
    "posix:system",
    "rayapp.storage:open_storage",
]


@pytest.mark.parametrize("name", LIBRARY)
def test_a_library_is_no_code_of_the_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not by a file of that name in the folder either, nor if the operator names it."""
    (folder / f"{name.partition(':')[0].partition('.')[0]}.py").write_text("1 / 0\n")
    monkeypatch.setenv("RAYAPP_CODE", name.partition(":")[0])
    monkeypatch.syspath_prepend(str(folder))
    why = f"run.hooks={name} is not code of yours: {name.partition(':')[0]} is a module of "
    assert refusal(name).startswith(why) and "Name a function" in refusal(name)
    with pytest.raises(CodeError, match="is not code of yours"):
        load_code("run.hooks", name, checked=True)


@pytest.mark.parametrize(
    "name",
    [
        "os:path.join",
        "pathlib:Path.write_text",
        ".lab:f",
        "lab/../os:f",
        "lab/losses.py",
    ],
)
def test_a_chain_or_a_path_is_no_name(name: str) -> None:
    for field in ("train.loss", "data.format", "eval.metrics", "run.hooks"):
        with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
            load(None, {field: name})


def test_an_installed_package_is_run_if_the_operator_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not imported before, wherever its path comes from."""
    for place in (folder / ".venv" / "site-packages", folder.parent / f"{folder.name}-elsewhere"):
        for name in list(sys.modules):
            if name.partition(".")[0] == "lab_a":
                del sys.modules[name]
        package(place, "lab_a")
        (place / "lab_a" / "__init__.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(place))
            told = refusal("lab_a.deep.losses:f")
            assert f"lab_a is {place}/lab_a, outside the working folder {folder}" in told
            assert told.endswith("or set RAYAPP_CODE=lab_a to allow this package")
            for other in ("lab", "lab_a.other", "lab_a.deep.loss", " , "):
                patch.setenv("RAYAPP_CODE", other)
                assert refusal("lab_a.deep.losses:f") == told
            assert not (folder / "ran").exists()
            for named in ("lab_a", "other, lab_a.deep"):
                patch.setenv("RAYAPP_CODE", named)
                assert load_code("run.hooks", "lab_a.deep.losses:f")() == 1
        (folder / "ran").unlink()


def test_a_link_out_of_the_folder_is_other_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a package, of a part of one, and of a file; a link to the folder itself is none."""
    away = package(folder.parent / f"{folder.name}-away", "lab_a")
    (folder / "lab_link").symlink_to(away)
    assert f"lab_link is {away}" in refusal("lab_link.other:X")
    mine = package(folder, "lab_mine")
    (mine / "library").symlink_to(Path(os.__file__).parent)
    assert "lab_mine.library is " in refusal("lab_mine.library.subprocess:run")
    (folder / "lab_file.py").symlink_to(away / "other.py")
    assert f"lab_file is {away}/other.py" in refusal("lab_file:X")
    (mine / "good.py").write_text("def f(): return 2\n")
    monkeypatch.chdir(away)
    (away / "link").symlink_to(folder)
    monkeypatch.chdir(away / "link")
    assert load_code("run.hooks", "lab_mine.good:f")() == 2


def test_an_archive_is_other_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(folder / "lab_zip.zip", "w") as archive:
        archive.writestr("lab_zip.py", "def f(): return 1\n")
    monkeypatch.syspath_prepend(str(folder / "lab_zip.zip"))
    assert "lab_zip is " in refusal("lab_zip:f") and "outside the working" in refusal("lab_zip:f")
    monkeypatch.setenv("RAYAPP_CODE", "lab_zip")
    assert load_code("run.hooks", "lab_zip:f")() == 1
    with pytest.raises(CodeError, match="is without source"):
        digest_of("run.hooks", "lab_zip:f")


def test_what_ones_module_imports_is_not_ones_own(folder: Path) -> None:
    """A function of another's would be called with what the config says."""
    (folder / "lab_e.py").write_text(
        "import functools\nimport torch\nfrom os import system\nfrom subprocess import Popen\n"
        "from torch.nn.functional import mse_loss\nfrom lab_f import mine\n"
        "@functools.lru_cache\ndef kept(): return 1\n"
        "part = functools.partial(mine, 3)\nnorm = torch.nn.L1Loss(reduction='none')\n"
    )
    (folder / "lab_f.py").write_text("def mine(x=2): return x\n")
    assert "posix is a module of Python" in refusal("lab_e:system")
    assert "subprocess is a module of Python" in refusal("lab_e:Popen")
    assert "torch is " in refusal("lab_e:mse_loss")
    assert [load_code("run.hooks", f"lab_e:{n}")() for n in ("kept", "mine", "part")] == [1, 2, 3]
    assert callable(load_code("run.hooks", "lab_e:norm"))


@pytest.mark.parametrize(
    ("where", "mode", "owner", "group", "safe"),
    [
        (".", 0o777, None, None, False),
        (".", 0o1777, None, None, False),
        (".", 0o775, None, 4321, False),
        (".", 0o775, None, None, True),
        (".", 0o755, 4321, 4321, False),
        ("lab_a", 0o777, None, None, False),
        ("lab_a/deep/losses.py", 0o666, None, None, False),
        ("lab_a/deep/losses.py", 0o644, 4321, None, False),
    ],
)
def test_code_that_others_can_write_is_shown_and_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, mode: int, owner: int | None,
    group: int | None, safe: bool,
) -> None:  # fmt: skip
    package(folder, "lab_a")
    asked, stat = folder / where, Path.stat

    def status(path: Path, **options: Any) -> os.stat_result:
        found = list(stat(path, **options))
        mine = path == asked
        found[0] = (found[0] & ~0o7777) | (mode if mine else 0o755)
        found[4] = owner if mine and owner is not None else os.geteuid()
        found[5] = group if mine and group is not None else os.getegid()
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", status)
    if not safe:
        told = refusal("lab_a.deep.losses:f")
        assert f"is not safe to run: others can write to {asked}. Remove" in told
        assert told.endswith("or set RAYAPP_CODE=lab_a to run the code anyway")
        assert "lab_a.deep.losses" not in sys.modules
        monkeypatch.setenv("RAYAPP_CODE", "lab_a")
    assert load_code("run.hooks", "lab_a.deep.losses:f")() == 1


def test_a_preview_runs_no_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config names a shell, and the file is its command."""
    (folder / "a;touch ran;.txt").write_text("x\n" * 100)
    (folder / "notes.py").write_text("open('ran', 'w')\n")
    for format, path in (("os:system", "a;touch ran;.txt"), ("runpy:run_path", "notes.py")):
        assert main(["data", f"--data.path={path}", f"--data.format={format}"]) == 2
        assert f"data.format={format} is not code of yours" in capsys.readouterr().err
    assert not (folder / "ran").exists()


def test_a_loss_of_ones_own_is_the_objective() -> None:
    given = {"train.loss": "lab:f", "train.z_loss": "0.1"}
    with pytest.raises(ConfigError, match=r"train\.loss=lab:f is in conflict"):
        load(None, given)
