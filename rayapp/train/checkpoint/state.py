"""Collect the state that a checkpoint holds, and restore a rank from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from rayapp.config import Origin
from rayapp.observe.records import LoopState
from rayapp.observe.run_folder import CHECKPOINTS
from rayapp.order import Cursor, differences
from rayapp.storage import Storage, open_storage
from rayapp.train.checkpoint import marker, quantized
from rayapp.train.checkpoint.checkpoint_files import (
    FAILURES,
    CheckedPlanner,
    CheckedReader,
    reason_of,
)
from rayapp.train.checkpoint.marker import CheckpointError, Damaged
from rayapp.train.checkpoint.staging import Tensors
from rayapp.train.spec import AnySpec
from rayapp.train.trainer_interface import Trainer

NOT_LOADED = " could not be loaded: "

logger = logging.getLogger("rayapp.training")


class Resumed(RuntimeError):
    """The run cannot resume: the data differ from the checkpoint's; the message names how."""


class StartAgain(RuntimeError):
    """This attempt cannot go on, but another one can; all ranks raise it. The message says why."""


def state_tensors(trainer: Trainer) -> Tensors:
    """Return the tensors of a checkpoint: model, optimizers, and this rank's RNG state and scales.

    They do not change before the next optimizer step: the model's buffers and the RNG state, which
    a forward pass changes, are copies.
    """
    weights, optimizer = dcp_state.get_state_dict(
        trainer.model,
        trainer.optimizers,
        options=dcp_state.StateDictOptions(ignore_frozen_params=True),
    )
    changing = {buffer.data_ptr() for buffer in trainer.model.buffers()}
    for name, value in weights.items():
        if isinstance(value, torch.Tensor) and quantized.local(value).data_ptr() in changing:
            weights[name] = value.clone()
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    rank = str(dist.get_rank())
    own = {"model": weights, "optimizer": optimizer, "rng": {rank: rng}}
    if scales := quantized.scales(optimizer):
        own["scales"] = {rank: scales}
    return own | trainer.tensors()


def state_values(spec: AnySpec, trainer: Trainer, step: int, loop: LoopState) -> marker.State:
    """Return the content of a checkpoint's state.json; `loop` is what `Engine.state` returns."""
    return {
        "step": step,
        **trainer.amounts(step),
        "cursor": spec.order.cursor(step, spec.data.fingerprint).to_dict(),
        "data": spec.data.parts,
        **({"stages": [list(stage) for stage in spec.order.stages]} if spec.order.stages else {}),
        "workers": dist.get_world_size(),
        **loop,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **({"ray": version("ray")} if find_spec("ray") else {}),  # a rank may run without it
        },
    }


def restore(spec: AnySpec, trainer: Trainer, storage: Storage) -> tuple[int, LoopState]:
    """Load the newest usable checkpoint into the trainer, if there is one.

    Returns (steps done, state of the loop); (0, {}) without a checkpoint.

    Raises:
        Resumed: the data are not those that the checkpoint was trained on.
        StartAgain: the checkpoint turned out to be damaged, and is refused from now on.
        NoneUsable: checkpoints were committed, and none can be used.
    """
    checkpoint = choose(storage)
    if checkpoint is None:
        return 0, {}
    check_cursor(spec, checkpoint.state)
    wanted, rank = state_tensors(trainer), str(dist.get_rank())
    own, scales = wanted["optimizer"], wanted.pop("scales", {rank: {}})[rank]
    try:
        saved = saved_shapes(storage, checkpoint.name)
        if not any(name.startswith(f"rng.{rank}.") for name in saved):  # there were fewer workers
            del wanted["rng"]
        same = all(
            saved.get(f"scales.{rank}.{key}") == (*scale.shape,) for key, scale in scales.items()
        )
        if scales and same:  # otherwise the shards' sizes have changed
            wanted["scales"] = {rank: scales}
        wanted = quantized.widened(wanted)
        load_checkpoint(storage, checkpoint.name, wanted)
    except marker.Damaged as damage:
        _refuse(storage, checkpoint.name, damage)
    known = wanted.get("scales", {rank: {}})[rank]
    dcp_state.set_state_dict(
        trainer.model,
        trainer.optimizers,
        model_state_dict=wanted["model"],
        optim_state_dict=quantized.narrowed(own, wanted["optimizer"], known),
        options=dcp_state.StateDictOptions(strict=False),  # frozen parameters are not saved
    )
    if "rng" in wanted:
        torch.set_rng_state(wanted["rng"][rank]["cpu"])
        if torch.cuda.is_available() and "cuda" in wanted["rng"][rank]:
            torch.cuda.set_rng_state(wanted["rng"][rank]["cuda"])
    return checkpoint.step, checkpoint.state


