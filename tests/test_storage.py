"""Check that a folder on disk and a prefix on S3 behave alike, also when killed or cut off.

The S3 side is moto's server and Ceph's; faults are injected by a real proxy in front of each.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from faults import Faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayapp.storage import (
    MIN_PART_BYTES,
    READ_BLOCK,
    Storage,
    StorageError,
    base,
    local,
    open_storage,
    part_bytes,
    s3,
    s3_client,
)

ROOT = Path(__file__).parent.parent
LARGE = bytes(range(256)) * (10 * 4096) * 2 + b"tail"  # 20 MiB and a bit: three parts
BLOCKS = random.Random(0).randbytes(2 * READ_BLOCK + 77)  # no part of it occurs twice


@pytest.fixture
def storage(place: str) -> Storage:
    return open_storage(place) / "some/prefix"


def names(storage: Storage, prefix: str = "") -> list[str]:
    return [entry.name for entry in storage.list(prefix)]


# ------------------------------------------------------------------ what it means


def test_write_read_and_describe(storage: Storage) -> None:
    storage.write("a/b.txt", b"hello")
    assert storage.read("a/b.txt") == b"hello"
    assert storage.size("a/b.txt") == 5 and storage.exists("a/b.txt")
    entry = storage.stat("a/b.txt")
    assert entry is not None and storage.list() == [entry]
    assert abs(entry.modified_s - time.time()) < 60
    storage.write("a/b.txt", b"other")
    again = storage.stat("a/b.txt")
    assert again is not None and again.etag != entry.etag


def test_absent_is_file_not_found(storage: Storage) -> None:
    storage.write("folder/file", b"x")
    for name in ("nothing", "folder", "folder/file/below"):
        for length in (None, 0, 1):
            with pytest.raises(FileNotFoundError, match="no such file"):
                storage.read(name, 0, length)
        assert storage.stat(name) is None and storage.size(name) is None
        assert not storage.exists(name)
        assert storage.list(name) == ([] if name != "folder" else storage.list())
        storage.delete(f"{name}/absent")
    storage.delete_tree("nothing")
    storage.delete_tree("folder/file")
    assert names(storage) == ["folder/file"]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.binary(max_size=40), offset=st.integers(0, 50), length=st.none() | st.integers(0, 50)
)
def test_ranges(storage: Storage, data: bytes, offset: int, length: int | None) -> None:
    storage.write("x", data)
    expected = data[offset:] if length is None else data[offset : offset + length]
    if length is None or len(expected) == length:
        assert storage.read("x", offset, length) == expected
    else:
        with pytest.raises(StorageError, match=f"expected {length} bytes.* had {len(expected)}"):
            storage.read("x", offset, length)


@pytest.fixture
def blocks(storage: Storage) -> Storage:
    storage.write("blocks", BLOCKS)
    return storage


POSITIONS = st.sampled_from([0, READ_BLOCK, 2 * READ_BLOCK, len(BLOCKS)]).flatmap(
    lambda border: st.integers(max(0, border - 100), border + 100)
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    moves=st.lists(
        st.tuples(
            st.none() | st.tuples(POSITIONS, st.sampled_from(list(range(3)))),
            st.integers(0, 200) | st.sampled_from([READ_BLOCK - 1, READ_BLOCK + 1, len(BLOCKS)]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_open_read_moves_and_reads_like_a_file_in_memory(
    blocks: Storage, moves: list[tuple[tuple[int, int] | None, int]]
) -> None:
    expected = io.BytesIO(BLOCKS)
    with blocks.open_read("blocks") as file:
        assert file.readable() and file.seekable() and file.tell() == 0
        for seek, length in moves:
            if seek is not None:
                position, whence = seek
                offset = position - (0, expected.tell(), len(BLOCKS))[whence]
                assert file.seek(offset, whence) == expected.seek(offset, whence) == position
            assert file.read(length) == expected.read(length)
            assert file.tell() == expected.tell()


def test_open_read_to_the_end(blocks: Storage) -> None:
    with blocks.open_read("blocks") as file:
        file.seek(READ_BLOCK - 1)
        assert file.read(2) == BLOCKS[READ_BLOCK - 1 : READ_BLOCK + 1]
        file.seek(-1000 - 77, os.SEEK_END)
        assert file.read() == BLOCKS[-1000 - 77 :] and file.read() == b"" == file.read(1)
    blocks.write("empty", b"")
    with blocks.open_read("empty") as file:
        assert file.read() == b"" and file.tell() == file.seek(0, os.SEEK_END) == 0


def test_open_read_fetches_each_block_once(
    blocks: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[int, int | None]] = []
    fetch = type(blocks).read

    def read(self: Storage, name: str, offset: int, length: int, etag: str) -> bytes:
        fetched.append((offset, length))
        return fetch(self, name, offset, length, etag)

    monkeypatch.setattr(type(blocks), "read", read)
    with blocks.open_read("blocks") as file:
        assert b"".join(iter(lambda: file.read(1000), b"")) == BLOCKS
    assert fetched == [(0, READ_BLOCK), (READ_BLOCK, READ_BLOCK), (2 * READ_BLOCK, 77)]


def test_open_read_of_an_absent_file(storage: Storage) -> None:
    storage.write("folder/file", b"x")
    for name in ("nothing", "folder", "folder/file/below"):
        with pytest.raises(FileNotFoundError, match=name):
            storage.open_read(name)


def test_listing_is_recursive_sorted_and_by_folder(storage: Storage) -> None:
    written = [
        "step-1/.metadata",
        "step-1/a/b",
        "step-10/x",
        "step-1.json",
        "Z",
        "step-1/a-b",
        "\u00e9 \u00fc+",
    ]
    for name in written:
        storage.write(name, name.encode())
    assert names(storage) == sorted(written)
    assert (
        names(storage, "step-1")
        == names(storage, "step-1/")
        == [
            "step-1/.metadata",
            "step-1/a-b",
            "step-1/a/b",
        ]
    )
    assert storage.dirs() == ["step-1", "step-10"] and storage.dirs("step-1") == ["a"]
    assert storage.dirs("nothing") == []
    child = storage / "step-1"
    assert names(child) == [".metadata", "a-b", "a/b"] and child.read("a/b") == b"step-1/a/b"
    assert child.url == f"{storage.url}/step-1" and storage.child("") == storage
    storage.delete_tree("step-1")
    assert names(storage) == ["Z", "step-1.json", "step-10/x", "\u00e9 \u00fc+"]
    assert storage.dirs() == ["step-10"]
    storage.delete("Z")
    storage.delete("Z")
    child.delete_tree("")
    storage.delete_tree("")
    assert storage.list() == [] and storage.dirs() == []


def test_listing_and_deleting_more_than_a_page(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "page_keys", 50)
    expected = [f"many/{i:04d}" for i in range(105)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: storage.write(name, b""), expected))
    assert names(storage) == expected
    storage.delete_tree("many")
    assert storage.list() == []


def test_links_are_neither_listed_nor_followed(tmp_path: Path) -> None:
    """Whoever can write to a shared folder can make them; the folder itself may be one."""
    outside, top = tmp_path / "outside", tmp_path / "top"
    (outside / "tokens").mkdir(parents=True)
    (outside / "tokens" / "thesis").write_text("precious")
    (tmp_path / "disk" / "run").mkdir(parents=True)
    top.symlink_to(tmp_path / "disk")
    storage = open_storage(str(top))
    storage.write("run/a", b"")
    (top / "run" / "folder").symlink_to(outside)
    (top / "run" / "file").symlink_to(outside / "tokens" / "thesis")
    (top / "run" / "loop").symlink_to(top / "run")
    (top / "linked").symlink_to(outside)
    assert names(storage) == ["run/a"] and storage.dirs() == ["run"]
    assert storage.strays() == ["linked", "run/file", "run/folder", "run/loop"]
    for prefix in ("linked", "linked/tokens", "run/folder/tokens"):
        assert storage.list(prefix) == [] and storage.dirs(prefix) == []
        for delete in (storage.delete_tree, lambda name: storage.delete(f"{name}/thesis")):
            with pytest.raises(StorageError, match="a symbolic link"):
                delete(prefix)
    storage.delete_tree("run")  # with the links, and nothing behind them
    storage.delete("linked")
    assert os.listdir(top) == [] and (outside / "tokens" / "thesis").read_text() == "precious"


def test_a_folder_that_becomes_a_link_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, open_folder = tmp_path / "outside", os.open
    outside.mkdir()
    (outside / "thesis").write_text("precious")
    storage = open_storage(str(tmp_path / "runs"))
    storage.write("run/deep/a", b"")

    def swap_first(name: str, flags: int, mode: int = 0o777, dir_fd: int | None = None) -> int:
        if name == "deep" and (tmp_path / "runs/run/deep/a").exists():
            (tmp_path / "runs/run/deep").rename(tmp_path / "moved")
            (tmp_path / "runs/run/deep").symlink_to(outside)
        return open_folder(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap_first)
    with pytest.raises(StorageError, match="a symbolic link"):
        storage.delete_tree("run")
    assert (outside / "thesis").exists() and (tmp_path / "moved" / "a").exists()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        (tmp_path / "endless").symlink_to("/dev/zero")
        for name in ("pipe", "socket", "endless"):
            with pytest.raises(StorageError, match=name):
                storage.read(name)
            with pytest.raises(StorageError, match="it is no file"):
                storage.create(name, b"")
            assert storage.stat(name) is None and not storage.exists(name)
        assert names(storage) == [] and storage.strays() == ["endless", "pipe", "socket"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="it is no file, but a folder"):
        storage.create("folder", b"")


def test_names_that_are_not_valid_are_not_listed(storage: Storage) -> None:
    storage.write("a/b", b"")
    folder = storage.local_path()
    if folder is not None:
        for name in (".rayapp-x/a", "a/.rayapp-y/b"):
            Path(folder, name).parent.mkdir()
            Path(folder, name).write_bytes(b"")
    else:
        import boto3

        bucket, _, prefix = storage.url.removeprefix("s3://").partition("/")
        for name in (".rayapp-x/a", "a/.rayapp-y/b", "c//d", "../e", "f/"):
            boto3.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=b"")
    assert names(storage) == ["a/b"] and storage.dirs("a") == []
    assert storage / "a" in [storage / name for name in storage.dirs()]


@pytest.mark.parametrize("name", ["", "/a", "a//b", "a/", "../a", "a/./b", ".rayapp-x", "a\0"])
def test_ambiguous_names_are_refused(storage: Storage, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: storage.read(name),
        lambda: storage.write(name, b""),
        lambda: storage.create(name, b""),
        lambda: storage.stat(name),
        lambda: storage.delete(name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not valid"):
            call()


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("a/../runs/").url == open_storage("runs").local_path() == f"{tmp_path}/runs"
    assert open_storage("file:///tmp/a%20b").url == "/tmp/a b"
    assert open_storage("~/x").url == os.path.expanduser("~/x")
    assert open_storage("s3://b").url == open_storage("s3://b/").url == "s3://b"
    deep = open_storage("s3://b/p/q/")
    assert deep.url == "s3://b/p/q" and deep.local_path("x") is None
    assert open_storage("runs").local_path("a/b") == f"{tmp_path}/runs/a/b"
    for bad in ("", "gs://b/x", "s3:/b/x", "s3://", "s3:///x", "s3://b/../x", "file://host/x"):
        with pytest.raises(StorageError, match="cannot open"):
            open_storage(bad)
    for root in ("/", "s3://b"):
        with pytest.raises(StorageError, match="that is the whole"):
            open_storage(root).delete_tree("")


def test_pickling(storage: Storage) -> None:
    storage.write("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy == storage and hash(copy) == hash(storage) and copy.read("a") == b"1"
    error = StorageError("write", "s3://b/x", "the disk is full", "Free some space")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "cannot write s3://b/x: the disk is full. Free some space."
    assert isinstance(again, StorageError) and again.why == error.why
    error.errno = errno.ENOSPC
    assert pickle.loads(pickle.dumps(error)).errno == errno.ENOSPC


def test_import_is_light() -> None:
    code = "import sys, rayapp.storage; print({'boto3', 'torch', 'ray'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert run.stdout.strip() == b"set()"


# ------------------------------------------------------------------ all or nothing


def test_large_file_is_streamed_in_parts(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    with storage.open_write("big") as out:
        for start in range(0, len(LARGE), 999_999):
            assert out.tell() == start
            chunk = LARGE[start : start + 999_999]
            assert out.write(memoryview(chunk)) == len(chunk)
        out.flush()
        assert out.tell() == len(LARGE) and not storage.exists("big")
    assert storage.read("big") == LARGE
    assert storage.read("big", MIN_PART_BYTES - 3, 7) == LARGE[MIN_PART_BYTES - 3 :][:7]
    entry = storage.stat("big")
    assert entry is not None
    if storage.local_path() is None:
        assert entry.etag.endswith('-3"')  # S3 puts the number of parts there
    assert caplog.messages == []  # Ceph completes an upload without its ETag
    with pytest.raises(ValueError, match="closed"):
        out.write(b"late")


@settings(max_examples=20, deadline=None)
@given(written=st.integers(0, 5 * 2**40))
def test_parts_stay_within_limits(written: int) -> None:
    assert MIN_PART_BYTES <= part_bytes(written) <= 5 * 2**30
    total = parts = 0
    while total < written:
        total += part_bytes(total)
        parts += 1
    assert parts <= 10_000


@pytest.mark.parametrize("sent", [10, 20 * 2**20])
def test_a_failed_write_changes_nothing(storage: Storage, sent: int) -> None:
    storage.write("old", b"old content")
    for name in ("old", "new"):
        with pytest.raises(RuntimeError, match="stop"), storage.open_write(name) as out:
            out.write(b"x" * sent)
            raise RuntimeError("stop")
    assert names(storage) == ["old"] and storage.read("old") == b"old content"
    assert uploads_of(storage) == []
    folder = storage.local_path()
    assert folder is None or os.listdir(folder) == ["old"]


def uploads_of(storage: Storage) -> list[dict[str, str]]:
    import boto3

    if storage.local_path() is not None:
        return []
    answer = boto3.client("s3").list_multipart_uploads(Bucket=storage.url.split("/")[2])
    return list(answer.get("Uploads", []))


KILLED = """
import sys
from rayapp.storage import open_storage
with open_storage(sys.argv[1]).open_write("file") as out:
    for _ in range(3):
        out.write(b"n" * (8 << 20))
    print("writing", flush=True)
    sys.stdin.read()
