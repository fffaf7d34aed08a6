"""The report's tables: a mixture's experts by layer, rendered records, answers by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_folders import RunFolder, eventful

from rayapp import report
from rayapp.observe.run_folder import REPORT
from rayapp.report import card, folder, pages, tables
from rayapp.storage import open_storage


def test_rendered_records_are_shown_with_their_loss_marked(tmp_path: Path) -> None:
    storage = eventful(open_storage(str(tmp_path))).run
    assert "Records as the model sees them" not in pages.run_page(folder.read(storage)).decode()
    plan = json.loads(storage.read("plan.json"))
    documents = [[["<b>ask ", False], ["answer", True]]]
    plan["rendered"] = [{"path": "chats.jsonl", "kind": "chat", "documents": documents}]
    storage.write("plan.json", json.dumps(plan).encode())
    page = pages.run_page(folder.read(storage)).decode()
    assert "&lt;b&gt;ask <mark>answer</mark>" in page and "Records as the model sees them" in page


def test_experts_are_shown_by_layer_where_the_run_has_some(tmp_path: Path) -> None:
    run: RunFolder = eventful(open_storage(str(tmp_path)))
    storage = run.run
    dense = folder.read(storage)
    assert tables.experts(dense) == []
    assert "Tokens of the experts by layer" not in pages.run_page(dense).decode()
    run.end(experts=[[25, 25, 25, 25], [0, 10, 60, 30]])
    mixture = folder.read(storage)
    assert tables.experts(mixture) == [
        ["0", "expert 0", "25 %", "1.00", "0 of 4", "████"],
        ["1", "expert 2", "60 %", "2.40", "1 of 4", " ▂█▄"],
    ]
    page = pages.run_page(mixture).decode()
    assert all(cell in page for cell in ("Tokens of the experts by layer", "1 of 4", " ▂█▄"))


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
    assert tables.head_of_answers(read.held) == ["step", "def a", "<b>"]
    rows = tables.answers(read.held)
    assert [row[0] for row in rows] == ["2", "4", "5", f"{run.step:,}"]
    assert rows[0] == ["2", "_2()", "<i>2"] and rows[2] == ["5", " 5", ""]
    report.write(run.run)
    page = run.run.read(REPORT).decode()
    assert "<td>_4()</td>" in page and "<td>&lt;i&gt;4" in page and "<td>_end()</td>" in page


def test_of_many_evaluations_some_answers_are_shown() -> None:
    held: list[Any] = [{"step": k, "eval_samples": [("a", f"{k}")]} for k in range(1, 401)]
    rows = tables.answers(held)
    assert len(rows) == tables.MOST_ROWS and rows[0] == ["1", "1"] and rows[-1][1] == "400"
    assert tables.head_of_answers([{"step": 1, "eval_loss": 2.0}]) == [] == tables.answers([])
    (_, shown) = tables.head_of_answers([{"step": 1, "eval_samples": [("x" * 500, "")]}])
    assert shown == "x" * tables.MOST_OF_PROMPT + "…"


def test_sources_show_what_was_trained_on_and_their_last_losses(tmp_path: Path) -> None:
    """A skipped step trains on nothing; the end's held-out losses count before a step's."""
    storage = open_storage(str(tmp_path))
    mixture = {"data__path": "stdlib", "data__mixture": "{s3://b/a: 1, b: 3}"}
    run = RunFolder(storage, "mixed", 12, **mixture)
    for step in range(1, 13):
        figures = {"tokens_by_source": {"s3://b/a": 10}, "loss_by_source": {"s3://b/a": 2.0}}
        if step % 2:
            figures["tokens_by_source"]["b"] = 100 * step
            figures["loss_by_source"]["b"] = float(step)
        held = {"eval_loss": 2.5, "eval_loss_by_source": {"s3://b/a": 4.0}} if step == 9 else {}
        run.train(1, skipped=step == 11, **figures, **held)
    train = {"documents": 7, "tokens": 900}
    part = {"train": train, "fill": 0.5, "bad": {"empty": 2}}
    run.run.write("plan.json", b"{}")
    read = folder.read(run.run)
    read.plan["data"] = {"sources": {"s3://b/a": part, "b": part}}  # type: ignore[typeddict-item]
    one, other = tables.sources(read)
    assert one == ["s3://b/a", "25 %", "7", "900", "50 %", "2", "110", "2.0000", "4.0000"]
    weighed = sum(100.0 * n * n for n in range(1, 12, 2)) / sum(100.0 * n for n in range(1, 12, 2))
    assert other[6:] == ["2,500", f"{weighed:.4f}", "n/a"]
    run.end(eval_loss=2.4, eval_loss_by_source={"s3://b/a": 3.0, "b": 3.5})
    read = folder.read(run.run)
    read.plan["data"] = {"sources": {"b": part}}  # type: ignore[typeddict-item]
    assert tables.sources(read)[0][-1] == "3.5000"


def test_the_figures_of_an_exported_best_are_of_its_step(tmp_path: Path) -> None:
    """The tile and the card tell the exported model's loss; the chart has the later ones too."""
    run = RunFolder(open_storage(str(tmp_path)), "best", 8)
    for step in range(1, 9):
        run.train(1, at=step - 1, eval_loss={2: 3.0, 4: 2.0, 6: 2.5}.get(step))
    held = {"eval_loss": 2.0, "eval_loss_per_byte": 0.5}
    best = {"figure": "eval_loss", "step": 4, "held_out": held, "since": 2}
    run.end(**held, best=best, last={"step": 8, "eval_loss": 2.75})
    read = folder.read(run.run)
    assert [(line["step"], line["eval_loss"]) for line in read.held] == [
        *((2, 3.0), (4, 2.0), (6, 2.5), (8, 2.75)),
    ]
    (tile,) = tables._held_tiles(read)
    assert (tile.value, tile.detail) == ("2.0000", "0.5000 per byte, step 4")
    assert ["held-out loss, nats per token", "2.0000"] in [*card._results(read)]
