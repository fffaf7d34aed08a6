"""Measure a group of workers: collectives as nccl-tests prints them, then each link.

    rows = table("all_reduce", device, budget_s, at)        # called by all ranks alike
    links = rates(plan, device, at)

Sizes and rates are defined as in nccl-tests (doc/PERFORMANCE.md): size is that of a rank's largest
buffer, algbw = size / time, and the bus bandwidth busbw = algbw x 2(n-1)/n for all-reduce, or
algbw x (n-1)/n for all-gather and reduce-scatter. All ranks use the slowest rank's time, so that
all stop at the same size; on a slow network the table has fewer sizes.

    network_of(["ip-10-0-0-1:79:79 [0] NCCL INFO Using network Socket"])     # "socket"

NCCL tries plug-ins and transports in turn and uses the first that works, so that a broken EFA is
slow and no error. Its log (NCCL_DEBUG=INFO) says which it uses. The plug-in's line names the
provider of libfabric, which may be tcp on a machine with EFA; NCCL's own line says whether it uses
the plug-in at all, and takes precedence. Source: logs of NCCL 2.4 to 2.28 and aws-ofi-nccl 1.0 to
1.17 in the issues of their projects.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from rayapp.cluster.preflight.facts import FactRow

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
SIZE_STEP = 4
FIRST_BYTES = 4096
LAST_BYTES = {"cuda": 2**30, "cpu": 2**26}
ROUND_S = 0.3  # seconds to repeat one size for, in at most MAX_REPEATS repeats
MAX_REPEATS = 20
LINK_BYTES = {"cuda": 2**29, "cpu": 2**26}
LINK_TRIAL_BYTES = 2**20
LINK_S = 1.0  # seconds to send for in one direction

Pair = tuple[int, int]
"""(sending rank, receiving rank)"""


def sizes(device: torch.device, world: int) -> list[int]:
    """Return the sizes of a table in bytes, each rounded down to whole fp32 elements per rank."""
    sizes, size = [], FIRST_BYTES
    while size <= LAST_BYTES[device.type]:
        sizes.append(size // (4 * world) * 4 * world)
        size *= SIZE_STEP
    return sizes


def bus_factor(operation: str, world: int) -> float:
    """Return busbw / algbw.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8)
    (1.75, 0.875)
    """
    return (2 if operation == "all_reduce" else 1) * (world - 1) / world


def table(
    operation: str, device: torch.device, budget_s: float, at: Callable[[str], None]
) -> list[FactRow]:
    """Measure one operation at growing sizes until the next would not fit into `budget_s` seconds.

    `at` is called with the name of each step as it begins.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    rows: list[FactRow] = []
    left_s = budget_s
    for size in sizes(device, world):
        at(f"{operation} of {size:,} bytes")
        run, check = _prepared(operation, size // 4, world, rank, device)
        trial_s = _agreed(_timed(run, 1, device), device)
        wrong = int(_summed(check(), device))
        repeats = max(1, min(MAX_REPEATS, int(ROUND_S / trial_s)))
        if repeats * trial_s > left_s and rows:
            break
        seconds = _agreed(_timed(run, repeats, device), device) / repeats
        algbw = size / seconds
        busbw = algbw * bus_factor(operation, world)
        rows.append(FactRow(operation, size, seconds, algbw, busbw, wrong))
        left_s -= trial_s + repeats * seconds
        if SIZE_STEP * 2 * seconds > left_s:
            break
    return rows


def _prepared(
    operation: str, numel: int, world: int, rank: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], int]]:
    """Return a function that runs the operation, and one that counts wrong elements after one run.

    Rank r contributes r + 1, so that a sum is n(n + 1)/2, exact in fp32 up to 5,792 ranks.
    """
    total = world * (world + 1) / 2
    mine = float(rank + 1)
    if operation == "all_reduce":
        whole = torch.full((numel,), mine, device=device)
        # In place: the values grow with each repeat, so only the first result is checked.
        return lambda: dist.all_reduce(whole), lambda: int((whole != total).sum())
    whole, part = torch.empty(numel, device=device), numel // world
    if operation == "all_gather":
        source = torch.full((part,), mine, device=device)
        wanted = torch.arange(1, world + 1, device=device, dtype=torch.float32)
        return (
            lambda: dist.all_gather_into_tensor(whole, source),
            lambda: int((whole.view(world, part) != wanted[:, None]).sum()),
        )
    whole.fill_(mine)
    target = torch.empty(part, device=device)
    return (
        lambda: dist.reduce_scatter_tensor(target, whole),
        lambda: int((target != total).sum()),
    )


