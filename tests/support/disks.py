"""A small file system of its own, to be filled up."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(mebibytes: int) -> Iterator[Path]:
    """Mount a tmpfs of this size on a new folder; skip the test where that is not permitted.

    The folder is not below pytest's, which could not be removed if a killed test left the mount.
    """
    folder = Path(tempfile.mkdtemp(prefix="disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def fill(folder: Path) -> Path:
    """Write a file until the disk is full; return it."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        (folder / "one more").write_bytes(b"x")
    except OSError as error:
        assert error.errno == errno.ENOSPC
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / "one more")
        return path
    raise AssertionError("the disk is not full")