def load_weights(trainer: Trainer, storage: Storage, name: str) -> None:
    """Load the model of a checkpoint into a trainer, and nothing else.

    Raises:
        Damaged: a file is not what was saved.
        CheckpointError: a tensor is missing or has another shape, or the storage has failed.
    """
    trained = dcp_state.StateDictOptions(ignore_frozen_params=True)
    weights = dcp_state.get_model_state_dict(trainer.model, options=trained)
    load_checkpoint(storage, name, {"model": weights, **trainer.tensors()})
    some = dcp_state.StateDictOptions(strict=False)
    dcp_state.set_model_state_dict(trainer.model, weights, options=some)


def start_from(trainer: Trainer, origin: Origin) -> None:
    """Load the weights of another run's checkpoint; all ranks call it.

    Raises: NoneUsable: the checkpoint is not usable, or is gone.
    """
    storage = open_storage(origin.run)
    try:
        found = _from_rank_0(lambda: marker.find(storage, origin.step))
        load_weights(trainer, storage, found.name)
    except CheckpointError as error:
        raise marker.NoneUsable(f"model.init_from={origin} is not usable: {error}") from error


def go_back_to(trainer: Trainer, storage: Storage, step: int) -> bool:
    """Load the weights of the run's own checkpoint of a step; return whether there is one.

    Raises: StartAgain: it turned out to be damaged, and is refused from now on.
    """
    try:
        name = _from_rank_0(lambda: marker.find(storage, step)).name
    except CheckpointError as error:
        if dist.get_rank() == 0:
            logger.warning("the best checkpoint is not exported: %s", error)
        return False
    try:
        load_weights(trainer, storage, name)
    except Damaged as damage:
        _refuse(storage, name, damage)
    return True


def _from_rank_0(look: Callable[[], Any]) -> Any:
    """Return what `look` returns on rank 0, or raise its CheckpointError, on all ranks."""
    choice: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            choice[0] = look()
        except CheckpointError as error:
            choice[0] = error
    dist.broadcast_object_list(choice, src=0)
    if isinstance(choice[0], CheckpointError):
        raise choice[0]
    return choice[0]


def _refuse(storage: Storage, name: str, damage: Damaged) -> NoReturn:
    """Let no attempt choose a damaged checkpoint again, and have another one begin."""
    if dist.get_rank() == 0:
        marker.refuse(storage, name, str(damage).partition(NOT_LOADED)[2])
    dist.barrier()
    raise StartAgain(f"{damage}; this checkpoint is not used again") from damage


def choose(storage: Storage) -> marker.SavedCheckpoint | None:
    """Return the newest usable checkpoint as rank 0 finds it; None if none was ever committed.

    Raises: NoneUsable: on all ranks.
    """
    newest, skipped = _from_rank_0(lambda: marker.resume_point(storage))
    for line in skipped if dist.get_rank() == 0 else ():
        logger.warning(line)
    return newest


def check_cursor(spec: AnySpec, state: marker.State) -> None:
    """Refuse a checkpoint that was trained on other data.

    Raises: Resumed: naming the parts that differ.
    """
    cursor = Cursor.from_dict(state["cursor"])
    if cursor.fingerprint != spec.data.fingerprint:
        changed = ", ".join(differences(state["data"], spec.data.parts))
        raise Resumed(
            f"the data differ from those of the checkpoint at step {state['step']}: changed "
            f"{changed}. Restore them, or set another run.name"
        )
    assert spec.order.step_of(cursor) == state["step"], (cursor, state["step"])


def load_checkpoint(storage: Storage, name: str, tensors: Tensors) -> None:
    """Read a checkpoint into `tensors` in place; each rank reads only what its shards need.

    Raises:
        Damaged: a file is not what was saved; parts of `tensors` may have been filled.
        CheckpointError: a tensor is missing or has another shape, or the storage has failed.
    """
    try:
        reader, alone = CheckedReader(storage / CHECKPOINTS, name), not dist.is_initialized()
        dcp_load(tensors, storage_reader=reader, planner=CheckedPlanner(), no_dist=alone)
    except FAILURES as error:
        causes: list[BaseException] = [error]
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
        damaged = any(isinstance(cause, Damaged) for cause in causes)
        raise (Damaged if damaged else CheckpointError)(
            f"{CHECKPOINTS}/{name}{NOT_LOADED}{reason_of(error)}"
        ) from error


def saved_shapes(storage: Storage, name: str) -> dict[str, tuple[int, ...] | None]:
    """Return the names in a checkpoint, each with the tensor's shape, or None for an object.

    Raises: Damaged: its metadata is not what was saved.
    """
    try:
        metadata = CheckedReader(storage / CHECKPOINTS, name).metadata.state_dict_metadata
    except Damaged as damage:
        raise Damaged(f"{CHECKPOINTS}/{name}{NOT_LOADED}{damage}") from damage
    return {
        key: tuple(item.size) if isinstance(item, TensorStorageMetadata) else None
        for key, item in metadata.items()
    }
