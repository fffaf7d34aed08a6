"""Check what the trackers hold, read back from TensorBoard's, MLflow's and W&B's own files."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rayapp.config import Config, ConfigError, load
from rayapp.observe import trackers
from rayapp.observe.metrics import FIELDS, MetricsLine
from rayapp.storage import Storage, open_storage

PROMPTED = [("Once upon a time", " there was  a\n* test.\n")]


NUMBERS = [name for name, shown in FIELDS.items() if shown.group and shown.tag in ("", "rank")]


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "runs")) / "demo"
    return open_storage(f"s3://{request.getfixturevalue('s3_bucket')}/runs") / "demo"


@pytest.fixture
def config() -> Config:
    return load(None, {"run.name": "demo", "model.overrides": "{num_hidden_layers: 1}"})


def line(step: int, attempt: int = 1, **values: float | None) -> dict[str, Any]:
    numbers: dict[str, Any] = dict.fromkeys(NUMBERS, 0.5) | {"mfu": None}
    numbers |= {"step": step, "attempt": attempt, "time": 1000.0 + step, "batch_digest": "00ff"}
    return numbers | {"loss": step + attempt / 10, "eval_loss": None} | values


def lines(first: int, last: int, attempt: int = 1) -> list[dict[str, Any]]:
    return [line(step, attempt) for step in range(first, last + 1)]


def events(run: Storage, tmp_path: Path) -> Any:
    """Return the run's event files as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / f"copy-{time.monotonic_ns()}"
    folder.mkdir()
    for entry in (run / "tensorboard").list():
        (folder / entry.name).write_bytes((run / "tensorboard").read(entry.name))
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return found.Reload()


def losses(found: Any) -> list[tuple[int, float]]:
    return [(point.step, round(point.value, 2)) for point in found.Scalars("loss/loss")]


def test_tensorboard_shows_each_step_once(run: Storage, config: Config, tmp_path: Path) -> None:
    first = trackers.TensorBoard(run, config)
    first.write(lines(1, 9))
    first.cut_back(6)  # a worker died, and the newest checkpoint was that of step 6
    first.write(lines(7, 8, attempt=2))
    first.close("stopped", [])
    expected = [(step, step + 0.1) for step in range(1, 7)] + [(7, 7.2), (8, 8.2)]
    found = events(run, tmp_path)
    assert losses(found) == expected
    assert [point.wall_time for point in found.Scalars("loss/loss")][:2] == [1001.0, 1002.0]

    time.sleep(1.1)  # the names of event files are by the second
    second = trackers.TensorBoard(run, config)
    second.write(lines(1, 6) + lines(7, 8, attempt=2) + lines(9, 10, attempt=3))
    second.close("done", PROMPTED)
    found = events(run, tmp_path)
    assert losses(found) == [*expected, (9, 9.3), (10, 10.3)]
    assert len((run / "tensorboard").list()) == 1


def test_tensorboard_forgets_what_a_killed_command_wrote(config: Config, tmp_path: Path) -> None:
    run = open_storage(str(tmp_path / "runs")) / "demo"
    first = trackers.TensorBoard(run, config)
    first.write(lines(1, 9))
    # It is killed here: no close.
    old = (run / "tensorboard").list()[0].name
    time.sleep(1.1)
    second = trackers.TensorBoard(run, config)
    (run / "tensorboard").write(old, (run / "tensorboard").read(old))  # not deleted yet
    second._old.clear()
    second.write(lines(1, 4))
    assert len((run / "tensorboard").list()) == 2
    assert losses(events(run, tmp_path)) == [(step, step + 0.1) for step in range(1, 5)]


def test_tensorboard_has_config_and_samples(run: Storage, config: Config, tmp_path: Path) -> None:
    tracker = trackers.TensorBoard(run, config)
    answers = [[["def ", "f():"]], [["def ", "g(x):\n    pass"]]]
    told = [line(k + 2, eval_loss=2.5, loss=None, eval_samples=answers[k]) for k in range(2)]
    tracker.write([line(1), *told])
    tracker.close("done", PROMPTED)
    found = events(run, tmp_path)

    def text(name: str, place: int = 0) -> str:
        shown = found.Tensors(f"{name}/text_summary")[place].tensor_proto.string_val[0].decode()
        return "".join(f"{each[4:]}\n" for each in shown.splitlines())

    assert [point.step for point in found.Tensors("answer/0/text_summary")] == [2, 3]
    assert text("answer/0") == "def f():\n" and text("answer/0", 1) == "def g(x):\n    pass\n"

    assert text("config") == config.to_yaml()
    assert text("sample/0") == "".join(PROMPTED[0])
    assert "_hparams_/session_start_info" in found.summary_metadata
    assert "speed/mfu" not in found.Tags()["scalars"]  # unknown is not zero
    assert [(point.step, point.value) for point in found.Scalars("loss/eval_loss")] == [
        (2, 2.5),
        (3, 2.5),
    ]
    assert losses(found) == [(1, 1.1)]


