"""Time from a command to its first step: rows all at once, by windows meanwhile, or before.

    python bench/windows.py [--mb=256] [--window_mib=64] [--steps=30]

JSONL of made-up documents in 8 files, a BPE tokenizer of 8,000 tokens and a small Llama. Each run
has a storage of its own, so nothing is found prepared but by the last, after `rayapp prepare`.
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
from typing import NamedTuple

import corpus
import numpy as np

FILES = 8
RUN = [
    "--data.seq_len=512",
    "--data.eval_fraction=0",
    "--train.tokens_per_step=8192",
    "--train.micro_batch=8",
    "--train.warmup_steps=0",
    "--checkpoint.every_s=none",
    "--checkpoint.export=false",
    "--cluster.workers=2",
]


class Timing(NamedTuple):
    """When a command's first step and its end came, in seconds, and the digests of its steps."""

    first_step: float
    end: float
    digests: list[str]


def main() -> None:
    """Print a line per run, and whether both runs with windows took the same rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=256, help="of text")
    parser.add_argument("--window_mib", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = write_inputs(folder, asked.mb, asked.steps)
        windows = f"--data.window_bytes={asked.window_mib * 2**20}"
        finetune, prepare = ["rayapp.finetune"], ["rayapp", "prepare"]
        report("all at once", timed(folder / "all", finetune, config))
        meanwhile = timed(folder / "meanwhile", finetune, config, windows)
        report("windows, meanwhile", meanwhile)
        prepared = timed(folder / "before", prepare, config, windows)
        print(f"`rayapp prepare`: {prepared.end:.0f} s", flush=True)
        before = timed(folder / "before", finetune, config, windows)
        report("windows, before", before)
        print(f"digests of {asked.steps} steps equal: {meanwhile.digests == before.digests}")


def write_inputs(folder: Path, megabytes: int, steps: int) -> list[str]:
    """Write data, tokenizer and model; return the arguments that name them."""
    rng = np.random.default_rng(0)
    pool = corpus.text_pool(rng)
    model, data = folder / "model", folder / "data"
    corpus.save_tokenizer(model, pool, 8_000)
    corpus.save_model(model)
    data.mkdir()
    for number in range(FILES):
        texts = corpus.documents(rng, pool, 500, 100_000)
        corpus.write(data / f"{number}.jsonl", texts, megabytes * 10**6 // FILES)
    return [f"--model.path={model}", f"--data.path={data}", f"--train.max_steps={steps}", *RUN]


def timed(storage: Path, program: list[str], config: list[str], *more: str) -> Timing:
    """Run a command with a storage. One that prepares has no steps: its first is its end."""
    command = [sys.executable, "-m", *program, *config, *more]
    command += [f"--run.storage={storage}", "--run.name=run"]
    log, began = storage.with_suffix(".log"), time.time()
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with log.open("a") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=output).returncode
    end = time.time() - began
    if code:
        sys.exit(f"{' '.join(command)}\n{log.read_text()[-3000:]}")
    lines = storage / "run" / "metrics.jsonl"
    steps = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    first = steps[0]["time"] - began if steps else end
    return Timing(first, end, [step["batch_digest"] for step in steps])


def report(name: str, run: Timing) -> None:
    """Print a run's times."""
    print(
        f"{name}: first step after {run.first_step:.0f} s, the end after {run.end:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
