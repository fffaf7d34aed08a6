"""Which nodes of a cluster run the tasks of a preparation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Node
from patience import PATIENCE_S

pytestmark = pytest.mark.full
TASKS = """
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from rayapp.data.ray_tasks import run_tasks


@dataclass
class Task:
    number: int
    seconds: float = 0.5
    source: int = 0

    def run(self, recipe, url, folder):
        time.sleep(self.seconds)
        node = ray.get_runtime_context().get_node_id()
        (Path(url) / str(self.number)).write_text(node)


@dataclass(frozen=True)
class Source:
    files: tuple = ()


@dataclass(frozen=True)
class Recipe:
    source: Source = Source()
    eval_source: None = None
    fingerprint: str = "rows"


if __name__ == "__main__":
    import tasks  # the class as the nodes import it

    address, folder, count, cpus = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    labels = {each["NodeID"]: each["Labels"].get("rayapp/group", "-") for each in ray.nodes()}
    todo = [tasks.Task(number) for number in range(int(count))]
    list(run_tasks([tasks.Recipe()], folder, todo, None, None if cpus == "1" else 0))
    for number in range(int(count)):
        print("ran on", labels[(Path(folder) / str(number)).read_text()])
"""


def groups(folder: Path, address: str, count: int, cpus: int) -> Counter[str]:
    """Return how many tasks ran on nodes of each group, where each reserves so many CPUs."""
    written = folder / "written"
    written.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(folder / "tasks.py"), address, str(written), str(count), str(cpus)],
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": path(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    return Counter(line.split()[-1] for line in lines if line.startswith("ran on"))


def path(folder: Path) -> str:
    return f"{folder}:{Path(__file__).parents[1]}"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Node]]:
    """A head that has no CPU for tasks, a node for workers, and one that prepares data."""
    nodes: dict[str, Node] = {}
    try:
        for group, cpus in (("head", 0), ("workers", 3), ("data", 4)):
            nodes[group] = Node(
                tmp_path / f"{group}.log",
                cpus=cpus,
                seats=0,
                head=nodes.get("head"),
                variables={"PYTHONPATH": path(tmp_path)},
                more=[f"--labels=rayapp/group={group}"],
            )
        yield nodes
    finally:
        for node in reversed(nodes.values()):
            node.end()


def test_tasks_run_where_data_is_prepared_and_never_beside_the_driver(
    nodes: dict[str, Node], tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    address = nodes["head"].address
    assert groups(tmp_path, address, 12, cpus=0) == {"data": 12}
    reserving = groups(tmp_path, address, 12, cpus=1)
    assert reserving["data"] >= 4 and reserving["workers"] > 0  # they help where it is busy
    nodes["data"].lose()
    assert groups(tmp_path, address, 6, cpus=0) == {"workers": 6}
