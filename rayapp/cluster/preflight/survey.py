"""Gather the facts of the connected cluster: a probe on every node, then a group of workers.

Every wait has a limit: `timeout_s`, plus MARGIN_S for the whole group. A node or worker that has
not answered by then becomes a Silence, and the survey goes on without it. Actors have hard node
affinity: one that cannot run on its node runs nowhere.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayapp.cluster.preflight.facts import (
    AllReduce,
    ClockOffset,
    ClusterFacts,
    Link,
    NodeReport,
    Rank,
    Silence,
)
from rayapp.cluster.preflight.group_worker import GroupMeasurement, GroupWorker, rounds
from rayapp.cluster.preflight.node_probe import NodeProbe, versions
from rayapp.config import Config, RunConfig
from rayapp.observe.attempts import reason_of
from rayapp.storage import StorageError, open_storage

CLOCK_ASKED = 5  # requests; the one with the shortest round trip counts
MARGIN_S = 15.0  # the process group's own timeout (timeout_s) expires first: its error says more
WHERE_S = 5.0  # limit of quick questions: the clock, and where a worker is

T = TypeVar("T")


def survey(config: RunConfig, timeout_s: float) -> ClusterFacts:
    """Return all facts of the connected cluster."""
    silences = list[Silence]()
    told = ("NodeID", "NodeManagerAddress", "NodeManagerHostname", "Resources")
    alive = (node for node in ray.nodes() if node["Alive"])
    nodes = [NodeReport(*(node[name] for name in told)) for node in alive]
    nodes = _look(nodes, config.run.storage, timeout_s, silences)
    kind = "GPU" if any(node.resources.get("GPU", 0) for node in nodes) else "CPU"
    kind = "CPU" if config.cluster.gpu == "false" else kind
    places = list[NodeReport]()
    for node in nodes:
        count = int(node.resources.get(kind, 0)) if node.facts is not None else 0
        places += [node] * (count if kind == "GPU" else min(count, 1))
    shape, problem = _shape(config) if kind == "GPU" else (None, None)
    ranks, reduced, links = _work(places, kind, shape, timeout_s, silences)
    return ClusterFacts(
        versions=versions(),
        backend="nccl" if kind == "GPU" else "gloo",
        storage=config.run.storage,
        nodes=tuple(nodes),
        ranks=tuple(ranks),
        all_reduce=reduced,
        links=tuple(links),
        silences=tuple(silences),
        model_problem=problem,
    )


def _shape(config: RunConfig) -> tuple[Any, str | None]:
    """Return the config.json of a language model, or None and why it cannot be read."""
    if not isinstance(config, Config):
        return None, None
    from rayapp.model.source import SHAPE_PATTERNS, resolve

    try:
        return resolve(config.model.path, SHAPE_PATTERNS).config, None
    except (ValueError, StorageError) as error:
        return None, str(error)


def _answers(
    asked: Sequence[tuple[NodeReport, ray.ObjectRef[T]]],
    step: str,
    timeout_s: float,
    silences: list[Silence],
) -> list[T | None]:
    """Return the answer of each; None, and a Silence, where there is none in time."""
    refs = [ref for _, ref in asked]
    ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
    answers = list[T | None]()
    for node, ref in asked:
        answer, why = None, f"no answer within {timeout_s:.0f} s"
        if ref in ready:
            try:
                answer = ray.get(ref, timeout=timeout_s)
            except RayError as error:
                why = reason_of(error)
        if answer is None:
            silences.append(Silence(node.id, step, why))
        answers.append(answer)
    return answers


def _look(
    nodes: Sequence[NodeReport], storage: str, timeout_s: float, silences: list[Silence]
) -> list[NodeReport]:
    actors = [_actor(NodeProbe, node, num_cpus=0, max_concurrency=4) for node in nodes]
    local: Any = vars(ray._private.worker)["_global_node"]  # Ray has no public call for it
    disk = str(local.get_temp_dir_path())  # Ray spills there, on all nodes
    asked = [(node, actor.facts.remote(disk)) for node, actor in zip(nodes, actors, strict=True)]
    facts = _answers(asked, "starting a process and looking around", timeout_s, silences)
    found = dict(zip((node.id for node in nodes), nodes, strict=True))
    alive = list[tuple[NodeReport, Any]]()
    for node, actor, fact in zip(nodes, actors, facts, strict=True):
        if fact is not None:
            found[node.id] = replace(node, facts=fact, clock=_clock(actor))
            alive.append((node, actor))
    with _driver_file(storage) as mark:
        asked = [(node, actor.probe.remote(storage, mark)) for node, actor in alive]
        probes = _answers(asked, "writing to run.storage", timeout_s, silences)
    for (node, _), probe in zip(alive, probes, strict=True):
        found[node.id] = replace(found[node.id], probe=probe)
    for actor in actors:
        ray.kill(actor)
    return list(found.values())


def _clock(probe: Any) -> ClockOffset | None:
    best = None
    for _ in range(CLOCK_ASKED):
        started = time.time()
        try:
            node_s = ray.get(probe.clock.remote(), timeout=WHERE_S)
        except RayError:
            return best
        ended = time.time()
        clock = ClockOffset(node_s - (started + ended) / 2, (ended - started) / 2)
        best = clock if best is None or clock.error_s < best.error_s else best
    return best


@contextmanager
def _driver_file(url: str) -> Iterator[str]:
    """Write a file that all nodes must see, yield its name (empty on failure), delete it after."""
    name = f"preflight-{uuid.uuid4().hex}/driver"
    storage, written = open_storage(url), False
    with suppress(StorageError, OSError):  # the probes of the nodes report why
        storage.check_writable()
        storage.write(name, b"")
        written = True
    try:
        yield name if written else ""
    finally:
        with suppress(StorageError, OSError):  # the probes report this too
            storage.delete_tree(name.split("/")[0])


def _work(
    places: Sequence[NodeReport], kind: str, shape: Any, timeout_s: float, silences: list[Silence]
) -> tuple[list[Rank], AllReduce | None, list[Link]]:
    """Start a worker for each entry of `places`; measure devices, an all-reduce and links.

    One worker of each node looks for the kernels of a model with the config `shape`. Workers that
    do not start or cannot measure their device are left out of the group.
    """
    need = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1}
    workers = [
        _actor(GroupWorker, node, kind == "GPU", max_concurrency=2, **need) for node in places
    ]
    try:
        asked = [(node, one.start.remote()) for node, one in zip(places, workers, strict=True)]
        what = f"starting a worker on a free {kind}, and measuring it"
        started = _answers(asked, what, timeout_s, silences)
        ranks, group, first = list[Rank](), list[Any](), None
        for node, worker, answer in zip(places, workers, started, strict=True):
            if answer is not None:
                port, speed = answer
                first = first or f"{node.address}:{port}"
                ranks.append(Rank(len(ranks), node.id, speed))
                group.append(worker)
        if shape is not None:
            nodes = {node.id: node for node in places}
            firsts = {rank.node: rank.rank for rank in reversed(ranks)}  # the first of each node
            looks = [(nodes[i], group[n].missing_kernels.remote(shape)) for i, n in firsts.items()]
            found = _answers(looks, "looking for kernels", timeout_s, silences)
            missing = dict(zip(firsts.values(), found, strict=True))
            ranks = [replace(one, missing_kernels=missing.get(one.rank) or ()) for one in ranks]
        if len(group) < 2:
            return ranks, None, []
        lanes = {rank.node: [r.rank for r in ranks if r.node == rank.node] for rank in ranks}
        plan = rounds(list(lanes.values()))
        size = len(group)
        refs = [one.together.remote(first, n, size, timeout_s, plan) for n, one in enumerate(group)]
        measured = _together(ranks, group, refs, timeout_s, silences)
    finally:
        for worker in workers:
            ray.kill(worker)
    if not measured:
        return ranks, None, []
    together = dict[tuple[str, str], list[float]]()
    for one in measured:
        for (sender, receiver), rate in one.links.items():
            together.setdefault((ranks[sender].node, ranks[receiver].node), []).append(rate)
    links = [Link(*ends, sum(rates), len(rates)) for ends, rates in together.items()]
    both = zip(ranks, measured, strict=True)
    ranks = [replace(rank, network=one.network, nccl=one.nccl) for rank, one in both]
    return ranks, measured[0].all_reduce, links


def _together(
    ranks: Sequence[Rank],
    group: Sequence[Any],
    refs: Sequence[ray.ObjectRef[GroupMeasurement]],
    timeout_s: float,
    silences: list[Silence],
) -> list[GroupMeasurement]:
    """Return the answers of all workers; none if any fails or does not answer.

    Then record Silences: of workers that do not even answer `where`; if all do, of those that have
    begun the fewest steps, as they hold up the others.
    """
    failed, answers = dict[int, str](), list[GroupMeasurement]()
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s + MARGIN_S)
    for rank, ref in enumerate(refs):
        try:
            if ref in ready:
                answers.append(ray.get(ref))
        except RayError as error:
            failed[rank] = reason_of(error)
    if len(answers) == len(refs):
        return answers
    asked = [worker.where.remote() for worker in group]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=WHERE_S)
    steps = dict[int, tuple[int, str]]()
    for rank, ref in enumerate(asked):
        with suppress(RayActorError):  # it has ended: it is named below
            if ref in ready:
                steps[rank] = ray.get(ref)
    said = {
        rank: failed.get(rank, "it does not answer any more")
        for rank in range(len(group))
        if rank not in steps
    }
    least = min((number for number, _ in steps.values()), default=0)
    said = said or {
        rank: f"rank {rank} at {step}: {failed.get(rank, f'hangs for {timeout_s:.0f} s')}"
        for rank, (number, step) in sorted(steps.items())
        if number == least
    }
    step = "measuring with the others"
    silences += [Silence(ranks[rank].node, step, why) for rank, why in said.items()]
    return []


def _actor(kind: type, node: NodeReport, *arguments: Any, **options: Any) -> Any:
    affinity = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(kind).options(scheduling_strategy=affinity, **options).remote(*arguments)
