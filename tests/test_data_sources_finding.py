"""Check that versions of local files follow their content."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rayapp.data import sources
from rayapp.data.sources import finding


def aged(path: Path, data: bytes, seconds: float) -> None:
    path.write_bytes(data)
    os.utime(path, (time.time() - seconds,) * 2)


def test_versions_are_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy and a changed time give the same, but of a large file, of which the ends are read."""
    monkeypatch.setattr(finding, "WHOLE_BYTES", 8)
    monkeypatch.setattr(finding, "END_BYTES", 2)
    monkeypatch.setattr(finding, "AT_ONCE", 2)
    found = {}
    for folder, seconds in (("one", 100), ("two", 200), ("three", 100)):
        (tmp_path / folder).mkdir()
        for name, data in (("a", b"a"), ("b", b"b"), ("c", b"12 of a large file 34")):
            aged(tmp_path / folder / f"{name}.txt", data, seconds)
        if folder == "three":
            aged(tmp_path / "three" / "b.txt", b"B", 100)  # of the same size
        found[folder] = sources.find(str(tmp_path / folder)).files
    changed = {
        folder: [a.version != b.version for a, b in zip(found["one"], found[folder], strict=True)]
        for folder in ("two", "three")
    }
    assert changed["two"] == [False, False, True]
    assert changed["three"][:2] == [False, True]
    assert sources.find(str(tmp_path / "one")).files == found["one"]
