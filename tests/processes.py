"""Processes of a gloo group, as torchrun starts them, for the tests that need real ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(function: Callable[..., None], world: int, rendezvous: str, *args: Any) -> None:
    """Call function(rank, world, *args) in `world` new processes that meet at a fresh file."""
    mp.spawn(_enter, (world, f"file://{rendezvous}", function, *args), nprocs=world)


def _enter(rank: int, world: int, init: str, function: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    function(rank, world, *args)
    # A gloo thread that frees the last collective's tensors while Python shuts down aborts the
    # process; the threads are joined once nothing (a model, a traceback) holds their group.
    gc.collect()
    dist.destroy_process_group()
