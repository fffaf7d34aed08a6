"""A sweep: its trials and their names, its budget, what it goes on with, and one that is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from patience import PATIENCE_S
from rich.console import Console
from run_folders import RunFolder

from rayapp.__main__ import main
from rayapp.config.fields import NAME_PATTERN
from rayapp.driver.placement import fit_in
from rayapp.driver.stop import TOLD, Stop
from rayapp.finetune import sweeping
from rayapp.finetune.sweep_config import name_of, read, trials_of
from rayapp.finetune.sweeping import ASHA, Asha, Running, driver_of, room
from rayapp.observe.run_folder import STOP
from rayapp.storage import Storage, open_storage

ROOT = Path(__file__).parent.parent
RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
TEXT = "".join(
    f"Line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} says {i * i % 97}.\n" for i in range(900)
)
TINY = {
    "model": {
        "path": "tiny",
        "tokenizer": "bytes",
        "overrides": {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128},
    },
    "data": {"path": "texts", "seq_len": 64, "eval_fraction": 0.2},
    "train": {"tokens_per_step": 512, "micro_batch": 4, "max_steps": 12, "precision": "fp32"},
    "eval": {"every_steps": 3},
    "checkpoint": {"every_steps": 3, "every_s": None},
    "cluster": {"workers": "1"},
}


def described(**changes: Any) -> dict[str, Any]:
    return {"config": TINY, "parameters": {"train.lr": RATES}, **changes}


def test_a_grid_begins_with_its_middle() -> None:
    found = trials_of(read(described(name="lr", storage="s3://b/runs/"), {}))
    assert [values["train.lr"] for values, _ in found.values()] == [1e-3, 3e-4, 3e-3, 1e-4, 1e-2]
    run = found["lr-0.001"][1].run
    assert (run.name, run.storage) == ("lr-0.001", "s3://b/runs/lr")
    two = {"train.lr": [1e-3, 3e-3], "model.lora": [None, {"rank": 2}]}
    assert len(trials_of(read(described(parameters=two), {}))) == 4


def test_draws_are_the_same_each_time_and_for_any_number_of_them() -> None:
    drawn = {
        "train.lr": {"min": 1e-5, "max": 1e-2, "scale": "log"},
        "train.min_lr": {"min": 0.0, "max": 1.0},
        "train.warmup_steps": {"min": 1, "max": 3},
        "train.schedule": {"choice": ["cosine", "linear"]},
    }
    few = trials_of(read(described(parameters=drawn, trials=5), {}))
    many = trials_of(read(described(parameters=drawn), {"trials": "20"}))
    assert [*many][:5] == [*few] and len(many) == 20
    values = [values for values, _ in many.values()]
    assert {v["train.warmup_steps"] for v in values} == {1, 2, 3}
    assert {v["train.schedule"] for v in values} == {"cosine", "linear"}
    assert all(v["train.lr"] == float(f"{v['train.lr']:.4g}") <= 1e-2 for v in values)
    assert [*trials_of(read(described(parameters=drawn, trials=5, seed=1), {}))] != [*few]


def test_values_have_different_names() -> None:
    every = [
        *({"train.lr": value} for value in (1e-3, 0.0010001, 1e-5, 1, True)),
        *(
            {"data.path": path}
            for path in ("a/b", "a-b", "s3://b/" + "x" * 90, "s3://b/" + "x" * 91)
        ),
        *({"model.lora": lora} for lora in (None, {"rank": 8}, {"rank": 16})),
        {"data.path": "a", "model.path": "b"},
        {"data.path": "b", "model.path": "a"},
    ]
    names = [name_of(values) for values in every]
    assert len({*names}) == len(names)
    assert all(re.fullmatch(NAME_PATTERN, name) for name in names), names


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parametres": {}}, "parametres={} is unknown: there is no such field. Did you mean para"),
        ({"parameters": {"run.name": ["a"]}}, "parameters.run.name=['a'] is not available: the sw"),
        ({"parameters": {"train.lr": 3}}, "parameters.train.lr=3 is not valid: it names no values"),
        ({"parameters": {"train.lr": []}}, "parameters.train.lr=[] is not valid"),
        (
            {"parameters": {"train.lr": {"min": 0, "max": 1, "scale": "log"}}, "trials": 2},
            "names no",
        ),
        (
            {"parameters": {"train.lr": {"choice": [1e-3]}}},
            "trials=none is missing: parameters are",
        ),
        ({"trials": 3}, "trials=3 is unused: nothing is drawn"),
        ({"parameters": {"train.lrr": [1]}}, "train.lrr=1 is unknown: there is no such field. Did"),
        (
            {"parameters": {"train.lr": [-1, 1]}},
            "train.lr=-1 is not valid: it must be greater than",
        ),
        ({"metric": "loss"}, "metric=loss is not valid"),
        ({"metric": "task.sums"}, "metric=task.sums is unknown: eval.tasks has no such task"),
        ({"config": {**TINY, "eval": {}}, "scheduler": "asha"}, "scheduler=asha is without effect"),
        ({"config": "nowhere.yaml"}, "config file nowhere.yaml is not readable"),
        ({"max_usd": 3}, "run.max_usd=3 is impossible: the price of the machines is not known"),
    ],
)
def test_a_wrong_sweep_is_refused_before_ray_starts(
    changes: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("Ray is started")

    monkeypatch.setattr(sweeping, "connected", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(described(**changes)))
    assert main(["sweep", "sweep.yaml"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("nodes", [[4], [3, 2], [1, 1, 1, 1], [16, 1], [2]])
def test_all_trials_at_a_time_have_room_for_their_workers(nodes: list[int], workers: int) -> None:
    """A driver holds no CPU; a CPU is left for the tasks that read the data."""
    free = fit_in({str(n): {"CPU": float(cpus)} for n, cpus in enumerate(nodes)}, {"CPU": 1.0})
    at_once = room(free, workers, float("inf"), 1.0)
    assert at_once * workers <= sum(nodes) - 1 or at_once == 1  # which waits, alone, as a run does
    assert (at_once + 1) * workers > sum(nodes) - 1
    assert "CPU" not in sweeping.HOLDS


class Folders:
    """A sweep of three trials in folders that runs have left, at 220 USD an hour."""

    def __init__(self, storage: Storage, **changes: Any) -> None:
        self.runs = {
            name: RunFolder(storage, name, steps=100, train__lr=lr)
            for name, lr in (("a", "1e-3"), ("b", "3e-3"), ("c", "1e-2"))
        }
        trials = {
            n: ({"train.lr": run.config.train.lr}, run.config) for n, run in self.runs.items()
        }
        sweep = read(described(name="lr", scheduler="asha", **changes), {})
        self.stop, self.root = Stop(storage / "control"), storage
        self.running = Running(sweep, trials, storage, self.stop, Console(quiet=True))


def trial(name: str, **more: Any) -> Any:
    return SimpleNamespace(
        config={"trial": name},
        trial_id=name,
        get_error=lambda: None,
        get_pickled_error=lambda: None,
    )


def test_the_budget_counts_what_runs_and_stops_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is spent while a trial whose driver was killed is not started again."""
    storage = open_storage(str(tmp_path))
    folders = Folders(storage, max_hours=0.5)
    for name in ("a", "b"):
        folders.runs[name].train(100)
    folders.runs["a"].end()
    running = Running(
        folders.running.sweep, folders.running.trials, storage, folders.stop, Console(quiet=True)
    )
    killed = folders.runs["b"]
    before_s, usd = running.spent()
    assert usd == pytest.approx(before_s / 3600 * 220)
    monkeypatch.setattr(sweeping.time, "time", lambda: killed.now)
    killed.now += 30_000.0  # later the sweep is started again
    running.on_trial_start(1, [], trial("b"))
    assert running.spent()[0] == pytest.approx(before_s)
    seen = killed.now - 30_000.0
    killed.add("started", host="head", submission_id=None, seen_until=seen, **killed.machines)
    killed.now += 60.0
    assert running.spent()[0] == pytest.approx(before_s + 60.0)
    running.tend()
    assert running.reason is None and not (storage / "b").exists(STOP)
    killed.now += 0.5 * 3600
    running.tend()
    assert str(running.reason).startswith("max_hours=0.5 is reached: its trials have taken 0.")
    told = f"{TOLD} lr: {running.reason}"
    assert (storage / "b").read(STOP).decode().strip() == told and Stop(
        storage / "b"
    ).told() == told
    assert folders.stop.asked() and not (storage / "a").exists(STOP)
    (storage / "b").delete(STOP)  # as a command does with one from before it
    running.tend()
    assert (storage / "b").exists(STOP)
    killed.end("stopped", told)
    running.on_trial_complete(1, [], trial("b"))
    assert running.row("b")["state"] == "stopped (max_hours)"
    (storage / "b").delete(STOP)
    running.tend()
    assert not (storage / "b").exists(STOP)


