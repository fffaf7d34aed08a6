"""Check that each fault of `make mutations` can be put into the code as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_each_fault_fits_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from mutations import MUTATIONS

    assert [problem for each in MUTATIONS if (problem := each.problem())] == []
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)
    files = {shlex.split(each.tests)[0].partition("::")[0] for each in MUTATIONS}
    assert [file for file in files if not (ROOT / file).is_file()] == []
