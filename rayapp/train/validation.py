"""Evaluate one checkpoint on held-out data in one process; the driver starts it."""

from __future__ import annotations

import tempfile
import time

import torch
import torch.distributed as dist

from rayapp.observe.records import Validation
from rayapp.storage import open_storage
from rayapp.train.checkpoint import state
from rayapp.train.spec import AnySpec


def validate(spec: AnySpec, name: str, step: int) -> Validation:
    """Load a checkpoint's model, evaluate it as training does, and return a line of its file.

    The line is one of validation.jsonl.
    """
    began = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=0, world_size=1)
        try:
            trainer = spec.alone().build(device)
            state.load_weights(trainer, open_storage(spec.run_url), name)
            engine = trainer.engine(dist.group.WORLD)
            assert engine.evaluate is not None, "no rows are held out"
            held_out = engine.evaluate(step)
        finally:
            dist.destroy_process_group()
    return {"step": step, **held_out, "seconds": time.time() - began, "time": time.time()}