"""

REWRITES = """
import sys
from rayapp.storage import open_storage
storage = open_storage(sys.argv[1])
for i in range(1 << 30):
    storage.write("file", bytes([65 + i % 26]) * (1 << 20))
    if i == 3:
        print("writing", flush=True)
"""


@pytest.mark.parametrize("program", [KILLED, REWRITES])
def test_a_killed_writer_leaves_all_or_nothing(storage: Storage, program: str) -> None:
    command = [sys.executable, "-c", program, storage.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdout.readline() == b"writing\n"
        time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
    if program == KILLED:
        assert storage.list() == [] and storage.dirs() == [] and not storage.exists("file")
        storage.write("file", b"next")
        assert names(storage) == ["file"]
    else:
        content = storage.read("file")
        assert content == content[:1] * (1 << 20) and names(storage) == ["file"]


def test_readers_never_see_a_half_written_file(storage: Storage) -> None:
    storage.write("file", b"0" * 100_000)
    stop = threading.Event()

    def rewrite() -> None:
        for i in range(1, 1000):
            storage.write("file", str(i % 10).encode() * 100_000)
            if stop.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(rewrite)
        for _ in range(50):
            content = storage.read("file")
            assert content == content[:1] * 100_000
        stop.set()
        writing.result()


# ------------------------------------------------------------------ decisions


def test_create_has_one_winner(storage: Storage) -> None:
    for turn in range(8):
        start = threading.Barrier(8)

        def claim(i: int, turn: int = turn, start: threading.Barrier = start) -> str | None:
            start.wait()
            return storage.create(f"claim-{turn}", str(i).encode())

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(claim, range(8)))
        (etag,) = filter(None, won)
        assert storage.read(f"claim-{turn}") == str(won.index(etag)).encode()
        entry = storage.stat(f"claim-{turn}")
        assert entry is not None and entry.etag == etag


def test_replace_if(storage: Storage) -> None:
    assert not storage.replace_if("lease", b"x", "any") and not storage.exists("lease")
    assert storage.create("lease", b"one") and not storage.create("lease", b"two")
    first = storage.stat("lease")
    assert first is not None
    second = storage.replace_if("lease", b"two", first.etag)
    entry = storage.stat("lease")
    assert entry is not None and entry.etag == second != first.etag
    assert not storage.replace_if("lease", b"three", first.etag)
    assert storage.read("lease") == b"two" and names(storage) == ["lease"]
    storage.delete("lease")
    assert not storage.replace_if("lease", b"four", first.etag) and storage.list() == []


def test_replace_if_counts_without_losing_any(storage: Storage) -> None:
    storage.write("count", b"0")

    def add_ten(_: int) -> None:
        done = 0
        while done < 10:
            entry = storage.stat("count")
            assert entry is not None
            value = int(storage.read("count"))
            added = storage.replace_if("count", str(value + 1).encode(), entry.etag)
            done += added is not None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add_ten, range(4)))
    assert storage.read("count") == b"40"


def test_delete_if(storage: Storage) -> None:
    assert not storage.delete_if("lease", "any")
    storage.write("lease", b"one")
    first = storage.stat("lease")
    assert first is not None
    storage.write("lease", b"two")
    second = storage.stat("lease")
    assert second is not None
    assert not storage.delete_if("lease", first.etag) and storage.read("lease") == b"two"
    assert storage.delete_if("lease", second.etag) and storage.list() == []
    assert not storage.delete_if("lease", second.etag)


# ------------------------------------------------------------------ a network that fails


@pytest.fixture
def faults(either_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    with Faults(os.environ["AWS_ENDPOINT_URL_S3"]).serving() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        monkeypatch.setattr(s3_client, "s3_attempts", 1)  # so that our own retry is what acts
        monkeypatch.setattr(s3_client, "first_pause_s", 0.02)
        yield proxy


@pytest.mark.parametrize("kind", ["slow", "reset", "cut", "lose"])
def test_faults_end_in_success_and_are_logged(
    faults: Faults, either_bucket: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(f"s3://{either_bucket}/p")
    actions: list[tuple[str, Callable[[], object]]] = [
        ("PUT", lambda: storage.write("a", b"content " * 1000)),
        ("GET", lambda: storage.read("a") == b"content " * 1000),
        ("HEAD", lambda: storage.exists("a")),
        ("GET", lambda: names(storage) == ["a"]),
        ("DELETE", lambda: storage.delete("a")),
        ("PUT", lambda: storage.create("b", b"1") is not None),
        ("POST", lambda: storage.delete_tree("")),
    ]
    busy_until = time.monotonic() + (1.1 if kind == "slow" else 0)
    while time.monotonic() < busy_until:  # adaptive mode slows an idle client down to 0.5 per s
        storage.exists("a")
    for method, act in actions:
        if kind == "cut" and method != "GET":
            continue
        if kind == "cut" and not storage.exists("a"):
            storage.write("a", b"content " * 1000)
        caplog.clear()
        faults.spoil(kind, method, 2)
        assert act() in (True, None), method
        assert faults.left == 0
        assert sum("; try " in line for line in caplog.messages) == 2, caplog.messages
    if kind != "cut":
        assert storage.list() == []


@pytest.mark.parametrize(
    "method, query, act",
    [
        ("PUT", "", lambda storage: storage.write("a", b"content " * 1000)),
        ("PUT", "", lambda storage: storage.create("new", b"1") is not None),
        ("PUT", "partNumber", lambda storage: storage.write("big", LARGE)),
        ("POST", "uploads", lambda storage: storage.write("big", LARGE)),
        ("POST", "uploadId=", lambda storage: storage.write("big", LARGE)),
        ("GET", "", lambda storage: storage.read("a") == b"content " * 1000),
        ("GET", "", lambda storage: storage.read("a", 7992) == b"content "),
        ("HEAD", "", lambda storage: storage.size("a") == 8000),
        ("GET", "", lambda storage: "a" in names(storage)),
    ],
)
def test_a_page_of_a_proxy_is_not_taken_for_an_answer_of_s3(
    faults: Faults, either_bucket: str, method: str, query: str, act: Callable[[Storage], object]
) -> None:
    storage = open_storage(f"s3://{either_bucket}/p")
    storage.write("a", b"content " * 1000)
    faults.spoil("page", method, 2, query)
    assert act(storage) in (True, None) and faults.left == 0
    for entry in storage.list():
        assert len(storage.read(entry.name)) == entry.size in (1, 8000, len(LARGE))


@pytest.mark.parametrize("kind", ["expired", "skewed"])
def test_credentials_and_clocks_that_come_right_are_waited_for(
    faults: Faults, either_bucket: str, kind: str
) -> None:
    storage = open_storage(f"s3://{either_bucket}/p")
    actions: list[tuple[tuple[str, ...], Callable[[], object]]] = [
        (("PUT",), lambda: storage.write("a", b"content")),
        (("GET",), lambda: storage.read("a") == b"content"),
        (("HEAD", "GET"), lambda: storage.exists("a")),  # the answer to HEAD has no reason
        (("DELETE",), lambda: storage.delete("a")),
    ]
    for methods, act in actions:
        faults.spoil(kind, methods, 4, "/p/a")  # not of the bucket, whose region botocore asks
        assert act() in (True, None) and faults.left == 0


def test_credentials_that_were_renewed_are_read(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from botocore.exceptions import ClientError

    def log_in(key: str) -> None:
        keys = f"aws_access_key_id={key}\naws_secret_access_key=testing\n"
        (tmp_path / "credentials").write_text(f"[default]\n{keys}")

    def request(client: Any) -> str:
        key = str(client._request_signer._credentials.access_key)
        if key == "old":
            log_in("new")
            raise ClientError({"Error": {"Code": "ExpiredToken"}}, "GetObject")
        return key

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    log_in("old")
    assert s3_client.send("read", f"s3://{s3_bucket}/a", request) == "new"


@pytest.mark.parametrize("kind", ["reset", "cut", "lose"])
def test_an_answer_that_there_is_no_such_file_may_be_spoilt(
    faults: Faults, either_bucket: str, kind: str
) -> None:
    """botocore reads the text of a refused download by itself, and lets urllib3's errors out."""
    storage = open_storage(f"s3://{either_bucket}/p")
    faults.spoil(kind, "GET", 2)
    with pytest.raises(FileNotFoundError):
        storage.read("a")
    assert faults.left == 0


