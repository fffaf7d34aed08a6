"""Check how inputs are opened, and that a file is read in the version that was found."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from rayapp.storage import READ_BLOCK, Readable, Storage, StorageError, open_input, open_storage

ROOT = Path(__file__).parent.parent
LARGE = random.Random(0).randbytes(2 * READ_BLOCK + 77)  # no part of it occurs twice


@pytest.fixture
def storage(place: str) -> Storage:
    return open_storage(place) / "some/prefix"


@pytest.fixture
def folder(storage: Storage) -> Readable:
    return open_input(storage.url)


def test_links_of_a_hubs_cache_are_files(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"123")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    folder = open_input(str(tmp_path / "snapshot"))
    assert [(entry.name, entry.size) for entry in folder.list()] == [("model.safetensors", 3)]


def test_inputs_are_opened_as_the_storage_opens_them(tmp_path: Path) -> None:
    assert open_input("s3://bucket/a/") == open_storage("s3://bucket/a/")
    assert open_input("s3://bucket/a/").url == "s3://bucket/a"
    assert open_input(str(tmp_path)) == open_storage(str(tmp_path))
    with pytest.raises(StorageError, match="cannot open"):
        open_input("gs://bucket/a")


def test_another_version_of_a_file_is_refused(storage: Storage, folder: Readable) -> None:
    storage.write("a", LARGE)
    entry = folder.stat("a")
    assert entry is not None and folder.read("a", 3, 5, entry.etag) == LARGE[3:8]
    replaced = f"cannot read {storage.url}/a: it was replaced since the run found it. Leave it as"
    with folder.open_read("a") as file:
        assert file.read(1) == LARGE[:1]
        storage.write("a", LARGE[::-1])
        for read in (
            lambda: file.read(2 * READ_BLOCK),
            lambda: folder.read("a", 3, 5, entry.etag),
            lambda: folder.read("a", 0, None, entry.etag),
            lambda: storage.read("a", 3, 5, entry.etag),
        ):
            with pytest.raises(StorageError, match=replaced):
                read()
    assert folder.read("a", 3, 5) == LARGE[::-1][3:8]


FORKED = """
import os, sys
from rayapp.storage import open_input
folder = open_input(sys.argv[1])
assert folder.read("a") == b"1"
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        assert folder.read("a") == b"1" and folder.list()[0].name == "a"
        sys.exit(7)
    children.append(child)
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert folder.read("a") == b"1"
"""


def test_a_forked_process_reads_too(storage: Storage) -> None:
    storage.write("a", b"1")
    command = [sys.executable, "-c", FORKED, storage.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
