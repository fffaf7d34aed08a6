"""Decide from facts what is wrong with a cluster: a pure function, tested on made-up facts.

A measurement without a known limit is reported, and not judged.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from rayapp.cluster.preflight import network
from rayapp.cluster.preflight.facts import (
    ClusterFacts,
    Finding,
    NodeFacts,
    NodeReport,
    Requirements,
)
from rayapp.hardware import GIB, Gpu, gpu_from_device_name
from rayapp.observe.words import number_of_bytes

# /dev/shm holds Ray's object store; NCCL puts the buffers between GPUs of a node there too, and
# NVIDIA's containers ask for 1 GiB of it (--shm-size=1g, NCCL's guide, "Docker", 2026).
NCCL_SHARED_MEMORY_BYTES = GIB
DISK_FREE_SHARE = 0.05  # Ray refuses to write objects beyond 95 % (local_fs_capacity_threshold)
OPEN_FILES = 4096  # Ray 2.60 warns below it
# A run's timeline needs this; leases allow LEASE_TAKEN_S, S3 refuses requests from 15 minutes on.
CLOCK_S = 1.0
# Lowest accepted FLOP/s, as a share of the data sheet's or, if known, of the measured ones
# (`Gpu.measured_flops`). The lowest measured ones are 0.73 (H100) and 0.76 (L4) of the sheet's; the
# limits are lower, as one size of matrix is measured instead of the best of many.
FLOPS_SHARE_OF_SHEET, FLOPS_SHARE_OF_MEASURED = 0.55, 0.8
MEMORY_SHARE = 0.7  # of the data sheet's bytes/s; a copy reaches 0.8 to 0.93 of it with ECC on
OF_MEDIAN = 0.85  # of the median of GPUs of the same name, which differ by a few percent
OF_MEDIAN_CPU = 0.5  # of the median core, as a core may be busy or of another kind

Fault = tuple[str, str, str, str]
"""What is wrong, what was measured, what is wanted, how to mend it."""


def assess(facts: ClusterFacts, required: Requirements) -> list[Finding]:
    """Return all findings, the gravest kinds first."""
    return [
        *_cluster(facts, required),
        *_versions(facts),
        *(finding for node in facts.nodes for finding in _node(node, facts, required)),
        *_speeds(facts),
        *_kernels(facts),
        *network.efa(facts, required),
        *network.all_reduce(facts, required),
        *network.links(facts, required),
    ]


def _cluster(facts: ClusterFacts, required: Requirements) -> Iterator[Finding]:
    fix = "Look at its Ray logs and at what else runs there; a run would hang here too"
    for silence in facts.silences:
        what, name = f"does not finish {silence.step}", facts.node(silence.node).name
        yield Finding(name, what, silence.why, "an answer", fix)
    if not facts.nodes:
        yield Finding("cluster", "has no node", "0 nodes", "1", "Start `ray start` on the nodes")
    of_instance = bool(required.instance and required.instance.gpus)
    if facts.backend == "gloo" and (of_instance if required.gpus is None else required.gpus):
        wanted = required.instance.name if required.instance else "cluster.gpu=true"
        fix = "Give the containers GPUs and the NVIDIA runtime; for a check without, set "
        yield Finding("cluster", "has no GPU", "0 GPUs in Ray", wanted, f"{fix}cluster.gpu=false")


def _versions(facts: ClusterFacts) -> Iterator[Finding]:
    """Report nodes whose version of a package is not the most common one.

    Of equally common versions the driver's counts as wanted, else the first.
    """
    reported = [(node.name, node.facts.versions) for node in facts.nodes if node.facts]
    nccl = {facts.node(rank.node).name: rank.nccl for rank in facts.ranks if rank.nccl}
    reported += [(name, {"nccl": version}) for name, version in nccl.items()]
    for package in dict.fromkeys(name for _, versions in reported for name in versions):
        counts = Counter(versions[package] for _, versions in reported if package in versions)
        most = max(counts.values())
        common = [version for version, count in counts.items() if count == most]
        own = facts.versions.get(package)
        wanted = own if own in common else common[0]
        fix = f"Give all nodes the same image, with {package} {wanted}"
        for name, versions in reported:
            if (version := versions.get(package, wanted)) != wanted:
                yield Finding(name, f"{package} differs", version, wanted, fix)
        if own is not None and own != wanted:
            fix = "Start it from the image that the nodes have"
            yield Finding("driver", f"{package} differs", own, wanted, fix)


def _node(node: NodeReport, facts: ClusterFacts, required: Requirements) -> Iterator[Finding]:
    faults = _of_answers(node, facts.storage)
    if (seen := node.facts) is not None:
        faults = {**_limits(node, seen), **_gpus(node, seen, required), **faults}
    yield from (Finding(node.name, *fault) for fault, there in faults.items() if there)


def _of_answers(node: NodeReport, storage: str) -> dict[Fault, bool]:
    offset_s, error_s = (node.clock.offset_s, node.clock.error_s) if node.clock else (0.0, 0.0)
    error, shared = (node.probe.error, node.probe.shared) if node.probe else (None, None)
    to_s3 = "Give its role s3:PutObject, s3:GetObject and s3:DeleteObject on the prefix, and "
    to_s3 += "s3:ListBucket on the bucket"
    return {
        (
            "its clock is off",
            f"{offset_s:+.1f} s against the driver's",
            f"{CLOCK_S:g} s at most",
            "Start chrony (EC2: server 169.254.169.123)",
        ): abs(offset_s) - error_s > CLOCK_S,
        (
            f"cannot use run.storage={storage}",
            f"{error}",
            "write, read and delete",
            to_s3 if storage.startswith("s3://") else "Mount it there, writable",
        ): error is not None,
        (
            f"run.storage={storage} is a folder of its own",
            "the driver's file is not in it",
            "one folder for all nodes",
            "Mount a shared file system there, or set run.storage=s3://bucket/prefix",
        ): error is None and shared is False,
    }


def _limits(node: NodeReport, seen: NodeFacts) -> dict[Fault, bool]:
    several, locked = node.resources.get("GPU", 0) > 1, seen.memlock_bytes
    wanted = int(node.resources.get("object_store_memory", 0))
    wanted += NCCL_SHARED_MEMORY_BYTES if several else 0
    return {
        (
            "shared memory (/dev/shm) is too small",
            number_of_bytes(seen.shared_memory_bytes),
            f"{number_of_bytes(wanted)} for Ray's object store{' and NCCL' if several else ''}",
            "Raise linuxParameters.sharedMemorySize (ECS), the emptyDir of medium Memory at "
            "/dev/shm (Kubernetes) or --shm-size (Docker)",
        ): seen.shared_memory_bytes < wanted,
        (
            f"the disk of {seen.disk} is full",
            f"{number_of_bytes(seen.disk_free_bytes)} free of {number_of_bytes(seen.disk_bytes)}",
            f"{DISK_FREE_SHARE:.0%} free: Ray writes no objects beyond that",
            "Delete what is not needed, or give it a larger disk",
        ): seen.disk_free_bytes < DISK_FREE_SHARE * seen.disk_bytes,
        (
            "too few open files are allowed",
            f"{seen.open_files:,}",
            f"{OPEN_FILES:,}",
            "Raise ulimits.nofile of the container, or `ulimit -n` before `ray start`",
        ): seen.open_files < OPEN_FILES,
        (
            "locked memory is limited, and EFA registers what it sends",
            number_of_bytes(locked or 0),
            "no limit",
            "Set ulimits.memlock to -1 (container), or LimitMEMLOCK=infinity",
        ): seen.efa_devices > 0 and locked is not None,
    }


def _gpus(node: NodeReport, seen: NodeFacts, required: Requirements) -> dict[Fault, bool]:
    """Compare the GPUs that the driver shows, Ray's GPUs and EFA with the instance type's.

    Judge the health of each GPU's memory.
    """
    ray, shown = int(node.resources.get("GPU", 0)), len(seen.devices)
    faults: dict[Fault, bool] = {
        (
            "Ray counts GPUs that the driver does not show",
            f"{shown} GPUs",
            f"{ray}",
            "Look at `nvidia-smi` there: a GPU that has fallen off the bus needs another instance",
        ): ray > shown
    }
    wanted = required.instance
    if wanted and wanted.gpu and required.gpus is not False and (ray or shown):
        known = {device.name: gpu_from_device_name(device.name) for device in seen.devices}
        other = [name for name, gpu in known.items() if gpu and gpu.name != wanted.gpu.name]
        faults |= {
            (
                "fewer GPUs than its instance has",
                f"{ray} in Ray, {shown} shown by the driver",
                f"{wanted.gpus} ({wanted.name})",
                "Give the container all GPUs; if the driver shows fewer, replace the instance",
            ): ray < wanted.gpus,
            (
                "another GPU than its instance has",
                ", ".join(sorted(other)),
                f"{wanted.gpu.name} ({wanted.name})",
                "Set cluster.instance to what the nodes are",
            ): other != [],
            (
                "EFA devices are missing",
                f"{seen.efa_devices}",
                f"{wanted.efa_interfaces} ({wanted.name})",
                "Attach EFA interfaces to the instance, and give the container /dev/infiniband "
                "(Kubernetes: vpc.amazonaws.com/efa)",
            ): seen.efa_devices < wanted.efa_interfaces,
        }
    for device in seen.devices:
        where = f"GPU {device.index} ({device.name})"
        faults |= {
            (
                f"{where} has memory errors",
                f"{device.ecc_errors} that ECC could not correct",
                "0",
                "Replace the instance, or reset the GPU and look again",
            ): bool(device.ecc_errors),
            (
                f"{where} waits to replace bad memory",
                "a row is to be remapped",
                "none",
                "Restart the instance; if it stays, replace it",
            ): bool(device.remap_pending),
        }
    return faults


def _speeds(facts: ClusterFacts) -> Iterator[Finding]:
    """Compare every device with its data sheet, and with the median of devices of its name."""
    fix = "End what else runs there; if nothing does, replace the instance"
    for device in dict.fromkeys(rank.speed.device for rank in facts.ranks):
        ranks = [rank for rank in facts.ranks if rank.speed.device == device]
        speeds, precision = [rank.speed for rank in ranks], ranks[0].speed.precision
        flops, memory = _marks(gpu_from_device_name(device), precision)
        multiplied = [speed.flops / 1e12 for speed in speeds]
        moved = [speed.memory_bytes_per_s / 1e9 for speed in speeds]
        for what, unit, sheet, values in (
            (f"multiplies matrices in {precision} slowly", "TFLOP/s", flops / 1e12, multiplied),
            ("moves memory slowly", "GB/s", memory / 1e9, moved),
        ):
            share = OF_MEDIAN_CPU if device == "cpu" else OF_MEDIAN
            mark = max(sheet, share * statistics.median(values))
            origin = "its sheet" if mark == sheet else "the median of its like"
            for rank, value in zip(ranks, values, strict=True):
                if value < mark:
                    speed, seen = rank.speed, f"{value:.3g} {unit}"
                    where = "a core" if speed.index is None else f"GPU {speed.index}"
                    seen += f" at {speed.clock_mhz:.0f} MHz" if speed.clock_mhz else ""
                    seen += f"; held down by {', '.join(speed.throttled)}" * bool(speed.throttled)
                    name, wanted = facts.node(rank.node).name, f"{mark:.3g} {unit}, by {origin}"
                    yield Finding(name, f"{where} ({device}) {what}", seen, wanted, fix)


def _marks(gpu: Gpu | None, precision: str) -> tuple[float, float]:
    """Return the FLOP/s and the bytes/s that a GPU must reach by its data sheet; 0: not known."""
    if gpu is None:
        return 0.0, 0.0
    flops = FLOPS_SHARE_OF_SHEET * (gpu.flops.get(precision) or 0.0)
    if precision in gpu.measured_flops:
        flops = FLOPS_SHARE_OF_MEASURED * gpu.measured_flops[precision]
    return flops, MEMORY_SHARE * gpu.memory_bytes_per_s


def _kernels(facts: ClusterFacts) -> Iterator[Finding]:
    for rank in facts.ranks:
        if rank.missing_kernels:
            named, what = " and ".join(rank.missing_kernels), "layers without attention"
            what = f"the model's {what} have no kernels"
            wanted = "what its GPU workers can import: PyTorch's own code takes many times as long"
            fix = f"Install {named} in the image of the nodes (docs/models.md)"
            yield Finding(facts.node(rank.node).name, what, f"no {named}", wanted, fix)
