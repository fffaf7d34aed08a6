"""Run the attempts of a run as worker groups of Ray Train, and validate checkpoints in tasks."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rayapp.config import RunConfig
from rayapp.driver import placement
from rayapp.driver.display import held_out
from rayapp.driver.ray_session import end_workers, threads, uses_gpus
from rayapp.observe.clock import CLOCK, Call
from rayapp.observe.records import Summary, Validation
from rayapp.observe.run_folder import RAY, VALIDATIONS
from rayapp.observe.status import read_validations
from rayapp.observe.words import last_line
from rayapp.storage import Storage, open_storage
from rayapp.storage.s3_client import settings_of
from rayapp.train.checkpoint.marker import newest_committed
from rayapp.train.spec import AnySpec

VALIDATION_POLL_S = 5.0
VALIDATION_CLOSE_S = 300.0  # for the last validation, after training has ended

logger = logging.getLogger("rayapp.driver")

# By default glibc returns every large block to the kernel when it is freed, and a training step on
# a CPU then spends a sixth of its time on page faults. With the first two settings freed blocks
# stay in the heap and are reused. glibc also assumes that one process has the last-level cache of
# the whole host (480 MiB on a shared Xeon), so that copies below that size first read the memory
# that they overwrite; the third setting uses non-temporal stores from 1 MiB on. A thread that
# waits for the others of its worker spins by default, on the core that they may wait for.
CPU_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={2**20}",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# Else memory that was freed in blocks of other sizes cannot be used.
GPU_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class RayWorkers:
    """Groups of Ray Train on the cluster that this process is connected to.

    The supervision of a run sees its cluster through this class and RayAttempt alone.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def asked_for(self) -> AbstractContextManager[None]:
        """Inside the block, ask the autoscaler for all workers of an elastic run."""
        return placement.asked_for(self._config)

    def wait_for_room(self, note: Callable[[str], None], check: Callable[[], None]) -> int:
        """Wait until enough workers fit, and return how many to start."""
        return placement.wait_for_room(self._config, note, check)

    def start(self, spec: AnySpec, workers: int) -> RayAttempt:
        return RayAttempt(_trainer(spec, workers))


class RayAttempt:
    """A group of Ray Train, from its start to its end."""

    def __init__(self, trainer: Any) -> None:
        # Not in the main thread: Ray Train would replace our signal handlers there and abort.
        self._fit: Call[Any] = Call(CLOCK, trainer.fit, "fit")

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the group, at most so long; return whether it has ended."""
        return self._fit.wait(seconds)

    def outcome(self) -> Summary | Exception:
        """Return rank 0's summary, or the error of Ray or its workers; waits for the end."""
        from ray.exceptions import RayError
        from ray.train.v2.api.exceptions import TrainingFailedError

        try:
            summary: Summary = self._fit.result().return_value
        except (TrainingFailedError, RayError) as error:
            # Ray Train leaves a group behind whose workers were there, but could not reach another.
            end_workers()
            return error
        return summary

    def end(self) -> None:
        end_workers()


def entry(spec: AnySpec) -> Callable[[], Summary]:
    """Return the function that each worker runs.

    It imports inside, so that Ray's controller, which unpickles it too, does not load torch.
    """

    def train() -> Summary:
        from rayapp.driver.worker import work

        return work(spec)

    return train


def environment(gpus: bool, workers: int) -> dict[str, str]:
    """Return the variables of the workers; of GPUs' allocator only where the user sets none."""
    of_gpus = {} if os.environ.keys() & ALLOCATOR else GPU_ENVIRONMENT
    own = of_gpus if gpus else CPU_ENVIRONMENT | threads(workers)
    return {"TOKENIZERS_PARALLELISM": "false", **own}


def ray_storage(url: str) -> tuple[Any, str]:
    """Return Arrow's file system of a folder, None for a local one, and the path in it.

    Arrow's own client for S3 takes no endpoint from ~/.aws/config, so that s3fs sends the requests.
    It keeps no listings, since several processes write there.
    """
    storage = open_storage(url)
    if storage.local_path() is not None:
        return None, storage.url
    from pyarrow.fs import FSSpecHandler, PyFileSystem
    from s3fs import S3FileSystem

    files = S3FileSystem(config_kwargs=settings_of(patient=True), use_listings_cache=False)
    return PyFileSystem(FSSpecHandler(files)), storage.url.removeprefix("s3://")


