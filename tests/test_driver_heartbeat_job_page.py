"""What a driver writes into its job's record in Ray's key-value store."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ray._private.ray_constants import KV_NAMESPACE_JOB
from ray.dashboard.modules.job.common import JobInfo, JobInfoStorageClient, JobStatus
from ray.exceptions import RpcError
from ray.experimental import internal_kv

from rayapp.driver import heartbeat
from rayapp.driver.heartbeat import JobPage

asked: list[str] = []


def page_of(run_url: str = "runs/demo") -> JobPage:
    asked.clear()
    return JobPage("raysubmit_1", "demo", run_url, lambda: asked.append("stop"))


KEY = JobInfoStorageClient.JOB_DATA_KEY.format(job_id="raysubmit_1").encode()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Ray's store, with a job that `ray job submit` has sent, and a clock that stands still."""
    record = JobInfo(JobStatus.RUNNING, "python -m rayapp.finetune", metadata={"team": "x"})
    values = {KEY: json.dumps(record.to_json()).encode()}

    def put(key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        assert overwrite and namespace == KV_NAMESPACE_JOB
        values[key] = value

    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: values.get(key))
    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: 0.0)
    return values


def record(store: dict[bytes, bytes]) -> Any:
    return json.loads(store[KEY])


def test_a_job_gets_a_name_a_folder_and_how_far_it_is(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = page_of("s3://b/runs/demo")
    page.tell("tokenising a.txt")
    assert record(store)["message"] == "tokenising a.txt"
    assert record(store)["metadata"] == {
        "job_name": "demo",
        "rayapp.run": "s3://b/runs/demo",
        "team": "x",
    }
    page.tell("step 3/9, loss 2.1000")
    assert record(store)["message"] == "tokenising a.txt", "not more often than every 10 s"
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: 10.0)
    page.tell("step 4/9, loss 2.0000")
    assert record(store)["message"] == "step 4/9, loss 2.0000"
    assert JobInfo.from_json(record(store)).status == JobStatus.RUNNING  # Ray reads it


def test_a_name_that_was_given_stays(store: dict[bytes, bytes]) -> None:
    store[KEY] = json.dumps({**record(store), "metadata": {"job_name": "mine"}}).encode()
    page_of().tell("planning")
    assert record(store)["metadata"] == {"job_name": "mine", "rayapp.run": "runs/demo"}


def test_a_head_that_does_not_answer_ends_no_heartbeat(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(key: bytes, namespace: bytes) -> bytes:
        raise RpcError("the head is gone")

    monkeypatch.setattr(internal_kv, "_internal_kv_get", lost)
    page_of().tell("planning")
    assert "Ray's Jobs page does not show how far the run is: the head is gone" in caplog.text


@pytest.mark.parametrize("status", ["STOPPED", "FAILED", None])
def test_a_job_that_has_ended_is_not_changed(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    if status is None:
        del store[KEY]
    else:
        store[KEY] = json.dumps({**record(store), "status": status}).encode()
    before = dict(store)
    page = page_of()
    page.tell("planning")
    assert store == before
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: 10.0)
    page.tell("training")
    assert asked == (["stop"] if status == "STOPPED" else []), "Ray has missed this driver, once"


def test_a_store_that_fails_is_told_once(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(key: bytes, namespace: bytes) -> bytes:
        raise RuntimeError("the head is gone")

    monkeypatch.setattr(internal_kv, "_internal_kv_get", fail)
    page = page_of()
    for text in ("planning", "training"):
        page.tell(text)
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: 60.0)
    assert [line.message for line in caplog.records] == [
        "Ray's Jobs page does not show how far the run is: the head is gone"
    ]
