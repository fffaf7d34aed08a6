"""Processes of a gloo group, as torchrun starts them, for the tests that need real ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What takes a process ten seconds to import is imported once, by the server that it is forked from.
PRELOADED = ["pytest", "hypothesis.strategies", "transformers.models.auto", "peft"]
PRELOADED += ["torch.distributed.fsdp", "rayapp.finetune.trainer", "rayapp.finetune.prepared_run"]
PRELOADED += ["rayapp.vision.classifier_trainer", "rayapp.vision.classifier_run"]
PRELOADED += ["rayapp.train.checkpoint.saver"]
PRELOADED += ["frozen_heap"]  # the last


def spawn(function: Callable[..., None], world: int, rendezvous: str, *args: Any) -> None:
    """Call function(rank, world, *args) in `world` new processes that meet at a fresh file."""
    ensure_server()
    # The server has the environment of when it was started.
    arguments = (world, f"file://{rendezvous}", dict(os.environ), function, *args)
    mp.start_processes(_enter, arguments, nprocs=world, start_method="forkserver")


def ensure_server() -> None:
    """Start the server that imports PRELOADED, of which some are in this folder."""
    before, here = os.environ.get("PYTHONPATH"), str(Path(__file__).parent)
    multiprocessing.set_forkserver_preload(PRELOADED)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        os.environ |= {} if before is None else {"PYTHONPATH": before}


def _enter(
    rank: int,
    world: int,
    init: str,
    environment: dict[str, str],
    function: Callable[..., None],
    *args: Any,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    function(rank, world, *args)
    # A gloo thread that frees the last collective's tensors while Python shuts down aborts the
    # process; the threads are joined once nothing (a model, a traceback) holds their group.
    gc.collect()
    dist.destroy_process_group()
