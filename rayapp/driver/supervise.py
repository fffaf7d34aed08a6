"""Train with Ray Train; meanwhile show the run's metrics, and restart its workers if need be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from rich.console import Console

from rayapp.driver import display, placement
from rayapp.driver.lease import Lease
from rayapp.driver.ray_session import end_workers, uses_gpus
from rayapp.driver.recovery import GiveUp, Recovery
from rayapp.driver.stop import POLL_S, Stop, StopAsked
from rayapp.driver.validation import Validator
from rayapp.observe import metrics
from rayapp.observe.ending import NO_ROOM, ending_of
from rayapp.observe.events import Journal
from rayapp.observe.records import MetricsLine, Summary
from rayapp.observe.result import failed
from rayapp.observe.run_folder import CONFIG, FAILED, METRICS, MOVED, RAY, STOPPED
from rayapp.observe.words import clock
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import steps_done
from rayapp.train.spec import AnySpec

ANSWER_S = 10.0  # workers that have not done a step are ended so long after a STOP
NOTE_EVERY_S = 60.0

# By default glibc returns every large block to the kernel when it is freed, and a training step on
# a CPU then spends a sixth of its time on page faults. With the first two settings freed blocks
# stay in the heap and are reused. glibc also assumes that one process has the last-level cache of
# the whole host (480 MiB on a shared Xeon), so that copies below that size first read the memory
# that they overwrite; the third setting uses non-temporal stores from 1 MiB on.
CPU_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={2**20}",
}

logger = logging.getLogger("rayapp.driver")

AfterFailure = Callable[[Any, Summary | Exception], AnySpec | None]
"""(spec, how the attempt ended): return a spec that may avoid the failure; None: there is none."""


def fit(
    spec: AnySpec,
    run: Storage,
    lease: Lease,
    stop: Stop,
    journal: Journal,
    console: Console,
    after_failure: AfterFailure,
) -> Summary:
    """Train with Ray Train, in as many attempts as it takes; return rank 0's summary.

    Before each attempt it waits for room for the workers. A stop that is requested while there are
    no workers, or that ended them, gives the summary of `as_it_stands`.

    Raises:
        RunFailed: training failed for good, with the first worker's reason, or the lease is lost.
    """
    cluster = spec.config.cluster
    recovery = Recovery(cluster.max_failures, cluster.max_preemptions, spec.order)
    bar = display.ProgressBar(console, spec.order.num_steps, spec.config.run.name)

    def check() -> None:
        lease.check()
        stop.check()

    validator = None
    if spec.config.eval.checkpoints and spec.data.held_out:
        validator = Validator(spec, run, bar.say)
    try:
        with placement.asked_for(spec.config):
            while True:
                workers = placement.wait_for_room(spec.config, bar.note, check)
                check()
                bar.note(f"starting {workers} worker{'s' if workers > 1 else ''}")
                began = time.time()
                journal.attempt(spec.config, workers)
                ended = _attempt(spec, workers, run, bar, lease, stop, journal, validator)
                last = journal.catch_up()
                if isinstance(ended, Exception):
                    check()  # a run that was asked to stop is not started again
                if isinstance(ended, dict) and ended["status"] != MOVED:
                    if validator is not None:
                        validator.close()
                    break
                ending = ending_of(ended, last, began)
                if ending.kind != NO_ROOM:
                    journal.interrupted(ending, workers)
                if smaller := after_failure(spec, ended):
                    spec = smaller
                    run.write(CONFIG, spec.config.to_yaml().encode())
                    again = spec.accumulation(workers)
                    bar.say(f"after step {ending.step}: {ending.reason}; again with {again}")
                    continue
                pause_s = recovery.after(ending)
                again = f"again in {pause_s:.0f} s" if pause_s else "again"
                bar.say(f"after step {ending.step}: {ending.reason}; {again}")
                _pause(pause_s, check)
    except StopAsked:
        return as_it_stands(run)
    except GiveUp as error:
        raise failed(run, str(error)) from error
    finally:
        bar.close()
    if ended["status"] == FAILED:
        raise failed(run, ended["reason"])
    group_s = ended.pop("entered") - began
    return ended | {"group_s": group_s}


def _attempt(
    spec: AnySpec,
    workers: int,
    run: Storage,
    bar: display.ProgressBar,
    lease: Lease,
    stop: Stop,
    journal: Journal,
    validator: Validator | None,
) -> Summary | Exception:
    """Make one attempt; return rank 0's summary, or the error of Ray or its workers."""
    trainer = _trainer(spec, workers)
    # Not in the main thread: Ray Train would replace our signal handlers there and abort.
    pool = ThreadPoolExecutor(1, thread_name_prefix="fit")
    try:
        fit = pool.submit(trainer.fit)
        _watch(run, bar, fit, lease, stop, journal, validator)
    finally:
        pool.shutdown(wait=False)  # after a second Ctrl-C the thread ends when Ray does
    error = fit.exception()
    if error is None:
        summary: Summary = fit.result().return_value
        return summary
    from ray.exceptions import RayError
    from ray.train.v2.api.exceptions import TrainingFailedError

    if isinstance(error, (TrainingFailedError, RayError)):
        return error
    raise error


