"""Where Ray Train stores its own files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from aws_config import endpoint_in_config

from rayapp.driver import ray_workers
from rayapp.driver.ray_workers import ray_storage
from rayapp.storage import open_input, open_storage


def test_an_endpoint_in_the_config_file_holds_for_ray_train_too(
    s3_server: str, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Train's context as its controller makes it, in another process than the trainer."""
    from ray.train.v2._internal.execution.storage import StorageContext, delete_fs_path

    endpoint_in_config(s3_server, tmp_path, monkeypatch)
    url = f"s3://{s3_bucket}/runs/.ray"
    filesystem, path = pickle.loads(pickle.dumps(ray_storage(url)))
    context = StorageContext(path, "demo", storage_filesystem=filesystem)
    marker = [".validate_storage_marker"]
    for folder in (open_storage(f"{url}/demo"), open_input(f"{url}/demo")):
        assert [entry.name for entry in folder.list()] == marker
    open_storage(url).write("demo/state", b"by another process")
    with filesystem.open_input_stream(f"{context.experiment_fs_path}/state") as stream:
        assert stream.read() == b"by another process"
    delete_fs_path(filesystem, context.experiment_fs_path)
    assert open_storage(url).list() == []


@pytest.mark.parametrize("own", [None, *ray_workers.ALLOCATOR])
def test_segments_of_gpus_are_expandable_unless_the_user_says_otherwise(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ray_workers.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(own, "max_split_size_mb:64")
    told = ray_workers.environment(gpus=True, workers=2)
    assert told.get("PYTORCH_ALLOC_CONF") == (None if own else "expandable_segments:True")
    on_cpus = ray_workers.environment(gpus=False, workers=2)
    assert (
        "PYTORCH_ALLOC_CONF" not in on_cpus and on_cpus.keys() > ray_workers.CPU_ENVIRONMENT.keys()
    )


def test_a_local_folder_needs_no_file_system(tmp_path: Path) -> None:
    assert ray_storage(f"{tmp_path}/runs/.ray") == (None, f"{tmp_path}/runs/.ray")
