"""The tag of the image built from these sources; it changes with every file that goes into it.

    python -m rayapp.cluster.image       # what `make image` builds and `render` writes

The registry's tags are immutable: an image is pushed once, and changed sources get another tag.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What cluster/Dockerfile copies, and the Dockerfile itself.
CONTEXT = (
    "cluster",
    "configs",
    "constraints.txt",
    "LICENSE",
    "pyproject.toml",
    "rayapp",
    "README.md",
    "setup.py",
)


def tag(root: Path = ROOT) -> str:
    """Return rayapp's version and a hash of its sources; without sources, the version alone."""
    release = version("rayapp")
    if not (root / "cluster" / "Dockerfile").is_file():  # installed from a wheel
        return release
    digest = hashlib.sha256()
    for name in CONTEXT:
        top = root / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return f"{release}-{digest.hexdigest()[:12]}"


if __name__ == "__main__":
    print(tag())
