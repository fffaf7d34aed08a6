"""The function that Ray Train runs on each worker: read rows from Ray Data and train one rank."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import ray.train
import ray.train.torch
import torch.distributed as dist
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME
from ray.exceptions import RayError

from rayapp.config import RunConfig
from rayapp.driver import placement
from rayapp.model import Unavailable, WrongExport
from rayapp.observe.activity import Phases, Reporter
from rayapp.observe.gauges import Steps
from rayapp.observe.records import Summary
from rayapp.observe.run_folder import FAILED, MOVED, RANK_ACTIVITY
from rayapp.storage import open_storage
from rayapp.train.checkpoint.marker import NoneUsable
from rayapp.train.checkpoint.state import Resumed, StartAgain
from rayapp.train.loop import BadLoss
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import AnySpec

logger = logging.getLogger("rayapp.driver")


def work(spec: AnySpec) -> Summary:
    """Train this worker's rank and return its summary.

    Errors that all ranks raise together become a summary: `moved` if another attempt can go on,
    `failed` if it would meet the same error again. Other errors are raised.
    """
    # Ray's log monitor then puts `(name pid=...)` before this process's lines, in place of the
    # actor's class: Ray Train creates the actors without names and gives ranks only afterwards.
    for stream in (sys.stdout, sys.stderr):
        name = f"{spec.config.run.name}/rank-{dist.get_rank()}"
        print(f"{LOG_PREFIX_ACTOR_NAME}{name}", file=stream, flush=True)
    shard = ray.train.get_dataset_shard("train")
    rows = spec.steps(shard, dist.get_world_size())
    # Ray Data takes seconds to deliver its first block; meanwhile this thread builds the model.
    pool = ThreadPoolExecutor(1, thread_name_prefix="first-rows")
    first = pool.submit(next, rows, None)
    pool.shutdown(wait=False)  # an error must not wait for rows that never come
    phases = Phases()
    run = open_storage(spec.run_url)
    with (
        Steps(spec.config.run.name, dist.get_rank()) as gauges,
        Reporter(run, RANK_ACTIVITY, phases) if dist.get_rank() == 0 else nullcontext(),
    ):

        def open_steps(step: int) -> Iterator[Any]:
            # Without a limit where they are maybe still prepared.
            limit_s = None if spec.order.more else spec.config.cluster.collective_timeout_s
            head = _first(first, limit_s)
            if head is None:
                return iter(())
            if head.step != step:  # a checkpoint was committed or refused after the data started
                raise StartAgain(f"the data start at step {head.step}, the checkpoint at {step}")
            return itertools.chain([head], rows)

        try:
            context = RankContext(
                ray.train.torch.get_device(),
                open_steps,
                preemption=preemption,
                free_workers=_free_workers(spec.config),
                on_record=gauges.step,
                phases=phases,
            )
            return train_rank(spec, context)
        except StartAgain as error:
            return {"status": MOVED, "notice": False, "again": True, "reason": str(error)}
        except (BadLoss, NoneUsable, Resumed, Unavailable, WrongExport) as error:
            # All ranks raise these together, and another attempt would raise the same again.
            if isinstance(error, BadLoss) and not error.finite:
                gauges.bad_step()
            return {"status": FAILED, "reason": str(error)}


def _first(rows: Future[Any], timeout_s: float | None) -> Any:
    """Wait up to `timeout_s` seconds for this rank's first step; return it, or None at the end."""
    try:
        return rows.result(timeout_s)
    except TimeoutError as error:
        raise RuntimeError(
            f"no rows came from Ray Data in {timeout_s:.0f} s (cluster.collective_timeout_s): its "
            "tasks wait or fail. Look at them with `ray list tasks`, or allow more time"
        ) from error


def preemption() -> str | None:
    """Say which ranks' nodes are being preempted, None if none; all ranks must call it together."""
    kit: Any = ray.train  # at run time this is Train v2, whatever the stubs of v1 say
    info = kit.get_preemption_info()
    if info is None:
        return None
    ranks = ", ".join(map(str, info.preempted_ranks))
    left = "" if not info.deadline_ms else f" in {info.deadline_ms / 1000 - time.time():.0f} s"
    return f"the node of rank {ranks} is taken away{left}"


def _free_workers(config: RunConfig) -> Callable[[], int] | None:
    missing = config.cluster.max_workers - dist.get_world_size()
    if not missing:
        return None

    def count() -> int:
        try:
            return min(missing, placement.free_workers(config))
        except (RayError, OSError, RuntimeError) as error:
            logger.warning("cannot ask for room: %s", error)
            return 0

    return count
