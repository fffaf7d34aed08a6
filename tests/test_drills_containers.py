"""Drills on a cluster of containers, each started from a rendered file: what a node can suffer.

Each container has its own address, limits and disk; S3 is Ceph's. A run that goes on is compared,
step by step, with one that nothing happened to. Each prints its row of docs/cluster_drills.md.
"""

from __future__ import annotations

import itertools
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

from rayapp.train.checkpoint.marker import latest

pytestmark = [pytest.mark.drill, pytest.mark.timeout(3600)]

STILL_S = 10.0  # a step here takes less than one
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


def row(what: str, run: Job, since: float, noticed: float | None, lost: int | None = None) -> None:
    """Print a line of the table: steps lost, seconds until it is noticed and until a new step.

    The steps lost are those of result.json, if `lost` is not given: a dead driver writes none.
    """
    times = [line["time"] for line in run.lines()]
    # The first step after the longest time without one; none if training never stood still.
    longest, first = max((b - a, b) for a, b in itertools.pairwise(times) if b > since)
    resumed = f"{first - since:.0f}" if longest > STILL_S else "-"
    if lost is None:
        lost = sum(event["lost_steps"] or 0 for event in run.result()["interruptions"])
    seconds = "-" if noticed is None else f"{noticed - since:.0f}"
    print(f"| {what} | {lost} | {seconds} | {resumed} | yes |")


