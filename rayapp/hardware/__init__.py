"""GPUs and EC2 instances: memory, FLOP/s, links, network, price; None if unknown, never a guess.

    instance("p5.48xlarge").gpu.flops["bf16"]               # 989.4e12: dense, never with sparsity
    gpu_from_device_name("NVIDIA H100 80GB HBM3")           # the same GPU, None if unknown

The figures stand in gpus.csv and instances.csv beside this file, with their sources and dates.
Units: GiB is 2**30 bytes; FLOP/s, bytes/s and bits/s are decimal.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30

PRICE_DATE = "2026-11-21"
PRICE_SOURCE = "AWS price list, on demand, Linux"
DEFAULT_REGION = "us-west-2"
# S3 Standard, the first 50 TB of an account, us-east-1 and us-west-2, in USD per 2**30 bytes (the
# unit that S3 bills) and month; requests are not counted. https://aws.amazon.com/s3/pricing, 2025.
USD_PER_GIB_MONTH = 0.023
MONTH_HOURS = 730.0
# Hours in which a deleted checkpoint still takes room: versions in runs/ are kept for a day.
DELETED_HOURS = 24.0


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory_gib: float
    """As EC2 reports it; the CUDA context takes a part of it."""
    flops: Mapping[str, float | None]
    """Dense FLOP/s by precision: fp32 (no tensor cores), tf32, bf16, fp8; None: not supported."""
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float | None
    """Of one GPU in one direction; None: it has PCIe only."""
    pcie_bytes_per_s: float
    """In one direction, 16 lanes."""
    compute_capability: str
    device_name: str
    """The driver's name of it."""
    measured_flops: Mapping[str, float] = field(default_factory=dict)
    """Dense FLOP/s that large matrix products were measured to reach; absent: not measured."""


@dataclass(frozen=True)
class Instance:
    """One EC2 instance type."""

    name: str
    gpu: Gpu | None
    gpus: int
    vcpus: int
    memory_gib: float
    network_bits_per_s: float
    """Baseline bandwidth, not the burst of "up to"."""
    usd_per_hour: Mapping[str, float]
    """On-demand price by region; absent: not known. See PRICE_SOURCE, PRICE_DATE."""
    efa_interfaces: int = 0
    """The most it can have; each on a network card of its own."""
    first_efa_card: int = 0
    """Index of the first card with EFA: 1 on p6-b300, whose card 0 has none."""
    architectures: tuple[str, ...] = ("x86_64",)


class UnknownInstance(ValueError):
    """An instance type is not in the table; the message names the nearest one, if any."""


def instance(name: str, field: str = "cluster.instance") -> Instance:
    """Return an instance type of the table; `field` is what the message calls its source.

    Raises:
        UnknownInstance: it is not listed; says which is nearest.
    """
    if name in INSTANCES:
        return INSTANCES[name]
    near = difflib.get_close_matches(name, list(INSTANCES), n=1, cutoff=0.5)
    with_gpus = ", ".join(other for other, listed in INSTANCES.items() if listed.gpus > 1)
    what = f"Did you mean {near[0]}?" if near else f"Set one of {with_gpus}"
    raise UnknownInstance(
        f"{field}={name} is unknown: there is no such instance type in the table. {what}"
    )


def gpu_from_device_name(name: str) -> Gpu | None:
    """Return the GPU with this driver name; None if it is not in the table.

    Only exact names match, since PCIe cards of the same model run at lower clocks.

    >>> gpu_from_device_name("NVIDIA H100 80GB HBM3").name
    'H100'
    >>> gpu_from_device_name("NVIDIA H100 PCIe") is None
    True
    """
    wanted = " ".join(name.split()).casefold()
    return next((gpu for gpu in GPUS.values() if wanted == gpu.device_name.casefold()), None)


def usd_of_checkpoints(
    committed: Sequence[float], keep: int, until: float, gib_each: float
) -> float:
    """Return what a run's checkpoints cost until the hour `until`, in USD.

    A checkpoint takes room from its commit until `keep` newer ones are committed, and for
    DELETED_HOURS more, also after `until`. Those that are kept are counted until `until`.

    Args:
        committed: the hour of each commit, ascending.
        keep: how many the run keeps.
        until: the hour when the run ends, on the same clock.
        gib_each: the size of one.

    >>> round(usd_of_checkpoints([0.0, 10.0], keep=1, until=30.0, gib_each=730.0), 3)
    1.242
    """
    hours = sum(
        committed[n + keep] + DELETED_HOURS - start if n + keep < len(committed) else until - start
        for n, start in enumerate(committed)
    )
    return gib_each * hours * USD_PER_GIB_MONTH / MONTH_HOURS


def _rows(file: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table beside this file by column; lines that begin with # are notes."""
    with Path(__file__).with_name(file).open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(line for line in lines if not line.startswith("#"))


def _number(text: str, unit: float = 1.0) -> float | None:
    return float(text) * unit if text else None


def _gpu(row: Mapping[str, str]) -> Gpu:
    flops = {name: _number(row[f"{name}_tflops"], 1e12) for name in ("fp32", "tf32", "bf16", "fp8")}
    measured = {name: _number(row[f"measured_{name}_tflops"], 1e12) for name in ("bf16", "fp8")}
    return Gpu(
        name=row["name"],
        memory_gib=float(row["memory_mib"]) / 1024,
        flops=flops,
        memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
        nvlink_bytes_per_s=_number(row["nvlink_gb_per_s"], 1e9),
        pcie_bytes_per_s=float(row["pcie_gb_per_s"]) * 1e9,
        compute_capability=row["compute_capability"],
        device_name=row["device_name"],
        measured_flops={name: rate for name, rate in measured.items() if rate is not None},
    )


def _instance(row: Mapping[str, str]) -> Instance:
    prices = {name: _number(cell) for name, cell in row.items() if name.count("-") == 2}
    return Instance(
        name=row["name"],
        gpu=GPUS[row["gpu"]] if row["gpu"] else None,
        gpus=int(row["gpus"]),
        vcpus=int(row["vcpus"]),
        memory_gib=float(row["memory_gib"]),
        network_bits_per_s=float(row["network_gbit_per_s"]) * 1e9,
        usd_per_hour={region: usd for region, usd in prices.items() if usd is not None},
        efa_interfaces=int(row["efa_interfaces"]),
        first_efa_card=int(row["first_efa_card"]),
    )


GPUS = {gpu.name: gpu for gpu in map(_gpu, _rows("gpus.csv"))}
INSTANCES = {each.name: each for each in map(_instance, _rows("instances.csv"))}
