"""Start or connect to the Ray that a run uses, and find out what its machines can compute."""

from __future__ import annotations

import logging
import os
import signal
import threading
import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rayapp.config import ConfigError, RunConfig
from rayapp.jobs.package import QUIET
from rayapp.observe.events import job_config
from rayapp.observe.result import RunFailed

DATA_CPUS = 2  # logical CPUs beyond those of the workers, so that Ray Data is never starved
OBJECT_STORE_BYTES = 512 * 2**20  # of a Ray that is started here, without GPUs

ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    # By default the controller looks at its workers every 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Memory of unused objects is freed for reuse after 0.1 s instead of 1 s, so that a stream of
    # large blocks reuses pages that are already mapped (docs/decisions.md).
    "RAY_free_objects_period_milliseconds": "100",
    # How long a worker that is known to hang delays the next attempt.
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    **QUIET,
}

WITHOUT_BF16 = {"K80", "P4", "P100", "V100", "T4"}  # NVIDIA GPUs before Ampere, by Ray's names
TOKENS_LOGGER = "ray._private.authentication.authentication_token_setup"
TOKENS_ARE_USED = "Token authentication is enabled"  # a warning that asks the user for nothing
STARTS = 3  # of Ray on this machine, which gives each 30 s; a later one finds its files in memory
SLOW_START = "timed out during startup"  # part of Ray's error message (ray/_private/node.py)
NOBODY = "http://127.0.0.1:9"  # the discard service, which no machine runs

logger = logging.getLogger("rayapp.driver")


