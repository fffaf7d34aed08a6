"""Run tests on a copy of this checkout, with one fault put in or with none.

    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        tree = copy_of_checkout(Path(folder) / "w")
        verdict = tried(tree, mutation, limit_s=60.0)

The checkout itself is not changed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
COPIED = ("rayapp", "tests", "configs", "pyproject.toml")
FAST = "not full and not drill and not image"  # as `make test` has it
EXIT_S = 20.0  # that pytest may take to exit once it has failed
PASSED, FAILED, NO_END = "passed", "failed", "no end"
FAILURE = re.compile(r"^(?:FAILED|ERROR) tests/(.+?)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """A fault that somebody could put into one place of one file."""

    name: str
    file: str
    """Its path from the root of the repository."""
    old: str
    """The text that is replaced; the file has it once."""
    new: str
    tests: str
    """The arguments of pytest that choose the tests which must find the fault."""

    def problem(self) -> str | None:
        """Say why the mutation cannot be made, None if it can."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.name}: there is no {self.file}"
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            return f"{self.name}: {self.file} has {count} times what is to be replaced: {self.old}"
        try:
            compile(text.replace(self.old, self.new), self.file, "exec")
        except SyntaxError as error:
            return f"{self.name}: {self.file} is no Python with it: {error}"
        return None


@dataclass(frozen=True)
class Verdict:
    """How a run of tests has ended."""

    end: str
    """PASSED, FAILED (a test has found something), NO_END (a test hung), else pytest's problem."""
    test: str
    """The first test that failed, if one did."""
    seconds: float
    output: str

    @property
    def killed(self) -> bool:
        return self.end in (FAILED, NO_END)


def copy_of_checkout(tree: Path) -> Path:
    """Copy what tests need to `tree`, and return it; its path is short, for the sockets of Ray."""
    tree.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree)
    return tree


def tried(tree: Path, mutation: Mutation, limit_s: float) -> Verdict:
    """Put the fault into the tree, run its tests there, and take it out again."""
    path = tree / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        return tested(tree, mutation.tests, limit_s)
    finally:
        path.write_text(text)


def tested(tree: Path, tests: str, limit_s: float) -> Verdict:
    """Run the tests on the tree as it is, up to the first that fails."""
    folder = tree / "t"  # of the tests' files; its log lies beside it
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", FAST, f"--basetemp={folder}", *shlex.split(tests)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "400"}
    environment.pop("RAY_ADDRESS", None)
    began = time.monotonic()
    log = tree / "log"
    with log.open("w") as file:
        process = psutil.Popen(command, cwd=tree, env=environment, stdout=file, stderr=file)
        try:
            code = ended(process, log, limit_s)
        finally:
            end(process)
    seconds, output = time.monotonic() - began, log.read_text(errors="replace")
    found = FAILURE.search(output)
    test, why = (found[1], found[2] or "") if found else ("", "")
    if code is None and not found:
        return Verdict(NO_END, "", seconds, output)
    if code in (None, 1) and found:
        return Verdict(NO_END if "Timeout (>" in why else FAILED, test, seconds, output)
    if code == 0 and re.search(r"\d+ passed", output):
        return Verdict(PASSED, "", seconds, output)
    return Verdict(f"pytest exits with {code}", test, seconds, output)


def ended(process: psutil.Popen, log: Path, limit_s: float) -> int | None:
    """Wait for the end of pytest, and return its exit code; None if it does not end.

    A thread of a test that has failed may hold it up, so it is waited for no longer than EXIT_S
    once it has said what failed.
    """
    until, told = time.monotonic() + limit_s, False
    while time.monotonic() < until:
        try:
            return int(process.wait(0.5))
        except psutil.TimeoutExpired:
            if not told and FAILURE.search(log.read_text(errors="replace")):
                told, until = True, min(until, time.monotonic() + EXIT_S)
    return None


def end(process: psutil.Popen) -> None:
    """Kill a process that still runs, and all below it."""
    if process.poll() is not None:
        return
    for each in [*process.children(recursive=True), process]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
