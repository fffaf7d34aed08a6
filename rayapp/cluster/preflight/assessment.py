"""Decide from facts what is wrong with a cluster: a pure function, tested on made-up facts.

    for finding in assess(facts, requirements_of(config, min_gbit_per_s=None)): ...

A measurement without a known limit is reported, and not judged.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from rayapp.cluster.preflight import network
from rayapp.cluster.preflight.facts import ClusterFacts, Device, NodeReport, Rank
from rayapp.cluster.preflight.findings import Finding, Requirements, size
from rayapp.hardware import GIB, Gpu, gpu_from_device_name

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
MEMORY = "memory"  # key of the memory rate, beside the precisions


def assess(facts: ClusterFacts, required: Requirements) -> list[Finding]:
    """Return all findings, the gravest kinds first."""
    return [
        *_silences(facts),
        *_gpus_at_all(facts, required),
        *_versions(facts),
        *(finding for node in facts.nodes for finding in _node(node, facts, required)),
        *_speeds(facts),
        *_kernels(facts),
        *network.addresses(facts),
        *network.efa(facts, required),
        *network.collectives(facts, required),
        *network.links(facts, required),
    ]


def _silences(facts: ClusterFacts) -> Iterator[Finding]:
    for silence in facts.silences:
        yield Finding(
            facts.node(silence.node).name if silence.node else "cluster",
            f"does not finish {silence.step}",
            silence.why,
            "an answer",
            "Look at its Ray logs and at what else runs there; a run would hang here too",
        )
    if not facts.nodes:
        yield Finding("cluster", "has no node", "0 nodes", "1", "Start `ray start` on the nodes")


def _gpus_at_all(facts: ClusterFacts, required: Requirements) -> Iterator[Finding]:
    """Report a cluster in which GPUs are wanted and Ray has none."""
    wanted = (
        bool(required.instance and required.instance.gpus)
        if required.gpus is None
        else required.gpus
    )
    if wanted and facts.backend == "gloo":
        yield Finding(
            "cluster",
            "has no GPU",
            "0 GPUs in Ray",
            required.instance.name if required.instance else "cluster.gpu=true",
            "Give the containers GPUs and the NVIDIA runtime; for a check without, set "
            "cluster.gpu=false",
        )


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
        for name, versions in reported:
            if package in versions and versions[package] != wanted:
                yield Finding(
                    name,
                    f"{package} differs",
                    versions[package],
                    wanted,
                    f"Give all nodes the same image, with {package} {wanted}",
                )
        if own is not None and own != wanted:
            yield Finding(
                "driver",
                f"{package} differs",
                own,
                wanted,
                "Start it from the image that the nodes have",
            )


def _node(node: NodeReport, facts: ClusterFacts, required: Requirements) -> Iterator[Finding]:
    """Judge one node by itself: limits, GPUs, clock, access to run.storage."""
    node_facts = node.facts
    if node_facts is not None:
        yield from _limits(node, facts)
        yield from _gpus(node, required)
        for device in node_facts.devices:
            yield from _device(node, device)
    clock = node.clock
    if clock is not None and abs(clock.offset_s) - clock.error_s > CLOCK_S:
        yield Finding(
            node.name,
            "its clock is off",
            f"{clock.offset_s:+.1f} s against the driver's",
            f"{CLOCK_S:g} s at most",
            "Start chrony (EC2: server 169.254.169.123)",
        )
    if node.probe is not None and node.probe.error is not None:
        yield Finding(
            node.name,
            f"cannot use run.storage={facts.storage}",
            node.probe.error,
            "write, read and delete",
            "Give its role s3:PutObject, s3:GetObject and s3:DeleteObject on the prefix, and "
            "s3:ListBucket on the bucket"
            if facts.storage.startswith("s3://")
            else "Mount it there, writable",
        )
    elif node.probe is not None and node.probe.shared is False:
        yield Finding(
            node.name,
            f"run.storage={facts.storage} is a folder of its own",
            "the driver's file is not in it",
            "one folder for all nodes",
            "Mount a shared file system there, or set run.storage=s3://bucket/prefix",
        )


def _limits(node: NodeReport, facts: ClusterFacts) -> Iterator[Finding]:
    """Judge shared memory, disk, open files and locked memory."""
    node_facts = node.facts
    assert node_facts is not None
    store = int(node.resources.get("object_store_memory", 0))
    gpus = int(node.resources.get("GPU", 0))
    wanted = store + (NCCL_SHARED_MEMORY_BYTES if gpus > 1 else 0)
    if node_facts.shared_memory_bytes < wanted:
        why = " and NCCL" if gpus > 1 else ""
        yield Finding(
            node.name,
            "shared memory (/dev/shm) is too small",
            size(node_facts.shared_memory_bytes),
            f"{size(wanted)} for Ray's object store{why}",
            "Raise linuxParameters.sharedMemorySize (ECS), the emptyDir of medium Memory at "
            "/dev/shm (Kubernetes) or --shm-size (Docker)",
        )
    if node_facts.disk_free_bytes < DISK_FREE_SHARE * node_facts.disk_bytes:
        yield Finding(
            node.name,
            f"the disk of {node_facts.disk} is full",
            f"{size(node_facts.disk_free_bytes)} free of {size(node_facts.disk_bytes)}",
            f"{DISK_FREE_SHARE:.0%} free: Ray writes no objects beyond that",
            "Delete what is not needed, or give it a larger disk",
        )
    if node_facts.open_files < OPEN_FILES:
        yield Finding(
            node.name,
            "too few open files are allowed",
            f"{node_facts.open_files:,}",
            f"{OPEN_FILES:,}",
            "Raise ulimits.nofile of the container, or `ulimit -n` before `ray start`",
        )
    if node_facts.efa_devices and node_facts.memlock_bytes is not None:
        yield Finding(
            node.name,
            "locked memory is limited, and EFA registers what it sends",
            size(node_facts.memlock_bytes),
            "no limit",
            "Set ulimits.memlock to -1 (container), or LimitMEMLOCK=infinity",
        )


def _gpus(node: NodeReport, required: Requirements) -> Iterator[Finding]:
    """Compare the GPUs that the driver shows, Ray's GPUs and EFA with the instance type's."""
    node_facts, ray = node.facts, int(node.resources.get("GPU", 0))
    assert node_facts is not None
    device_count = len(node_facts.devices)
    if ray > device_count:
        yield Finding(
            node.name,
            "Ray counts GPUs that the driver does not show",
            f"{device_count} GPUs",
            f"{ray}",
            "Look at `nvidia-smi` there: a GPU that has fallen off the bus needs another instance",
        )
    wanted = required.instance
    if wanted is None or not wanted.gpus or required.gpus is False or not (ray or device_count):
        return
    if ray < wanted.gpus:
        yield Finding(
            node.name,
            "fewer GPUs than its instance has",
            f"{ray} in Ray, {device_count} shown by the driver",
            f"{wanted.gpus} ({wanted.name})",
            "Give the container all GPUs; if the driver shows fewer, replace the instance",
        )
    other = {device.name for device in node_facts.devices if not _is(device, wanted.gpu)}
    if other:
        assert wanted.gpu is not None
        yield Finding(
            node.name,
            "another GPU than its instance has",
            ", ".join(sorted(other)),
            f"{wanted.gpu.name} ({wanted.name})",
            "Set cluster.instance to what the nodes are",
        )
    if wanted.efa_interfaces and node_facts.efa_devices < wanted.efa_interfaces:
        yield Finding(
            node.name,
            "EFA devices are missing",
            f"{node_facts.efa_devices}",
            f"{wanted.efa_interfaces} ({wanted.name})",
            "Attach EFA interfaces to the instance, and give the container /dev/infiniband "
            "(Kubernetes: vpc.amazonaws.com/efa)",
        )


def _is(device: Device, gpu: Gpu | None) -> bool:
    known = gpu_from_device_name(device.name)
    return gpu is None or known is None or known.name == gpu.name


def _device(node: NodeReport, device: Device) -> Iterator[Finding]:
    """Judge the health of a GPU's memory."""
    where = f"GPU {device.index} ({device.name})"
    if device.ecc_errors:
        yield Finding(
            node.name,
            f"{where} has memory errors",
            f"{device.ecc_errors} that ECC could not correct",
            "0",
            "Replace the instance, or reset the GPU and look again",
        )
    if device.remap_pending:
        yield Finding(
            node.name,
            f"{where} waits to replace bad memory",
            "a row is to be remapped",
            "none",
            "Restart the instance; if it stays, replace it",
        )


