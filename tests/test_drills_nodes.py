"""Drills on a cluster of two nodes: one is taken away, lost, or comes back, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from nodes import Node, cluster
from test_drills import TEXT, Drill, Lines, assert_alike

# Long enough for a node to come back; slow enough in learning that another order of summing fp32
# gradients stays within 1e-4 for so many steps.
LONG = {"train.epochs": 12, "train.lr": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Lines:
    """The run of one worker that nothing happens to."""
    drill = Drill(folder, "undisturbed", 1, **LONG)
    drill.end(0)
    return drill.lines()


@pytest.fixture
def nodes(folder: Path) -> Iterator[list[Node]]:
    with cluster(folder) as nodes:
        nodes.append(Node(folder / "second.log", cpus=1, seats=1, head=nodes[0]))
        yield nodes


def start(folder: Path, name: str, nodes: list[Node]) -> Drill:
    """Run 1 to 2 workers, of which each node can hold one."""
    return Drill(
        folder,
        name,
        "1:2",
        max_failures=1,
        **LONG,
        **{"cluster.address": nodes[0].address, "cluster.resources": "{seat: 1}"},
    )


def test_a_node_is_taken_away_and_another_comes(
    folder: Path, nodes: list[Node], undisturbed: Lines
) -> None:
    """SIGTERM to a node's `ray start`: saved within the notice, on with 1 worker, later with 2."""
    drill = start(folder, "taken", nodes)
    drill.wait_for_step(13)
    nodes[1].preempt()
    drill.wait_for(lambda line: line["workers"] == 1)
    nodes.append(Node(folder / "third.log", cpus=1, seats=1, head=nodes[0]))
    drill.end(0)
    lines = drill.lines()
    assert_alike(lines, undisturbed)
    assert [workers for workers, _ in groupby(line["workers"] for line in lines)] == [2, 1, 2]
    taken, grown = drill.result()["interruptions"]
    assert (taken["kind"], taken["workers"], taken["lost_steps"]) == ("preemption", 2, 0), taken
    assert (grown["kind"], grown["workers"], grown["lost_steps"]) == ("resize", 1, 0), grown


@pytest.mark.drill
def test_a_lost_node_is_left_behind(folder: Path, nodes: list[Node], undisturbed: Lines) -> None:
    """SIGKILL to all of a node's processes: the other node goes on from the last checkpoint."""
    drill = start(folder, "lost", nodes)
    drill.wait_for_step(15)
    nodes[1].lose()
    drill.end(0)
    lines = drill.lines()
    assert_alike(lines, undisturbed)
    workers = [line["workers"] for line in lines]
    assert workers == sorted(workers, reverse=True) and set(workers) == {1, 2}
    (loss,) = drill.result()["interruptions"]
    assert loss["kind"] == "failure" and workers.count(2) % 10 == 0, loss
