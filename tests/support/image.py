"""cluster/Dockerfile, built and run without Docker and without a registry.

    with Image(folder) as image:
        image.run("python", "--version")

Debian's packages: buildah mmdebstrap; it needs root. In the build, pip has this machine's settings,
and the files and indexes that they name.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMANDS = ("buildah", "mmdebstrap")
# What decides which packages are in the image. A job brings the sources of rayapp with it.
PACKAGES = ("cluster/Dockerfile", "constraints.txt", "pyproject.toml", "setup.py")
# The official image has its own Python in /usr/local, with C headers and without those of libc: the
# package of Python's headers would bring these, and is unpacked instead.
PYTHON = """chroot "$1" sh -ec '
cd /tmp
apt-get download libpython3.11-dev
dpkg -x libpython3.11-dev_*.deb /
rm libpython3.11-dev_*.deb
python3 -m venv /usr/local
'"""


def missing() -> list[str]:
    """Return the commands that this machine lacks."""
    return [command for command in COMMANDS if shutil.which(command) is None]


def checked(command: list[str], **options: Any) -> str:
    """Return what a command prints; raise with its last lines if it fails."""
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, **piped, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def pip_settings() -> tuple[str, set[Path]]:
    """Return this machine's settings of pip as one file, and what they name on its disk."""
    sections: dict[str, dict[str, str]] = defaultdict(dict)
    paths = set()
    listed = checked([sys.executable, "-m", "pip", "config", "list"]).splitlines()
    for line in sorted(listed, key=lambda line: line.startswith(":env:")):  # variables win
        name, _, text = line.partition("=")
        section, _, key = name.rpartition(".")
        words = str(ast.literal_eval(text)).split()
        sections["global" if section == ":env:" else section][key] = " ".join(words)
        for word in words:
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                # An index links to files beside it.
                paths.add(path.parent if key.endswith("index-url") else path)
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {value}" for key, value in values.items())]
    return "\n".join(lines) + "\n", paths


def make_base(path: Path) -> None:
    """Write a Debian 12 with its Python 3.11 as `python` and with pip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.tar")
    packages = "--include=ca-certificates,python3-venv"
    hook = f"--customize-hook={PYTHON}"
    checked(["mmdebstrap", "--variant=apt", packages, hook, "bookworm", str(partial)])
    partial.rename(path)


def unpacked(folder: Path) -> Path:
    """Return a folder with `files` and `config.json` of the image; build it where it is not there.

    Another Dockerfile, or other packages, make another one, and the old one is deleted.
    """
    key = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in PACKAGES)).hexdigest()[:12]
    place, partial = folder / f"unpacked-{key}", folder / "partial"
    if place.is_dir():
        return place
    for old in [partial, *folder.glob("unpacked-*")]:
        shutil.rmtree(old, ignore_errors=True)
    with Image(folder) as image:
        partial.mkdir()
        checked(["cp", "-a", image.buildah("mount", image.container), str(partial / "files")])
        (partial / "config.json").write_text(json.dumps(image.config()))
    partial.rename(place)
    return place


class Image:
    """The image in a storage of its own, which ends with it, and one container of it."""

    def __init__(self, folder: Path) -> None:
        """Keep the base in the folder for the next time."""
        self.folder, self.base = folder / "storage", folder / "base.tar"
        self.seconds: dict[str, float] = {}
        self.container = ""

    def buildah(self, *arguments: str | Path) -> str:
        storage = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        variables = {**os.environ, "TMPDIR": str(self.folder), "BUILDAH_ISOLATION": "chroot"}
        command = ["buildah", *storage, *map(str, arguments)]
        return checked(command, cwd=ROOT, env=variables).strip()

    def run(self, *command: str) -> str:
        """Return what a command in the container prints."""
        return self.buildah("run", self.container, "--", *command)

    def __enter__(self) -> Image:
        self._remove()
        self.folder.mkdir(parents=True)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def config(self) -> dict[str, Any]:
        """Return what the image says of user, environment and folder."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", self.container))
        return dict(found["OCIv1"]["config"])

    def size(self) -> float:
        """Return the GB of its files."""
        return int(self.run("sh", "-c", "du -sbx / 2>/dev/null | cut -f1")) / 1e9

    def _build(self) -> None:
        begin = time.monotonic()
        if not self.base.is_file():
            make_base(self.base)
            self.seconds["base"] = time.monotonic() - begin
        empty = self.buildah("from", "scratch")
        self.buildah("add", empty, self.base, "/")
        self.buildah("commit", "--rm", empty, "base")
        settings, paths = pip_settings()
        (self.folder / "pip.conf").write_text(settings)
        volumes = [f"{self.folder / 'pip.conf'}:/etc/pip.conf:ro", *(f"{x}:{x}:ro" for x in paths)]
        begin = time.monotonic()
        self.buildah(
            "bud",
            *(f"--volume={volume}" for volume in volumes),
            *("--build-arg=BASE=localhost/base", "--build-arg=EFA_INSTALLER="),
            *("--format=docker", "--file=cluster/Dockerfile", "--tag=rayapp", "."),
        )
        self.seconds["image"] = time.monotonic() - begin
        self.container = self.buildah("from", "localhost/rayapp")

    def _remove(self) -> None:
        if self.folder.exists():
            self.buildah("rm", "--all")  # which unmounts
            shutil.rmtree(self.folder)
