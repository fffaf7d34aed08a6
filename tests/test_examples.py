"""Execute the notebooks as a reader would, from their folder, in kernels of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import nodes
import pytest
from nbclient import NotebookClient
from patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples"


def execute(name: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> list[Any]:
    """Run all cells; return their outputs. A cell that raises fails the test."""
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    book = nbformat.read(FOLDER / name, as_version=4)
    # The results go where the test says, not beside the notebook.
    NotebookClient(
        book, timeout=int(PATIENCE_S), resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(outputs: list[Any]) -> str:
    """Return what is printed, and the plain text of results."""
    found = [
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs
    ]
    return "\n".join(found)


def images_of(outputs: list[Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(ROOT))
        with nodes.with_jobs(tmp_path, cpus=4) as variables:
            yield variables


@pytest.mark.full
def test_first_fine_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"RAYAPP_STORAGE": str(tmp_path / "runs"), "RAY_AUTH_MODE": "disabled"}
    outputs = execute("first_fine_tune.ipynb", monkeypatch, **kept)
    text = text_of(outputs)
    assert "fits: True" in text and re.search(r"'done',\s*60", text), text
    assert images_of(outputs) == 1
    assert "import os" in text_of(outputs[-1:])


@pytest.mark.drill
def test_submit_watch_resume_compare(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"RAYAPP_STORAGE": str(tmp_path / "runs")}
    outputs = execute("submit_watch_resume_compare.ipynb", monkeypatch, **{**cluster, **kept})
    text = text_of(outputs)
    assert "'stopped'" in text and "of 60 steps" in text
    assert "job warm-2 at" in text and "'done'" in text
    assert images_of(outputs) == 1
    pages = [
        output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})
    ]
    assert any("60 / 60" in page for page in pages), "watch() shows the end of the run"
