"""Gather the facts of the connected cluster: a probe on every node, then a group of workers.

    facts = survey(config, timeout_s=180.0)

Every wait has a limit: `timeout_s`, plus MARGIN_S for steps of the whole group. A node or worker
that has not answered by then becomes a Silence, and the survey goes on without it. Actors have hard
node affinity: one that cannot run on its node runs nowhere.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayapp.cluster.preflight.collectives import rounds
from rayapp.cluster.preflight.facts import (
    ClusterFacts,
    FactRow,
    GpuClock,
    Link,
    NodeReport,
    Rank,
    Silence,
)
from rayapp.cluster.preflight.node_probe import NodeProbe, versions
from rayapp.cluster.preflight.worker import Worker
from rayapp.config import Config, RunConfig
from rayapp.storage import StorageError, open_storage

CLOCK_ASKED = 5  # requests; the one with the shortest round trip counts
COLLECTIVES_S = 30.0  # for all collectives, or a third of timeout_s if that is less
MARGIN_S = 15.0  # the process group's own timeout (timeout_s) expires first: its error says more
WHERE_S = 5.0  # limit of quick questions: the clock, and where a worker is

T = TypeVar("T")


class Survey:
    """The silences and the durations of a survey so far."""

    def __init__(self, config: RunConfig, timeout_s: float) -> None:
        self.config, self.timeout_s = config, timeout_s
        self.silences: list[Silence] = []
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record how long a part of the survey takes, in seconds."""
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 2)

    def answers(
        self,
        asked: dict[str, ray.ObjectRef[T]],
        nodes: dict[str, str | None],
        step: str,
        timeout_s: float,
    ) -> dict[str, T]:
        """Return {name: answer} of those that answered; record a Silence of each that did not.

        `nodes` gives the node of each name, `step` says what was asked.
        """
        refs = list(asked.values())
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
        answers = dict[str, T]()
        for name, ref in asked.items():
            if ref not in ready:
                why = f"no answer within {timeout_s:.0f} s"
                self.silences.append(Silence(nodes[name], step, why))
                continue
            try:
                answers[name] = ray.get(ref, timeout=timeout_s)
            except RayError as error:
                self.silences.append(Silence(nodes[name], step, reason_of(error)))
        return answers


