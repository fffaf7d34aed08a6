"""Show the longest silences in the log of a run on a slow machine.

    python bench/silence.py [--busy=1] [--nice=19] -- python -m rayapp.finetune \
        configs/tiny_cpu.yaml --run.storage=FOLDER

The command runs at nice 19, with --busy other processes on each core (if they are at nice 0 and
never wait, 1 % of a core is left for it; --nice=0 shares the cores evenly). Printed are the longest
gaps between two lines of its output, in seconds, with the line before and the line after each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time

SHOWN = 8
WIDTH = 70
ALLOWED_S = 15.0


def main() -> int:
    """Run the command and print its gaps; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--busy", type=int, default=1, help="other processes on each core")
    parser.add_argument("--nice", type=int, default=19, help="of the command")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(asked.busy * (os.cpu_count() or 1))
    ]
    try:
        lines, code = timed_lines(asked.command, asked.nice)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    gaps = [
        (after - before, told, said) for (before, told), (after, said) in itertools.pairwise(lines)
    ]
    print(f"{len(lines)} lines in {lines[-1][0] - lines[0][0]:.0f} s, exit code {code}")
    print(f"{sum(gap > ALLOWED_S for gap, _, _ in gaps)} gaps over {ALLOWED_S:.0f} s. The longest:")
    for gap, told, said in sorted(gaps, reverse=True)[:SHOWN]:
        print(f"{gap:6.1f} s  after  {told[:WIDTH]}\n          until  {said[:WIDTH]}")
    return code


def timed_lines(command: list[str], nice: int) -> tuple[list[tuple[float, str]], int]:
    """Run a command; return (seconds since its start, line) of its output, and its exit code.

    The first line is its start and the last is its end. Ctrl-C and SIGTERM end the command by
    SIGTERM.
    """
    began = time.monotonic()
    lines = [(0.0, "(start)")]
    process = subprocess.Popen(
        ["nice", "-n", str(nice), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )

    def take() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic() - began, line.rstrip("\n")))

    try:
        take()
    except KeyboardInterrupt:
        process.terminate()
        take()
    code = process.wait()
    return [*lines, (time.monotonic() - began, "(end)")], code


if __name__ == "__main__":
    sys.exit(main())