@pytest.mark.parametrize("how", ["kill", "lose", "cut"])
def test_a_worker_is_lost(
    how: str, ground: Ground, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """SIGKILL to a container, whose host tells so; a host without power; one without network.

    The last lives on: what it does once its network is back changes nothing, and Ray ends it.
    """
    workers = ground.workers()
    run = Job(ground.cluster, folder, how, storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    getattr(workers[1], how)()
    run.wait_for(lambda line: line["workers"] == 1)
    if how == "cut":
        workers[1].plug()
        workers[1].process.wait(PATIENCE_S)
    run.wait_for_step(run.lines()[-1]["step"] + 10)
    run.stop()
    assert_alike(run.lines(), expected(run, 1))
    assert worker_counts(run.lines()) == [2, 1]
    what = {
        "kill": "a worker's container is killed",
        "lose": "a worker's host loses power",
        "cut": "a worker's network is cut; it lives on, and is plugged in again later",
    }
    row(what[how], run, since, ground.watch.fell_at(since))
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


def test_packets_are_lost(
    ground: Ground, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """One packet in a hundred, on all three: TCP sends it again."""
    ground.workers()
    run = Job(ground.cluster, folder, "packets", storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    for container in ground.cluster.containers:
        container.drop(0.01)
    run.wait_for_step(run.lines()[-1]["step"] + 30)
    run.stop()
    ground.cluster.end()
    ground.renew()
    assert_alike(run.lines(), expected(run, 1))
    assert worker_counts(run.lines()) == [2] and run.result()["interruptions"] == []
    row("1 % of all packets are lost", run, since, None)


def test_memory_runs_out(ground: Ground, folder: Path, storage: str, expected: Undisturbed) -> None:
    """The kernel kills the training worker of one container, whose node lives on."""
    workers = ground.workers()
    run = Job(ground.cluster, folder, "memory", storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    workers[1].exhaust_memory()
    run.wait_for(lambda line: line["attempt"] > 1)
    run.wait_for_step(run.lines()[-1]["step"] + 10)
    run.stop()
    workers[1].end()
    assert_alike(run.lines(), expected(run, 1))
    (killed,) = run.result()["interruptions"]
    assert killed["kind"] == "failure" and "memory" in (killed["reason"] or ""), killed
    row("a container is at its memory limit", run, since, killed["time"])


def test_a_disk_is_full(ground: Ground, folder: Path, storage: str, expected: Undisturbed) -> None:
    """A worker's container writes no byte more; what training writes goes to S3."""
    ground.workers()[1].end()
    ground.cluster.containers.pop()
    small = ground.cluster.start("worker", disk_mib=400)
    run = Job(ground.cluster, folder, "disk", storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    small.fill_disk()
    run.wait_for_step(run.lines()[-1]["step"] + 20)
    run.stop()
    small.end()
    assert_alike(run.lines(), expected(run, 1))
    assert worker_counts(run.lines()) == [2] and run.result()["interruptions"] == []
    row("a worker's disk is full", run, since, None)


@pytest.mark.parametrize("seconds", [30, 150])
@pytest.mark.parametrize("restarts", [False, True], ids=["run", "restart"])
def test_s3_answers_nothing(
    seconds: int,
    restarts: bool,
    ground: Ground,
    s3: Ceph,
    folder: Path,
    storage: str,
    expected: Undisturbed,
) -> None:
    """For a while; also as a worker is lost, so that the run has to start again without S3."""
    workers = ground.workers()
    name = f"paused-{seconds}-{'restart' if restarts else 'run'}"
    run = Job(ground.cluster, folder, name, storage, LONG)
    run.wait_for_checkpoint(15)
    since = time.time()
    with s3.paused():
        if restarts:
            workers[1].kill()
        time.sleep(seconds)
    if restarts:
        run.wait_for(lambda line: line["workers"] == 1)
    run.wait_for(lambda line: line["time"] > since + seconds)
    run.wait_for_step(run.lines()[-1]["step"] + 10)
    run.stop()
    assert_alike(run.lines(), expected(run, 1))
    assert worker_counts(run.lines()) == ([2, 1] if restarts else [2])
    what = f"S3 answers nothing for {seconds} s"
    row(what + (" as a worker's container is killed" if restarts else ""), run, since, None)


def test_the_head_is_lost(
    ground: Ground, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """The driver is on it: the same command on a new cluster goes on."""
    ground.workers()
    run = Job(ground.cluster, folder, "head", storage, LONG)
    run.wait_for_checkpoint(15)
    since, reached = time.time(), run.lines()[-1]["step"]
    ground.cluster.head.lose()
    ground.cluster.end()
    ground.renew()
    ground.workers()
    again = Job(ground.cluster, folder, "head", storage, LONG)
    again.wait_for_step(run.lines()[-1]["step"] + 10)
    again.stop()
    assert_alike(again.lines(), expected(again, 1))
    row(
        "the head's host loses power; the command is given again on a new cluster",
        again,
        since,
        None,
        reached - [line["attempt"] for line in again.lines()].count(1),
    )


def test_two_clusters_have_one_run(
    ground: Ground,
    image: Path,
    network: Network,
    s3: Ceph,
    folder: Path,
    storage: str,
    expected: Undisturbed,
) -> None:
    """The second is refused while the first is at work, and takes over once it is cut off."""
    ground.workers()
    run = Job(ground.cluster, folder, "both", storage, LONG)
    run.wait_for_checkpoint(15)
    with ContainerCluster("ecs", image, network, of_s3(s3)) as second:
        second.start("head")
        second.start("worker")
        refused = Job(second, folder, "both", storage, LONG)
        assert refused.process.wait(PATIENCE_S) != 0
        assert "run.name=both is running" in refused.log.read_text()
        since, reached = time.time(), run.lines()[-1]["step"]
        for container in ground.cluster.containers:
            container.cut()
        other = Job(second, folder, "both", storage, {**LONG, "cluster.workers": 1})
        other.wait_for_step(run.lines()[-1]["step"] + 10)
        for container in ground.cluster.containers:
            container.plug()
        other.wait_for_step(run.lines()[-1]["step"] + 10)
        other.stop()
        assert_alike(other.lines(), expected(other, 1))
        lost = reached - [line["attempt"] for line in other.lines()].count(1)
        what = "all hosts of a cluster are cut off; another takes the run over"
        row(what, other, since, None, lost)
    ground.cluster.end()
    ground.renew()


def saved(run: Job) -> int:
    """Return the step of the run's newest checkpoint."""
    found, _ = latest(run.run)
    return 0 if found is None else found.step


def test_pods_are_deleted_and_killed(
    image: Path, network: Network, s3: Ceph, folder: Path, storage: str, expected: Undisturbed
) -> None:
    """Pods as KubeRay makes them of a rendered RayCluster: the operator replaces one that is gone.

    One is deleted, as a drain of its node does it: SIGTERM and its grace period. The run goes on
    with the other, takes the new pod in, and loses that one by SIGKILL.
    """
    with ContainerCluster("kuberay", image, network, of_s3(s3)) as cluster:
        cluster.start("head")
        workers = [cluster.start("worker") for _ in range(2)]
        watch = Watch(cluster.head)
        run = Job(cluster, folder, "pods", storage, LONG)
        run.wait_for_checkpoint(15)
        deleted = time.time()
        seconds = workers[1].stop()
        assert seconds < workers[1].spec.stop_s, workers[1].said()
        run.wait_for(lambda line: line["workers"] == 1)
        alone = run.lines()[-1]["attempt"]
        replacement = cluster.start("worker")
        run.wait_for(lambda line: line["attempt"] > alone and line["workers"] == 2)
        both, reached = (run.lines()[-1][name] for name in ("attempt", "step"))
        run.wait_until(lambda: saved(run) > reached)
        killed = time.time()
        replacement.kill()
        run.wait_for(lambda line: line["attempt"] > both and line["workers"] == 1)
        run.wait_for_step(run.lines()[-1]["step"] + 10)
        run.stop()
        assert_alike(run.lines(), expected(run, 1))
        assert worker_counts(run.lines()) == [2, 1, 2, 1]
        taken, *moved, died = run.result()["interruptions"]
        assert (taken["kind"], taken["lost_steps"]) == ("preemption", 0), taken
        assert [event["lost_steps"] for event in moved] == [0] * len(moved), moved
        assert died["kind"] == "failure", died
        told = f"a pod is deleted; it left after {seconds:.0f} s, and another takes its place"
        row(told, run, deleted, taken["time"], 0)
        row("that pod is killed", run, killed, watch.fell_at(killed), died["lost_steps"])
