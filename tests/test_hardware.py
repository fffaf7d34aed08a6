"""The table of GPUs and instances, held to what EC2 itself reports (by moto's copy of it)."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import moto
import pytest

from rayapp.hardware import GPUS, INSTANCES, UnknownInstance, gpu_from_device_name, instance


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """DescribeInstanceTypes of every type, as moto ships it."""
    path = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
    with gzip.open(path) as file:
        return json.load(file)


def test_every_instance_is_as_ec2_describes_it(described: dict[str, Any]) -> None:
    absent = set(INSTANCES) - set(described)
    assert absent == {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge"}, "EC2 no longer lists p3"
    for name in set(INSTANCES) - absent:
        one, truth = INSTANCES[name], described[name]
        network = truth["NetworkInfo"]
        cards = network["NetworkCards"]
        gpus = truth.get("GpuInfo", {}).get("Gpus", [])
        assert one.vcpus == truth["VCpuInfo"]["DefaultVCpus"], name
        assert one.memory_gib == truth["MemoryInfo"]["SizeInMiB"] / 1024, name
        assert one.gpus == sum(gpu["Count"] for gpu in gpus), name
        assert set(one.architectures) == set(truth["ProcessorInfo"]["SupportedArchitectures"])
        efa = network.get("EfaInfo") or {"MaximumEfaInterfaces": 0}
        assert one.efa_interfaces == efa["MaximumEfaInterfaces"], name
        if len(cards) == 1:
            assert one.network_bits_per_s == cards[0]["BaselineBandwidthInGbps"] * 1e9, name
        else:
            factors = re.findall(r"[0-9.]+", network["NetworkPerformance"])  # "4x 100 Gigabit"
            assert one.network_bits_per_s == math.prod(map(float, factors)) * 1e9, name
        if one.gpu is None:
            assert not gpus
            continue
        assert one.gpu.name.split("-")[0] == gpus[0]["Name"], name
        assert one.gpu.memory_gib == gpus[0]["MemoryInfo"]["SizeInMiB"] / 1024, name
        with_efa = [
            card["NetworkCardIndex"]
            for card in cards
            if "efa" in card.get("InterfaceTypes", ["efa"])
        ]
        if one.efa_interfaces > 1:
            assert one.first_efa_card == min(with_efa), name
            assert one.efa_interfaces <= len(with_efa), name


def test_peaks_are_dense_and_ordered() -> None:
    for gpu in GPUS.values():
        known = [gpu.flops[name] for name in ("fp32", "tf32", "bf16", "fp8")]
        rising = [value for value in known if value is not None]
        assert rising == sorted(rising), gpu.name
        assert gpu.memory_bytes_per_s < 1e13
    # tf32, bf16 and fp8 each double the one before on tensor cores.
    for name in ("H100", "H200", "B200", "B300", "L40S"):
        flops = GPUS[name].flops
        assert flops["bf16"] == pytest.approx(2 * flops["tf32"], rel=0.02)
        assert flops["fp8"] == pytest.approx(2 * flops["bf16"], rel=0.02)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
    ],
)
def test_a_device_name_is_recognised(device: str, name: str) -> None:
    gpu = gpu_from_device_name(device)
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize("device", ["NVIDIA A10", "NVIDIA H100 NVL", "NVIDIA L40", "cpu", ""])
def test_another_card_of_like_name_is_not(device: str) -> None:
    assert gpu_from_device_name(device) is None


def test_an_unknown_instance_names_the_nearest() -> None:
    with pytest.raises(UnknownInstance, match=r"p5\.48xlrge is unknown.*Did you mean p5\.48xlarge"):
        instance("p5.48xlrge")
    with pytest.raises(UnknownInstance, match=r"workers=zzz is unknown.*Set one of .*p4d"):
        instance("zzz", field="workers")


def test_prices() -> None:
    assert INSTANCES["g5.12xlarge"].usd_per_hour["us-west-2"] == 5.672  # the seed's own figure
    assert "us-west-2" not in INSTANCES["p5e.48xlarge"].usd_per_hour
    for one in INSTANCES.values():
        assert all(0.1 < usd < 200 for usd in one.usd_per_hour.values()), one.name
