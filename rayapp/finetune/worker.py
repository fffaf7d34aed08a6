"""The two functions that Ray Train runs for us: on each worker, and when a group of them starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray.train
import ray.train.torch
import torch.distributed as dist

from rayapp import checkpoint
from rayapp.data import stream
from rayapp.data.rows import StepRows
from rayapp.finetune import training
from rayapp.loop import NonFiniteLoss
from rayapp.storage import open_storage


def first_step(job: training.Job) -> int:
    """Return the step at which the data must start: that of the newest whole checkpoint."""
    found, _ = checkpoint.latest(open_storage(job.run_url))
    return found.step if found else 0


def work(job: training.Job) -> dict[str, Any]:
    """Train as one of Ray Train's workers."""
    shard = ray.train.get_dataset_shard("train")
    order = job.order
    rows = stream.steps(shard, order.micro_batch, order.num_micro_batches(dist.get_world_size()))
    # Ray Data takes seconds to deliver its first block; the model is built meanwhile.
    with ThreadPoolExecutor(1, thread_name_prefix="first-rows") as pool:
        first = pool.submit(next, rows, None)

        def open_steps(step: int) -> Iterator[StepRows]:
            head = first.result()
            if head is None:
                return iter(())
            assert head.step == step, f"data start at step {head.step}, the checkpoint at {step}"
            return itertools.chain([head], rows)

        try:
            return training.run(job, ray.train.torch.get_device(), open_steps)
        except (NonFiniteLoss, training.Resumed) as error:
            # All ranks raise these together, and a restart would only find the same again.
            return {"status": "failed", "reason": str(error)}
