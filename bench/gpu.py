"""Measure and check this product on the GPUs of one machine in ten minutes: no Ray, no network.

    python bench/gpu.py --out FOLDER --budget_s 520
    python bench/gpu.py --device cpu --out FOLDER      # the same rows in small
    python bench/gpu.py --missing                      # rows that no card has measured

Rows come in the order of their value (gpu_rows.py), one process a GPU; a row is skipped when less
of the budget is left than it needs. Data and weights are drawn on the device. Each row is a line at
once, and a record of one JSON file, which is whole after every row: commit, versions, card, and for
each row tokens/s, MFU, wall, device and idle milliseconds of a step, peaks, and the plan's figures.
bench/gpu/ keeps the file of each card and date; bench/gpu_tables.py makes docs/numbers.md's tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_rows import ROWS, Row

HERE = Path(__file__).parent
KEPT = HERE / "gpu"
WORKER = HERE / "gpu_worker.py"
MEASURED = {"tokens_per_s", "images_per_s", "passed"}  # what the record of a row that ran has
PACKAGES = ("torch", "transformers", "triton", "torchao", "bitsandbytes", "flash-attn", "ray")
START_S = 60.0  # a worker's imports and its first use of the device, on a machine never used
LAST_S = 3.0  # to end what runs, and to write the file
# Or resident memory would have no peak of a row or a phase: glibc keeps freed tensors.
FREED_GOES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**16)}
PATIENCE = {"cuda": 3, "cpu": 12}  # times what a row needs, until it is given up


def main(argv: list[str] | None = None) -> int:
    options = parsed(argv)
    if options.missing:
        print("\n".join(missing()))
        return 0
    deadline = time.time() + options.budget_s
    rows = [row for row in ROWS if re.search(options.only, row.name)]
    report: dict[str, Any] = facts(options) | {"rows": {}}
    path = Path(options.out) / file_name(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    left = list(rows)
    while left and time.time() < deadline - LAST_S:
        left = left[run_group(options, left, deadline, report, path) :]
    for row in left:
        keep(report, path, row, {"skipped": "the budget was spent"})
    print(path)
    failed = [name for name, found in report["rows"].items() if "failed" in found]
    return 1 if failed else 0


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="build/gpu", help="folder of the JSON file")
    parser.add_argument("--budget_s", type=float, default=520.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", default="", help="rows whose name this pattern finds")
    parser.add_argument("--missing", action="store_true", help="print what no card has measured")
    return parser.parse_args(argv)


def missing() -> list[str]:
    """Return the names of rows that no kept file of a card has a figure or an answer for."""
    seen = set[str]()
    for path in KEPT.glob("*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        seen |= {name for name, found in rows.items() if found.keys() & MEASURED}
    return [row.name for row in ROWS if row.name not in seen]


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures hold for: commit, versions, card, driver and host."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    card, driver, gpus = "CPU", None, 1
    if options.device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        lines = subprocess.check_output(asked, text=True).splitlines()
        card, driver = (part.strip() for part in lines[0].split(","))
        gpus = len(lines)
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git.stdout.strip() or None,
        "card": card,
        "gpus": gpus,
        "driver": driver,
        "python": platform.python_version(),
        "versions": versions,
        "budget_s": options.budget_s,
    }


def file_name(report: dict[str, Any]) -> str:
    """Return the name of the JSON file: card and date."""
    card = "-".join(report["card"].lower().replace("nvidia", "").split())
    return f"{card}-{report['date']}.json"


def run_group(
    options: argparse.Namespace,
    rows: list[Row],
    deadline: float,
    report: dict[str, Any],
    path: Path,
) -> int:
    """Run rows in one group of processes, one a GPU; return how many rows have their record.

    A group that dies, or a row that takes much longer than it needs, ends the group: that row has
    failed, and the caller starts another group for the rows after it.
    """
    processes = start_group(options, rows, deadline, report["gpus"])
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(processes[0], lines), daemon=True).start()
    done = 0
    try:
        for row in rows:
            patience = PATIENCE[options.device] * row.needs_s + (START_S if not done else 0.0)
            until = min(time.time() + patience, deadline - LAST_S)
            found = _next(lines, until)
            if found is None and time.time() >= deadline - LAST_S:
                return done
            if found is None:
                why = "it took too long"
                if time.time() < until:  # it has closed its output
                    why = f"its process ended with {processes[0].wait()}"
                keep(report, path, row, {"failed": why})
                return done + 1
            keep(report, path, row, found)
            done += 1
        return done
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start_group(
    options: argparse.Namespace, rows: list[Row], deadline: float, gpus: int
) -> list[subprocess.Popen[str]]:
    """Start one process a GPU, each in a session of its own; rank 0 prints the records."""
    command = [sys.executable, str(WORKER), "--device", options.device]
    command += ["--deadline", str(deadline - LAST_S)]
    command += ["--names", json.dumps([row.name for row in rows])]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(gpus),
        "LOCAL_WORLD_SIZE": str(gpus),
    }
    if options.device == "cpu":
        common |= FREED_GOES_BACK
    return [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(gpus)
    ]


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Queue the records that a group prints, and None at the end of its output."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("RECORD "):
            lines.put(line.removeprefix("RECORD "))
    lines.put(None)


def _next(lines: queue.Queue[str | None], until: float) -> dict[str, Any] | None:
    try:
        line = lines.get(timeout=max(0.0, until - time.time()))
    except queue.Empty:
        return None
    return None if line is None else json.loads(line)


def keep(report: dict[str, Any], path: Path, row: Row, found: dict[str, Any]) -> None:
    """Print a row's line, and write the file anew."""
    if row.published is not None:
        found = found | {"published": row.published._asdict()}
    report["rows"][row.name] = found
    print(f"{row.name:52} {line_of(found)}", flush=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def line_of(found: dict[str, Any]) -> str:
    """Return a record as text.

    >>> line_of({"skipped": "the budget was spent"})
    'skipped: the budget was spent'
    >>> line_of({"passed": True, "detail": "2 reads"})
    'pass: 2 reads'
    """
    for word in ("skipped", "failed"):
        if word in found:
            return f"{word}: {found[word]}"
    if "passed" in found:
        return f"{'pass' if found['passed'] else 'FAIL'}: {found['detail']}"
    unit = "images" if "images_per_s" in found else "tokens"
    parts = [f"{found[f'{unit}_per_s']:10,.0f} {unit}/s", f"{found['wall_ms']:8.1f} ms"]
    if found.get("mfu") is not None:
        parts.append(f"MFU {found['mfu']:.1%}")
    if "device_ms" in found:
        idle = ", ".join(f"{name} {ms:.1f}" for name, ms in found["idle_ms"].items())
        parts.append(f"device {found['device_ms']:.1f} ms, idle {idle or 'none'}")
    if found.get("peak_gib") is not None:
        parts.append(f"peak {found['peak_gib']:.2f} GiB")
    plan = found.get("plan")
    if plan is not None:
        rate = plan["tokens_per_s"]
        told = "" if rate is None else f"{rate:,.0f} tokens/s, "
        parts.append(f"plan {told}{plan['peak_gib']:.2f} GiB")
    if "published" in found:
        parts.append(f"{found['published']['system']} {found['published']['tokens_per_s']:,.0f}")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
