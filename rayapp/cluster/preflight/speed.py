"""Measure how fast one device multiplies matrices and copies memory, in a second or two.

speed = measure(torch.device("cuda", 0), index=0)     # on a CPU: one core
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rayapp.cluster.preflight.facts import Speed

SECONDS = 0.4  # of each measurement; its best round counts, since disturbances only slow it down
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


def measure(device: torch.device, index: int | None = None, uuid: str | None = None) -> Speed:
    """Measure a device that nothing else uses.

    `uuid` is NVML's name of the GPU, to read its clock under load; None: the clock is not read.
    """
    flops = {}
    side = SIDES[device.type]
    for name, dtype, tf32 in (
        ("fp32", torch.float32, False),
        ("tf32", torch.float32, True),
        ("bf16", torch.bfloat16, False),
    ):
        if tf32 and device.type == "cpu":
            continue
        torch.backends.cuda.matmul.allow_tf32 = tf32
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty(side, side, device=device, dtype=dtype)

        def multiply(
            a: torch.Tensor = left, b: torch.Tensor = right, c: torch.Tensor = out
        ) -> None:
            torch.mm(a, b, out=c)

        flops[name] = 2 * side**3 / best(multiply, device)
        if name == "bf16" and uuid is not None:
            clock, throttled = _under_load(multiply, uuid)
            break
    else:
        clock, throttled = None, ()
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = best(lambda: target.copy_(source), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Speed(name, index, flops, 2 * source.numel() / seconds, clock, throttled)


def best(function: Callable[[], object], device: torch.device, seconds: float = SECONDS) -> float:
    """Return the seconds of one call, from the best round in `seconds` seconds of rounds."""
    function()
    calls, shortest, started = 1, float("inf"), time.perf_counter()
    while time.perf_counter() - started < seconds:
        _wait(device)
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        _wait(device)
        taken = time.perf_counter() - begun
        shortest = min(shortest, taken / calls)
        # A GPU gets more calls per round, so that launch overhead does not count. A core keeps to
        # one call: if others use it too, some rounds fall between two of their time slices.
        if device.type == "cuda" and taken < seconds / 10:
            calls *= 2
    return shortest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _under_load(function: Callable[[], object], uuid: str) -> tuple[float, tuple[str, ...]]:
    """Return the SM clock of a GPU under load, in MHz, and the reasons for which it is reduced."""
    import ray._private.thirdparty.pynvml as nvml

    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        for _ in range(20):  # queued, so that the GPU is at work while NVML is asked
            function()
        clock = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        torch.cuda.synchronize()
    finally:
        nvml.nvmlShutdown()
    return clock, tuple(text for bit, text in HELD_DOWN.items() if reasons & bit)
