"""Check that a run's figures have one label and one format, whoever shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_folders import eventful

from rayapp.driver.display import figures_of, held_out
from rayapp.observe.figures import figures, label, shown, text
from rayapp.observe.status import read
from rayapp.report import comparison, folder, tables, timeline
from rayapp.storage import open_storage


def test_terminal_list_and_report_show_a_figure_alike(tmp_path: Path) -> None:
    run = eventful(open_storage(str(tmp_path)), steps=80).run
    now, reported = read(run), folder.read(run)
    line: Any = now.line
    listed = figures(now)
    rows = {row.label: row.cells[0] for row in comparison.results([reported])}
    planned = {name: measured for name, _, measured, *_ in timeline.planned(reported)}
    tiles = {tile.label.lower(): tile.value for tile in tables.headline(reported)}
    assert rows["cost"] == listed["cost"] == tiles["cost"] == planned["cost"]
    assert rows["goodput"] == listed["goodput"] == tiles["goodput"]
    assert rows["time"] == listed["time"] and rows["memory"] == planned["memory"]
    assert rows["tokens/s"] == tiles["tokens/s"] == planned["tokens/s"]
    told = figures_of(line)
    assert told.startswith(f"loss {listed['loss']}  loss per byte ")
    assert f"tokens/s {listed['tokens/s']}" in told
    assert f"held-out loss {rows['held-out loss']}, " in held_out(reported.held[-1])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("peak_gib", 1.5, "memory 1.50 GiB"),
        ("cost_usd", 12.0, "cost $12.00"),
        ("left_s", 4000.0, "time left 1:06:40"),
        ("tokens_per_s", 17_808.5, "tokens/s 17,808"),
        ("mfu", 0.384, "MFU 38.4 %"),
        ("brevity", 0.25, "brevity 0.25"),  # of the user's own
    ],
)
def test_a_figure_is_a_label_and_a_text(name: str, value: float, expected: str) -> None:
    assert f"{label(name)} {text(name, value)}" == shown({name: value}, name) == expected
    assert shown({name: None}, name) == f"{label(name)} n/a"
