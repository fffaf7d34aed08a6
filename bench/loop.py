"""Steady tokens/s of `python -m rayapp.finetune` over a bare FSDP2 loop's, and the cold start.

    python bench/loop.py [--pairs 3] [--steps 60]

The two run in turn, A B A B ..., same model, rows, precision and 2 workers of one core each; the
ratio is taken pair by pair, so that it holds when the machine's speed drifts. Cold start is from
the command to the end of the first step, with where the time goes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WARM_UP_STEPS = 10


def ours(storage: str, name: str, steps: int) -> tuple[float, dict[str, float]]:
    """Run the default job; return (steady tokens/s, seconds of the cold start by phase)."""
    command = [sys.executable, "-m", "rayapp.finetune", "configs/tiny_cpu.yaml"]
    command += [f"--run.storage={storage}", f"--run.name={name}", f"--train.max_steps={steps}"]
    command += ["--checkpoint.every_s=none", "--eval.prompts="]
    subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    run = Path(storage, name)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The last step saves a checkpoint, which the bare loop has not.
    steady = lines[WARM_UP_STEPS:-1]
    seconds = sum(line["step_s"] for line in steady)
    tokens = sum(
        line["tokens_per_s"] * (line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"])
        for line in steady
    )
    return tokens / seconds, json.loads((run / "result.json").read_text())["start_s"]


def bare(run: str, steps: int) -> float:
    """Run the bare loop on the rows of that run; return steady tokens/s."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["bench/bare_loop.py", run, str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment
    )
    return json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as storage:
        ratios, starts = [], []
        for pair in range(options.pairs):
            rate, start = ours(storage, f"bench-{pair}", options.steps)
            reference = bare(f"{storage}/bench-{pair}", options.steps)
            ratios.append(rate / reference)
            starts.append(start)
            print(
                f"pair {pair + 1}: rayapp {rate:,.0f} tokens/s, bare loop {reference:,.0f}, "
                f"ratio {ratios[-1]:.3f}",
                flush=True,
            )
    print(
        f"steady tokens/s over the bare loop: median "
        f"{statistics.median(ratios):.3f} of {options.pairs} pairs"
    )
    for label, phases in (("first run (prepares the data)", starts[0]), ("later runs", starts[-1])):
        parts = ", ".join(f"{name} {value:.1f}" for name, value in phases.items())
        print(
            f"cold start, {label}: {sum(phases.values()):.1f} s to the end of the first step "
            f"({parts})"
        )


if __name__ == "__main__":
    main()
