"""The evaluations of a report: the answers to a run's prompts, by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_folders import RunFolder

from rayapp import report
from rayapp.observe.run_folder import REPORT
from rayapp.report import evaluations, folder
from rayapp.storage import open_storage


def test_answers_stand_in_a_table_of_step_and_prompt(tmp_path: Path) -> None:
    """Those of metrics.jsonl, of validated checkpoints, and of the end, each step once."""
    storage = open_storage(str(tmp_path))
    run = RunFolder(storage, "answers", 8, eval__prompts='["def a", "<b>"]')
    for step in range(1, 7):
        said = [["def a", f"_{step}()"], ["<b>", f"<i>{step}\n"]]
        held = {"eval_loss": 2.0, "eval_samples": said} if step % 2 == 0 else {}
        run.train(1, at=step - 1, **held)
    validated = {"step": 5, "eval_loss": 2.1, "eval_samples": [["def a", " 5"], ["<b>", ""]]}
    run.run.write(
        "validation.jsonl", json.dumps(validated | {"seconds": 1.0, "time": 9.0}).encode() + b"\n"
    )
    run.end(eval_loss=1.98, eval_samples=[["def a", "_end()"], ["<b>", "</b>"]])
    read = folder.read(run.run)
    assert evaluations.head(read.held) == ["step", "def a", "<b>"]
    rows = evaluations.answers(read.held)
    assert [row[0] for row in rows] == ["2", "4", "5", f"{run.step:,}"]
    assert rows[0] == ["2", "_2()", "<i>2"] and rows[2] == ["5", " 5", ""]
    report.write(run.run)
    page = run.run.read(REPORT).decode()
    assert "<td>_4()</td>" in page and "<td>&lt;i&gt;4" in page and "<td>_end()</td>" in page


def test_of_many_evaluations_some_answers_are_shown() -> None:
    held: list[Any] = [{"step": k, "eval_samples": [("a", f"{k}")]} for k in range(1, 401)]
    rows = evaluations.answers(held)
    assert len(rows) == evaluations.MOST_ROWS and rows[0] == ["1", "1"] and rows[-1][1] == "400"
    assert evaluations.head([{"step": 1, "eval_loss": 2.0}]) == [] == evaluations.answers([])
    (_, shown) = evaluations.head([{"step": 1, "eval_samples": [("x" * 500, "")]}])
    assert shown == "x" * evaluations.MOST_OF_PROMPT + "…"
