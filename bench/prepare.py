"""Prepare a large corpus through the real path; wall time, tokens/s, and peak memory.

    python bench/prepare.py [--gib 0.25 2]

For each size a corpus of JSONL is made (8 files, documents of about 30 to 30,000 tokens) in a
temporary folder, which needs 5 times that size, and prepared by a fresh process: Ray is started as
`python -m rayapp.finetune` does it, then `prepare.prepare` runs. That memory is bounded shows in
the peaks of a small and a large corpus. Peaks of the driver and of the largest Ray worker are the
kernel's own (VmHWM); the sum over all processes of that Ray is sampled, shared pages counted once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rayapp.driver.ray_session import ENVIRONMENT

ROOT = Path(__file__).parent.parent
SEQ_LEN = 2048
FILES = 8
SAMPLE_S = 0.5


class Memory(threading.Thread):
    """Follow the memory of this process and its descendants, in MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.driver, self.worker, self.total, self.workers = 0.0, 0.0, 0.0, 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            self.sample()

    def sample(self) -> None:
        """Look at every process once."""
        family = descendants(os.getpid())
        self.driver = peak(os.getpid())
        workers = [pid for pid in family if is_worker(pid)]
        self.worker = max([self.worker, *map(peak, workers)])
        self.workers = max(self.workers, len(workers))
        self.total = max(self.total, sum(field(pid, "smaps_rollup", "Pss:") for pid in family))


def descendants(root: int) -> list[int]:
    """Return a process and all that it and its children have started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = int(field(int(entry.name), "status", "PPid:") * 1024)
            children.setdefault(parent, []).append(int(entry.name))
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return family


def field(pid: int, file: str, name: str) -> float:
    """Return a number of kB in a file of /proc, in MiB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), 0.0)


def peak(pid: int) -> float:
    return field(pid, "status", "VmHWM:")


def is_worker(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def make_corpus(folder: Path, num_bytes: int) -> None:
    """Write files of documents whose least lengths grow from file to file, and a tokenizer."""
    import corpus
    import numpy as np

    rng = np.random.default_rng(0)
    pool = corpus.text_pool(rng)
    corpus.save_tokenizer(folder / "tokenizer", pool, 16_384)
    (folder / "data").mkdir()
    for number in range(FILES):
        texts = corpus.documents(rng, pool, 100 * 2**number, 120_000)
        corpus.write(folder / "data" / f"{number}.jsonl", texts, num_bytes // FILES)


def prepare_corpus(folder: str) -> dict[str, float]:
    """Start Ray, prepare the corpus in the folder, and return what it took."""
    import corpus

    import rayapp
    from rayapp.data import preparation as prepare
    from rayapp.driver.ray_session import connected
    from rayapp.storage import open_storage

    memory = Memory()
    memory.start()
    calls = []
    with connected(rayapp.load("configs/tiny_cpu.yaml"), "local"):
        start = time.perf_counter()
        recipe = corpus.recipe(f"{folder}/data", "text", f"{folder}/tokenizer", SEQ_LEN, 0.05)
        prepared = prepare.prepare(
            recipe, open_storage(f"{folder}/rows"), progress=lambda *done: calls.append(done)
        )
        seconds = time.perf_counter() - start
        memory.sample()
    memory.ended.set()
    assert calls and calls[-1][0] == calls[-1][1] == recipe.source.num_bytes, calls[-1:]
    return {
        "seconds": seconds,
        "tokens": sum(counts["tokens"] for counts in prepared.counts.values()),
        "documents": prepared.records,
        "fill": prepared.report()["fill"],
        "driver": memory.driver,
        "worker": memory.worker,
        "workers": memory.workers,
        "total": memory.total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[0.25, 2.0])
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        print(json.dumps(prepare_corpus(options.prepare)))
        return
    for size in options.gib:
        with tempfile.TemporaryDirectory() as folder:
            make_corpus(Path(folder), int(size * 2**30))
            done = subprocess.run(
                [sys.executable, __file__, "--prepare", folder],
                cwd=ROOT,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        print(
            f"{size:g} GiB: {found['documents']:,} documents, {found['tokens']:,} tokens in "
            f"{found['seconds']:.0f} s ({found['tokens'] / found['seconds']:,.0f} tokens/s), rows "
            f"{found['fill']:.1%} full; peak MiB: driver {found['driver']:.0f}, largest of "
            f"{found['workers']} Ray workers {found['worker']:.0f}, all processes together "
            f"{found['total']:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
