"""How long a plan takes as a user calls it, and how far it is off from what cards have measured.

    python bench/plan.py --rounds 7

Prints medians of the clock and of CPU seconds of the whole command, beside a Python that does
nothing; rounds take turns. Then the plan over the measurement, less 1, for each row of bench/gpu/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIG = str(Path(__file__).parent.parent / "configs" / "llama3_1_8b_c4_eks.yaml")
PLAN = ["-m", "rayapp", "plan", CONFIG]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "plan": PLAN,
    "plan --json": [*PLAN, "--json"],
    "plan --deadline_hours=24": [*PLAN, "--deadline_hours=24"],
}


def measure(arguments: list[str]) -> tuple[float, float]:
    """Run a command; return (seconds by the clock, CPU seconds)."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system
    return seconds, cpu - before.children_user - before.children_system


def errors() -> list[str]:
    """Return a line for each planned row that a card has measured."""
    lines = []
    for path in sorted((Path(__file__).parent / "gpu").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        for name, found in report["rows"].items():
            plan = {key: value for key, value in found.get("plan", {}).items() if key in found}
            off = {key: value / found[key] - 1 for key, value in plan.items() if value is not None}
            if off:
                told = "".join(f"{key} {error:+7.1%}  " for key, error in off.items())
                lines.append(f"{report['card']}, {report['date']}: {name:44} {told}".rstrip())
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found = {name: list[tuple[float, float]]() for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            found[name].append(measure(arguments))
    print(f"{'':28}{'seconds':>9}{'CPU':>9}")
    for name, runs in found.items():
        clock, cpu = (statistics.median(each) for each in zip(*runs, strict=True))
        print(f"{name:28}{clock:9.2f}{cpu:9.2f}")
    print("plan over measured, less 1", *errors(), sep="\n")


if __name__ == "__main__":
    main()