@pytest.mark.parametrize("kind", ["reset", "lose"])
@pytest.mark.parametrize("method, query", [("PUT", "partNumber"), ("POST", "uploadId=")])
def test_faults_during_a_multipart_upload(
    faults: Faults, either_bucket: str, kind: str, method: str, query: str
) -> None:
    storage = open_storage(f"s3://{either_bucket}/p")
    faults.spoil(kind, method, 2, query)
    storage.write("big", LARGE)
    assert faults.left == 0 and storage.read("big") == LARGE and uploads_of(storage) == []


def test_an_upload_that_is_gone_is_not_repeated(either_bucket: str) -> None:
    """Someone else aborts it before its completion; Ceph and moto then answer with status 500."""
    import boto3

    storage = open_storage(f"s3://{either_bucket}/p")
    with pytest.raises(StorageError, match="aborted by"), storage.open_write("big") as out:
        out.write(LARGE[:MIN_PART_BYTES])
        while not all(sending.done() for sending in out._sending):  # type: ignore[attr-defined]
            time.sleep(0.01)
        (upload,) = uploads_of(storage)
        where = {name: upload[name] for name in ("Key", "UploadId")}
        boto3.client("s3").abort_multipart_upload(Bucket=either_bucket, **where)
        started = time.monotonic()
    assert time.monotonic() - started < 20 and storage.list() == []


