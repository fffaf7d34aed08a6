"""Drills on a cluster of containers, each started from a rendered file: what a node can suffer.

Each container has its own address, limits and disk; S3 is Ceph's. A run that goes on is compared,
step by step, with one that nothing happened to. Each prints its row of docs/cluster_drills.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ceph import KEYS, Ceph
from ceph import missing as ceph_missing
from conftest import new_bucket
from container_clusters import ContainerCluster, Job, Watch
from containers import Container, Network, missing
from drill import Undisturbed, assert_alike, worker_counts
from image import ROOT, unpacked
from image import missing as image_missing

pytestmark = [pytest.mark.drill, pytest.mark.timeout(3600)]

LONG: dict[str, Any] = {"train.epochs": 200, "train.lr": 1e-4, "cluster.max_failures": 5}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if absent := [*missing(), *image_missing(), *ceph_missing()]:
        pytest.fail(f"no {', '.join(absent)} here: .ci/run names Debian's packages")
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
def s3(network: Network) -> Iterator[Ceph]:
    """Ceph at this machine's address on the containers' network, whose keys are those of moto."""
    with Ceph(network.address) as server, pytest.MonkeyPatch.context() as variables:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            variables.delenv(name)
        for name, value in of_s3(server).items():
            variables.setenv(name, value)
        yield server


def of_s3(server: Ceph) -> dict[str, str]:
    region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    return {**KEYS, **region, "AWS_ENDPOINT_URL_S3": server.url}


@pytest.fixture(scope="module")
def image() -> Path:
    return unpacked(ROOT / "build" / "image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("containers")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Undisturbed:
    return Undisturbed(folder)


@pytest.fixture(scope="module")
def storage(s3: Ceph) -> str:
    return f"s3://{new_bucket(s3.url)}/runs"


class Ground:
    """A cluster with two workers at the start of each drill, as a service keeps them."""

    def __init__(self, platform: str, image: Path, network: Network, s3: Ceph) -> None:
        self._asked = (platform, image, network, of_s3(s3))
        self.renew()

    def renew(self) -> None:
        """Start a new cluster."""
        self.cluster = ContainerCluster(*self._asked)
        self.cluster.start("head")
        self.watch = Watch(self.cluster.head)

    def workers(self) -> list[Container]:
        """Return two that run; start them where there are fewer, after a drill that failed anew."""
        if any(run.process.poll() is None for run in self.cluster.runs):
            self.cluster.end()
            self.renew()
        lost = [one for one in self.cluster.containers if one.process.poll() is not None]
        for one in lost:
            one.end()
            self.cluster.containers.remove(one)
        while len(self.cluster.containers) < 3:
            self.cluster.start("worker")
        return self.cluster.containers[1:]


@pytest.fixture(scope="module")
def ground(image: Path, network: Network, s3: Ceph) -> Iterator[Ground]:
    ground = Ground("ecs", image, network, s3)
    try:
        yield ground
    finally:
        ground.cluster.end()


def row(what: str, run: Job, since: float, noticed: float | None) -> None:
    """Print a line of the table: steps lost, seconds until it is noticed and until a new step."""
    before = max(line["attempt"] for line in run.lines() if line["time"] < since)
    later = [line["time"] for line in run.lines() if line["attempt"] > before]
    lost = sum(event["lost_steps"] or 0 for event in run.result()["interruptions"])
    seconds = "-" if noticed is None else f"{noticed - since:.0f}"
    first = f"{later[0] - since:.0f}" if later else "-"
    print(f"| {what} | {lost} | {seconds} | {first} | yes |")


@pytest.mark.parametrize("how", ["kill", "lose"])
def test_a_worker_is_lost(
    how: str, ground: Ground, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """SIGKILL to a container, whose host tells so; a host whose power fails, of which none does."""
    workers = ground.workers()
    run = Job(ground.cluster, folder, how, storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    getattr(workers[1], how)()
    run.stop_after_change(1)
    assert_alike(run.lines(), expected(run, 1))
    assert worker_counts(run.lines()) == [2, 1]
    what = {"kill": "a worker's container is killed", "lose": "a worker's host loses power"}[how]
    row(what, run, since, ground.watch.fell_at(since))
    assert [event["kind"] for event in run.result()["interruptions"]] == ["failure"]


def test_a_worker_is_taken_away(
    ground: Ground, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """SIGTERM as ECS sends it after a spot notice: saved, and the container ends by itself."""
    workers = ground.workers()
    run = Job(ground.cluster, folder, "spot", storage, LONG)
    run.wait_for_step(13)
    since = time.time()
    seconds = workers[1].stop()
    assert seconds < workers[1].spec.stop_s, workers[1].said()
    run.stop_after_change(1)
    assert_alike(run.lines(), expected(run, 1))
    (taken,) = run.result()["interruptions"]
    assert (taken["kind"], taken["lost_steps"]) == ("preemption", 0), taken
    row(f"SIGTERM, a spot notice's end; it left after {seconds:.0f} s", run, since, taken["time"])