def test_what_is_compared_and_what_is_over(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    folders = Folders(storage)
    reasons = {"a": None, "b": f"{TOLD} lr: asha: its eval_loss at step 50 is not among the best"}
    for (name, reason), loss in zip(reasons.items(), (2.5, 2.0), strict=True):
        folders.runs[name].train(100)
        status = "stopped" if reason else "done"
        folders.runs[name].end(
            status,
            reason,
            eval_loss=loss,
            wall_s=60.0,
            goodput={},
            cost_usd=3.0,
            lost_steps=0,
            interruptions=[],
        )
    shutil.rmtree(tmp_path / "c")
    result = folders.running.compared()
    assert [row["trial"] for row in result["trials"]] == ["b", "a", "c"]
    assert [row["state"] for row in result["trials"]] == [ASHA, "done", "not started"]
    assert [row["figure"] for row in result["trials"]] == [2.0, 2.5, None]
    assert result["best"]["trial"] == "b" and "init_from" not in result["best"]["command"]
    page = (tmp_path / "sweep.html").read_text()
    assert result["page"] == str(tmp_path / "sweep.html") and "0.003" in page
    json.dumps(result, allow_nan=False)
    folders.running.sweep = folders.running.sweep.model_copy(update={"mode": "max"})
    best = folders.running.compared()["best"]
    assert best["trial"] == "a" and f"--model.init_from={tmp_path}/a" in best["command"]
    assert "--run.name=a-on" in best["command"]


def test_asha_asks_a_trial_to_save_instead_of_killing_it() -> None:
    running: Any = SimpleNamespace(sweep=read(described(scheduler="asha"), {}), asked={})
    asha = Asha(running, "min", 3, 12)
    for name, loss in (("a", 2.0), ("b", 3.0), ("c", 1.0)):
        asha.on_trial_add(None, trial(name))
        told = asha.on_trial_result(None, trial(name), {"step": 3, "eval_loss": loss})
        assert told == asha.CONTINUE
    assert asha.on_trial_result(None, trial("b"), {"step": 12, "eval_loss": 9.0}) == asha.CONTINUE
    assert running.asked == {"b": "asha: its eval_loss at step 3 is not among the best quarter"}


def test_a_trial_that_is_over_or_comes_too_late_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    folders, reported, ran = Folders(storage), list[Any](), list[str]()
    folders.runs["a"].train(100)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(sweeping.tune, "report", reported.append)
    monkeypatch.setattr(sweeping, "finetune", lambda config, *_, **__: ran.append(config.run.name))
    drive = driver_of(folders.running, ["b", "c"])
    for name in ("a", "b"):
        drive({"trial": name})
    assert [line["step"] for line in reported] == [50, 100] and ran == ["b"]
    control = storage / ".ray" / ".sweep" / "lr"
    control.write(STOP, b"")
    drive({"trial": "c"})
    assert ran == ["b"]


def commands(run: Path) -> int:
    return (run / "events.jsonl").read_text().count('"event": "started"')


@pytest.mark.full
def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """Its driver is killed after the first trial: that one is not run again, no data are either."""
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[number:])
    sweep = described(name="lr", parameters={"train.lr": [1e-5, 1e-2, 1e-3]}, concurrency=1)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    temporary = tempfile.mkdtemp()
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": temporary}
    environment |= {"PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    argv = [sys.executable, "-m", "rayapp", "sweep", "sweep.yaml", "--json"]
    folder, until = tmp_path / "runs" / "lr", time.monotonic() + PATIENCE_S
    with subprocess.Popen(argv, env=environment, cwd=tmp_path, stdout=subprocess.PIPE) as first:
        while not list(folder.glob("lr-1e-05/metrics.jsonl")):  # the second that is run
            assert first.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        os.kill(first.pid, signal.SIGKILL)
    assert commands(folder / "lr-0.01") == 1 and not (folder / "lr-0.001").exists()
    rows = [file.stat().st_mtime_ns for file in folder.glob(".prepared/*/manifest.json")]
    done = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True)
    shutil.rmtree(temporary, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["state"] for row in result["trials"]] == ["done"] * 3
    assert (result["best"]["trial"], len(rows)) == ("lr-0.01", 1)
    assert [commands(folder / f"lr-{rate}") for rate in ("0.01", "1e-05", "0.001")] == [1, 2, 1]
    assert [file.stat().st_mtime_ns for file in folder.glob(".prepared/*/manifest.json")] == rows
    for row in result["trials"]:
        lines = (Path(row["run"]) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
        assert (
            row["figure"] == json.loads((Path(row["run"]) / "result.json").read_text())["eval_loss"]
        )
    assert "1e-05" in (folder / "sweep.html").read_text()
    assert "lr-1e-05 done: eval_loss" in done.stderr and "2 of 3 trials to run" in done.stderr
