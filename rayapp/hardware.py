"""GPUs and EC2 instances: memory, FLOP/s, links, network, price; None if unknown, never a guess.

    instance("p5.48xlarge").gpu.flops["bf16"]               # 989.4e12: dense, never with sparsity
    gpu_from_device_name("NVIDIA H100 80GB HBM3")           # the same GPU, None if unknown

Sources. GPUs: NVIDIA's data sheets and architecture papers (V100 2020, A100 2021, A10G and L4 2023,
L40S and H100 2024, H200 2024, Blackwell 2025), dense figures: where only the sparse one is printed
it is halved. Instances: EC2's DescribeInstanceTypes as of 2026-11, and for the p3 sizes, which it
no longer lists, AWS's page of 2023. Prices: on demand, Linux, from the AWS price list as of 2026-11
(after the price cut of P4 and P5 in June 2025); p5e is sold only in capacity blocks and has no
on-demand price. Measured matrix products: A100, B200, B300 mamf-finder (ml-engineering, its table
of 2026), A10G and L4 gpu_benchmark (2024), H100 and H200 SemiAnalysis (2024-12-22: shapes of a
Llama, sustained). Units: GiB is 2**30 bytes; FLOP/s, bytes/s and bits/s are decimal.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30

PRICE_DATE = "2026-11-21"
PRICE_SOURCE = "AWS price list, on demand, Linux"
DEFAULT_REGION = "us-west-2"


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
    device_names: tuple[str, ...] = ()
    """The driver's names of it."""
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
    network_cards: int = 1
    interfaces_per_card: int | None = None
    """The most ENA and EFA interfaces that one card can have."""
    first_efa_card: int = 0
    """Index of the first card with EFA: 1 on p6-b300, whose card 0 has none."""
    local_disk_gib: float | None = None
    """NVMe instance store, all disks together; None: there is none."""
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
    with_gpus = ", ".join(other for other, one in INSTANCES.items() if one.gpus > 1)
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
    for gpu in GPUS.values():
        if any(wanted == known.casefold() for known in gpu.device_names):
            return gpu
    return None


def usd_per_hour(one: Instance, region: str) -> float | None:
    """Return the on-demand price of an instance in USD per hour, None if it is not known."""
    return one.usd_per_hour.get(region)


def _flops(fp32: float, tf32: float | None, bf16: float | None, fp8: float | None) -> dict:
    """Return FLOP/s by precision, given TFLOP/s."""
    values = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp8": fp8}
    return {name: None if value is None else value * 1e12 for name, value in values.items()}


def _mib(mebibytes: float) -> float:
    return mebibytes / 1024


_H100_FLOPS = _flops(66.9, 494.7, 989.4, 1978.9)  # also the H200's: the same die
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "V100-16GB",
            _mib(16384),
            _flops(15.7, None, None, None),  # its tensor cores do fp16 only (125 TFLOP/s)
            900e9,
            150e9,
            16e9,
            "7.0",
            ("Tesla V100-SXM2-16GB",),
        ),
        Gpu(
            "V100-32GB",
            _mib(32768),
            _flops(15.7, None, None, None),
            900e9,
            150e9,
            16e9,
            "7.0",
            ("Tesla V100-SXM2-32GB",),
        ),
        Gpu(
            "A10G",
            _mib(22888),
            _flops(31.5, 35.0, 70.0, None),
            600e9,
            None,
            32e9,
            "8.6",
            ("NVIDIA A10G",),
            {"bf16": 69.7e12},
        ),
        Gpu(
            "L4",
            _mib(22888),
            _flops(30.3, 60.0, 121.0, 242.0),
            300e9,
            None,
            32e9,
            "8.9",
            ("NVIDIA L4",),
            {"bf16": 91.4e12},
        ),
        Gpu(
            "L40S",
            _mib(45776),
            _flops(91.6, 183.0, 362.0, 733.0),
            864e9,
            None,
            32e9,
            "8.9",
            ("NVIDIA L40S",),
        ),
        Gpu(
            "A100-40GB",
            _mib(40960),
            _flops(19.5, 156.0, 312.0, None),
            1555e9,
            300e9,
            32e9,
            "8.0",
            ("NVIDIA A100-SXM4-40GB",),
            {"bf16": 271.2e12},
        ),
        Gpu(
            "A100-80GB",
            _mib(81920),
            _flops(19.5, 156.0, 312.0, None),
            2039e9,
            300e9,
            32e9,
            "8.0",
            ("NVIDIA A100-SXM4-80GB",),
            {"bf16": 271.2e12},
        ),
        Gpu(
            "H100",
            _mib(81920),
            _H100_FLOPS,
            3352e9,
            450e9,
            64e9,
            "9.0",
            ("NVIDIA H100 80GB HBM3",),
            {"bf16": 720e12, "fp8": 1280e12},
        ),
        Gpu(
            "H200",
            _mib(144384),
            _H100_FLOPS,
            4800e9,
            450e9,
            64e9,
            "9.0",
            ("NVIDIA H200",),
            {"bf16": 720e12, "fp8": 1280e12},
        ),
        Gpu(
            "B200",
            _mib(183359),
            _flops(75.0, 1125.0, 2250.0, 4500.0),  # HGX, 1,000 W
            7700e9,
            900e9,
            64e9,
            "10.0",
            ("NVIDIA B200",),
            {"bf16": 1745e12, "fp8": 3432e12},
        ),
        Gpu(
            "B300",
            _mib(275040),
            _flops(75.0, 1125.0, 2250.0, 4500.0),
            8000e9,
            900e9,
            128e9,
            "10.3",
            ("NVIDIA B300 SXM6 AC",),
            {"bf16": 1769e12, "fp8": 3353e12},
        ),
    )
}


