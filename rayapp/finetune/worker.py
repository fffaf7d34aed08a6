"""What Ray Train runs on each worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray.train
import ray.train.torch
import torch.distributed as dist

from rayapp.data import stream
from rayapp.data.rows import StepRows
from rayapp.finetune import training
from rayapp.finetune.job import Job
from rayapp.loop import NonFiniteLoss


def work(job: Job) -> dict[str, Any]:
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