def _speeds(facts: ClusterFacts) -> Iterator[Finding]:
    """Compare every device with its data sheet, and with the median of devices of its name."""
    rates: dict[tuple[str, str], list[float]] = {}
    for rank in facts.ranks:
        for name, value in _rates(rank).items():
            assert rank.speed is not None
            rates.setdefault((rank.speed.device, name), []).append(value)
    median = {key: statistics.median(values) for key, values in rates.items()}
    for rank in facts.ranks:
        for name, value in _rates(rank).items():
            assert rank.speed is not None
            device = rank.speed.device
            sheet = _mark(gpu_from_device_name(device), name)
            peers = (OF_MEDIAN_CPU if device == "cpu" else OF_MEDIAN) * median[device, name]
            yield from _slow(facts, rank, name, value, sheet, peers)


def _kernels(facts: ClusterFacts) -> Iterator[Finding]:
    """Report nodes on which PyTorch's code takes the place of kernels of the model's layers."""
    for rank in facts.ranks:
        if rank.missing_kernels:
            named = " and ".join(rank.missing_kernels)
            yield Finding(
                facts.node(rank.node).name,
                "the model's layers without attention have no kernels",
                f"no {named}",
                "what its GPU workers can import: PyTorch's own code takes many times as long",
                f"Install {named} in the image of the nodes (docs/models.md)",
            )


