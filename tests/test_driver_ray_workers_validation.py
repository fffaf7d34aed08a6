"""What the driver does about checkpoints that are validated beside training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from rayapp.config import load
from rayapp.driver import ray_workers as validation
from rayapp.driver.ray_workers import Validator
from rayapp.observe.goodput import DamagedFile
from rayapp.observe.run_folder import VALIDATIONS
from rayapp.storage import open_storage


@pytest.mark.parametrize("error", [RayError("no answer"), RuntimeError("no answer")])
def test_a_cluster_that_does_not_say_its_room_ends_no_training(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def free_workers(config: object) -> int:
        raise error

    newest = SimpleNamespace(step=3, name="step-00000003")
    monkeypatch.setattr(validation, "VALIDATION_POLL_S", 0.0)
    monkeypatch.setattr(validation, "newest_committed", lambda run: newest)
    monkeypatch.setattr(validation.placement, "free_workers", free_workers)
    spec: Any = SimpleNamespace(config=load())
    Validator(spec, open_storage(str(tmp_path)), print).poll()
    assert [each.getMessage() for each in caplog.records] == [
        "cannot look for checkpoints to validate: no answer"
    ]


def test_a_checkpoint_is_validated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an earlier command has done it: a cluster is asked for room only for a newer one."""
    run, asked = open_storage(str(tmp_path)), list[int]()
    run.write(VALIDATIONS, b'{"step": 3}\n')
    newest = SimpleNamespace(step=3, name="step-00000003")
    monkeypatch.setattr(validation, "VALIDATION_POLL_S", 0.0)
    monkeypatch.setattr(validation, "newest_committed", lambda run: newest)
    monkeypatch.setattr(
        validation.placement, "free_workers", lambda config: asked.append(newest.step)
    )
    spec: Any = SimpleNamespace(config=load())
    validator = Validator(spec, run, print)
    validator.poll()
    assert not asked
    newest.step = 4
    validator.poll()
    assert asked == [4]


def test_a_validation_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec: Any = SimpleNamespace(config=load())
    validator, ended = Validator(spec, open_storage(str(tmp_path)), print), list[object]()
    validator.close()  # there is none
    validator._task = task = object()
    monkeypatch.setattr(ray, "wait", lambda tasks, timeout: ([], tasks))
    monkeypatch.setattr(ray, "cancel", lambda task, force: ended.append(task))
    validator.close()
    assert ended == [task]
    assert caplog.messages == ["a checkpoint was not validated: it took 300 s after training"]


def test_a_damaged_file_of_validations_is_named(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    spec: Any = SimpleNamespace(config=load())
    for line in (b"not JSON", b"[]", b"{}", b'{"step": "x"}'):
        run.write(VALIDATIONS, b'{"step": 1}\n' + line + b"\n")
        with pytest.raises(DamagedFile, match=r"validation\.jsonl is damaged: line 2: "):
            Validator(spec, run, print)
