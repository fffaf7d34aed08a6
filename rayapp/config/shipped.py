"""The folders beside the package in a clone, which a wheel has inside it: cluster/ and configs/."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def shipped(name: str) -> Path:
    """Return the folder `cluster` or `configs` as it came with this rayapp."""
    inside = PACKAGE / "_files" / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def config_file(path: str) -> Path:
    """Return a config's file; `configs/tiny_cpu.yaml` and `tiny_cpu` are found from any folder.

    A file of that path wins over the one that came with rayapp.
    """
    name = path.removeprefix("configs/").removesuffix(".yaml")
    ours = {file.stem: file for file in shipped("configs").glob("*.yaml")}
    return Path(path) if Path(path).exists() else ours.get(name, Path(path))
