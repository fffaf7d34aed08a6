"""Inspect the node that this runs on: one actor on every node, which imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from rayapp.cluster.preflight.facts import Device, NodeFacts, Probe
from rayapp.jobs import secrets
from rayapp.storage import StorageError, open_storage

PROBE_BYTES = 32 * 2**20
PACKAGES = ("ray", "torch", "transformers", "rayapp")
SHARED_MEMORY = "/dev/shm"
EFA_DRIVER = "efa"


class NodeProbe:
    """An actor on one node; its methods run concurrently, so one that hangs blocks no other."""

    def __init__(self) -> None:
        secrets.load()

    def clock(self) -> float:
        """Return this node's time, in Unix seconds."""
        return time.time()

    def facts(self, disk: str) -> NodeFacts:
        """Return the node's facts; `disk` is the folder that Ray spills objects to."""
        shared = os.statvfs(SHARED_MEMORY)
        usage = shutil.disk_usage(disk)
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return NodeFacts(
            host=socket.gethostname(),
            versions=versions(),
            devices=devices(),
            efa_devices=_efa_devices(),
            shared_memory_bytes=shared.f_blocks * shared.f_frsize,
            disk=disk,
            disk_bytes=usage.total,
            disk_free_bytes=usage.free,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        )

    def probe(self, url: str, mark: str) -> Probe:
        """Write, read back and delete an object under `url`; look for the driver's file `mark`."""
        return probe(url, mark)


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions | {"rayapp's files": _digest(Path(__file__).parents[1])}


def _digest(package: Path) -> str:
    """Return a digest of a package's modules, as two builds of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def probe(url: str, mark: str, size: int = PROBE_BYTES) -> Probe:
    """Write `size` random bytes under a folder, read them back, delete them; time both.

    An error is returned in `Probe.error`, not raised. `mark` is a file below the folder that all
    nodes must see; empty: there is none.
    """
    storage, name = open_storage(url), f"preflight-{uuid.uuid4().hex}/probe"
    data = os.urandom(size)
    try:
        storage.check_writable()
        started = time.perf_counter()
        storage.write(name, data)
        written = time.perf_counter()
        same = storage.read(name) == data
        read = time.perf_counter()
        shared = storage.exists(mark) if mark else None
        storage.delete_tree(name.split("/")[0])
    except (StorageError, OSError) as error:
        return Probe(size, error=str(error))
    if not same:
        return Probe(size, error=f"what was read back from {url} differs from what was written")
    return Probe(size, size / (written - started), size / (read - written), shared=shared)


def devices() -> tuple[Device, ...]:
    """Return the GPUs that NVML lists on this node, regardless of CUDA_VISIBLE_DEVICES."""
    import ray._private.thirdparty.pynvml as nvml  # comes with Ray

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver: no GPU
        return ()
    try:
        return tuple(_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    which = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ecc = _asked(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, *which)
    rows = _asked(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    return Device(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        ecc_errors=ecc,
        remap_pending=None if rows is None else bool(rows[2] or rows[3]),  # is pending, has failed
    )


def _asked(nvml: Any, function: Any, *arguments: Any) -> Any:
    """Return NVML's answer; None if this GPU does not support the query."""
    try:
        return function(*arguments)
    except nvml.NVMLError_NotSupported:
        return None


def _efa_devices(
    root: str = "/sys/class/infiniband_verbs", devices: str = "/dev/infiniband"
) -> int:
    """Count the EFA devices that this process may open; a container's /sys shows all the host's."""
    if not os.path.isdir(root):
        return 0
    return sum(
        (entry / "device" / "driver").resolve().name == EFA_DRIVER
        and os.access(Path(devices) / entry.name, os.R_OK | os.W_OK)
        for entry in Path(root).glob("uverbs*")
    )
