"""Read files as raw records in Ray's workers: by pieces, as rayapp does, and by Ray Data's readers.

    python bench/readers.py [--mib 128]

The same corpus lies in 8 files, and in one, as JSONL, Parquet and plain text. Both sides read it
with Ray Data on 2 CPUs, each in a fresh process and a fresh Ray, and count records and their bytes
in the workers. CPU seconds are of all of that Ray's processes, its start left out. Then one line
of the JSONL is broken, and both read it again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prepare import Memory, descendants

from rayapp.driver.ray_session import ENVIRONMENT

ROOT = Path(__file__).parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
FORMATS = ("jsonl", "parquet", "txt")
FILES = 8
ROW_GROUP = 1000  # documents
Counts = tuple[int, int]
"""Records, and characters of their texts."""


def make(folder: Path, num_bytes: int) -> None:
    """Write the corpus in each format, in one file and in FILES, and once with a broken line."""
    import corpus
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    drawn = corpus.documents(rng, corpus.text_pool(rng), 400, 120_000)
    texts, size = [], 0
    while size < num_bytes:
        texts.append(next(drawn).replace("\n", " "))
        size += len(texts[-1])
    for name, parts in (("one", 1), ("many", FILES)):
        for number in range(parts):
            mine = texts[number::parts]
            lines = [json.dumps({"text": text}) for text in mine]
            for form, body in (("jsonl", lines), ("txt", mine)):
                path = folder / form / name / f"{number}.{form}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("\n".join(body) + "\n")
            path = folder / "parquet" / name / f"{number}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.table({"text": mine}), path, row_group_size=ROW_GROUP)
    broken = folder / "jsonl" / "broken" / "0.jsonl"
    broken.parent.mkdir()
    broken.write_text("\n".join([*lines[:100], lines[100][:-3], *lines[101:]]) + "\n")


def by_pieces(path: str) -> Counts:
    """Read with a task for each unit, as a preparation does."""
    import ray.data

    from rayapp.data import sources

    source = sources.find(path)

    def count(row: dict[str, Any]) -> dict[str, int]:
        records = characters = 0
        for piece in units[row["item"]].pieces:
            for record in sources.read_piece(source, piece):
                text = record.value["text"] if isinstance(record.value, dict) else record.value
                records += record.problem is None
                characters += 0 if record.problem else len(text)
        return {"records": records, "characters": characters}

    units = sources.units(source, 0.0)
    numbers = ray.data.from_items(list(range(len(units))), override_num_blocks=len(units))
    return _sums(numbers.map(count))


def by_ray(path: str) -> Counts:
    """Read with Ray Data's own reader of the format."""
    import numpy as np
    import pyarrow.compute as pc
    import ray.data

    form = Path(path).parent.name
    if form == "jsonl":
        dataset = ray.data.read_json(path, lines=True)
    elif form == "parquet":
        dataset = ray.data.read_parquet(path)
    else:
        dataset = ray.data.read_text(path)

    def count(table: Any) -> dict[str, Any]:
        characters = pc.sum(pc.utf8_length(table["text"])).as_py() or 0
        return {"records": np.array([len(table)]), "characters": np.array([characters])}

    return _sums(dataset.map_batches(count, batch_format="pyarrow"))


def _sums(dataset: Any) -> Counts:
    rows = list(dataset.iter_rows())
    return sum(row["records"] for row in rows), sum(row["characters"] for row in rows)


SIDES = {"pieces": by_pieces, "Ray Data": by_ray}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, ended children included."""
    total = 0
    for pid in descendants(os.getpid()):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        total += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return total / TICKS


def measure(side: str, path: str) -> dict[str, Any]:
    """Start Ray, read, and return what it took."""
    import ray

    memory = Memory()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.get(ray.remote(lambda: None).remote())
    memory.start()
    began, before = time.perf_counter(), cpu_seconds()
    try:
        records, characters = SIDES[side](path)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    seconds, cpu_s = time.perf_counter() - began, cpu_seconds() - before
    memory.ended.set()
    memory.sample()
    return {
        "records": int(records),
        "characters": int(characters),
        "seconds": seconds,
        "cpu_s": cpu_s,
        "worker_mib": memory.worker,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    with tempfile.TemporaryDirectory() as root:
        make(Path(root), options.mib * 2**20)
        print(f"{'':26}{'records':>9}{'seconds':>9}{'CPU s':>8}{'worker MiB':>12}")
        cases = [f"{form}/{name}" for form in FORMATS for name in ("many", "one")]
        for case in [*cases, "jsonl/broken"]:
            for side in SIDES:
                command = [sys.executable, __file__, "--measure", side, f"{root}/{case}"]
                environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    sys.exit(done.stderr)
                found = json.loads(done.stdout.splitlines()[-1])
                said = found.get("error", "")[:90] or (
                    f"{found['records']:9,}{found['seconds']:9.1f}{found['cpu_s']:8.1f}"
                    f"{found['worker_mib']:12.0f}"
                )
                print(f"{case:16}{side:10}{said}", flush=True)


if __name__ == "__main__":
    main()
