"""A run that is made longer: what is done stays as it is until there is a new step."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rayapp.config import Config, ConfigError, load
from rayapp.driver import command
from rayapp.driver.growth import describe
from rayapp.observe import metrics
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import DONE, LEASE, METRICS, STOP, STOPPED
from rayapp.observe.status import read
from rayapp.order import Order
from rayapp.storage import Storage, open_storage
from rayapp.storage.local import LocalStorage
from rayapp.train.checkpoint import commit, marker
from rayapp.train.checkpoint.marker import steps_done

LINE = {"loss": 2.0, "tokens": 9, "tokens_per_s": 1.0, "mfu": None, "step_s": 1.0, "time": 9e9}
LINE |= {"checkpoint_stall_s": 0.0, "eval_s": 0.0, "data_wait_s": 0.0}
KEPT = ("config.yaml", "plan.json", "result.json")


class Killed(BaseException):
    """The driver's process is gone."""


def config_of(folder: Path, steps: int, **train: Any) -> Config:
    fields = {"run.storage": str(folder), "run.name": "r", "run.trackers": "none"}
    fields |= {"train.schedule": "constant", "train.max_steps": steps, "cluster.address": "local"}
    fields |= {f"train.{name}": value for name, value in train.items()}
    return load(None, {name: str(value) for name, value in fields.items()}, Config)


def train(run: Storage, steps: int, saved: int) -> None:
    """Do what a group of workers leaves: lines, and a checkpoint of step `saved`."""
    last, done = metrics.last(run), steps_done(run)
    attempt = last["attempt"] + 1 if last else 1
    kept = [line for line in metrics.read(run) if line["step"] <= done]
    new = [{**LINE, "step": step, "attempt": attempt} for step in range(done + 1, steps + 1)]
    text = "".join(json.dumps(line) + "\n" for line in [*kept, *new])
    Path(run.local_path(METRICS) or "").write_text(text)
    if saved > done:
        state = json.dumps({"data": {"files": "a"}}).encode()
        name = commit.claim(run, saved, state)
        Path(run.local_path(f"checkpoints/{name}/.metadata") or "").write_bytes(b"")
        digest = marker.Digest()
        digest.update(state)
        commit.commit(run, name, saved, state, {".metadata": marker.Digest().file()})


class Driver:
    """The driver's command on stand-ins: `work` is what the workers do before they end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.run = folder, open_storage(str(folder / "r"))
        self.files = "a"
        self.out = io.StringIO()
        self.work: Callable[[int], Any] = self.finish
        monkeypatch.setattr(command, "connected", lambda *options: nullcontext())
        monkeypatch.setattr(command, "uses_gpus", lambda config: False)
        monkeypatch.setattr(command.placement, "places", list)
        monkeypatch.setattr(command, "RayWorkers", lambda config: self)

    # The cluster, and its attempt.
    asked_for = nullcontext

    def wait_for_room(self, note: Any, check: Any) -> int:
        return 1

    def start(self, spec: Any, workers: int) -> Driver:
        self.steps = spec.order.num_steps
        return self

    def wait(self, seconds: float) -> bool:
        return True

    def outcome(self) -> Any:
        return self.work(self.steps)

    def end(self) -> None:
        pass

    def finish(self, steps: int) -> dict[str, Any]:
        """Train to the end and export."""
        if steps_done(self.run) < steps:
            train(self.run, steps, steps)
        step = steps_done(self.run)
        summary = {"status": DONE, "steps": step, "entered": 0.0, "seconds": {}, "stall_s": None}
        held_out = {"eval_loss": float(step), "eval_loss_per_byte": None}
        return {**summary, **held_out, "commit_s": None, "model_path": f"m{step}"}

    def __call__(self, config: Config) -> dict[str, Any]:
        class Ready(command.CheckedRun):
            parts = {"files": self.files}  # noqa: RUF012

        def prepare(ready: Any, *_: Any) -> Any:
            steps = ready.config.train.max_steps
            plan: Any = {"steps": steps, "fingerprint": "f", "parts": ready.parts}
            describe(ready.run, ready.config, plan)
            order = Order.for_steps(64, 4, 2, 3, steps)
            data = SimpleNamespace(held_out=0)
            return SimpleNamespace(config=ready.config, order=order, data=data), None

        kind = command.Kind(
            lambda config, *here: Ready(config, self.run), lambda ready, gpus: ready, prepare
        )
        self.out.truncate(0)
        result: Any = kind.run(config, Console(file=self.out, width=200))
        return dict(result)

    def state(self) -> dict[str, bytes]:
        return {name: self.run.read(name) for name in KEPT}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver whose run of 3 steps is done."""
    driver = Driver(tmp_path, monkeypatch)
    assert driver(config_of(tmp_path, 3))["status"] == DONE
    return driver


def stopped(driver: Driver) -> Any:
    driver.run.write(STOP, b"asked\n")
    return RuntimeError("ended")


def fails(driver: Driver) -> Any:
    return {"status": "failed", "reason": "no such weights"}


def dies(driver: Driver) -> None:
    raise Killed