def _us(usd: float) -> dict[str, float]:
    """Return a price for the regions of the United States that have the same one."""
    return {"us-east-1": usd, "us-east-2": usd, "us-west-2": usd}


def _gb(gigabytes: float) -> float:
    """Convert a disk's GB to GiB."""
    return gigabytes * 1e9 / GIB


def _one_card(
    gpu: str, rows: tuple[tuple[str, int, int, float, float, int, int, int, float], ...]
) -> tuple[Instance, ...]:
    """Return the sizes of a family, each with one network card per EFA interface, and at least one.

    Rows: name, GPUs, vCPUs, GiB, Gbit/s, EFA interfaces, interfaces per card, disk GB, USD/h.
    """
    return tuple(
        Instance(
            name,
            GPUS[gpu],
            gpus,
            vcpus,
            memory,
            gigabits * 1e9,
            _us(usd),
            efa_interfaces=efa,
            network_cards=max(efa, 1),
            interfaces_per_card=per_card,
            local_disk_gib=_gb(disk) if disk else None,
        )
        for name, gpus, vcpus, memory, gigabits, efa, per_card, disk, usd in rows
    )


_G = (
    *_one_card(
        "A10G",
        (
            ("g5.xlarge", 1, 4, 16, 2.5, 0, 4, 250, 1.006),
            ("g5.2xlarge", 1, 8, 32, 5, 0, 4, 450, 1.212),
            ("g5.4xlarge", 1, 16, 64, 10, 0, 8, 600, 1.624),
            ("g5.8xlarge", 1, 32, 128, 25, 1, 8, 900, 2.448),
            ("g5.16xlarge", 1, 64, 256, 25, 1, 8, 1900, 4.096),
            ("g5.12xlarge", 4, 48, 192, 40, 1, 15, 3800, 5.672),
            ("g5.24xlarge", 4, 96, 384, 50, 1, 15, 3800, 8.144),
            ("g5.48xlarge", 8, 192, 768, 100, 1, 7, 7600, 16.288),
        ),
    ),
    *_one_card(
        "L4",
        (
            ("g6.xlarge", 1, 4, 16, 2.5, 0, 4, 250, 0.8048),
            ("g6.2xlarge", 1, 8, 32, 5, 0, 4, 450, 0.9776),
            ("g6.4xlarge", 1, 16, 64, 10, 0, 8, 600, 1.3232),
            ("g6.8xlarge", 1, 32, 128, 25, 1, 8, 900, 2.0144),
            ("g6.16xlarge", 1, 64, 256, 25, 1, 15, 1880, 3.3968),
            ("g6.12xlarge", 4, 48, 192, 40, 1, 8, 3760, 4.6016),
            ("g6.24xlarge", 4, 96, 384, 50, 1, 15, 3760, 6.6752),
            ("g6.48xlarge", 8, 192, 768, 100, 1, 15, 7520, 13.3504),
        ),
    ),
    *_one_card(
        "L40S",
        (
            ("g6e.xlarge", 1, 4, 32, 2.5, 0, 4, 250, 1.861),
            ("g6e.2xlarge", 1, 8, 64, 5, 0, 4, 450, 2.24208),
            ("g6e.4xlarge", 1, 16, 128, 20, 0, 8, 600, 3.00424),
            ("g6e.8xlarge", 1, 32, 256, 25, 1, 8, 900, 4.52856),
            ("g6e.16xlarge", 1, 64, 512, 35, 1, 15, 1900, 7.57719),
            ("g6e.12xlarge", 4, 48, 384, 100, 1, 10, 3800, 10.49264),
            ("g6e.24xlarge", 4, 96, 768, 200, 2, 10, 3800, 15.06559),
            ("g6e.48xlarge", 8, 192, 1536, 400, 4, 10, 7600, 30.13118),
        ),
    ),
)