def _trainer(spec: AnySpec, workers: int) -> Any:
    import ray.train.torch

    from rayapp.data.stream import ExactOrder

    filesystem, place = ray_storage(f"{spec.config.run.storage}/{RAY}")
    kit: Any = ray.train  # at run time this is Train v2, whatever the stubs of v1 say
    cluster, gpus = spec.config.cluster, uses_gpus(spec.config)
    return kit.torch.TorchTrainer(
        entry(spec),
        torch_config=kit.torch.TorchConfig(
            # Gloo too: with parallel.cpu_offload the gradient norm is summed in host memory.
            backend="cpu:gloo,cuda:nccl" if gpus else "gloo",
            timeout_s=cluster.collective_timeout_s,
        ),
        scaling_config=kit.ScalingConfig(
            num_workers=workers, use_gpu=gpus, resources_per_worker=placement.needs(spec.config)
        ),
        run_config=kit.RunConfig(
            name=spec.config.run.name,
            storage_path=place,
            storage_filesystem=filesystem,
            # No retries by Ray Train: fit() decides, which knows all attempts, rows and free nodes.
            failure_config=kit.FailureConfig(
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            ),
            logging_config=kit.LoggingConfig(log_level="WARNING"),
            worker_runtime_env={"env_vars": environment(gpus, workers)},
        ),
        datasets={"train": spec.first_step},
        dataset_config=ExactOrder(spec.stream),
    )


class Validator:
    """Evaluate committed checkpoints on held-out data, where a worker's room is free.

    Every VALIDATION_POLL_S seconds it looks for a newer one, and evaluates it in a Ray task with a
    worker's resources. Each result is a line of `validation.jsonl`. A validation that fails is
    logged and does not end training.
    """

    def __init__(self, spec: AnySpec, run: Storage, say: Callable[[str], None]) -> None:
        self._spec, self._run, self._say = spec, run, say
        self._lines = read_validations(run)
        self._asked = max((line["step"] for line in self._lines), default=-1)
        self._looked_at = time.monotonic()
        self._task: Any = None

    def poll(self) -> None:
        """Take the result of a finished validation; else start one if there is a newer commit."""
        import ray

        if self._task is not None:
            if ray.wait([self._task], timeout=0)[0]:
                self._take()
            return
        now = time.monotonic()
        if now - self._looked_at < VALIDATION_POLL_S:
            return
        self._looked_at = now
        try:
            self._start()
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            logger.warning("cannot look for checkpoints to validate: %s", error)

    def close(self) -> None:
        """Wait VALIDATION_CLOSE_S for a running validation, if any, and take its result."""
        import ray

        if self._task is None:
            return
        if ray.wait([self._task], timeout=VALIDATION_CLOSE_S)[0]:
            self._take()
            return
        ray.cancel(self._task, force=True)
        logger.warning(
            "a checkpoint was not validated: it took %.0f s after training", VALIDATION_CLOSE_S
        )

    def _start(self) -> None:
        import ray

        newest = newest_committed(self._run)
        if newest is None or newest.step <= self._asked:
            return
        if not placement.free_workers(self._spec.config):
            return
        self._asked = newest.step
        others = dict(placement.needs(self._spec.config))
        own: Any = {"num_cpus": others.pop("CPU"), "num_gpus": others.pop("GPU", 0)}
        task = ray.remote(**own, resources=others, max_retries=0)(_validate)
        self._task = task.remote(self._spec, newest.name, newest.step)

    def _take(self) -> None:
        import ray

        task, self._task = self._task, None
        try:
            line = ray.get(task)
            self._lines.append(line)
            text = "".join(json.dumps(each) + "\n" for each in self._lines)
            self._run.write(VALIDATIONS, text.encode())
        except (ray.exceptions.RayError, OSError) as error:  # e.g. the checkpoint was deleted first
            logger.warning("a checkpoint was not validated: %s", last_line(error))
            return
        self._say(f"checkpoint of step {line['step']}: {held_out(line)}")


def _validate(spec: AnySpec, name: str, step: int) -> Validation:
    from rayapp.train.rank import validate

    return validate(spec, name, step)