def _rates(rank: Rank) -> dict[str, float]:
    """Return the rates of a device: FLOP/s by precision, and bytes/s of its memory."""
    speed = rank.speed
    return {} if speed is None else {**speed.flops, MEMORY: speed.memory_bytes_per_s}


def _mark(gpu: Gpu | None, name: str) -> float | None:
    """Return the rate that a GPU must reach by its data sheet; None for fp32 and tf32.

    Cards such as A10G and L4 reach their power limit well below the sheet's fp32 figure.
    """
    if gpu is None or name in ("fp32", "tf32"):
        return None
    if name == MEMORY:
        return MEMORY_SHARE * gpu.memory_bytes_per_s
    if name in gpu.measured_flops:
        return FLOPS_SHARE_OF_MEASURED * gpu.measured_flops[name]
    peak = gpu.flops.get(name)
    return None if peak is None else FLOPS_SHARE_OF_SHEET * peak


def _slow(
    facts: ClusterFacts, rank: Rank, name: str, value: float, sheet: float | None, peers: float
) -> Iterator[Finding]:
    """Report a device below the higher of two limits, `sheet` and `peers`, and say which it is."""
    assert rank.speed is not None
    mark = max(sheet or 0.0, peers)
    if value >= mark:
        return
    unit, of = (1e9, "GB/s") if name == MEMORY else (1e12, "TFLOP/s")
    what = "moves memory slowly" if name == MEMORY else f"multiplies matrices in {name} slowly"
    origin = "its sheet" if mark == sheet else "the median of its like"
    where = "a core" if rank.speed.index is None else f"GPU {rank.speed.index}"
    held = f"; held down by {', '.join(rank.speed.throttled)}" if rank.speed.throttled else ""
    clock = f" at {rank.speed.clock_mhz:.0f} MHz" if rank.speed.clock_mhz else ""
    yield Finding(
        facts.node(rank.node).name,
        f"{where} ({rank.speed.device}) {what}",
        f"{value / unit:.3g} {of}{clock}{held}",
        f"{mark / unit:.3g} {of}, by {origin}",
        "End what else runs there; if nothing does, replace the instance",
    )
