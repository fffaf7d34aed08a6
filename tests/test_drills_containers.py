"""Drills on a cluster of containers, each started from a rendered file: what a node can suffer.

Each container has its own address, limits and disk; S3 is Ceph's. A run that goes on is compared,
step by step, with one that nothing happened to. Each drill prints its row of docs/ecs.md.
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
from patience import PATIENCE_S
from takeover import files_of

from rayapp.observe.run_folder import CHECKPOINTS
from rayapp.train.checkpoint.marker import latest

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


def test_pods_of_kuberay_lose_one(
    image: Path, network: Network, s3: Ceph, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """A pod is deleted, which is SIGTERM to its container. Before the other drills' cluster."""
    ground = Ground("kuberay", image, network, s3)
    try:
        workers = ground.workers()
        run = Job(ground.cluster, folder, "pods", storage, LONG)
        run.wait_for_step(13)
        since = time.time()
        seconds = workers[1].stop()
        assert seconds < workers[1].spec.stop_s, workers[1].said()
        run.stop_after_change(1)
    finally:
        ground.cluster.end()
    assert_alike(run.lines(), expected(run, 1))
    (taken,) = run.result()["interruptions"]
    assert (taken["kind"], taken["lost_steps"]) == ("preemption", 0), taken
    row(f"a pod of KubeRay is deleted; it left after {seconds:.0f} s", run, since, taken["time"])


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


def test_a_node_that_is_cut_off_lives_on_and_writes_nothing(
    ground: Ground, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """Its cable is cut; the other one goes on. Back again, it ends without having written."""
    workers = ground.workers()
    run = Job(ground.cluster, folder, "cut", storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    workers[1].cut()
    noticed = ground.watch.fell_at(since)
    assert workers[1].process.poll() is None, "it lives on"
    run.wait_for(lambda line: line["workers"] == 1)
    saved = latest(run.run)[0]
    assert saved is not None
    name = f"{CHECKPOINTS}/step-{saved.step:08d}/"
    before = {path: tag for path, tag in files_of(run.run).items() if path.startswith(name)}
    workers[1].heal()
    workers[1].process.wait(PATIENCE_S)
    after = files_of(run.run)
    assert before and all(after.get(path, tag) == tag for path, tag in before.items())
    run.stop()
    assert_alike(run.lines(), expected(run, 1))
    row("a worker's network is cut", run, since, noticed)


@pytest.mark.parametrize("seconds", [30, 150])
def test_s3_hangs(
    seconds: int, ground: Ground, folder: Path, s3: Ceph, storage: str, expected: Undisturbed
) -> None:
    """The server takes connections and answers nothing; longer than a lease lasts, too."""
    ground.workers()
    run = Job(ground.cluster, folder, f"hang-{seconds}", storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    s3.pause()
    time.sleep(seconds)
    s3.resume()
    run.wait_for(lambda line: line["time"] > since + seconds + 5.0)
    run.stop()
    lines = run.lines()
    assert_alike(lines, expected(run, 2))
    during = sum(since < line["time"] < since + seconds for line in lines)
    row(f"S3 hangs for {seconds} s; {during} steps meanwhile", run, since, None)


def test_s3_hangs_while_the_run_starts_again(
    ground: Ground, folder: Path, s3: Ceph, storage: str, expected: Undisturbed
) -> None:
    """A worker is killed, and S3 hangs for 30 s from then on."""
    workers = ground.workers()
    run = Job(ground.cluster, folder, "hang-restart", storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    s3.pause()
    workers[1].kill()
    time.sleep(30)
    s3.resume()
    run.stop_after_change(1)
    assert_alike(run.lines(), expected(run, 1))
    noticed = ground.watch.fell_at(since)
    row("a worker's container is killed, and S3 hangs for 30 s", run, since, noticed)


def test_packets_are_lost(
    ground: Ground, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """Each worker loses 1 % of what comes in: the run is slower, and nothing else."""
    workers = ground.workers()
    for worker in workers:
        worker.network.drop(worker.space, 0.01)
    try:
        run = Job(ground.cluster, folder, "loss", storage, LONG)
        run.wait_for_checkpoint(40)
        run.stop()
    finally:
        for worker in workers:
            worker.network.drop(worker.space, 0.01, "-D")
    assert_alike(run.lines(), expected(run, 2))
    assert run.result()["interruptions"] == []
    row("1 % of the packets are lost", run, run.lines()[0]["time"] + 1.0, None)


def test_another_cluster_is_refused(
    image: Path,
    network: Network,
    s3: Ceph,
    folder: Path,
    storage: str,
    ground: Ground,
    expected: Undisturbed,
) -> None:
    """The same run on a second cluster: the first one's lease is renewed, so it is refused."""
    ground.workers()
    run = Job(ground.cluster, folder, "twice", storage, LONG)
    run.wait_for_step(3)
    since = time.time()
    with ContainerCluster("ecs", image, network, of_s3(s3)) as other:
        other.start("head")
        other.start("worker")
        second = Job(other, folder, "twice", storage, {**LONG, "cluster.workers": 1})
        assert second.process.wait(PATIENCE_S) != 0
        told = time.time()
    assert "run.name=twice is running: " in second.log.read_text().replace("\n", " ")
    run.wait_for(lambda line: line["time"] > told)
    run.stop()
    assert_alike(run.lines(), expected(run, 2))
    assert {line["attempt"] for line in run.lines()} == {1}
    row("the same run is sent to a second cluster: refused", run, since, None)


def test_the_head_is_lost(
    ground: Ground, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """The driver is on it: the same command on a new cluster goes on."""
    ground.workers()
    first = Job(ground.cluster, folder, "headless", storage, LONG)
    first.wait_for_checkpoint(15)
    since = time.time()
    ground.cluster.head.lose()
    ground.cluster.end()
    ground.renew()
    ground.workers()
    second = Job(ground.cluster, folder, "headless", storage, LONG)
    second.wait_for(lambda line: line["attempt"] > 1)
    second.wait_for_step(second.lines()[-1]["step"] + 10)
    second.stop()
    assert_alike(second.lines(), expected(second, 2))
    kept = [line["attempt"] for line in second.lines()].count(1)
    assert kept >= 10 and kept % 10 == 0
    row("the head is lost, the command given again on a new cluster", second, since, None)
