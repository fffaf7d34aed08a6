"""Train with Ray Train, while the driver shows the run's own metrics and listens for a stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from rayapp import metrics
from rayapp.finetune import display
from rayapp.finetune.job import STOP_FILE, Job, first_step, train
from rayapp.finetune.lease import Lease
from rayapp.finetune.outcome import failed, reason_of
from rayapp.finetune.session import uses_gpus
from rayapp.storage import Storage

POLL_S = 0.5

# glibc gives every large block back to the kernel when it is freed, and a training step on a CPU
# then spends a sixth of its time faulting pages in again. Kept in the heap, they are reused.
CPU_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}

logger = logging.getLogger("rayapp.finetune")


def fit(job: Job, run: Storage, lease: Lease, console: Console) -> dict[str, Any]:
    """Train with Ray Train while showing the run's own metrics; return rank 0's summary.

    Raises:
        RunFailed: training failed, with the first worker's reason, or the lease is lost.
    """
    from ray.train.v2.api.exceptions import TrainingFailedError

    trainer = _trainer(job)
    bar = display.Bar(console, job.order.num_steps, job.config.run.name)
    bar.note(f"starting {job.config.cluster.workers} workers")
    # Not in the main thread: there Ray Train would replace our handling of signals by an abort.
    pool = ThreadPoolExecutor(1, thread_name_prefix="fit")
    try:
        with _stop_on_signal(run, console):
            fit = pool.submit(trainer.fit)
            _watch(run, bar, fit, lease)
            summary = fit.result().return_value
    except TrainingFailedError as error:
        raise failed(run, reason_of(error)) from error
    finally:
        pool.shutdown(wait=False)  # after a second Ctrl-C it ends when Ray does
        bar.close()
    assert isinstance(summary, dict), summary
    if summary["status"] == "failed":
        raise failed(run, summary["reason"])
    return summary


def _trainer(job: Job) -> Any:
    import ray.train.torch

    from rayapp.data.stream import ExactOrder

    kit: Any = ray.train  # at run time this is Train v2, whatever the stubs of v1 say
    cluster, gpus = job.config.cluster, uses_gpus(job.config)
    elastic = cluster.min_workers != cluster.max_workers
    return kit.torch.TorchTrainer(
        lambda: train(job),
        torch_config=kit.torch.TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=kit.ScalingConfig(
            num_workers=(cluster.min_workers, cluster.max_workers)
            if elastic
            else cluster.min_workers,
            use_gpu=gpus,
            resources_per_worker={"CPU": 1, **({"GPU": 1} if gpus else {}), **cluster.resources},
        ),
        run_config=kit.RunConfig(
            name=job.config.run.name,
            storage_path=f"{job.config.run.storage}/.ray",
            failure_config=kit.FailureConfig(max_failures=cluster.max_failures),
            logging_config=kit.LoggingConfig(log_level="WARNING"),
            worker_runtime_env={
                "env_vars": {"TOKENIZERS_PARALLELISM": "false", **({} if gpus else CPU_ENVIRONMENT)}
            },
        ),
        datasets={"train": lambda: first_step(job)},
        dataset_config=ExactOrder(job.prepared, job.order),
    )


def _watch(run: Storage, bar: display.Bar, fit: Future[Any], lease: Lease) -> None:
    """Follow metrics.jsonl, the run's own record wherever it trains, until `fit` is done."""
    shown, wait_s = None, POLL_S if run.local_path() else 4 * POLL_S
    done = False
    while not done:
        done = bool(wait([fit], timeout=wait_s).done)
        lease.check()
        try:
            lines = metrics.read(run)
        except OSError as error:
            logger.warning("cannot read %s: %s", metrics.FILE, error)
            continue
        if lines and lines[-1]["step"] != shown:
            shown = lines[-1]["step"]
            bar.update(lines[-1])


@contextmanager
def _stop_on_signal(run: Storage, console: Console) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a stop at the next step; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: Any) -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)
        console.print("stopping after this step (once more to end at once)", highlight=False)
        run.write(STOP_FILE, b"signal\n")

    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
