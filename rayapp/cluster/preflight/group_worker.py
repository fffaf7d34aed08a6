"""One worker of the preflight group: an actor on one GPU, or on one core if GPUs are not used.

Alone it measures its device; together with the others an all-reduce, and each link between two
nodes. The bus bandwidth of an all-reduce is 2(n-1)/n of size / time (nccl-tests,
doc/PERFORMANCE.md), which compares it with a link's rate at any number of workers.

    network_of(["ip-10-0-0-1:79:79 [0] NCCL INFO Using network Socket"])     # "socket"

NCCL tries plug-ins and transports in turn and uses the first that works, so that a broken EFA is
slow and no error. Its log (NCCL_DEBUG=INFO) says which it uses. The plug-in's line names the
provider of libfabric, which may be tcp on a machine with EFA; NCCL's own line says whether it uses
the plug-in at all, and takes precedence. Source: logs of NCCL 2.4 to 2.28 and aws-ofi-nccl 1.0 to
1.17 in the issues of their projects.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from rayapp.cluster.preflight import node_probe
from rayapp.cluster.preflight.facts import AllReduce, Speed

DEVICE_S = 0.4  # of each measurement; its best call counts, since disturbances only slow it down
SIDES = {"cuda": 8192, "cpu": 512}  # of the square matrices
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # larger than any cache
# NVML's reasons for reduced clocks. Left out: idle, application clocks, sync boost, display clock.
HELD_DOWN = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
TRIAL_BYTES = 2**20  # its rate says how much takes SENT_S
MOST_BYTES = {"cuda": 2**30, "cpu": 2**26}
SENT_S = 1.0  # seconds of one all-reduce, or of sending in one direction
ROUNDS = 3  # of the all-reduce; the best counts
ENVIRONMENT = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
FABRICS = ("aws libfabric", "libfabric", "ofi")  # names of aws-ofi-nccl in NCCL's log, by version

Note = Callable[[str], None]
"""Is called with the name of each step as it begins."""
Pair = tuple[int, int]
"""(sending rank, receiving rank)"""


class GroupMeasurement(NamedTuple):
    """What one rank has measured with the others."""

    all_reduce: AllReduce
    """The same on all ranks."""
    links: dict[Pair, float]
    """bytes/s of the pairs in which this rank sends."""
    network: str | None
    nccl: str | None


class GroupWorker:
    """An actor with two threads, so that `where` answers while the group is at work or hangs."""

    def __init__(self, gpu: bool) -> None:
        self._log = Path(tempfile.mkdtemp(prefix="preflight-")) / "nccl.log" if gpu else None
        if gpu:  # NCCL reads these when it makes its first communicator
            os.environ |= {**ENVIRONMENT, "NCCL_DEBUG_FILE": str(self._log)}
        torch.set_num_threads(1)
        self._device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        self._at = (0, "idle")

    def start(self) -> tuple[int, Speed]:
        """Return a free port on this node, for a rendezvous, and this device's speed alone."""
        self._note("measuring its device")
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = int(listener.getsockname()[1])
        index = uuid = None
        if self._device.type == "cuda":
            own = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
            # NVML lists no such uuid if the device is only a part of a GPU (MIG).
            for device in node_probe.devices():
                if device.uuid == own:
                    index, uuid = device.index, own
        return port, measure(self._device, index, uuid)

    def missing_kernels(self, shape: Any) -> tuple[str, ...]:
        """Return the packages with kernels for a model's layers that cannot be imported here.

        `shape` is the model's config.
        """
        from rayapp import model
        from rayapp.model.scans import missing_kernels

        self._note("building the model on the meta device")
        lm = model.build(shape, loss=model.no_loss, attention="eager")
        return tuple(missing_kernels(lm.hf))

    def together(
        self, address: str, rank: int, world: int, timeout_s: float, plan: Sequence[Sequence[Pair]]
    ) -> GroupMeasurement:
        """Join the process group at `address` (host:port); measure what it can do."""
        gpu = self._device.type == "cuda"
        self._note("joining the group")
        if gpu:
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=self._device if gpu else None,
        )
        self._note("meeting the group")
        dist.barrier()
        reduced = all_reduce(self._device, self._note)
        rates = link_rates(plan, self._device, self._note)
        if self._log is None:
            return GroupMeasurement(reduced, rates, None, None)
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return GroupMeasurement(reduced, rates, network_of(lines), version)

    def where(self) -> tuple[int, str]:
        """Return how many steps this worker has begun, and the name of the last."""
        return self._at

    def _note(self, step: str) -> None:
        self._at = (self._at[0] + 1, step)


