"""Check that inputs are read through s3fs as rayapp.storage would read them, in bad times too."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import Faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayapp.storage import READ_BLOCK, Readable, Storage, StorageError, open_storage, s3_client
from rayapp.storage.inputs import S3Input, open_input

ROOT = Path(__file__).parent.parent
CONTENT = b"content " * 1000
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


def test_s3_is_read_through_s3fs_and_a_folder_as_it_is(tmp_path: Path) -> None:
    assert isinstance(open_input("s3://bucket/a/"), S3Input)
    assert open_input("s3://bucket/a/").url == "s3://bucket/a"
    assert open_input(str(tmp_path)) == open_storage(str(tmp_path))
    with pytest.raises(StorageError, match="cannot open"):
        open_input("gs://bucket/a")


def test_entries_are_those_of_the_storage(storage: Storage, folder: Readable) -> None:
    written = ["b/c", "b/d e+\u00fc", "b/model.safetensors", "b.txt", "Z"]
    for name in written:
        storage.write(name, name.encode())
    assert folder.list() == storage.list() and folder.list("b") == storage.list("b")
    assert [entry.name for entry in folder.list()] == sorted(written)
    for name in written:
        assert folder.stat(name) == storage.stat(name) and folder.read(name) == name.encode()
        assert folder.size(name) == len(name.encode()) and folder.exists(name)
    assert pickle.loads(pickle.dumps(folder)) == folder and hash(folder)


@pytest.mark.full
def test_listing_goes_on_after_a_page(storage: Storage, folder: Readable) -> None:
    expected = [f"many/{number:04d}" for number in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: storage.write(name, b""), expected))
    assert [entry.name for entry in folder.list()] == expected


def test_absent_is_file_not_found(storage: Storage, folder: Readable) -> None:
    storage.write("folder/file", b"x")
    for name in ("nothing", "folder", "folder/file/below"):
        for length in (None, 0, 1):
            with pytest.raises(FileNotFoundError, match="no such file"):
                folder.read(name, 0, length)
        with pytest.raises(FileNotFoundError, match=name):
            folder.open_read(name)
        assert folder.stat(name) is None and folder.size(name) is None
        assert folder.list(name) == ([] if name != "folder" else folder.list())


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.binary(max_size=40),
    offset=st.integers(0, 50),
    length=st.none() | st.integers(0, 50),
    pinned=st.booleans(),
)
def test_ranges(
    storage: Storage, folder: Readable, data: bytes, offset: int, length: int | None, pinned: bool
) -> None:
    storage.write("x", data)
    entry = storage.stat("x")
    assert entry is not None
    etag = entry.etag if pinned else None
    expected = data[offset:] if length is None else data[offset : offset + length]
    if length is None or len(expected) == length:
        assert folder.read("x", offset, length, etag) == expected
    else:
        with pytest.raises(StorageError, match=f"expected {length} bytes.* had {len(expected)}"):
            folder.read("x", offset, length, etag)


def test_open_read_is_a_file(storage: Storage, folder: Readable) -> None:
    storage.write("x", LARGE)
    expected = io.BytesIO(LARGE)
    with folder.open_read("x") as file:
        for position, length in [(0, 10), (READ_BLOCK - 5, 10), (5, 2 * READ_BLOCK), (-3, 9)]:
            whence = os.SEEK_END if position < 0 else os.SEEK_SET
            assert file.seek(position, whence) == expected.seek(position, whence)
            assert file.read(length) == expected.read(length)


def test_what_was_just_written_is_seen(storage: Storage, folder: Readable) -> None:
    """s3fs would keep listings, and answer from them what a file is."""
    assert folder.list() == []
    for number in range(3):
        storage.write("a", b"x" * number)
        assert folder.size("a") == number and folder.read("a") == b"x" * number
        assert [entry.size for entry in folder.list()] == [number]
    storage.delete("a")
    assert folder.list() == [] and not folder.exists("a")


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
from rayapp.storage.inputs import open_input
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


def test_threads_read_at_once(storage: Storage, folder: Readable) -> None:
    """8 requests are under way when the last of 8 threads asks."""
    storage.write("a", LARGE)
    starts, at_once = range(0, 64_000, 1000), threading.Barrier(8)

    def read(start: int) -> bytes:
        at_once.wait(30)
        return folder.read("a", start, 1000)

    with ThreadPoolExecutor(8) as pool:
        assert b"".join(pool.map(read, starts)) == LARGE[:64_000]


# ------------------------------------------------------------------ a network that fails


@pytest.fixture
def faults(either_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    with Faults(os.environ["AWS_ENDPOINT_URL_S3"]).serving() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        monkeypatch.setattr(s3_client, "s3_attempts", 1)  # so that our own retry is what acts
        monkeypatch.setattr(s3_client, "first_pause_s", 0.02)
        open_storage(f"s3://{either_bucket}/p").write("a", CONTENT)
        yield proxy


READS: list[tuple[str, Callable[[Readable], object]]] = [
    ("GET", lambda folder: folder.read("a") == CONTENT),
    ("GET", lambda folder: folder.read("a", 8, 80) == CONTENT[8:88]),
    ("GET", lambda folder: folder.read("a", 8, 80, folder.list()[0].etag) == CONTENT[8:88]),
    ("HEAD", lambda folder: folder.size("a") == len(CONTENT)),
    ("GET", lambda folder: [entry.name for entry in folder.list()] == ["a"]),
]


@pytest.mark.parametrize("kind", ["slow", "reset", "cut", "lose", "page", "short"])
def test_faults_end_in_success_and_are_logged(
    faults: Faults, either_bucket: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_input(f"s3://{either_bucket}/p")
    folder.size("a")
    for method, act in READS:
        if kind in ("cut", "short") and method == "HEAD":
            continue
        caplog.clear()
        faults.spoil(kind, method, 2)
        assert act(folder), (method, kind)
        assert faults.left == 0
        # aiohttp by itself repeats a GET once, if a connection that it had kept is dropped.
        own = 1 if kind in ("reset", "lose") else 2
        assert own <= sum("; try " in line for line in caplog.messages) <= 2, caplog.messages


@pytest.mark.parametrize("kind", ["expired", "skewed"])
def test_credentials_and_clocks_that_come_right_are_waited_for(
    faults: Faults, either_bucket: str, kind: str
) -> None:
    folder = open_input(f"s3://{either_bucket}/p")
    for method, act in READS[1:4:2]:
        methods = ("HEAD", "GET") if method == "HEAD" else (method,)
        # A refused HEAD is two, as botocore asks for the bucket's region and repeats it.
        faults.spoil(kind, methods, 4 if method == "HEAD" else 2, "/p/a")
        assert act(folder) and faults.left == 0


def test_giving_up_says_how_long(
    faults: Faults, either_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "retry_s", 0.5)
    folder = open_input(f"s3://{either_bucket}/p")
    folder.size("a")
    faults.spoil("reset", ("GET", "HEAD"), 1000)
    for act in (lambda: folder.read("a", 0, 5), lambda: folder.size("a"), lambda: folder.list()):
        started = time.monotonic()
        with pytest.raises(StorageError, match=r"s3://.*: .*\(gave up after \d tries") as raised:
            act()
        assert raised.value.outage and time.monotonic() - started < 5


def test_what_is_denied_or_wrong_is_said_as_by_the_storage(
    faults: Faults,
    either_bucket: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def messages(url: str, spoil: Callable[[], object] = lambda: None) -> list[str]:
        found = []
        for act in (
            lambda folder: folder.list(),
            lambda folder: folder.stat("a"),
            lambda folder: folder.read("a", 0, 5),
        ):
            for folder in (open_storage(url), open_input(url)):
                spoil()
                with pytest.raises((StorageError, FileNotFoundError)) as raised:
                    act(folder)
                found.append(str(raised.value))
        return found

    url = f"s3://{either_bucket}/p"
    denied = messages(url, lambda: faults.spoil("denied", ("GET", "HEAD"), 2))
    faults.spoil("", "", 0)
    assert denied[::2] == denied[1::2]
    assert all(f"access denied. Allow s3:ListBucket on {either_bucket}" in one for one in denied)
    assert caplog.messages == []
    absent = "the bucket no-such-bucket does not exist. Create it with `aws s3 mb"
    with pytest.raises(StorageError, match=absent):
        open_input("s3://no-such-bucket/x").list()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "nonsense")
    invalid = messages(url)
    assert invalid[::2] == invalid[1::2] and "Invalid endpoint: nonsense" in invalid[0]
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    without = messages(url)
    assert without[::2] == without[1::2] and "no AWS credentials were found" in without[0]
