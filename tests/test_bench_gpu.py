"""bench/gpu.py: its budget, its records, and the pages that are made from its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "bench"))

import gpu  # noqa: E402
import gpu_tables  # noqa: E402
from gpu_rows import ROWS  # noqa: E402

SLEEPS = "import time; time.sleep(1000)"
DIES = "import sys; sys.exit(7)"
FIRST = "import json, sys, time; print('RECORD ' + json.dumps({'passed': True, 'detail': 'x'}))"


def run_with(worker: str, budget_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Run the command with another worker; return its file."""
    script = tmp_path / "worker.py"
    script.write_text(
        f"import os\nopen({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')\n{worker}\n"
    )
    monkeypatch.setattr(gpu, "WORKER", script)
    gpu.main(["--device=cpu", f"--budget_s={budget_s}", f"--out={tmp_path}"])
    (file,) = tmp_path.glob("*.json")
    return json.loads(file.read_text())


def test_the_budget_holds_whatever_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_with(SLEEPS, gpu.LAST_S + 2, tmp_path, monkeypatch)
    assert list(report["rows"]) == [row.name for row in ROWS]
    assert all(found.keys() & {"skipped"} for found in report["rows"].values())
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_worker_that_dies_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_with(DIES, 60, tmp_path, monkeypatch)
    assert {found["failed"] for found in report["rows"].values()} == {"its process ended with 7"}
    assert len((tmp_path / "pids").read_text().split()) == len(ROWS)


def test_what_a_worker_has_told_is_kept_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_with(f"{FIRST}\n{DIES}", 60, tmp_path, monkeypatch)
    told = ["passed" if "passed" in found else "failed" for found in report["rows"].values()]
    assert told == ["passed", "failed"] * (len(ROWS) // 2) + ["passed"] * (len(ROWS) % 2)


@pytest.mark.parametrize(
    ("kernels", "busy", "idle"),
    [
        ([(0, 4, 0), (6, 9, 5)], 7, {"backward": 2}),
        ([(0, 4, 0), (2, 3, 1), (3, 8, 2)], 8, {}),  # two streams at once
        (
            [(0, 2, 0), (3, 4, 1), (9, 10, 8), (30, 31, 29)],
            5,
            {"forward": 1, "backward": 5, "between": 20},
        ),
        ([], 0, {}),
    ],
)
def test_idle_time_is_of_the_phase_that_launches_next(
    kernels: list[tuple[int, int, int]], busy: int, idle: dict[str, int]
) -> None:
    from gpu_steps import idle_by_phase

    assert idle_by_phase(kernels, [(0, 4, "forward"), (4, 20, "backward")]) == (busy, idle)


def test_missing_names_what_no_card_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (row.name for row in ROWS[:3])
    rows = {first: {"tokens_per_s": 1.0}, second: {"skipped": "late"}, third: {"failed": "why"}}
    (tmp_path / "card.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(gpu, "KEPT", tmp_path)
    assert gpu.main(["--missing"]) == 0
    assert capsys.readouterr().out.splitlines() == [row.name for row in ROWS[1:]]


def test_the_pages_are_made_from_the_files() -> None:
    assert gpu_tables.tables() in gpu_tables.PAGE.read_text(encoding="utf-8")
    assert gpu_tables.readme_row() in gpu_tables.README.read_text(encoding="utf-8").splitlines()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_row_runs_in_small_on_cpus(tmp_path: Path) -> None:
    command = [sys.executable, str(gpu.HERE / "gpu.py"), "--device=cpu", "--budget_s=800"]
    done = subprocess.run([*command, f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr[-5000:])
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    skipped = {name: found["skipped"] for name, found in rows.items() if "skipped" in found}
    assert all("GPU" in why or "CPU" in why for why in skipped.values()), skipped
    assert not {name: found for name, found in rows.items() if not found.get("passed", True)}
    assert not [name for name, found in rows.items() if "failed" in found]
    assert len(rows) == len(ROWS) and len(skipped) <= 2
