"""One worker of the preflight group: an actor on one GPU, or on one core if GPUs are not used."""

from __future__ import annotations

import os
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from rayapp.cluster.preflight import collectives
from rayapp.cluster.preflight.facts import FactRow, Speed

Pair = tuple[int, int]


class Worker:
    """An actor with two threads, so that `where` answers while the group is at work or hangs."""

    def __init__(self, gpu: bool) -> None:
        self._log: Path | None = None
        if gpu:  # NCCL reads these when it makes its first communicator
            folder = tempfile.mkdtemp(prefix="preflight-")
            self._log = Path(folder) / "nccl.log"
            os.environ |= {**collectives.ENVIRONMENT, "NCCL_DEBUG_FILE": str(self._log)}
        import torch

        torch.set_num_threads(1)
        self._device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        self._at = (0, "idle")

    def port(self) -> int:
        """Return a free port on this node, for rank 0's rendezvous store."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return int(listener.getsockname()[1])

    def speed(self) -> Speed:
        """Measure this worker's device alone."""
        from rayapp.cluster.preflight import node_probe
        from rayapp.cluster.preflight.speed import measure

        self._note("measuring its device")
        if self._device.type == "cpu":
            return measure(self._device)
        import torch

        uuid = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        index = next((device.index for device in node_probe.devices() if device.uuid == uuid), None)
        # NVML lists no such uuid if the device is only a part of a GPU (MIG).
        return measure(self._device, index, None if index is None else uuid)

    def missing_kernels(self, shape: Any) -> tuple[str, ...]:
        """Return the packages with kernels for a model's layers that cannot be imported here.

        `shape` is the model's config.
        """
        from rayapp import model

        self._note("building the model on the meta device")
        lm = model.build(shape, loss=model.no_loss, attention="eager")
        return tuple(model.missing_kernels(lm.hf))

    def join(self, address: str, port: int, rank: int, world: int, timeout_s: float) -> None:
        """Join the process group at `address`:`port`, and wait for all ranks at a barrier."""
        import torch
        import torch.distributed as dist

        gpu = self._device.type == "cuda"
        self._note("joining the group")
        if gpu:
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=self._device if gpu else None,
        )
        self._note("meeting the group")
        dist.barrier()

    def collectives(self, budget_s: float) -> list[FactRow]:
        """Measure all operations in `budget_s` seconds; return the rows, the same on all ranks."""
        from rayapp.cluster.preflight.collectives import OPERATIONS, table

        return [
            row
            for operation in OPERATIONS
            for row in table(operation, self._device, budget_s / len(OPERATIONS), self._note)
        ]

    def links(self, plan: list[list[Pair]]) -> dict[Pair, float]:
        """Send in all rounds of the plan; return bytes/s of the pairs in which this rank sends."""
        from rayapp.cluster.preflight.collectives import rates

        return rates(plan, self._device, self._note)

    def where(self) -> tuple[int, str]:
        """Return how many steps this worker has begun, and the name of the last."""
        return self._at

    def network(self) -> tuple[str | None, str | None]:
        """Return the network that NCCL uses, by its log, and NCCL's version; both None on a CPU."""
        if self._log is None:
            return None, None
        import torch

        version: Any = torch.cuda.nccl.version()
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return collectives.network_of(lines), ".".join(map(str, version))

    def _note(self, step: str) -> None:
        self._at = (self._at[0] + 1, step)
