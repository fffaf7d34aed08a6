"""Drills on clusters of several nodes: one is taken away, lost, or comes, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drill import Drill, Undisturbed, assert_alike, worker_counts
from nodes import Node, join, seats
from patience import PATIENCE_S

pytestmark = pytest.mark.drill

# Longer than any of these drills, which stop when they have seen enough; slow enough in learning
# that another order of summing fp32 gradients stays within 1e-4 for so many steps.
LONG: dict[str, Any] = {"train.epochs": 40, "train.lr": 1e-4, "cluster.max_failures": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Undisturbed:
    return Undisturbed(folder)


def start(folder: Path, name: str, nodes: list[Node], workers: str) -> Drill:
    placed = {"cluster.address": nodes[0].address, "cluster.resources": "{seat: 1}"}
    return Drill(folder, name, {**LONG, **placed, "cluster.workers": workers})


def test_a_node_is_taken_away_and_another_comes(folder: Path, expected: Undisturbed) -> None:
    """SIGTERM to a node's `ray start`: saved within the notice, on with 1 worker, later with 2."""
    with seats(folder, 2) as nodes:
        drill = start(folder, "taken", nodes, "1:2")
        drill.wait_for_step(13)
        nodes[1].preempt()
        drill.wait_for(lambda line: line["workers"] == 1)
        join(nodes, folder)
        drill.stop_after_change(2)
    assert_alike(drill.lines(), expected(drill, 1))
    assert worker_counts(drill.lines()) == [2, 1, 2]
    taken, grown = drill.result()["interruptions"]
    assert (taken["kind"], taken["workers"], taken["lost_steps"]) == ("preemption", 2, 0), taken
    assert (grown["kind"], grown["workers"], grown["lost_steps"]) == ("resize", 1, 0), grown


def test_a_lost_node_is_left_behind(folder: Path, expected: Undisturbed) -> None:
    """SIGKILL to all of a node's processes: the other node goes on from the last checkpoint."""
    with seats(folder, 2) as nodes:
        drill = start(folder, "lost", nodes, "1:2")
        drill.wait_for_checkpoint(15)
        nodes[1].lose()
        drill.stop_after_change(1)
    assert_alike(drill.lines(), expected(drill, 1))
    workers = [line["workers"] for line in drill.lines()]
    assert worker_counts(drill.lines()) == [2, 1]
    (loss,) = drill.result()["interruptions"]
    assert loss["kind"] == "failure" and workers.count(2) % 10 == 0, loss


def test_three_nodes_shrink_to_two_and_grow_again(folder: Path, expected: Undisturbed) -> None:
    """One of three is lost; the run goes on with two, and with three once another has come."""
    with seats(folder, 3) as nodes:
        drill = start(folder, "three", nodes, "1:3")
        drill.wait_for_checkpoint(15)
        nodes[2].lose()
        drill.wait_for(lambda line: line["workers"] == 2)
        join(nodes, folder)
        drill.stop_after_change(3)
    assert_alike(drill.lines(), expected(drill, 1))
    assert worker_counts(drill.lines()) == [3, 2, 3]
    lost, grown = drill.result()["interruptions"]
    assert (lost["kind"], lost["workers"]) == ("failure", 3), lost
    assert (grown["kind"], grown["workers"], grown["lost_steps"]) == ("resize", 2, 0), grown


def test_a_lost_head_ends_the_command_and_another_cluster_goes_on(
    folder: Path, expected: Undisturbed
) -> None:
    """SIGKILL to the head, on which the driver is: the same command on a new cluster resumes."""
    with seats(folder, 2) as nodes:
        first = start(folder, "headless", nodes, "2")
        first.wait_for_checkpoint(15)
        nodes[0].lose()
        assert first.process.wait(timeout=PATIENCE_S) not in (0, 2, 3), first.log.read_text()
    with seats(folder, 2) as nodes:
        second = start(folder, "headless", nodes, "2")
        second.wait_for_step(30)
        second.stop()
    assert_alike(second.lines(), expected(second, 1))
    kept = [line["attempt"] for line in second.lines()].count(1)
    assert kept >= 10 and kept % 10 == 0