@pytest.mark.parametrize("end", [stopped, fails, dies])
def test_a_longer_run_that_does_no_step_leaves_the_result(
    driver: Driver, end: Callable[[Driver], Any]
) -> None:
    before, first = driver.state(), config_of(driver.folder, 3)
    driver.work = lambda steps: end(driver)
    with nullcontext() if end is stopped else pytest.raises((RunFailed, Killed)):
        assert driver(config_of(driver.folder, 6))["status"] == STOPPED
    assert driver.state() == before
    driver.work = driver.finish
    again = driver(first)
    assert "already done" in driver.out.getvalue()
    assert (again["status"], again["model_path"], read(driver.run).status) == (DONE, "m3", DONE)
    assert driver.state() == before
    longer = driver(config_of(driver.folder, 6))
    assert (longer["steps"], longer["model_path"]) == (6, "m6")
    with pytest.raises(ConfigError, match=r"cannot shrink: .* has done 6 of a run of 6"):
        driver(first)


@contextmanager
def changes(count: int) -> Iterator[list[int]]:
    """Let a process change so many files before it dies; yield how many it has not."""
    left = [count]

    def counted(real: Any) -> Any:
        def change(self: Any, *given: Any) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return real(self, *given)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "create", "replace_if", "delete", "delete_if"):
            patch.setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))
        yield left


@pytest.mark.full
@pytest.mark.parametrize("new_steps", [0, 2, 3], ids=["before a step", "unsaved", "saved"])
def test_a_driver_may_be_killed_at_any_write(driver: Driver, new_steps: int) -> None:
    """Both commands find the run as its newest step has left it."""
    first, longer = config_of(driver.folder, 3), config_of(driver.folder, 6)
    finished, saved = driver.folder / "finished", 6 if new_steps == 3 else 3
    shutil.copytree(driver.folder / "r", finished)

    def work(steps: int) -> Any:
        train(driver.run, 3 + new_steps, saved)
        return driver.finish(steps) if new_steps == 3 else stopped(driver)

    for count in range(200):
        driver.work = work
        with changes(count) as left, suppress(Killed):
            driver(longer)
        (driver.folder / "r" / LEASE).unlink(missing_ok=True)
        killed = driver.folder / "killed"
        shutil.copytree(driver.folder / "r", killed, dirs_exist_ok=True)
        driver.work = driver.finish
        if steps_done(driver.run) == 3:
            again = driver(first)
            assert (again["status"], again["model_path"], again["steps"]) == (DONE, "m3", 3), count
            assert driver(first)["status"] == read(driver.run).status == DONE
        shutil.rmtree(driver.folder / "r")
        killed.rename(driver.folder / "r")
        result = driver(longer)
        assert (result["steps"], result["model_path"]) == (6, "m6"), count
        assert json.loads(driver.run.read("plan.json"))["steps"] == 6
        assert read(driver.run).status == DONE
        shutil.rmtree(driver.folder / "r")
        shutil.copytree(finished, driver.folder / "r")
        if left[0]:
            return
    raise AssertionError("the command has no end")


def test_other_data_are_refused_before_they_are_prepared_and_told_of_a_run_that_is_done(
    driver: Driver,
) -> None:
    before, driver.files = driver.state(), "b"
    driver.work = lambda steps: dies(driver)
    driver(config_of(driver.folder, 3))
    changed = "the data differ from those of the checkpoint at step 3: changed files"
    assert changed in driver.out.getvalue() and "already done" in driver.out.getvalue()
    with pytest.raises(ConfigError, match=f"run.name=r is taken: {changed}. Restore them, or set"):
        driver(config_of(driver.folder, 6))
    assert driver.state() == before and "preparing" not in driver.out.getvalue()
    shutil.rmtree(driver.folder / "r" / "checkpoints")
    driver(config_of(driver.folder, 3))
    assert "the data differ from those of the run: changed files" in driver.out.getvalue()


def test_before_a_checkpoint_a_run_may_have_other_data_and_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, monkeypatch)
    driver.work = lambda steps: (train(driver.run, 2, 0), fails(driver))[1]
    with pytest.raises(RunFailed, match="no such weights"):
        driver(config_of(tmp_path, 6))
    driver.work, driver.files = driver.finish, "b"
    assert driver(config_of(tmp_path, 4))["steps"] == 4
    assert json.loads(driver.run.read("plan.json"))["parts"] == {"files": "b"}


def test_the_result_of_a_shorter_run_is_no_end_of_a_longer_one(driver: Driver) -> None:
    """An earlier version wrote the longer run's config and plan, and kept the result."""
    longer = config_of(driver.folder, 6)
    driver.run.write("config.yaml", longer.to_yaml().encode())
    driver.run.write("plan.json", b'{"steps": 6}')
    assert driver(longer)["model_path"] == "m6"
    driver.run.write("config.yaml", config_of(driver.folder, 9).to_yaml().encode())
    driver.run.write("plan.json", b'{"steps": 9}')
    driver.run.write("result.json", b'{"status": "stopped", "steps": 6}')
    assert driver(longer)["status"] == DONE