def rounds(lanes: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Return the (sender, receiver) pairs of each round, each node in at most one link per round.

    `lanes` are the ranks of each node. The nodes form a ring. A link is measured with all pairs of
    ranks of the same lane at once, since on EFA machines each GPU has network cards of its own.

    >>> rounds([[0], [1]])
    [[(0, 1)], [(1, 0)]]
    >>> rounds([[0, 1], [2, 3], [4, 5]])[0]
    [(0, 2), (1, 3)]
    """
    nodes = len(lanes)
    if nodes < 2:
        return []
    edges = [(a, (a + 1) % nodes) for a in range(nodes if nodes > 2 else 1)]
    rounds = []
    for parity in (0, 1, 2):  # an odd ring's closing edge needs a third round
        closing = nodes % 2 == 1 and nodes > 2
        chosen = [
            (a, b)
            for a, b in edges
            if (2 if closing and b == 0 else a % 2) == parity  # (n-1, 0) meets both parities
        ]
        for pairs in (chosen, [(b, a) for a, b in chosen]):
            if pairs:
                rounds.append([p for a, b in pairs for p in zip(lanes[a], lanes[b], strict=False)])
    return rounds


def rates(
    plan: Sequence[Sequence[Pair]], device: torch.device, at: Callable[[str], None]
) -> dict[Pair, float]:
    """Take part in all rounds of a plan; return bytes/s of the pairs in which this rank sends."""
    rank, rates = dist.get_rank(), {}
    for number, pairs in enumerate(plan):
        for sender, receiver in pairs:
            if rank == sender:
                at(f"link {number}: sending to rank {receiver}")
                rates[(sender, receiver)] = _send(receiver, device)
            elif rank == receiver:
                at(f"link {number}: receiving from rank {sender}")
                _receive(sender, device)
        at(f"link {number}: waiting for the others")
        dist.barrier()
    return rates


def _send(receiver: int, device: torch.device) -> float:
    """Send a trial, then what takes about LINK_S seconds at its rate; return the higher bytes/s."""
    trial = torch.zeros(LINK_TRIAL_BYTES, dtype=torch.uint8, device=device)
    _sent(trial, receiver, device)  # not timed: it opens the connection
    bytes_per_s = trial.numel() / _sent(trial, receiver, device)
    size = int(min(LINK_BYTES[device.type], max(LINK_TRIAL_BYTES, LINK_S * bytes_per_s)))
    dist.send(torch.tensor([size], device=device), receiver)
    data = torch.zeros(size, dtype=torch.uint8, device=device)
    return max(bytes_per_s, size / _sent(data, receiver, device))


def _sent(data: torch.Tensor, receiver: int, device: torch.device) -> float:
    """Send, wait for the receiver's answer, return the seconds of both."""
    answer = torch.zeros(1, device=device)
    started = time.perf_counter()
    dist.send(data, receiver)
    dist.recv(answer, receiver)
    _wait(device)
    return time.perf_counter() - started


def _receive(sender: int, device: torch.device) -> None:
    answer, size = torch.zeros(1, device=device), torch.tensor([LINK_TRIAL_BYTES], device=device)
    for number in range(3):
        if number == 2:
            dist.recv(size, sender)
        dist.recv(torch.empty(int(size), dtype=torch.uint8, device=device), sender)
        _wait(device)
        dist.send(answer, sender)


def _timed(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    dist.barrier()
    _wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    _wait(device)
    return time.perf_counter() - started


def _agreed(seconds: float, device: torch.device) -> float:
    """Return the longest time of all ranks."""
    value = torch.tensor([seconds], device=device, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return max(float(value), 1e-9)


def _summed(count: int, device: torch.device) -> float:
    value = torch.tensor([float(count)], device=device, dtype=torch.float64)
    dist.all_reduce(value)
    return float(value)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


ENVIRONMENT = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
FABRICS = ("aws libfabric", "libfabric", "ofi")  # names of aws-ofi-nccl in NCCL's log, by version

_PROVIDER = re.compile(r"NET/OFI Selected provider is ([\w;-]+)", re.IGNORECASE)
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$")
_TRANSPORT = re.compile(r"NET/(Socket|IB) ?: Using ")
_VIA = re.compile(r" via NET/(.+?)/\d+")


def network_of(lines: Iterable[str]) -> str | None:
    """Return efa (or another provider of libfabric), ib, socket, or a plug-in's own name.

    None: the log does not say, for example before NCCL has made a communicator.
    """
    provider = network = transport = via = None
    for line in lines:
        if match := _PROVIDER.search(line):
            provider = match[1].split(";")[0].casefold()
        if match := _NETWORK.search(line):
            network = match[1].casefold()
        if match := _TRANSPORT.search(line):
            transport = match[1].casefold()
        if match := _VIA.search(line):
            via = match[1].casefold()
    name = via or network or transport  # a channel's, else the chosen, else the found network
    if name in FABRICS:
        return provider or "libfabric"
    return name