def survey(config: RunConfig, timeout_s: float) -> ClusterFacts:
    """Return all facts of the connected cluster."""
    seen = Survey(config, timeout_s)
    nodes = [
        NodeReport(
            entry["NodeID"],
            entry["NodeManagerAddress"],
            entry["NodeManagerHostname"],
            entry["Resources"],
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]
    with seen.part("nodes"):
        nodes = _look(seen, nodes)
    gpus = config.cluster.gpu != "false" and any(node.resources.get("GPU", 0) for node in nodes)
    answering = [node for node in nodes if node.facts is not None]
    places = [
        (node, lane)
        for node in answering
        for lane in range(
            int(node.resources.get("GPU", 0)) if gpus else int(node.resources.get("CPU", 0) >= 1)
        )
    ]
    shape, problem = _shape(config) if gpus else (None, None)
    with seen.part("workers"):
        ranks, rows, links = _work(seen, places, gpus, shape)
    return ClusterFacts(
        versions=versions(),
        backend="nccl" if gpus else "gloo",
        storage=config.run.storage,
        nodes=tuple(nodes),
        ranks=ranks,
        rows=tuple(rows),
        links=tuple(links),
        silences=tuple(seen.silences),
        model_problem=problem,
        seconds=seen.seconds,
    )


def _shape(config: RunConfig) -> tuple[Any, str | None]:
    """Return the config.json of a language model, or None and why it cannot be read."""
    if not isinstance(config, Config):
        return None, None
    from rayapp import model

    try:
        return model.resolve(config.model.path, model.SHAPE_PATTERNS).config, None
    except (ValueError, StorageError) as error:
        return None, str(error)


def _look(seen: Survey, nodes: Sequence[NodeReport]) -> list[NodeReport]:
    """Start a probe on each node; return the nodes with their facts, clocks and storage probes."""
    actors = {node.id: _actor(NodeProbe, node, num_cpus=0, max_concurrency=4) for node in nodes}
    home: dict[str, str | None] = {node.id: node.id for node in nodes}
    disk = _spill_folder()
    facts = {id: actor.facts.remote(disk) for id, actor in actors.items()}
    answered = seen.answers(facts, home, "starting a process and looking around", seen.timeout_s)
    alive = {id: actor for id, actor in actors.items() if id in answered}
    clocks = {id: _clock(actor) for id, actor in alive.items()}
    with _mark(seen.config.run.storage) as mark:
        asked = {
            id: actor.probe.remote(seen.config.run.storage, mark) for id, actor in alive.items()
        }
        probes = seen.answers(asked, home, "writing to run.storage", seen.timeout_s)
    for actor in actors.values():
        ray.kill(actor)
    return [
        replace(
            node,
            facts=answered.get(node.id),
            clock=clocks.get(node.id),
            probe=probes.get(node.id),
        )
        for node in nodes
    ]


def _spill_folder() -> str:
    """Return the folder that Ray spills objects to, the same path on all nodes."""
    local: Any = vars(ray._private.worker)["_global_node"]  # Ray has no public call for it
    return str(local.get_temp_dir_path())


def _clock(probe: Any) -> GpuClock | None:
    """Compare a node's clock with the driver's; None if the first request gets no answer."""
    best = None
    for _ in range(CLOCK_ASKED):
        started = time.time()
        try:
            node_s = ray.get(probe.clock.remote(), timeout=WHERE_S)
        except RayError:
            return best
        ended = time.time()
        clock = GpuClock(node_s - (started + ended) / 2, (ended - started) / 2)
        best = clock if best is None or clock.error_s < best.error_s else best
    return best


@contextmanager
def _mark(url: str) -> Iterator[str]:
    """Write a file that all nodes must see, yield its name (empty on failure), delete it after."""
    name = f"preflight-{uuid.uuid4().hex}/driver"
    storage = open_storage(url)
    try:
        storage.check_writable()
        storage.write(name, b"")
        written = True
    except (StorageError, OSError):  # the probes of the nodes report why
        written = False
    try:
        yield name if written else ""
    finally:
        with suppress(StorageError, OSError):  # the probes report this too
            storage.delete_tree(name.split("/")[0])


def _work(
    seen: Survey, places: Sequence[tuple[NodeReport, int]], gpus: bool, shape: Any
) -> tuple[tuple[Rank, ...], list[FactRow], list[Link]]:
    """Start a worker at each (node, lane) of `places`; measure devices, collectives and links.

    One worker of each node looks for the kernels of a model with the config `shape`. Workers that
    do not start or cannot measure their device are left out of the group.
    """
    need = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
    workers = {
        str(number): _actor(Worker, node, gpus, max_concurrency=2, **need)
        for number, (node, _) in enumerate(places)
    }
    home: dict[str, str | None] = {str(n): node.id for n, (node, _) in enumerate(places)}
    what = "a free GPU" if gpus else "a free CPU"
    try:
        asked = {name: worker.port.remote() for name, worker in workers.items()}
        ports = seen.answers(asked, home, f"starting a worker on {what}", seen.timeout_s)
        asked = {name: workers[name].speed.remote() for name in ports}
        speeds = seen.answers(asked, home, "measuring a device", seen.timeout_s)
        ranks = [
            Rank(number, places[int(name)][0].id, places[int(name)][1], speeds[name])
            for number, name in enumerate(speeds)
        ]
        group = [workers[name] for name in speeds]
        if shape is not None:
            _look_for_kernels(seen, ranks, group, shape)
        if len(group) < 2:
            return tuple(ranks), [], []
        first = next(iter(speeds))
        address = places[int(first)][0].address
        rows, links = _together(seen, ranks, group, address, ports[first])
        asked = {str(rank.rank): group[rank.rank].network.remote() for rank in ranks}
        networks = seen.answers(
            asked, {str(r.rank): r.node for r in ranks}, "reading NCCL's log", WHERE_S * 2
        )
        for rank in ranks:
            network, version = networks.get(str(rank.rank), (None, None))
            ranks[rank.rank] = replace(rank, network=network, nccl=version)
        return tuple(ranks), rows, links
    finally:
        for worker in workers.values():
            ray.kill(worker)


def _look_for_kernels(seen: Survey, ranks: list[Rank], group: Sequence[Any], shape: Any) -> None:
    """Put into the first rank of each node what kernels of the model's layers the node lacks."""
    first_of = {rank.node: rank.rank for rank in reversed(ranks)}
    asked = {id: group[rank].missing_kernels.remote(shape) for id, rank in first_of.items()}
    home: dict[str, str | None] = {id: id for id in asked}
    for id, missing in seen.answers(asked, home, "looking for kernels", seen.timeout_s).items():
        ranks[first_of[id]] = replace(ranks[first_of[id]], missing_kernels=missing)


def _together(
    seen: Survey, ranks: Sequence[Rank], group: Sequence[Any], address: str, port: int
) -> tuple[list[FactRow], list[Link]]:
    """Form the process group, then measure collectives and links; stop at a step that fails."""
    world, timeout_s = len(group), seen.timeout_s
    joined = [
        worker.join.remote(address, port, rank, world, timeout_s)
        for rank, worker in enumerate(group)
    ]
    if _all(seen, ranks, group, joined, "the group of workers") is None:
        return [], []
    budget_s = min(COLLECTIVES_S, timeout_s / 3)
    tables = _all(
        seen, ranks, group, [actor.collectives.remote(budget_s) for actor in group], "collectives"
    )
    if tables is None:
        return [], []
    lanes = {rank.node: [r.rank for r in ranks if r.node == rank.node] for rank in ranks}
    plan = rounds(list(lanes.values()))
    measured = _all(seen, ranks, group, [actor.links.remote(plan) for actor in group], "links")
    if measured is None:
        return tables[0], []
    together: dict[tuple[str, str], list[float]] = {}
    for rates in measured:
        for (sender, receiver), rate in rates.items():
            ends = (ranks[sender].node, ranks[receiver].node)
            together.setdefault(ends, []).append(rate)
    links = [Link(*ends, sum(each), len(each)) for ends, each in together.items()]
    return tables[0], links


def _all(
    seen: Survey, ranks: Sequence[Rank], group: Sequence[Any], refs: Sequence[Any], step: str
) -> list[Any] | None:
    """Return the answers of all workers, or None if any fails or does not answer.

    Then record Silences: of workers that do not even answer `where`; if all do, of those that have
    begun the fewest steps, as they hold up the others.
    """
    ready, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=seen.timeout_s + MARGIN_S)
    failed: dict[int, RayError] = {}
    for rank, ref in enumerate(refs):
        if ref in ready:
            try:
                ray.get(ref)
            except RayError as error:
                failed[rank] = error
    if not failed and not waiting:
        return list(ray.get(list(refs)))
    asked = [worker.where.remote() for worker in group]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=WHERE_S)
    steps: dict[int, tuple[int, str]] = {}
    for rank, ref in enumerate(asked):
        if ref not in ready:
            continue
        try:
            steps[rank] = ray.get(ref)
        except RayActorError:
            continue
    for rank in sorted(set(range(len(group))) - steps.keys()):
        why = reason_of(failed[rank]) if rank in failed else "it does not answer any more"
        seen.silences.append(Silence(ranks[rank].node, step, why))
    if len(steps) == len(group):  # all are alive: those with the fewest steps hold up the others
        least = min(number for number, _ in steps.values())
        for rank in sorted(rank for rank, (number, _) in steps.items() if number == least):
            why = reason_of(failed[rank]) if rank in failed else f"hangs for {seen.timeout_s:.0f} s"
            seen.silences.append(
                Silence(ranks[rank].node, step, f"rank {rank} at {steps[rank][1]}: {why}")
            )
    return None


def _actor(kind: type, node: NodeReport, *arguments: Any, **options: Any) -> Any:
    """Start an actor on this node and on no other."""
    affinity = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(kind).options(scheduling_strategy=affinity, **options).remote(*arguments)


def reason_of(error: RayError) -> str:
    """Return the first line of an error, of its cause if a task or method of an actor raised it."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        text = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(error)
    else:
        text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
