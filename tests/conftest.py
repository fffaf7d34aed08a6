"""Fixtures that several test files share: S3 servers on loopback, and fresh buckets on them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ceph import KEYS, Ceph, missing
from patience import PATIENCE_S

# Ray's workers are nice by default and would starve beside tests that are not.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112, Ray has it so

CEPH = pytest.param("ceph", marks=pytest.mark.full)

# Seconds since 1970 until which tests that `make test` leaves out begin. `.ci/run` sets it, which
# ends after a fixed time on machines of any speed.
UNTIL = float(os.environ.get("FULL_TESTS_UNTIL", "inf"))

# What takes minutes goes first, so that the workers of pytest-xdist end together.
LONG = (
    "test_drills.py",
    "test_drills_nodes.py",
    "test_vision_drills.py",
    "test_infra.py",
    "test_bench_gpu.py",
    "test_examples.py",
    "test_jobs_notebook.py",
    "test_cluster_dashboards.py",
    "test_finetune.py",
    "test_ray_job.py",
    "test_finetune_model_parts.py",
    "test_train_loop.py",
    "test_reference.py",
    "test_vision.py",
    "test_preflight.py",
    "test_generation.py",
    "test_model.py",
)
APART = (
    "test_drills.py",
    "test_drills_nodes.py",
    "test_examples.py",
    "test_ray_job.py",
    "test_reference.py",
    "test_vision_drills.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep the tests of a file on one worker, which then makes its fixtures once; not the long.

    A test ends after 5 minutes (pyproject.toml); those that `make test` leaves out may take more.
    """
    if item.path.name not in APART and item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(item.path.name))
    if any(item.get_closest_marker(name) for name in ("full", "drill", "image")):
        item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(trylast=True)  # after `-m` has left out what does not run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by LONG; the other way round where time may run out."""
    order = {name: place for place, name in enumerate(LONG)}
    limited = math.isfinite(UNTIL) and all(item.get_closest_marker("full") for item in items)
    items.sort(key=lambda item: order.get(item.path.name, len(order)), reverse=limited)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin too late, before its fixtures are made."""
    if item.get_closest_marker("full") and time.time() > UNTIL:
        pytest.skip("no time is left on this machine (FULL_TESTS_UNTIL); `make test-full` runs it")


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it has just ended
        return []


def is_connected() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


@pytest.fixture(autouse=True)
def no_ray_outlives_its_test() -> Iterator[None]:
    """Fail a test that has started a Ray, as each call of Ray's API does where none is.

    Its mode of authentication would be that of all later ones in this process.
    """
    before = is_connected()
    yield
    if is_connected() and not before:
        sys.modules["ray"].shutdown()
        pytest.fail("a Ray was started, and not ended")


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    """Kill the runs that a test which failed has left, and the Ray of each."""
    yield
    for process in psutil.Process().children():
        if {"rayapp.finetune", "rayapp.vision"} & {*command_of(process)}:
            for each in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait(timeout=PATIENCE_S)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Run moto's S3 server on a free port, point the AWS_ variables at it, yield its URL."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    # S3 decides an If-None-Match in one instant; moto's threads look, and write a moment later.
    one_at_a_time, put_object = threading.Lock(), S3Response.put_object

    def put_in_turn(self: S3Response) -> Any:
        with one_at_a_time:
            return put_object(self)

    S3Response.put_object = put_in_turn
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for name in before:
        del os.environ[name]
    os.environ |= {
        **KEYS,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
    }
    yield f"http://{host}:{port}"
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= before
    server.stop()
    S3Response.put_object = put_object


@pytest.fixture(scope="session")
def ceph() -> Iterator[Ceph]:
    """Start Ceph's gateway; its keys are those of moto's server."""
    if absent := missing():
        pytest.skip(f"Ceph is not installed here: no {', '.join(absent)}")
    with Ceph() as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server: str) -> str:
    """Create an empty bucket and return its name."""
    return new_bucket(s3_server)


@pytest.fixture
def ceph_bucket(s3_server: str, ceph: Ceph, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create an empty bucket on Ceph, point the AWS_ variables there, and return its name."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": ceph.url}.items():
        monkeypatch.setenv(name, value)
    return new_bucket(ceph.url)


@pytest.fixture(params=["moto", CEPH])
def either_bucket(request: pytest.FixtureRequest) -> str:
    """Create an empty bucket on each S3 server in turn, and return its name."""
    name = "s3_bucket" if request.param == "moto" else "ceph_bucket"
    return str(request.getfixturevalue(name))


@pytest.fixture(params=["local", "moto", CEPH])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty folder: of this machine, then of each S3 server."""
    if request.param == "local":
        return str(tmp_path / "store")
    name = "s3_bucket" if request.param == "moto" else "ceph_bucket"
    return f"s3://{request.getfixturevalue(name)}"


def new_bucket(endpoint: str) -> str:
    """Create a bucket of a name that no other has."""
    import boto3

    name = f"test-{uuid.uuid4().hex}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=name)
    return name
