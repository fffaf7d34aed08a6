"""Run the tasks of a preparation by Ray Data.

for task in run_tasks(recipes, url, tasks, concurrency): ...     # as they end
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rayapp.config import DATA_LABEL
from rayapp.data import sources

LOST = "lost"
NODE_LABEL = "ray.io/node-id"  # which Ray gives to each node
MAX_ATTEMPTS = 4  # times that preparing a unit may kill its process


class Task(Protocol):
    """A part of a preparation that one process does."""

    @property
    def source(self) -> int:
        """The number of its recipe."""

    def place(self, recipe: Any) -> str:
        """Return what it reads, for messages."""

    def run(self, recipe: Any, url: str, folder: str) -> None:
        """Do it by its recipe, for a folder of rows or of an index below `url`."""


AnyTask = TypeVar("AnyTask", bound=Task)


def run_tasks(
    recipes: Sequence[Any],
    url: str,
    tasks: Sequence[AnyTask],
    concurrency: int | None,
    num_cpus: float | None = None,
) -> Iterator[AnyTask]:
    """Run tasks by Ray Data, which begins them in their order, and yield them as they end.

    `recipes` are of rows, or of an index of images. Each task reserves `num_cpus` in Ray, by
    default one. They run on the nodes that prepare data, if the cluster has such, and on others
    where these are busy or gone. Tasks that reserve nothing are at most as many at once as these
    nodes have CPUs; without such nodes they run where workers do.

    Raises:
        SourceError: of a task, or it ended every process that ran it.
    """
    if not tasks:
        return
    import ray.data

    # With the folder of its rows, whose name is made from the files too.
    light = [(_without_files(recipe), recipe.fingerprint) for recipe in recipes]

    def work(row: dict[str, Any]) -> dict[str, Any]:
        if _attempts() >= MAX_ATTEMPTS:  # Ray itself retries without limit
            return {"number": row["number"], "problem": LOST}
        task: AnyTask = pickle.loads(row["task"])
        try:
            recipe, folder = light[task.source]
            task.run(recipe, url, folder)
        except sources.SourceError as error:  # Ray Data would wrap it
            return {"number": row["number"], "problem": str(error)}
        return {"number": row["number"], "problem": ""}

    items = [{"number": n, "task": pickle.dumps(task)} for n, task in enumerate(tasks)]
    dataset = ray.data.from_items(items, override_num_blocks=len(items))
    where, cpus = _on_data_nodes()
    if num_cpus == 0 and cpus:
        concurrency = min(concurrency or cpus, cpus)
    elif num_cpus == 0:
        where = on_workers_nodes()
    mapped = dataset.map(work, concurrency=concurrency, num_cpus=num_cpus, **where)
    # By default Ray Data fails after 30 minutes without a result; one file may take longer.
    mapped.context.execution_no_progress_timeout_s = -1
    for row in mapped.iter_rows():
        task = tasks[row["number"]]
        if row["problem"] == LOST:
            raise sources.SourceError(
                f"{task.place(recipes[task.source])} cannot be prepared: the process that reads it "
                f"died {MAX_ATTEMPTS} times, as when its memory is full. Split the large records "
                "there, or leave them out"
            )
        if row["problem"]:
            raise sources.SourceError(row["problem"])
        yield task


def on_workers_nodes() -> dict[str, Any]:
    """Return options for tasks that reserve no CPU: they run on the nodes that train, if they can.

    Ray would spread them over all nodes. A head without CPUs, where the drivers are, and the nodes
    that prepare data get none.
    """
    nodes = _nodes()
    return _first(*_not_on([node for node in nodes if not _cpus(node) or _prepares_data(node)]))


def _on_data_nodes() -> tuple[dict[str, Any], int]:
    """Return options for tasks on the nodes that prepare data, and their CPUs; ({}, 0) for none."""
    nodes = _nodes()
    there = [node for node in nodes if _prepares_data(node)]
    if not there:
        return {}, 0
    heads = [node for node in nodes if not _cpus(node)]
    return _first(dict([DATA_LABEL]), *_not_on(heads)), int(sum(map(_cpus, there)))


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _cpus(node: Mapping[str, Any]) -> float:
    return float(node["Resources"].get("CPU", 0))


def _prepares_data(node: Mapping[str, Any]) -> bool:
    return DATA_LABEL in node["Labels"].items()


def _not_on(nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the labels of all nodes but these, as a list of one; empty if there are none."""
    names = ",".join(node["NodeID"] for node in nodes)
    return [{NODE_LABEL: f"!in({names})"}] if names else []


def _first(*labels: dict[str, str]) -> dict[str, Any]:
    """Return options by which Ray takes a node with the first labels that one can be had for."""
    if not labels:
        return {}
    others = [{"label_selector": each} for each in (*labels[1:], {})]
    return {"label_selector": labels[0], "fallback_strategy": others}


def _without_files(recipe: Any) -> Any:
    """Drop the lists of files, which may be long: a unit names its own."""
    held_out = replace(recipe.eval_source, files=()) if recipe.eval_source else None
    return replace(recipe, source=replace(recipe.source, files=()), eval_source=held_out)


def _attempts() -> int:
    """Return how often the current Ray task was started before, on any machine."""
    from ray._private.worker import global_worker  # no public API has it

    worker: Any = global_worker
    return int(worker.core_worker.get_current_task_attempt_number())