_P = (
    Instance("p3.2xlarge", GPUS["V100-16GB"], 1, 8, 61, 2.5e9, _us(3.06)),
    Instance("p3.8xlarge", GPUS["V100-16GB"], 4, 32, 244, 10e9, _us(12.24)),
    Instance("p3.16xlarge", GPUS["V100-16GB"], 8, 64, 488, 25e9, _us(24.48)),
    *_one_card("V100-32GB", (("p3dn.24xlarge", 8, 96, 768, 100, 1, 15, 1800, 31.212),)),
    *_one_card("A100-40GB", (("p4d.24xlarge", 8, 96, 1152, 400, 4, 15, 8000, 21.95764),)),
    Instance(
        "p4de.24xlarge",
        GPUS["A100-80GB"],
        8,
        96,
        1152,
        400e9,
        {"us-east-1": 27.44705, "us-west-2": 27.44705, "eu-central-1": 34.29122},
        efa_interfaces=4,
        network_cards=4,
        interfaces_per_card=15,
        local_disk_gib=_gb(8000),
    ),
    *_one_card("H100", (("p5.4xlarge", 1, 16, 256, 100, 1, 4, 3800, 6.88),)),
    Instance(
        "p5.48xlarge",
        GPUS["H100"],
        8,
        192,
        2048,
        3200e9,
        {**_us(55.04), "ap-northeast-1": 68.8, "ap-south-1": 66.048, "eu-west-2": 71.552},
        efa_interfaces=32,
        network_cards=32,
        interfaces_per_card=2,
        local_disk_gib=_gb(30400),
    ),
    Instance(
        "p5e.48xlarge",
        GPUS["H200"],
        8,
        192,
        2048,
        3200e9,
        {},
        efa_interfaces=32,
        network_cards=32,
        interfaces_per_card=2,
        local_disk_gib=_gb(30400),
    ),
    Instance(
        "p5en.48xlarge",
        GPUS["H200"],
        8,
        192,
        2048,
        3200e9,
        {**_us(63.296), "ap-northeast-1": 79.12, "ap-south-1": 75.9552, "eu-north-1": 67.72672},
        efa_interfaces=16,
        network_cards=16,
        interfaces_per_card=4,
        local_disk_gib=_gb(30400),
    ),
    *_one_card("B200", (("p6-b200.48xlarge", 8, 192, 2048, 3200, 8, 4, 30400, 113.9328),)),
    Instance(
        "p6-b300.48xlarge",
        GPUS["B300"],
        8,
        192,
        4096,
        6400e9,
        {"us-west-2": 142.416},
        efa_interfaces=16,
        network_cards=17,
        interfaces_per_card=4,
        first_efa_card=1,
        local_disk_gib=_gb(30400),
    ),
)

# Without a GPU, for a Ray head or for preparing data: name, vCPUs, GiB, Gbit/s, USD per hour.
_CPU = tuple(
    Instance(name, None, 0, vcpus, memory, gigabits * 1e9, _us(usd))
    for name, vcpus, memory, gigabits, usd in (
        ("c5.2xlarge", 8, 16, 2.5, 0.34),
        ("c5.4xlarge", 16, 32, 5, 0.68),
        ("c5.9xlarge", 36, 72, 12, 1.53),
        ("c5.18xlarge", 72, 144, 25, 3.06),
        ("c6i.2xlarge", 8, 16, 3.125, 0.34),
        ("c6i.4xlarge", 16, 32, 6.25, 0.68),
        ("c6i.8xlarge", 32, 64, 12.5, 1.36),
        ("c6i.16xlarge", 64, 128, 25, 2.72),
        ("c7i.2xlarge", 8, 16, 3.125, 0.357),
        ("c7i.4xlarge", 16, 32, 6.25, 0.714),
        ("c7i.8xlarge", 32, 64, 12.5, 1.428),
        ("c7i.16xlarge", 64, 128, 25, 2.856),
        ("m5.xlarge", 4, 16, 1.25, 0.192),
        ("m5.2xlarge", 8, 32, 2.5, 0.384),
        ("m5.4xlarge", 16, 64, 5, 0.768),
        ("m5.8xlarge", 32, 128, 10, 1.536),
        ("m6i.xlarge", 4, 16, 1.562, 0.192),
        ("m6i.2xlarge", 8, 32, 3.125, 0.384),
        ("m6i.4xlarge", 16, 64, 6.25, 0.768),
        ("m6i.8xlarge", 32, 128, 12.5, 1.536),
        ("m7i.xlarge", 4, 16, 1.562, 0.2016),
        ("m7i.2xlarge", 8, 32, 3.125, 0.4032),
        ("m7i.4xlarge", 16, 64, 6.25, 0.8064),
        ("m7i.8xlarge", 32, 128, 12.5, 1.6128),
        ("m7i.16xlarge", 64, 256, 25, 3.2256),
        ("r6i.2xlarge", 8, 64, 3.125, 0.504),
        ("r6i.4xlarge", 16, 128, 6.25, 1.008),
        ("r6i.8xlarge", 32, 256, 12.5, 2.016),
    )
)

INSTANCES = {one.name: one for one in (*_G, *_P, *_CPU)}
