"""Read from S3: through s3fs, as runs read inputs, and with boto3, as they read their own files.

    python bench/inputs.py [--rounds 5]

The server is Ceph's gateway on this machine (Debian's radosgw, ceph-mon and ceph-osd). Both sides
run in turn in one process: 256 MiB of weights in ranges of 8 MiB on 8 threads; 1,000 ranges of
16 KiB on 8 threads; 1,000 files of 4,000 bytes on 16 threads; a listing of 2,000 files; 200 whole
files one after another. The least seconds of a round are printed, and CPU seconds of this process.
Then each side's first request in a fresh process, with what it imports.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ceph import KEYS, Ceph, missing

from rayapp.storage import Readable, open_storage
from rayapp.storage.inputs import open_input

MIB, URL, FILES = 2**20, "s3://inputs/folder", 2000
SIDES: dict[str, Callable[[str], Readable]] = {"s3fs": open_input, "boto3": open_storage}
FIRST = """
import resource
from rayapp.storage import open_storage
from rayapp.storage.inputs import open_input
before = resource.getrusage(resource.RUSAGE_SELF)
assert {opener}("s3://inputs/folder").size("weights")
after = resource.getrusage(resource.RUSAGE_SELF)
seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(f"{{seconds:.2f}} CPU s")
"""


def fill() -> None:
    import boto3

    boto3.client("s3").create_bucket(Bucket="inputs")
    storage = open_storage(URL)
    with storage.open_write("weights") as out:
        for _ in range(256):
            out.write(os.urandom(MIB))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: storage.write(name, b"x" * 4000), names(FILES)))


def names(count: int) -> list[str]:
    return [f"many/{number:05d}" for number in range(count)]


def tasks(folder: Readable, etag: str) -> dict[str, Callable[[], int]]:
    """Return what is timed; each returns the bytes or entries that it has read."""
    draw = random.Random(0)
    offsets = [draw.randrange(255 * MIB) for _ in range(1000)]

    def ranges(starts: list[int], length: int) -> int:
        with ThreadPoolExecutor(8) as pool:
            read = pool.map(lambda start: folder.read("weights", start, length, etag), starts)
            return sum(map(len, read))

    def small() -> int:
        with ThreadPoolExecutor(16) as pool:
            return sum(map(len, pool.map(lambda name: folder.read(name, 0, 4000), names(1000))))

    return {
        "256 MiB of weights": lambda: ranges(list(range(0, 256 * MIB, 8 * MIB)), 8 * MIB),
        "1,000 ranges of 16 KiB": lambda: ranges(offsets, 16 * 1024),
        "1,000 files of 4,000 bytes": small,
        "listing of 2,001 files": lambda: len(folder.list()),
        "200 whole files in turn": lambda: sum(len(folder.read(name)) for name in names(200)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if absent := missing():
        sys.exit(f"Ceph is not installed here: no {', '.join(absent)}")
    with Ceph() as server:
        os.environ |= {**KEYS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL_S3": server.url}
        fill()
        entry = open_storage(URL).stat("weights")
        assert entry is not None
        timed = {side: tasks(opened(URL), entry.etag) for side, opened in SIDES.items()}
        for task in timed["s3fs"]:
            taken: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
            for _ in range(rounds):
                for side in SIDES:
                    wall, cpu = time.perf_counter(), time.process_time()
                    timed[side][task]()
                    taken[side].append((time.perf_counter() - wall, time.process_time() - cpu))
            for side, pairs in taken.items():
                walls, cpus = zip(*pairs, strict=True)
                print(f"{task}; {side}: {min(walls):.2f} s, {min(cpus):.2f} CPU s", flush=True)
        for side, opened in SIDES.items():
            code = FIRST.format(opener=opened.__name__)
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            print(f"first request of a process; {side}: {run.stdout.strip() or run.stderr}")


if __name__ == "__main__":
    main()
