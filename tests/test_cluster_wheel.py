"""What a wheel has: the files of cluster/ and configs/, found from another folder than a clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rayapp.config import load

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built without network and installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    source, target = folder / "source", folder / "target"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("rayapp", "cluster", "configs"):
        shutil.copytree(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run([*pip, "wheel", *offline, "--wheel-dir", str(folder), str(source)], folder)
    (wheel,) = folder.glob("*.whl")
    run([*pip, "install", *offline, "--target", str(target), str(wheel)], folder)
    return target


def run(command: list[str], folder: Path, path: Path | None = None) -> str:
    """Run a command elsewhere than in the clone, and return what it prints."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if path is None else {"PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("platform", ["ecs", "kuberay"])
def test_a_cluster_is_rendered(installed: Path, tmp_path: Path, platform: str) -> None:
    command = [sys.executable, "-m", "rayapp", "render", platform, "--account=123456789012"]
    run([*command, "configs/dolly_v2_7b_ecs.yaml", "--out=out"], tmp_path, installed)
    assert (tmp_path / "out" / "terraform.tfvars.json").is_file()


@pytest.mark.parametrize("config", ["configs/tiny_cpu.yaml", "tiny_cpu"])
def test_a_shipped_config_is_planned(installed: Path, tmp_path: Path, config: str) -> None:
    told = run([sys.executable, "-m", "rayapp", "plan", config, "--json"], tmp_path, installed)
    assert json.loads(told)["peak_gib"]["value"] > 0


def test_it_has_all_files_and_types(installed: Path) -> None:
    for name in ("cluster", "configs"):
        ours = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()}
        files = installed / "rayapp" / "_files"
        packed = {path.relative_to(files) for path in (files / name).rglob("*") if path.is_file()}
        assert packed == ours
    assert (installed / "rayapp" / "py.typed").is_file()
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"rayapp"}


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
