"""Runs of rayapp against a trainer of one page that shares no code with it (tests/reference).

The product's own check, preparation, training and export, in plain processes; every step's loss,
gradient norm, rate and tokens, the held-out loss, and every exported tensor are compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from reference import compare, grid, product


def wrong(done: dict[str, product.Done]) -> dict[str, list[str]]:
    found = {}
    for name, each in done.items():
        exact = each.config["train"]["precision"] == "fp32"
        found[name] = (compare.problems if exact else compare.problems_in_bf16)(each)
    return {name: problems for name, problems in found.items() if problems}


def test_named_runs_train_what_their_configs_say(tmp_path: Path) -> None:
    assert wrong(product.run(grid.named(tmp_path), tmp_path)) == {}


@pytest.mark.full
def test_drawn_configs_train_what_they_say(tmp_path: Path) -> None:
    assert wrong(product.run(grid.draw(40, tmp_path), tmp_path)) == {}
