"""Check that versions of local files follow their content, and are kept between commands."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from rayapp.data import sources
from rayapp.data.sources import finding


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each file is added that is read for its version."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(finding, "KEPT_BYTES", 1)
    read: list[str] = []
    digest = finding._digest
    monkeypatch.setattr(finding, "_digest", lambda s, e: (read.append(e.name), digest(s, e))[1])
    return read


def aged(path: Path, data: bytes, seconds: float = 100) -> None:
    path.write_bytes(data)
    os.utime(path, (time.time() - seconds,) * 2)


def test_versions_of_files_that_did_not_change_are_kept(tmp_path: Path, kept: list[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in "abc":
        aged(data / f"{name}.txt", name.encode())
    first = sources.find(str(data))
    assert sorted(kept) == ["a.txt", "b.txt", "c.txt"]
    kept.clear()
    assert sources.find(str(data)) == first and not kept

    aged(data / "b.txt", b"B", seconds=50)  # of the same size, in the same file
    (data / "d.txt").write_bytes(b"d")  # just now, so that it may change without another time
    second = sources.find(str(data))
    assert sorted(kept) == ["b.txt", "d.txt"]
    changed = [
        one.version != other.version
        for one, other in zip(first.files, second.files[:3], strict=True)
    ]
    assert changed == [False, True, False]
    kept.clear()
    assert sources.find(str(data)) == second and kept == ["d.txt"]


def test_versions_are_of_the_content(tmp_path: Path, kept: list[str]) -> None:
    """A copy and a changed time give the same; so does a cache that cannot be read or written."""
    for folder, seconds in (("one", 100), ("two", 200)):
        (tmp_path / folder).mkdir()
        aged(tmp_path / folder / "a.txt", b"a", seconds)
        aged(tmp_path / folder / "b.txt", b"b")
    one = sources.find(str(tmp_path / "one")).files
    assert sources.find(str(tmp_path / "two")).files == one
    folder_of_caches = tmp_path / "cache" / "rayapp"
    caches = list(folder_of_caches.glob("versions-*.json"))
    assert len(caches) == 2
    for cache in caches:
        cache.write_bytes(b"of another program" * 1000)
    assert sources.find(str(tmp_path / "one")).files == one
    shutil.rmtree(folder_of_caches)
    folder_of_caches.write_bytes(b"no folder")
    assert sources.find(str(tmp_path / "one")).files == one and len(kept) == 8
