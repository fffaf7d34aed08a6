"""Steady tokens/s of `python -m rayapp.finetune` over a bare FSDP2 loop's, and the cold start.

    python bench/loop.py [--rounds 3] [--steps 100]

The two run in turn, same model, rows, precision and 2 workers of one core each; the ratio is taken
round by round, so that it holds when the machine's speed drifts. rayapp sets glibc's allocator for
its workers; the bare loop runs both without that and with it, and rayapp's loop also under torchrun
without Ray, whose own processes share the two cores: each ratio shows one thing.
Cold start is from the command to the end of the first step, with where the time goes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from loop_alone import steady_rate

from rayapp.driver.ray_workers import CPU_ENVIRONMENT

ROOT = Path(__file__).parent.parent


def ours(storage: str, name: str, steps: int) -> tuple[float, dict[str, float]]:
    """Run the default job; return (steady tokens/s, seconds of the cold start by phase)."""
    command = [sys.executable, "-m", "rayapp.finetune", "configs/tiny_cpu.yaml"]
    command += [f"--run.storage={storage}", f"--run.name={name}", f"--train.max_steps={steps}"]
    command += ["--checkpoint.every_s=none", "--eval.prompts="]
    run = Path(storage, name)
    subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return steady_rate(run), json.loads((run / "result.json").read_text())["start_s"]


def torchrun(script: str, run: str, steps: int, settings: dict[str, str]) -> float:
    """Run a script of this folder on the rows of that run; return steady tokens/s."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [f"bench/{script}", run, str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **settings}
    done = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment
    )
    return json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as storage:
        ratios: dict[str, list[float]] = {}
        starts = []
        for number in range(1, options.rounds + 1):
            run = f"{storage}/bench-{number}"
            rate, start = ours(storage, f"bench-{number}", options.steps)
            starts.append(start)
            bare = torchrun("bare_loop.py", run, options.steps, {})
            tuned = torchrun("bare_loop.py", run, options.steps, CPU_ENVIRONMENT)
            alone = torchrun("loop_alone.py", run, options.steps, CPU_ENVIRONMENT)
            print(
                f"round {number}: tokens/s of rayapp {rate:,.0f}, its loop alone {alone:,.0f}, "
                f"bare loop {bare:,.0f}, bare loop with rayapp's settings of glibc {tuned:,.0f}",
                flush=True,
            )
            for label, value in (
                ("rayapp / bare loop", rate / bare),
                ("loop without Ray / bare loop, both with the settings of glibc", alone / tuned),
                ("rayapp / bare loop with the settings of glibc", rate / tuned),
            ):
                ratios.setdefault(label, []).append(value)
    for label, found in ratios.items():
        print(f"{label}: median {statistics.median(found):.3f} of {options.rounds} rounds")
    for label, phases in (("first run (prepares the data)", starts[0]), ("later runs", starts[-1])):
        parts = ", ".join(f"{name} {value:.1f}" for name, value in phases.items())
        print(
            f"cold start, {label}: {sum(phases.values()):.1f} s to the end of the first step "
            f"({parts})"
        )


if __name__ == "__main__":
    main()
