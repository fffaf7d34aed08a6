"""Record the first ten minutes: README's commands, in an empty clone; writes docs/first_minutes.md.

    python bench/transcript.py                 # clones HEAD into a temporary folder
    python bench/transcript.py --venv=FOLDER   # with an environment that is installed already

Each command's output is as it came through a pipe, so that there are lines in place of a bar.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first_minutes.md"
COMMANDS = (
    "make finetune",
    "rayapp list",
    'rayapp generate runs/reminders --prompt="Remind me to buy milk on 3 May 2027 at 9:30."',
    "rayapp init demo",
    "rayapp data demo.yaml",
    "rayapp plan demo.yaml",
    "rayapp finetune demo.yaml",
    "rayapp finetune demo.yaml --train.lrr=3",
    "rayapp status demo",
)
KEPT = 60  # lines of a command's output; of longer ones the middle is left out


def main(argv: list[str]) -> None:
    venv = next((word.removeprefix("--venv=") for word in argv if word.startswith("--venv=")), None)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "rayapp"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        if venv is not None:
            adopt(Path(venv).resolve(), clone / ".venv")
        environment = {
            **os.environ,
            "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}",
            "COLUMNS": "100",
            "PYTHONPATH": str(clone),
        }
        began = time.monotonic()
        parts = [record(command, clone, environment, began) for command in COMMANDS]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    PAGE.write_text(page(parts, commit, installed=venv is None))


def adopt(theirs: Path, ours: Path) -> None:
    """Make an environment of links to another one, so that the clone's own code is what runs."""
    ours.mkdir()
    for name in ("bin", "lib"):
        (ours / name).symlink_to(theirs / name)
    shutil.copy(theirs / "pyvenv.cfg", ours)
    (ours / ".ready").touch()


def record(command: str, clone: Path, environment: dict[str, str], began: float) -> str:
    """Run a command; return what a terminal would have shown, with the time at which it began."""
    at = time.monotonic() - began
    typed = (
        command.replace("rayapp ", "python -m rayapp ", 1) if command[:6] == "rayapp" else command
    )
    done = subprocess.run(
        typed,
        shell=True,
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    took = time.monotonic() - began - at
    text = done.stdout.replace(str(clone), "~/rayapp")
    text = text.replace(str((clone / ".venv" / "lib").resolve().parent), "~/rayapp/.venv")
    lines = text.splitlines()
    if len(lines) > KEPT:
        half = KEPT // 2
        lines[half:-half] = [f"... {len(lines) - KEPT} lines ..."]
    code = f", exit code {done.returncode}" if done.returncode else ""
    head = f"At {clock(at)}, for {clock(took)}{code}:"
    shown = "\n".join([f"$ {command}", *(line.rstrip() for line in lines)])
    return f"{head}\n\n```console\n{shown}\n```\n"


def clock(seconds: float) -> str:
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


def page(parts: list[str], commit: str, installed: bool) -> str:
    load, cores = os.getloadavg()[0], os.cpu_count()
    install = (
        "The first command installs what it needs."
        if installed
        else "The packages were installed already: that takes one to five minutes more."
    )
    return "\n".join(
        [
            "# The first ten minutes",
            "",
            "What README's commands print in an empty clone, recorded by `bench/transcript.py`: "
            f"commit {commit}, {datetime.now(UTC):%Y-%m-%d}, {cores} cores "
            f"({platform.machine()}) without a GPU, at a load of {load:.0f} by other programs.",
            install,
            "On idle cores `make finetune` takes 5 minutes, set-up included "
            "([Numbers](numbers.md)).",
            "",
            *parts,
        ]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