def tell_ray() -> None:
    """Set environment variables for Ray, unless the user has; call it before Ray is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def connected(config: RunConfig, address: str) -> Iterator[None]:
    """Connect to the cluster, or start Ray on this machine; disconnect or shut it down afterwards.

    A Ray that this process is connected to already is used, and stays connected.
    """
    import ray

    ours = not ray.is_initialized()
    if ours:
        _init(config, address)
    try:
        if not ours or address != "local":
            check_cluster(config)
        with _address_is_known():
            yield
    finally:
        if ours:
            ray.shutdown()


def _init(config: RunConfig, address: str) -> None:
    """Call ray.init, again while a local start times out."""
    import ray

    options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
    if address == "local":
        cores = os.cpu_count() or 1
        options |= {"num_cpus": max(cores, config.cluster.max_workers + DATA_CPUS)}
        if not gpus_here():
            options["object_store_memory"] = OBJECT_STORE_BYTES
    else:
        options["runtime_env"] = {"env_vars": _quiet_workers()}
    logging.getLogger(TOKENS_LOGGER).addFilter(
        lambda record: not record.getMessage().startswith(TOKENS_ARE_USED)
    )
    for attempt in range(1, STARTS + 1):
        try:
            with _signals_are_for_the_driver():
                ray.init(address=address, **options)
            break
        except Exception as error:  # Ray has no type for it
            if address != "local" or SLOW_START not in str(error):
                raise
            ray.shutdown()
            if attempt == STARTS:
                raise RunFailed(
                    f"Ray is slow to start on this machine: {STARTS} starts took more than 30 s "
                    "each, which Ray does not allow. Free its CPUs and disk, and run the same "
                    "command again"
                ) from error
            logger.warning("Ray took more than 30 s to start, trying again (%d)", attempt + 1)


@contextmanager
def _signals_are_for_the_driver() -> Iterator[None]:
    """Inside the block, let Ray start in sessions of its own, and set no handler of SIGTERM.

    A signal to the driver's process group (Ctrl-C, `timeout`, a batch system) then reaches the
    driver alone, which saves and ends Ray afterwards. The kernel still ends Ray's processes with
    the driver, as Ray asks it to (PR_SET_PDEATHSIG).
    """
    from ray._private import services, utils

    start: Any = services.ConsolePopen
    handle = utils.set_sigterm_handler
    services.ConsolePopen = partial(start, start_new_session=True)  # type: ignore[misc, assignment]
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = start, handle  # type: ignore[misc]
        if threading.current_thread() is threading.main_thread():
            # Ray's C++ has put its own handler before Python's, and ends the process after it.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _quiet_workers() -> dict[str, str]:
    """Return the variables that keep other lines out of workers' output on a cluster.

    Workers have the job's environment, not that of its driver; Ray refuses to be told twice.
    """
    told = (job_config().get("runtime_env") or {}).get("env_vars") or {}
    return {name: os.environ.get(name, value) for name, value in QUIET.items() if name not in told}


def end_workers() -> None:
    """End this process's Ray Train controllers and workers, and free what they hold.

    Workers end with their controller. A placement group that nobody removes lasts as long as the
    Ray job: after a group's start has failed, Ray Train removes none.
    """
    import ray
    from ray._private.state import state  # Ray Train hands out no handle of its controller
    from ray._private.worker import global_worker
    from ray.core.generated import gcs_pb2
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    worker: Any = global_worker
    tables: Any = gcs_pb2
    core, accessor = worker.core_worker, state._connect_and_get_accessor()
    actors = map(tables.ActorTableData.FromString, accessor.get_actor_table(None, None))
    me = core.get_worker_id().binary()
    controllers = {
        actor.actor_id: actor
        for actor in actors
        if actor.class_name == "TrainController" and actor.owner_address.worker_id == me
    }
    for identity, actor in controllers.items():
        if actor.state != tables.ActorTableData.DEAD:
            core.kill_actor(ray.ActorID(identity), True)
    kind = tables.PlacementGroupTableData
    for group in map(kind.FromString, accessor.get_placement_group_table()):
        if group.creator_actor_id in controllers and group.state != kind.REMOVED:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))


@contextmanager
def _address_is_known() -> Iterator[None]:
    """Give Ray Train's actors this Ray's address and the shutdown timeout of process groups.

    Ray Train's PlacementGroupCleaner asks the Ray that it finds on its machine whether the
    controller is alive. If it finds another Ray, which does not know the controller, it ends all
    workers. A Ray without a dashboard still names port 8265, which another Ray may own; with the
    address of a port that nobody listens on, the cleaner gets no answer and keeps watching.
    """
    import ray
    from ray._private.worker import get_dashboard_url
    from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

    known = {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_API_SERVER_ADDRESS": "" if get_dashboard_url() else NOBODY,  # "": use RAY_ADDRESS
    }
    before = {name: os.environ.get(name) for name in known}
    ENV_VARS_TO_PROPAGATE.update((*known, "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"))
    os.environ |= known
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def check_cluster(config: RunConfig) -> None:
    """Refuse more workers than the cluster has room for or can grow to.

    Raises:
        ConfigError: naming what is there.
    """
    import ray

    resources, limits = ray.cluster_resources(), most_resources()
    workers = config.cluster.min_workers
    asked = {name: each * workers for name, each in config.cluster.resources.items()}
    needed = {"CPU": float(workers + 1), **asked}
    if config.cluster.gpu == "true" or (config.cluster.gpu == "auto" and resources.get("GPU")):
        needed["GPU"] = float(workers)
    short = [
        f"{amount:g} {name} (it has {resources.get(name, 0):g})"
        for name, amount in needed.items()
        if amount > max(resources.get(name, 0), limits.get(name, 0))
    ]
    if short:
        why = f"it needs {', '.join(short)}. Set cluster.workers lower, or add nodes"
        what = f"cluster.workers={config.cluster.workers} is more than the cluster can place"
        raise ConfigError([f"{what}: {why}"])


def most_resources() -> Mapping[str, float]:
    """Return the resources that the cluster may grow to; empty without an autoscaler."""
    from ray._private.state import state  # no public call gives what an autoscaler may add

    return state.get_max_resources_from_cluster_config() or {}


def gpus_here() -> int:
    """Return the number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def uses_gpus(config: RunConfig) -> bool:
    """Say whether each worker on the connected Ray gets a GPU."""
    import ray

    if config.cluster.gpu != "auto":
        return config.cluster.gpu == "true"
    return ray.cluster_resources().get("GPU", 0) >= 1


def started_here() -> bool:
    """Say whether this process has started the Ray that it uses, on this machine."""
    from ray._private import worker

    node: Any = worker._global_node
    return node is not None and bool(node.is_head())


def threads(workers: int) -> dict[str, str]:
    """Return the variable that gives each of so many workers its share of this machine's cores.

    On a cluster it is empty: Ray gives a worker as many threads as CPUs (cluster.resources).
    """
    import torch

    if not started_here():
        return {}
    return {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // workers))}


def fastest_precision(gpus: bool) -> str:
    """Return the precision of `auto`: bf16 if all GPUs have it; on CPUs the faster by a test."""
    return "bf16" if (gpus_have_bf16() if gpus else _bf16_is_faster()) else "fp32"


def gpus_have_bf16() -> bool:
    """Say whether all GPUs of the connected Ray compute in bf16; GPUs before Ampere emulate it."""
    import ray

    there = {name.removeprefix("accelerator_type:") for name in ray.cluster_resources()}
    return not there & WITHOUT_BF16


def _bf16_is_faster() -> bool:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(1024, 256, dtype=dtype), torch.ones(256, 1024, dtype=dtype)
        sides = {"left": left, "right": right}
        seconds.append(min(timeit.repeat("left @ right", repeat=12, number=1, globals=sides)))
    torch.set_num_threads(threads)
    return seconds[1] < 0.8 * seconds[0]
