"""Count how many workers a cluster has room for, and wait until there is room for enough.

Room is counted node by node from what is free, so that other jobs keep theirs. Nodes that do not
answer or are being drained do not count. One CPU of the whole cluster is left free for data tasks.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from rayapp.config import INSTANCE_LABEL, MARKET_LABEL, ConfigError, Described, Place, RunConfig
from rayapp.driver.ray_session import most_resources, uses_gpus

POLL_S = 1.0
SETTLE_S = 5.0  # room for fewer than all must stay the same this long: nodes come and go in groups
NOTE_EVERY_S = 10.0
ENDLESS_S = 30.0
CONNECT_S = 2.0
PROBES = 32  # nodes that are probed at once
SHOWN_COMMAND = 80  # characters


def needs(config: RunConfig) -> dict[str, float]:
    """Return the Ray resources that one worker needs, by name."""
    gpu = {"GPU": 1.0} if uses_gpus(config) else {}
    return {"CPU": 1.0, **gpu, **config.cluster.resources}


def fit_in(free: Mapping[str, Mapping[str, float]], need: Mapping[str, float]) -> int:
    """Return how many workers fit into the free resources of the nodes and leave one CPU free.

    >>> fit_in({"a": {"CPU": 4.0}, "b": {"CPU": 1.5}}, {"CPU": 1.0})
    4
    >>> fit_in({"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 8.0}}, {"CPU": 1.0, "GPU": 1.0})
    2
    """
    asked = {name: amount for name, amount in need.items() if amount > 0}
    workers = sum(
        min(math.floor(node.get(name, 0.0) / amount + 1e-9) for name, amount in asked.items())
        for node in free.values()
    )
    cpus = sum(node.get("CPU", 0.0) for node in free.values())
    return max(0, min(workers, math.floor((cpus - 1.0) / need["CPU"] + 1e-9)))


def free_workers(config: RunConfig) -> int:
    """Return how many more workers the cluster has room for."""
    import ray
    from ray._private.state import state  # no public call gives the free resources of each node

    draining = state.get_draining_nodes()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]
    free = state.available_resources_per_node()
    with ThreadPoolExecutor(PROBES, thread_name_prefix="probe") as pool:
        replies = list(pool.map(answers, nodes))
    there = {node["NodeID"] for node, reply in zip(nodes, replies, strict=True) if reply}
    return fit_in({name: node for name, node in free.items() if name in there}, needs(config))


def answers(node: Mapping[str, Any]) -> bool:
    """Say whether a node accepts a connection; Ray takes 15 s to notice that a node lost power."""
    place = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(place, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def places() -> list[Place]:
    """Return the instance type and market of each node that is up, by its labels, if it has them.

    The nodes of a cluster that is rendered for a list of instance types have them.
    """
    import ray

    labels = [node.get("Labels", {}) for node in ray.nodes() if node["Alive"]]
    return [(each[INSTANCE_LABEL], each[MARKET_LABEL]) for each in labels if INSTANCE_LABEL in each]


def on_what_is_there(config: Described) -> Described:
    """Return the config with the first of cluster.instance's list that is up, for a plan of it.

    It stays as it is where none is up, or where it names no list.
    """
    if len(config.cluster.choices) < 2:
        return config
    there = places()
    both = zip(config.cluster.choices, config.alternatives(), strict=True)
    return next((each for choice, each in both if choice.place in there), config)


def is_elastic(config: RunConfig) -> bool:
    """Say whether the number of workers may change while a run lasts."""
    return config.cluster.min_workers != config.cluster.max_workers


@contextmanager
def asked_for(config: RunConfig) -> Iterator[None]:
    """Inside the block, ask the autoscaler for the largest number of workers of an elastic run."""
    if not is_elastic(config):
        yield
        return
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[needs(config)] * config.cluster.max_workers)
    try:
        yield
    finally:
        request_resources(bundles=[])


def wait_for_room(config: RunConfig, note: Callable[[str], None], check: Callable[[], None]) -> int:
    """Wait until enough workers fit, and return how many to start.

    A run with a fixed number of workers meanwhile holds a placement group for them, so that an
    autoscaler makes room. `note` is told what fits and who holds the rest, at first and every
    NOTE_EVERY_S seconds, while it waits. `check` is called every POLL_S seconds and may end the
    wait by raising.

    Raises:
        ConfigError: the wait would have no end.
    """
    least, most = config.cluster.min_workers, config.cluster.max_workers
    seen, since, noted = -1, time.monotonic(), -math.inf
    wanted = f"{'at least ' * is_elastic(config)}{least} worker{'s' * (least > 1)}"
    endless = refusing_endless_waits(config)
    with ExitStack() as stack:
        placed: Callable[[], bool] | None = None
        while True:
            now, free = time.monotonic(), min(free_workers(config), most)
            if free != seen:
                seen, since = free, now
            if seen == most or (seen >= least and now - since >= SETTLE_S):
                return seen
            if seen < least:
                if placed is None and not is_elastic(config):
                    placed = stack.enter_context(demand(config, least))
                if placed is not None and placed():
                    return least
                endless()
                if now - noted >= NOTE_EVERY_S:
                    noted = now
                    note(f"{seen} of {wanted} fit; {taken()}")
            check()
            time.sleep(POLL_S)


def refusing_endless_waits(config: RunConfig) -> Callable[[], None]:
    """Return a function for a run that waits: it raises ConfigError if no room will ever come.

    It must be so for ENDLESS_S: another trial may be about to end.
    """
    since = math.inf

    def check() -> None:
        nonlocal since
        problem, now = never(config), time.monotonic()
        since = min(since, now) if problem else math.inf
        if problem and now - since >= ENDLESS_S:
            raise ConfigError([problem])

    return check


def never(config: RunConfig) -> str | None:
    """Return why no room can come: actors that wait as this one does hold it; None if it can.

    These are the trials of Ray Tune, which wait for their runs, or any actors of one class.
    """
    import ray

    context = ray.get_runtime_context()
    me = context.get_actor_id()
    if me is None:  # a driver, which holds nothing
        return None
    actors = {actor.actor_id.hex(): actor for actor in _alive_actors()}
    kind = [(each.job_id, each.class_name) for each in (actors[me], *actors.values())]
    alike, mine = kind.count(kind[0]) - 1, context.get_assigned_resources()
    whole, limits = ray.cluster_resources(), most_resources()
    workers = config.cluster.min_workers
    for name, amount in needs(config).items():
        needed = amount * workers + (name == "CPU")
        there, held = max(whole.get(name, 0.0), limits.get(name, 0.0)), mine.get(name, 0.0)
        if held and there - alike * held < needed:
            few = math.floor((there - needed) / held)
            fix = f"max_concurrent_trials={few} in tune.TuneConfig, or " if few > 0 else ""
            return (
                f"cluster.workers={config.cluster.workers} will never have room: {alike} trials "
                f"that wait as this one does hold {alike * held:g} of {there:g} {name}s, and a run "
                f"needs {needed:g} beside them. Set {fix}fewer {name}s for a trial, as in "
                f"tune.with_resources(trial, {{{name!r}: 0.1}})"
            )
    return None


@contextmanager
def demand(config: RunConfig, workers: int) -> Iterator[Callable[[], bool]]:
    """Inside the block, ask Ray for a placement group with room for so many workers and one CPU.

    Yields a function that says whether Ray has reserved the room. The end of the block gives the
    room back, so that the workers can take it.
    """
    import ray

    group = ray.util.placement_group([needs(config)] * workers + [{"CPU": 1.0}])
    try:
        yield lambda: bool(group.wait(0))
    finally:
        ray.util.remove_placement_group(group)


def taken() -> str:
    """Say how much of the cluster is taken, and by which jobs."""
    import ray

    whole, free = ray.cluster_resources(), ray.available_resources()
    amounts = [
        f"{whole[name] - free.get(name, 0.0):g} of {whole[name]:g} {name}s"
        for name in ("CPU", "GPU")
        if whole.get(name)
    ]
    jobs = holders()
    by = f" by {', '.join(jobs)}" if jobs else ""
    return f"{' and '.join(amounts) or 'no CPU is there, and none'} are taken{by}"


def holders() -> list[str]:
    """Return the jobs whose actors hold CPUs or GPUs, each by its name, else its id or command."""
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    table: Any = gcs_pb2
    holding = {
        actor.job_id
        for actor in _alive_actors()
        if any(name.startswith(("CPU", "GPU")) for name in actor.required_resources)
    }
    holders, accessor = [], state._connect_and_get_accessor()
    for raw in accessor.get_job_table(
        skip_submission_job_info_field=True, skip_is_running_tasks_field=True
    ):
        job = table.JobTableData.FromString(raw)
        if job.job_id in holding:
            metadata = job.config.metadata
            name = metadata.get("job_name") or metadata.get("job_submission_id")
            holders.append(f"job {name}" if name else f"`{job.entrypoint[:SHOWN_COMMAND]}`")
    return holders


def _alive_actors() -> list[Any]:
    from ray._private.state import state  # the public API needs a dashboard
    from ray.core.generated import gcs_pb2

    table: Any = gcs_pb2
    found = state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    return [*map(table.ActorTableData.FromString, found)]
