"""What grows in a long run: memory of its processes, and files in its folder.

    python bench/soak.py [--steps 5000] [--every_s 5]

One command trains a tiny model with two workers on this machine, saves every 100 steps and
evaluates every 250. Memory is the resident pages that a process does not share, in MiB, as pages of
the object store are bounded by its size. Each figure is the median of the samples within 100 steps
of its column.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import fire
import psutil

from rayapp.observe import metrics
from rayapp.observe.run_folder import METRICS, REPORT, TENSORBOARD
from rayapp.storage import open_storage

SETTINGS = {
    "data.seq_len": 128,
    "data.eval_fraction": 0.02,
    "model.path": "tiny",
    "model.tokenizer": "bytes",
    "model.overrides": "{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128}",
    "train.tokens_per_step": 512,
    "train.micro_batch": 2,
    "train.lr": 1e-4,
    "train.precision": "fp32",
    "checkpoint.every_steps": 100,
    "checkpoint.every_s": "none",
    "checkpoint.export": "false",
    "eval.every_steps": 250,
    "cluster.workers": 2,
}
ROLES = {  # by a part of the command line
    "ray::SplitCoordinator": "SplitCoordinator",
    "TrainWorker": "a worker, the larger",
    "ray::TrainController": "Ray Train's controller",
    "gcs_server": "gcs_server",
    "raylet/raylet": "raylet",
    "dashboard": "dashboard and agents",
    "ray::": "other actors and tasks",
}
DRIVER = "driver"
FILES = {METRICS: METRICS, TENSORBOARD: TENSORBOARD, REPORT: REPORT, "": "the folder"}
NEAR = 100  # steps


def soak(steps: int = 5_000, every_s: float = 5.0) -> None:
    """Train so many steps, look every so many seconds, and print the table of growth."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(f"Line {i} says {i * i % 97}.\n" for i in range(20_000)))
        asked = {"run.storage": folder, "run.name": "soak", "data.path": text, **SETTINGS}
        asked["train.max_steps"] = steps
        command = [sys.executable, "-m", "rayapp.finetune"]
        command += [f"--{field}={value}" for field, value in asked.items()]
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": tempfile.mkdtemp(dir=folder)}
        log = Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env={**os.environ, **own}, stdout=output, stderr=subprocess.STDOUT
            )
        samples = watched(process, Path(folder, "soak"), every_s)
        if process.returncode:
            sys.exit(log.read_text())
        show(samples, [at for at in (500, 2_500, 5_000) if at < steps] + [steps])


def watched(
    process: subprocess.Popen[bytes], run: Path, every_s: float
) -> list[tuple[int, dict[str, float]]]:
    """Return (step, MiB or kB by name) of each look until the command ends."""
    storage, samples, began = open_storage(str(run)), [], time.monotonic()
    while process.poll() is None:
        line = metrics.last(storage) if run.exists() else None
        if line is not None:
            samples.append((line["step"], {**memory_of(process.pid), **sizes_of(run)}))
            told = " ".join(f"{k}={v:.1f}" for k, v in samples[-1][1].items())
            print(f"{time.monotonic() - began:.0f} s, step {line['step']}: {told}", flush=True)
        time.sleep(every_s)
    return samples


def memory_of(pid: int) -> dict[str, float]:
    """Return MiB of each role: of workers the largest, else the sum."""
    found: dict[str, list[float]] = defaultdict(list)
    driver = psutil.Process(pid)
    for process in [driver, *driver.children(recursive=True)]:
        try:
            title, memory = " ".join(process.cmdline()), process.memory_info()
        except psutil.NoSuchProcess:
            continue
        roles = [role for part, role in ROLES.items() if part in title]
        role = DRIVER if process.pid == pid else [*roles, "other"][0]
        found[role].append((memory.rss - memory.shared) / 2**20)
    largest = ROLES["TrainWorker"]
    return {role: max(each) if role == largest else sum(each) for role, each in found.items()}


def sizes_of(run: Path) -> dict[str, float]:
    """Return kB of files, and how many files there are."""
    sizes: Counter[str] = Counter()
    files = [path for path in run.rglob("*") if path.is_file()]
    for path in files:
        try:
            size = path.stat().st_size / 1e3
        except FileNotFoundError:
            continue
        for part in {path.relative_to(run).parts[0], ""} & FILES.keys():
            sizes[f"kB of {FILES[part]}"] += size
    return {**sizes, "files in the folder": len(files)}


def show(samples: list[tuple[int, dict[str, float]]], columns: list[int]) -> None:
    """Print each figure near the columns' steps, and its growth per 1,000 steps between them."""
    print("| | " + " | ".join(f"step {at:,}" for at in columns) + " | growth per 1,000 steps |")
    print("|---|" + "---|" * (len(columns) + 1))
    for name in dict.fromkeys(name for _, sample in samples for name in sample):
        values = [
            statistics.median(
                [sample[name] for step, sample in samples if name in sample and near(step, at)]
                or [float("nan")]
            )
            for at in columns
        ]
        spans = zip(columns[:-1], columns[1:], values[:-1], values[1:], strict=True)
        growth = [1_000 * (after - before) / (b - a) for a, b, before, after in spans]
        cells = [f"{value:.1f}" for value in values] + [
            ", ".join(f"{each:+.2f}" for each in growth)
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def near(step: int, at: int) -> bool:
    return at - NEAR <= step <= at + NEAR


if __name__ == "__main__":
    fire.Fire(soak)
