"""The report's tables: a mixture's experts by layer, and rendered records."""

from __future__ import annotations

import json
from pathlib import Path

from run_folders import RunFolder, eventful

from rayapp.report import folder, pages, tables
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