def test_tensorboard_reaches_s3_before_the_end(
    s3_bucket: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_storage(f"s3://{s3_bucket}/demo")
    monkeypatch.setattr(trackers, "STORE_S", 0.5)
    tracker = trackers.TensorBoard(run, config)
    tracker.write(lines(1, 3))
    assert [step for step, _ in losses(events(run, tmp_path))] == [1, 2, 3]
    tracker.write(lines(4, 4))  # too soon
    assert [step for step, _ in losses(events(run, tmp_path))] == [1, 2, 3]
    time.sleep(0.6)
    tracker.write(lines(5, 5))
    assert [step for step, _ in losses(events(run, tmp_path))] == [1, 2, 3, 4, 5]
    tracker.close("failed", [])


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLflow's own store of files, for which no server is needed."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield


def test_mlflow_goes_on_with_the_same_run(
    config: Config, tmp_path: Path, mlflow_store: None
) -> None:
    from mlflow import MlflowClient

    run = open_storage(str(tmp_path / "runs")) / "demo"
    first = trackers.MLflow(run, config)
    first.write(lines(1, 60))  # more than fits into one request
    first.cut_back(50)
    first.write(lines(51, 55, attempt=2))
    first.close("stopped", [])
    client = MlflowClient()
    experiment = client.get_experiment_by_name("rayapp")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "KILLED" and found.info.run_name == "demo"

    more = config.model_copy(update={"cluster": load(None, {"cluster.workers": "4"}).cluster})
    second = trackers.MLflow(run, more)
    assert client.get_run(found.info.run_id).info.status == "RUNNING"
    second.write(lines(1, 50) + lines(51, 70, attempt=3))
    second.close("done", PROMPTED)
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss/loss")
    assert [point.step for point in history] == list(range(1, 71))
    assert [point.timestamp for point in history][:2] == [1_001_000, 1_002_000]
    assert history[52].value == pytest.approx(53.1)  # as it was the first time
    assert found.info.status == "FINISHED"
    assert found.data.params["train.lr"] == "0.0003" and found.data.params["run.name"] == "demo"
    assert found.data.params["cluster.workers"] == "1"  # MLflow's parameters do not change
    assert found.data.tags["rayapp.sample.0"] == "".join(PROMPTED[0])
    assert "speed/mfu" not in found.data.metrics

    trackers.MLflow(run.child("other"), config).close("failed", [])
    assert len(client.search_runs([experiment.experiment_id])) == 2


def test_wandb_writes_the_whole_run_offline(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = open_storage(str(tmp_path / "runs")) / "demo"
    Path(run.local_path() or "").mkdir(parents=True)
    ids = []
    for status in ("stopped", "done"):
        before = set(Path(run.local_path() or "").glob("wandb/offline-run-*"))
        tracker = trackers.Wandb(run, config)
        tracker.write(lines(1, 8))
        tracker.cut_back(5)
        tracker.write(lines(6, 9, attempt=2))
        tracker.close(status, PROMPTED)
        (folder,) = set(Path(run.local_path() or "").glob("wandb/offline-run-*")) - before
        (path,) = folder.glob("run-*.wandb")
        until = time.monotonic() + 60
        while not (records := list(wandb_records(path))) or not records[-1].HasField("exit"):
            assert time.monotonic() < until, records  # W&B's own process writes it
            time.sleep(0.2)
        ids.append(next(each.run.run_id for each in records if each.HasField("run")))
        history = [each.history for each in records if each.HasField("history")]
        assert [each.step.num for each in history] == list(range(1, 10))
        first = {"/".join(i.nested_key) or i.key: i.value_json for i in history[0].item}
        assert float(first["loss/loss"]) == 1.1 and "speed/mfu" not in first
        settings = next(each.run.config for each in records if each.HasField("run"))
        assert {i.key: i.value_json for i in settings.update}["train.lr"] == "0.0003"
        summary = {
            "/".join(i.nested_key) or i.key: i.value_json
            for each in records
            if each.HasField("summary")
            for i in each.summary.update
        }
        assert summary["status"] == f'"{status}"' and "there was" in summary["sample/0"]
        time.sleep(1.1)  # the names of W&B's folders are by the second
    assert ids[0] == ids[1]


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: a header, then LevelDB's log format in 32 KiB blocks."""
    from wandb.proto import wandb_internal_pb2

    data, position, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if kind == 0 or position + 7 + length > len(data):
            break
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = load(None, {"run.trackers": "tensorboard,mlflow,wandb"})
    assert [problem.split(" ")[:4] for problem in trackers.problems(config)] == [
        ["run.trackers=mlflow", "is", "without", "a"],
        ["run.trackers=wandb", "is", "without", "a"],
    ]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert trackers.problems(config) == []
    monkeypatch.setitem(trackers.PACKAGES, "wandb", "no_such_package")
    (problem,) = trackers.problems(config)
    assert problem.startswith("run.trackers=wandb is not installed") and "pip install" in problem
    assert trackers.problems(load()) == []
    with pytest.raises(ConfigError, match=r"run\.trackers"):
        load(None, {"run.trackers": "comet"})


def test_all_figures_are_shown_each_once_own_ones_too() -> None:
    mappings = [name for name, shown in FIELDS.items() if shown.tag in ("name", "source")]
    by_name = {name: {"a": 1.0} for name in mappings}
    own = {"margin": 0.25, "none": None}
    names = [name for name, _ in trackers.scalars(cast(MetricsLine, line(1) | by_name | own))]
    assert len(names) == len(set(names))
    there = [name for name in NUMBERS if name not in ("mfu", "eval_loss")]
    expected = [f"{FIELDS[name].group}/{name}" for name in there]
    expected += ["metrics/a", *(f"{name}/a" for name in by_name if name != "eval_metrics")]
    assert sorted(names) == sorted([*expected, "loss/margin"])
    assert {*trackers.SHOWN_BY_HPARAMS, trackers.STEP_S} <= {*names, "loss/eval_loss"}