def measure(device: torch.device, index: int | None = None, uuid: str | None = None) -> Speed:
    """Measure a device that nothing else uses: a matrix product and a copy, in a second or two.

    `uuid` is NVML's name of the GPU, to read its clock under load; None: the clock is not read.
    """
    gpu, side = device.type == "cuda", SIDES[device.type]
    precision, dtype = ("bf16", torch.bfloat16) if gpu else ("fp32", torch.float32)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=out)

    flops = 2 * side**3 / best(multiply)
    clock, throttled = (None, ()) if uuid is None else _under_load(multiply, uuid)
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / best(lambda: target.copy_(source))
    name = torch.cuda.get_device_name(device) if gpu else "cpu"
    return Speed(name, index, precision, flops, copied, clock, throttled)


def best(function: Callable[[], object]) -> float:
    """Return the seconds of one call, the fewest of DEVICE_S seconds of calls."""
    timer = Timer("function()", globals={"function": function})
    return min(timer.blocked_autorange(min_run_time=DEVICE_S).times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _under_load(function: Callable[[], object], uuid: str) -> tuple[float, tuple[str, ...]]:
    """Return the SM clock of a GPU under load, in MHz, and the reasons for which it is reduced."""
    import ray._private.thirdparty.pynvml as nvml

    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        for _ in range(20):  # queued, so that the GPU is at work while NVML is asked
            function()
        clock = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        torch.cuda.synchronize()
    finally:
        nvml.nvmlShutdown()
    return clock, tuple(text for bit, text in HELD_DOWN.items() if reasons & bit)


def all_reduce(device: torch.device, note: Note) -> AllReduce:
    """Time an all-reduce of the size that takes about SENT_S seconds, and check all values."""
    world, rounds = dist.get_world_size(), list[tuple[float, int]]()

    def repeat(size: int, times: int) -> float:
        for _ in range(times):
            note(f"all-reduce of {size:,} bytes")
            rounds.append(_reduced(size, device))
        return min(seconds for seconds, _ in rounds[-times:])

    repeat(TRIAL_BYTES, 1)  # opens the connections
    size = _taking(SENT_S, repeat(TRIAL_BYTES, 1) / TRIAL_BYTES, device)
    seconds = repeat(size, ROUNDS)
    busbw = size / seconds * 2 * (world - 1) / world
    return AllReduce(size, seconds, busbw, max(wrong for _, wrong in rounds))


def _reduced(size: int, device: torch.device) -> tuple[float, int]:
    """Return the seconds of an all-reduce, and how many elements are wrong, the most of all ranks.

    All ranks so take the slowest one's time, and agree on the next size. Rank r contributes r + 1:
    the sum is n(n + 1)/2, exact in fp32 up to 5,792 ranks.
    """
    world = dist.get_world_size()
    data = torch.full((size // 4,), dist.get_rank() + 1.0, device=device)
    dist.barrier()
    _wait(device)
    started = time.perf_counter()
    dist.all_reduce(data)
    _wait(device)
    seconds, wrong = time.perf_counter() - started, int((data != world * (world + 1) / 2).sum())
    most = torch.tensor([seconds, wrong], device=device, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most[0]), int(most[1])


def _taking(seconds: float, s_per_byte: float, device: torch.device) -> int:
    size = int(seconds / s_per_byte) // 4 * 4
    return min(MOST_BYTES[device.type], max(TRIAL_BYTES, size))


def rounds(lanes: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Return the (sender, receiver) pairs of each round, each node in at most one link per round.

    `lanes` are the ranks of each node. The nodes form a ring. A link is measured with all pairs of
    ranks of the same lane at once, since on EFA machines each GPU has network cards of its own.

    >>> rounds([[0], [1]])
    [[(0, 1)], [(1, 0)]]
    >>> rounds([[0, 1], [2, 3], [4, 5]])[0]
    [(0, 2), (1, 3)]
    """
    nodes, found = len(lanes), dict[tuple[int, int], list[Pair]]()
    for first in range(nodes if nodes > 2 else nodes - 1):
        second = (first + 1) % nodes
        # The closing edge of an odd ring meets edges of both parities.
        turn = 2 if second == 0 and nodes % 2 else first % 2
        for way, (sender, receiver) in enumerate(((first, second), (second, first))):
            pairs = zip(lanes[sender], lanes[receiver], strict=False)
            found.setdefault((turn, way), []).extend(pairs)
    return [found[key] for key in sorted(found)]


def link_rates(
    plan: Sequence[Sequence[Pair]], device: torch.device, note: Note
) -> dict[Pair, float]:
    """Take part in all rounds of a plan; return bytes/s of the pairs in which this rank sends."""
    rank, rates = dist.get_rank(), dict[Pair, float]()
    for number, pairs in enumerate(plan):
        for pair in (pair for pair in pairs if rank in pair):
            note(f"link {number}: rank {pair[0]} sends to rank {pair[1]}")
            rate = _rate(pair, device)
            if rank == pair[0]:
                rates[pair] = rate
        note(f"link {number}: waiting for the others")
        dist.barrier()
    return rates


def _rate(pair: Pair, device: torch.device) -> float:
    """Send a trial, then what takes about SENT_S seconds at its rate; return the higher bytes/s."""
    sender, receiver = pair
    _sent(pair, TRIAL_BYTES, device)  # opens the connection
    trial = _sent(pair, TRIAL_BYTES, device)
    size = torch.tensor([_taking(SENT_S, 1 / trial, device)], device=device)
    if dist.get_rank() == sender:
        dist.send(size, receiver)
    else:
        dist.recv(size, sender)
    return max(trial, _sent(pair, int(size), device))


def _sent(pair: Pair, size: int, device: torch.device) -> float:
    """Send so many bytes from rank to rank, and an answer back; return bytes/s of both."""
    sender, receiver = pair
    data = torch.zeros(size, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, device=device)
    started = time.perf_counter()
    if dist.get_rank() == sender:
        dist.send(data, receiver)
        dist.recv(answer, receiver)
    else:
        dist.recv(data, sender)
        dist.send(answer, sender)
    _wait(device)
    return size / (time.perf_counter() - started)


_PROVIDER = re.compile(r"NET/OFI Selected provider is ([\w-]+)", re.IGNORECASE)
# What NCCL says of a network, the more telling last: it is there, it is chosen, a channel uses it.
_NETWORKS = (
    re.compile(r"NET/(Socket|IB) ?: Using "),
    re.compile(r"(?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$"),
    re.compile(r" via NET/(.+?)/\d+"),
)


def network_of(lines: Iterable[str]) -> str | None:
    """Return efa (or another provider of libfabric), ib, socket, or a plug-in's own name.

    None: the log does not say, for example before NCCL has made a communicator.
    """
    text = list(lines)
    provider, *networks = (
        [match[1].casefold() for line in text if (match := pattern.search(line))]
        for pattern in (_PROVIDER, *_NETWORKS)
    )
    name = next((told[-1] for told in reversed(networks) if told), None)
    if name in FABRICS:
        return provider[-1] if provider else "libfabric"
    return name
