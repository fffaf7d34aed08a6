"""Hold the table of docs/faults.md, what happens when something dies, to the tests it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADING = "## What happens when something dies\n"
TEST_ID = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def rows(text: str) -> list[list[str]]:
    """Return the cells of the first table under HEADING, by line, without its head."""
    section = text.split(HEADING)[1].split("\n## ")[0]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines is not None
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].splitlines()
    ][2:]


def functions_of(name: str) -> set[str]:
    """Return the test functions of a file, without importing it; none if there is no such file."""
    path = ROOT / "tests" / name
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def missing(text: str) -> list[str]:
    """Return what the table promises without a test."""
    found = []
    for what, then, drills in rows(text):
        ids = TEST_ID.findall(drills)
        if not ids or TEST_ID.sub("", drills).strip(", "):
            found.append(f"{what}: {then} has no drill, or more than drills: {drills}")
        found += [f"{what}: {file}::{test}" for file, test in ids if test not in functions_of(file)]
    return found


def test_every_promise_names_its_drills_and_they_exist() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert len(rows(text)) >= 10
    assert missing(text) == []


def test_a_promise_without_a_drill_is_found() -> None:
    head = f"# A\n{HEADING}\n| what | then | drills |\n|---|---|---|\n"
    here = "`test_docs_faults.py::test_a_promise_without_a_drill_is_found`"
    assert missing(f"{head}| a | b | {here} |\n\n| not | of | it |\n## B\n") == []
    for wrong in (here.replace("found", "lost"), here.replace("faults", "nothing"), "none", ""):
        assert len(missing(f"{head}| a | b | {here} |\n| c | d | {wrong} |\n\n")) == 1, wrong
