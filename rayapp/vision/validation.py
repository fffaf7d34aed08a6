"""Held-out figures of one checkpoint, in a process alone: what rayapp.driver.validation starts."""

from __future__ import annotations

import tempfile
import time

from rayapp.observe.records import Validation
from rayapp.vision.job import Job


def validate(job: Job, name: str, step: int) -> Validation:
    """Load a checkpoint's model in this process alone and evaluate it, as training does."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict as dcp_state

    from rayapp.storage import open_storage
    from rayapp.train.checkpoint import loader
    from rayapp.vision.training import Classifying

    began = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=0, world_size=1)
        try:
            trainee = Classifying(job, device)
            weights = dcp_state.get_model_state_dict(trainee.model)
            loader.load(open_storage(job.run_url), name, {"model": weights, **trainee.tensors()})
            dcp_state.set_model_state_dict(trainee.model, weights)
            engine = trainee.engine(dist.group.WORLD, [])
            assert engine.evaluate is not None, "there are no held-out images"
            found = engine.evaluate()
        finally:
            dist.destroy_process_group()
    return {"step": step, **found, "seconds": time.time() - began, "time": time.time()}
