"""Held-out loss of one checkpoint, in a process alone: what rayapp.driver.validation starts."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace

from rayapp.finetune.job import Job
from rayapp.observe.records import Validation


def validate(job: Job, name: str, step: int) -> Validation:
    """Load a checkpoint's model in this process alone and evaluate it, as training does."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict as dcp_state

    from rayapp.data.rows import sequential_batches
    from rayapp.finetune.parts import make_parts
    from rayapp.finetune.training import held_out_losses
    from rayapp.storage import open_storage
    from rayapp.train import loop
    from rayapp.train.checkpoint import loader

    began = time.time()
    parallel = job.config.parallel.model_copy(update={"strategy": "full_shard", "replicas": None})
    job = replace(job, config=job.config.model_copy(update={"parallel": parallel}))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=0, world_size=1)
        try:
            parts = make_parts(job, device)
            trained = dcp_state.StateDictOptions(ignore_frozen_params=True)
            weights = dcp_state.get_model_state_dict(parts.lm, options=trained)
            loader.load(open_storage(job.run_url), name, {"model": weights})
            some = dcp_state.StateDictOptions(strict=False)
            dcp_state.set_model_state_dict(parts.lm, weights, options=some)
            engine = loop.Engine(
                model=parts.lm,
                optimizers=parts.optimizers,
                lr_at=lambda step: 0.0,
                device=device,
                grad_clip=None,
                control=dist.group.WORLD,
            )
            rows = job.prepared.rows("eval")
            batches = sequential_batches(rows, job.config.micro_batch, 0, 1)
            found = held_out_losses(engine, batches)
        finally:
            dist.destroy_process_group()
    return {
        "step": step,
        **found,
        "seconds": time.time() - began,
        "time": time.time(),
    }
