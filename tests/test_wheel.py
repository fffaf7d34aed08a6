"""What a wheel and an sdist have, and that rayapp works from another folder than a clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from rayapp.cluster.options import IMAGE_CONTEXT
from rayapp.config import load

ROOT = Path(__file__).parent.parent
FOLDERS = ("bench", "cluster", "configs", "docs", "examples", "infra", "rayapp", "tests")
MADE = {"__pycache__", ".terraform", ".terraform.lock.hcl"}  # by what is run in the clone

BUILD = """
import os, sys
from setuptools import build_meta
source, kind, out = sys.argv[1:]
os.chdir(source)
getattr(build_meta, f"build_{kind}")(out)
"""


def files_of(folder: Path, root: Path) -> set[str]:
    """Return the files below a folder by their paths from `root`, but for what commands make."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in found if not MADE & {*path.parts}}


def build(source: Path, kind: str, out: Path) -> Path:
    """Build a wheel or an sdist as pip does, without network and without an environment."""
    run([sys.executable, "-c", BUILD, str(source), kind, str(out)], source)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout: what is built leaves files there."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*MADE))
    return folder


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(clone, "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist builds."""
    return build(sdist, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    target = tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", "--target", str(target), str(wheel)], target)
    return target


def run(command: list[str], folder: Path, path: Path | None = None) -> str:
    """Run a command elsewhere than in the clone, and return what it prints."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if path is None else {"PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_sdist_has_the_repository(sdist: Path) -> None:
    for name in FOLDERS:
        assert files_of(sdist / name, sdist) == files_of(ROOT / name, ROOT)
    # By rayapp.cluster.options these sources have the same image as the clone.
    assert all((sdist / name).exists() for name in (*IMAGE_CONTEXT, ".dockerignore", "Makefile"))


def test_a_clone_and_an_sdist_build_the_same_wheel(
    clone: Path, wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(build(clone, "wheel", tmp_path)) as other:
        assert {i.filename: i.CRC for i in one.infolist()} == {
            i.filename: i.CRC for i in other.infolist()
        }


def test_a_wheel_has_all_files_and_no_other_package(installed: Path) -> None:
    inside = files_of(installed / "rayapp", installed)
    shipped = {f"rayapp/_files/{each}" for name in ("cluster", "configs")
               for each in files_of(ROOT / name, ROOT)}  # fmt: skip
    assert inside == files_of(ROOT / "rayapp", ROOT) | shipped
    assert "rayapp/py.typed" in inside
    named = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert named == {"rayapp", "bin"}


def test_the_console_command_is_python_m_rayapp(installed: Path, tmp_path: Path) -> None:
    command, module = [str(installed / "bin" / "rayapp")], [sys.executable, "-m", "rayapp"]
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for argv, answer in (("--version", f"rayapp {release}\n"), ("--help", None)):
        told = [run([*each, argv], tmp_path, installed) for each in (command, module)]
        assert told[0] == told[1] == (answer or told[1])


def test_a_run_is_described_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    told = run([sys.executable, "-m", "rayapp.finetune", "--help"], tmp_path, installed)
    assert "train.tokens_per_step" in told
    shutil.copytree(ROOT / "tests" / "golden" / "run", tmp_path / "demo")
    run([str(installed / "bin" / "rayapp"), "report", "demo"], tmp_path, installed)
    assert "Bokeh" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("platform", ["ecs", "kuberay"])
def test_a_cluster_is_rendered(installed: Path, tmp_path: Path, platform: str) -> None:
    command = [str(installed / "bin" / "rayapp"), "render", platform, "--account=123456789012"]
    run([*command, "configs/dolly_v2_7b_ecs.yaml", "--out=out"], tmp_path, installed)
    assert (tmp_path / "out" / "terraform.tfvars.json").is_file()


@pytest.mark.parametrize("config", ["configs/tiny_cpu.yaml", "tiny_cpu"])
def test_a_shipped_config_is_planned(installed: Path, tmp_path: Path, config: str) -> None:
    told = run([str(installed / "bin" / "rayapp"), "plan", config, "--json"], tmp_path, installed)
    assert json.loads(told)["peak_gib"]["value"] > 0


def test_a_file_of_ones_own_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("configs/tiny_cpu.yaml").run.name == load("tiny_cpu").run.name == "tiny"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny_cpu.yaml").write_text("run: {name: own}")
    assert load("configs/tiny_cpu.yaml").run.name == "own"
    assert load("tiny_cpu").run.name == "tiny"


def test_the_oldest_transformers_is_the_one_that_is_tested() -> None:
    """5.22 lacks activation_checkpointing_enable, 5.20 apply_converters."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = [each for each in known if each.startswith("transformers")]
    (tested,) = re.findall(
        r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M
    )
    assert bounds == f"transformers>={tested},<6"