def test_decisions_survive_a_lost_answer(faults: Faults, either_bucket: str) -> None:
    storage = open_storage(f"s3://{either_bucket}")
    faults.spoil("lose", "PUT", 1)
    assert storage.create("lease", b"mine")
    assert not storage.create("lease", b"other")
    entry = storage.stat("lease")
    assert entry is not None
    faults.spoil("lose", "PUT", 1)
    assert storage.replace_if("lease", b"renewed", entry.etag)
    assert not storage.replace_if("lease", b"other", entry.etag)
    assert storage.read("lease") == b"renewed"


def test_botocores_own_retries_are_logged(
    faults: Faults,
    either_bucket: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_client, "s3_attempts", 10)
    storage = open_storage(f"s3://{either_bucket}")
    faults.spoil("slow", "PUT", 1)
    storage.write("a", b"1")
    assert caplog.messages == ["PutObject attempt 1 failed: 503 SlowDown"]
    assert caplog.records[0].name == "rayapp.storage"


def test_giving_up_says_how_long(
    faults: Faults, either_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "retry_s", 0.5)
    storage = open_storage(f"s3://{either_bucket}/p")
    faults.spoil("reset", "PUT", 1000)
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"write s3://.*/p/a: .*gave up after \d tries"):
        storage.write("a", b"1")
    assert time.monotonic() - started < 5
    with pytest.raises(StorageError, match=r"endpoint cannot be reached.*gave up"):
        storage.write("big", LARGE)
    assert storage.list() == [] and uploads_of(storage) == []


