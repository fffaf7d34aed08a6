"""From the command to the first step: all rows at once, windows meanwhile, windows prepared before.

    python bench/windows.py [--mib 1024] [--window_mib 64] [--steps 20]

A corpus of JSONL is made, and each run begins with an empty storage folder. The runs of windows
must train the same batches, whenever their rows are prepared.
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

import corpus
import numpy as np

ROOT = Path(__file__).parent.parent
FILES = 8
FIELDS = {
    "run.name": "w",
    "run.trackers": "none",
    "data.seq_len": 1024,
    "data.eval_fraction": 0.001,
    "train.tokens_per_step": 4096,
    "train.micro_batch": 1,
    "eval.every_steps": "none",
    "eval.prompts": "[]",
    "checkpoint.every_s": "none",
    "model.from_scratch": "true",
    "cluster.workers": 2,
}


def rayapp(command: str, log: Path, fields: dict[str, object]) -> subprocess.Popen[bytes]:
    """Start a command of rayapp with these fields of a config."""
    given = [f"--{name}={value}" for name, value in fields.items()]
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "rayapp", command, "configs/tiny_cpu.yaml", *given],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )


def ended(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait():
        sys.exit(f"the command failed:\n{log.read_text()[-3000:]}")


def first_step(log: Path, fields: dict[str, object]) -> tuple[float, float, list[str]]:
    """Run to the end; return seconds to the first step and to the end, and the batches' digests."""
    metrics = Path(str(fields["run.storage"]), "w", "metrics.jsonl")
    began, first = time.monotonic(), 0.0
    process = rayapp("finetune", log, fields)
    while process.poll() is None:
        if not first and metrics.exists() and metrics.stat().st_size:
            first = time.monotonic() - began
        time.sleep(0.2)
    ended(process, log)
    lines = map(json.loads, metrics.read_text().splitlines())
    return first, time.monotonic() - began, [line["batch_digest"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--window_mib", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder, log = Path(root), Path(root, "log")
        rng = np.random.default_rng(0)
        pool = corpus.text_pool(rng)
        corpus.save_tokenizer(folder / "model", pool, 16_384)
        corpus.save_model(folder / "model")
        (folder / "data").mkdir()
        for number in range(FILES):
            texts = corpus.documents(rng, pool, 400, 120_000)
            corpus.write(folder / "data" / f"{number}.jsonl", texts, options.mib * 2**20 // FILES)
        fields = FIELDS | {"model.path": folder / "model", "data.path": folder / "data"}
        fields |= {"train.max_steps": options.steps}
        windows = {"data.window_bytes": options.window_mib * 2**20}
        digests = {}
        for name, more in (("all rows at once", {}), ("meanwhile", windows), ("before", windows)):
            mine = {**fields, **more, "run.storage": folder / name.replace(" ", "-")}
            if name == "before":
                began = time.monotonic()
                ended(rayapp("prepare", log, mine), log)
                print(f"{'rayapp prepare':18}{time.monotonic() - began:8.0f} s", flush=True)
            first, end, digests[name] = first_step(log, mine)
            print(f"{name:18}{first:8.0f} s to the first step, {end:.0f} to the end", flush=True)
        assert digests["meanwhile"] == digests["before"] and len(digests["before"]) == options.steps


if __name__ == "__main__":
    main()
