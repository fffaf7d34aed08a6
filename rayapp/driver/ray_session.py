"""The Ray that a run uses: started here, or connected to; and what it has to compute with."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rayapp.config import ConfigError, RunConfig
from rayapp.jobs.package import QUIET
from rayapp.observe.result import RunFailed

DATA_CPUS = 2  # logical CPUs beside the workers' own, so that Ray Data is never starved
OBJECT_STORE_BYTES = 512 * 2**20  # of a Ray started here on CPUs

# The controller would otherwise look at its workers every 2 s.
ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Room of objects that nobody needs is used again after this and not 1 s, so that a stream of
    # large blocks goes through pages that are there already (docs/decisions.md).
    "RAY_free_objects_period_milliseconds": "100",
    # How long a worker that hangs holds up the next attempt, once it has been found out.
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    **QUIET,
}

WITHOUT_BF16 = {"K80", "P4", "P100", "V100", "T4"}  # NVIDIA's before Ampere, as Ray calls them
SLOW_START = "timed out during startup"  # in what Ray raises (ray/_private/node.py)
NOBODY = "http://127.0.0.1:9"  # the discard service, which no machine runs

logger = logging.getLogger("rayapp.driver")


def tell_ray() -> None:
    """Set what Ray reads when it is imported, where the user has not; so before that."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def connected(config: RunConfig, address: str) -> Iterator[None]:
    """Connect to the cluster, or start Ray here and end it after."""
    import ray

    if ray.is_initialized():
        check_cluster(config)
        with _address_is_known():
            yield
        return
    options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
    if address == "local":
        cores = os.cpu_count() or 1
        options |= {"num_cpus": max(cores, config.cluster.max_workers + DATA_CPUS)}
        if not gpus_here():
            options["object_store_memory"] = OBJECT_STORE_BYTES
    _init(address, **options)
    try:
        if address != "local":
            check_cluster(config)
        with _address_is_known():
            yield
    finally:
        ray.shutdown()


def _init(address: str, **options: Any) -> None:
    """Call ray.init, again if the Ray of a busy machine was slow; keep our handling of SIGTERM.

    Raises:
        RunFailed: Ray does not start on this machine.
    """
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    for attempt in (1, 2):
        try:
            ray.init(address=address, **options)
            break
        except Exception as error:  # Ray has no type for it
            if address != "local" or SLOW_START not in str(error):
                raise
            ray.shutdown()
            if attempt == 2:
                raise RunFailed(
                    "Ray is slow to start on this machine: two starts took more than 30 s each, "
                    "which Ray does not allow. Free its CPUs and disk, and run the same command "
                    "again"
                ) from error
            logger.warning("Ray took more than 30 s to start, trying once more")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def end_workers() -> None:
    """Kill the controllers of Ray Train that this process has started; their workers go too."""
    import ray
    from ray._private.state import state  # Ray Train hands out no handle of its controller
    from ray._private.worker import global_worker

    core: Any = global_worker
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    for name, actor in state.actor_table(None, job, "ALIVE").items():
        if actor["ActorClassName"] == "TrainController":
            core.core_worker.kill_actor(ray.ActorID.from_hex(name), True)


@contextmanager
def _address_is_known() -> Iterator[None]:
    """Let Ray Train's actors find this Ray, whatever others run here, and hand on its time limit.

    Its PlacementGroupCleaner asks "the" Ray of its machine whether the controller lives, and where
    that is another Ray, which knows of none, ends all workers. A Ray without a dashboard tells port
    8265 whether it got it or not; asked where nobody listens, the cleaner goes on watching.
    """
    import ray
    from ray._private.worker import get_dashboard_url
    from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

    known = {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_API_SERVER_ADDRESS": "" if get_dashboard_url() else NOBODY,  # "": as RAY_ADDRESS says
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
    """Refuse more workers than the cluster has, or can grow to.

    Raises:
        ConfigError: naming what is there.
    """
    import ray
    from ray._private.state import state  # what an autoscaler may add is in no public call

    resources = ray.cluster_resources()
    limits = state.get_max_resources_from_cluster_config() or {}
    workers = config.cluster.min_workers
    needed = {
        "CPU": float(workers + 1),
        **{k: v * workers for k, v in config.cluster.resources.items()},
    }
    if config.cluster.gpu == "true" or (config.cluster.gpu == "auto" and resources.get("GPU")):
        needed["GPU"] = float(workers)
    short = [
        f"{amount:g} {name} (it has {resources.get(name, 0):g})"
        for name, amount in needed.items()
        if amount > max(resources.get(name, 0), limits.get(name, 0))
    ]
    if short:
        raise ConfigError(
            [
                f"cluster.workers={config.cluster.workers} is more than the cluster can place: it "
                f"needs {', '.join(short)}. Set cluster.workers lower, or add nodes"
            ]
        )


def gpus_here() -> int:
    """Return the number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def uses_gpus(config: RunConfig) -> bool:
    """Say whether the workers of the connected Ray get a GPU each."""
    import ray

    if config.cluster.gpu != "auto":
        return config.cluster.gpu == "true"
    return ray.cluster_resources().get("GPU", 0) >= 1


def fastest_precision(gpus: bool) -> str:
    """Return what `auto` is: bf16 on GPUs that have it; on CPUs what a measurement says."""
    return "bf16" if (gpus_have_bf16() if gpus else _bf16_is_faster()) else "fp32"


def gpus_have_bf16() -> bool:
    """Say whether none of the connected Ray's GPUs is too old for it; older ones emulate it."""
    import ray

    there = {name.removeprefix("accelerator_type:") for name in ray.cluster_resources()}
    return not there & WITHOUT_BF16


def _bf16_is_faster() -> bool:
    """Multiply matrices of a small model's size in both precisions; take the best of some runs."""
    import torch

    seconds = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(1024, 256, dtype=dtype), torch.ones(256, 1024, dtype=dtype)
        runs = []
        for _ in range(12):
            start = time.perf_counter()
            left @ right
            runs.append(time.perf_counter() - start)
        seconds[dtype] = min(runs)
    torch.set_num_threads(threads)
    return seconds[torch.bfloat16] < 0.8 * seconds[torch.float32]