def _pause(seconds: float, check: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        check()
        time.sleep(POLL_S)


def as_it_stands(run: Storage) -> Summary:
    """Return the summary of a run that stops without workers: its newest usable checkpoint's."""
    step = steps_done(run)
    return {
        "status": STOPPED,
        "steps": step,
        "first_step": step,
        "group_s": 0.0,
        "stall_s": None,
        "commit_s": None,
        "seconds": {},
    }


def entry(spec: AnySpec) -> Callable[[], Summary]:
    """Return the function that each worker runs.

    It imports inside, so that Ray's controller, which unpickles it too, does not load torch.
    """

    def train() -> Summary:
        from rayapp.driver.worker import work

        return work(spec)

    return train


def _trainer(spec: AnySpec, workers: int) -> Any:
    import ray.train.torch

    from rayapp.data.stream import ExactOrder

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
            storage_path=f"{spec.config.run.storage}/{RAY}",
            # No retries by Ray Train: fit() decides, which knows all attempts, rows and free nodes.
            failure_config=kit.FailureConfig(
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            ),
            logging_config=kit.LoggingConfig(log_level="WARNING"),
            worker_runtime_env={
                "env_vars": {"TOKENIZERS_PARALLELISM": "false", **({} if gpus else CPU_ENVIRONMENT)}
            },
        ),
        datasets={"train": spec.first_step},
        dataset_config=ExactOrder(spec.stream),
    )


def _watch(
    run: Storage,
    bar: display.ProgressBar,
    fit: Future[Any],
    lease: Lease,
    stop: Stop,
    journal: Journal,
    validator: Validator | None,
) -> None:
    """Show the last line of metrics.jsonl until `fit` is done, and check the lease.

    Workers that take steps answer a STOP themselves. Before the first step they may be loading,
    compiling or waiting for rows, and have nothing to save: they are ended after ANSWER_S seconds.
    """
    shown, wait_s = _last_line(run), POLL_S if run.local_path() else 4 * POLL_S
    began = noted = time.monotonic()
    asked_at = None
    done = stepped = False
    while not done:
        done = bool(wait([fit], timeout=wait_s).done)
        lease.check()
        line, now = _last_line(run), time.monotonic()
        if line is not None and line != shown:
            shown, stepped = line, True
            bar.update(line)
            journal.saw(line)
        elif not stepped:
            if asked_at is None and stop.asked():
                asked_at = now
            if asked_at is not None and now - asked_at >= ANSWER_S:
                end_workers()
                asked_at = now
            if now - noted >= NOTE_EVERY_S:
                noted = now
                bar.note(f"no step yet, {clock(now - began)} after the workers were asked for")
        if validator is not None:
            validator.poll()


def _last_line(run: Storage) -> MetricsLine | None:
    try:
        return metrics.last(run)
    except OSError as error:
        logger.warning("cannot read %s: %s", METRICS, error)
        return None