def test_denied_is_not_retried(
    faults: Faults, either_bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(f"s3://{either_bucket}/p")
    for method, act in [
        ("PUT", lambda: storage.write("a", b"")),
        ("HEAD", lambda: storage.exists("a")),
        ("GET", lambda: storage.read("a")),
    ]:
        faults.spoil("denied", method, 1)
        with pytest.raises(StorageError, match=f"access denied. Allow s3:.* {either_bucket}"):
            act()
    assert caplog.messages == []


# ------------------------------------------------------------------ before the money is spent


def test_check_writable_leaves_nothing(storage: Storage) -> None:
    storage.check_writable()
    storage.check_writable()
    assert storage.list() == []
    folder = storage.local_path()
    assert folder is None or os.listdir(folder) == []


@pytest.mark.parametrize("endpoint", ["closed", "silent", "unknown"])
def test_check_writable_names_an_unreachable_endpoint(
    s3_server: str, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if endpoint == "silent":
            server.listen()
        host = "no-such-host.invalid" if endpoint == "unknown" else "127.0.0.1"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{server.getsockname()[1]}")
        assert s3_client.probe_timeout_s <= 3
        monkeypatch.setattr(s3_client, "probe_timeout_s", 0.5)
        started = time.monotonic()
        with pytest.raises(StorageError, match=r"endpoint cannot be reached.*AWS_ENDPOINT_URL_S3"):
            open_storage("s3://bucket/p").check_writable()
        assert time.monotonic() - started < 10  # two tries, each with up to 1 s for Expect: 100


def test_check_writable_names_bucket_permission_and_credentials(
    faults: Faults, either_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent = "the bucket no-such-bucket does not exist. Create it with `aws s3 mb"
    with pytest.raises(StorageError, match=absent):
        open_storage("s3://no-such-bucket/x").check_writable()
    with pytest.raises(StorageError, match="the bucket no-such-bucket does not exist"):
        open_storage("s3://no-such-bucket/x").list()
    for method in ("HEAD", "PUT", "GET", "DELETE"):
        faults.spoil("denied", method, 1)
        with pytest.raises(StorageError, match=r"access denied\. Allow s3:ListBucket"):
            open_storage(f"s3://{either_bucket}/x").check_writable()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "nonsense")
    with pytest.raises(StorageError, match="Invalid endpoint: nonsense"):
        open_storage(f"s3://{either_bucket}/x").check_writable()
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match=r"no AWS credentials were found\. Set AWS_PROFILE"):
        open_storage(f"s3://{either_bucket}/x").check_writable()


@pytest.mark.parametrize("either_bucket", ["moto"], indirect=True)  # it judges no signatures
@pytest.mark.parametrize(
    "forwarded, why",
    [
        (1, "If-None-Match: it wrote over an object that exists"),
        (3, "If-Match: it took an ETag that an object has no more"),
    ],
)
def test_check_writable_refuses_a_store_on_which_two_could_own_a_run(
    faults: Faults, either_bucket: str, forwarded: int, why: str
) -> None:
    faults.spoil("blind", "PUT", 1, skip=forwarded)
    with pytest.raises(StorageError, match=rf"the store does not hold to {why}.*\. Use a bucket"):
        open_storage(f"s3://{either_bucket}/x").check_writable()
    assert open_storage(f"s3://{either_bucket}").list() == []


@pytest.mark.full
def test_check_writable_refuses_a_versioned_bucket_on_ceph(ceph_bucket: str) -> None:
    import boto3

    open_storage(f"s3://{ceph_bucket}/x").check_writable()
    enabled = {"Status": "Enabled"}
    boto3.client("s3").put_bucket_versioning(Bucket=ceph_bucket, VersioningConfiguration=enabled)
    with pytest.raises(StorageError, match=r"does not hold to If-.*a bucket without versioning"):
        open_storage(f"s3://{ceph_bucket}/x").check_writable()


def test_check_writable_names_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, why in [
        (f"{tmp_path}/file", "a file stands where a folder is needed"),
        (f"{tmp_path}/file/below", "a file stands where a folder is needed"),
        ("/proc/no-such-folder/x", "does not exist and cannot be created"),
    ]:
        for act in (
            lambda storage: storage.check_writable(),
            lambda storage: storage.write("a", b""),
        ):
            with pytest.raises(StorageError, match=f"cannot write {path}.*{why}"):
                act(open_storage(path))


@pytest.mark.parametrize(
    "call, error, why",
    [
        ("os.link", errno.EPERM, "is without hard links (Operation not permitted)"),
        ("os.link", None, "does not hold to hard links, so two drivers could own one run"),
        ("fcntl.flock", errno.ENOSYS, "is without flock (Function not implemented)"),
        ("fcntl.flock", None, "does not hold to flock, so two drivers could own one run"),
        ("os.replace", errno.ENOSYS, "is without atomic renaming (Function not implemented)"),
        ("local._sync_folder", errno.EINVAL, "is without fsync of folders (Invalid argument)"),
    ],
)
def test_check_writable_refuses_a_file_system_that_cannot_hold_its_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int | None, why: str
) -> None:
    """As FUSE does for buckets, Lustre without -o flock, and file systems that lie."""

    def refused(*_: object) -> None:
        if error is not None:
            raise OSError(error, os.strerror(error))

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(f"rayapp.storage.local.{call.removeprefix('local.')}", refused)
    said = re.escape(f"cannot write {tmp_path}/runs: its file system {why}. Choose a folder on")
    with pytest.raises(StorageError, match=said):
        open_storage(f"{tmp_path}/runs").check_writable()
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.parametrize(
    "mode, folders, lock",
    [
        (0o2770, 0o2775, 0o664),  # umask leaves others what the parent denies to all
        (0o777, 0o777, 0o666),
        (0o755, 0o755, 0o644),
        (0o1777, 0o755, 0o644),
    ],
)
def test_a_shared_folder_stays_shared(tmp_path: Path, mode: int, folders: int, lock: int) -> None:
    """Under the usual umask; a group that may write to the parent may write below it too."""
    shared = tmp_path / "shared"
    shared.mkdir()
    if os.geteuid() == 0:
        os.chown(shared, -1, 65533)
    shared.chmod(mode)
    before = os.umask(0o022)
    try:
        run = open_storage(str(shared)) / "run"
        run.write("a/LEASE", b"1")
        entry = run.stat("a/LEASE")
        assert entry is not None and run.replace_if("a/LEASE", b"2", entry.etag)
    finally:
        os.umask(before)
    for folder in (shared / "run", shared / "run" / "a"):
        assert oct(folder.stat().st_mode & 0o7777) == oct(folders)
        if mode & 0o020 and not mode & 0o1000:
            assert folder.stat().st_gid == shared.stat().st_gid
    made = shared / "run" / "a" / f"{base.HIDDEN}LEASE.lock"
    assert oct(made.stat().st_mode & 0o7777) == oct(lock)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Use /dev/full, the one device that is always full, as the temporary file."""
    out = local._LocalWriter.__new__(local._LocalWriter)
    super(type(out), out).__init__("/dev/full", "wb")
    out._path = "/runs/a"
    full = r"cannot write /runs/a: the disk is full\. Free"
    with out, pytest.raises(StorageError, match=full) as raised:
        out.write(b"x")
    assert raised.value.errno == errno.ENOSPC
