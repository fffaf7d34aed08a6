"""What the survey finds out about a cluster, and what a cluster must reach, as plain values.

NodeReport, NodeFacts, ClockOffset and Probe come from the probe of a node, Rank and Speed from each
worker, AllReduce and Link from all workers together. A step that is not answered is a Silence.
Units: bytes, bytes/s, FLOP/s, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.config import RunConfig
from rayapp.hardware import Instance
from rayapp.planner.question import named_instance


@dataclass(frozen=True)
class Device:
    """A GPU as NVML describes it."""

    index: int
    uuid: str
    name: str
    ecc_errors: int | None
    """Uncorrected since the driver was loaded; None: the GPU has no ECC, or ECC is off."""
    remap_pending: bool | None
    """Memory rows wait for a reset to be remapped, or a remap has failed; None: not supported."""


@dataclass(frozen=True)
class NodeFacts:
    """What the probe finds on its node."""

    host: str
    versions: dict[str, str]
    devices: tuple[Device, ...]
    efa_devices: int
    shared_memory_bytes: int
    """Size of /dev/shm."""
    disk: str
    """The folder that Ray spills objects to."""
    disk_bytes: int
    disk_free_bytes: int
    open_files: int
    """The hard limit, to which Ray raises its soft limit."""
    memlock_bytes: int | None
    """None: no limit."""


@dataclass(frozen=True)
class ClockOffset:
    """How far a node's clock is ahead of the driver's."""

    offset_s: float
    error_s: float
    """Half the round trip: the offset may be wrong by as much."""


@dataclass(frozen=True)
class Probe:
    """The result of writing an object under run.storage, reading it back and deleting it."""

    size_bytes: int
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    error: str | None = None
    shared: bool | None = None
    """Whether the node sees the driver's file; None: not known."""


@dataclass(frozen=True)
class NodeReport:
    """One node and its answers; None: no answer."""

    id: str
    address: str
    host: str
    resources: dict[str, float]
    """Ray's resources of the node: CPU, GPU, object_store_memory (bytes)."""
    facts: NodeFacts | None = None
    clock: ClockOffset | None = None
    probe: Probe | None = None

    @property
    def name(self) -> str:
        """Its name in findings: host, address, and the first 8 characters of Ray's node id."""
        return f"{self.host} ({self.address}, {self.id[:8]})"


@dataclass(frozen=True)
class Speed:
    """The speed of one worker's device alone."""

    device: str
    """The driver's name of the GPU, or cpu (one core)."""
    index: int | None
    """NVML's index of the GPU on its node."""
    precision: str
    """bf16 on a GPU, fp32 on a core."""
    flops: float
    """FLOP/s of a matrix product."""
    memory_bytes_per_s: float
    """Bytes read plus bytes written per second of a copy."""
    clock_mhz: float | None = None
    throttled: tuple[str, ...] = ()
    """NVML's reasons for reduced clocks under load."""


@dataclass(frozen=True)
class Rank:
    """One worker of the group."""

    rank: int
    node: str
    """NodeReport.id."""
    speed: Speed
    network: str | None = None
    """Network that NCCL sends through, as `network_of` names it; None: not known."""
    nccl: str | None = None
    missing_kernels: tuple[str, ...] = ()
    """Packages for the model's layers that a GPU worker cannot import: of a node's first rank."""


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce over all workers; busbw in bytes/s, as nccl-tests defines it."""

    size_bytes: int
    seconds: float
    busbw: float
    wrong: int
    """Number of wrong elements in the results of the worker that has most."""


@dataclass(frozen=True)
class Link:
    """One direction between two nodes: the sum of `pairs` pairs of workers that send at once."""

    sender: str
    receiver: str
    bytes_per_s: float
    pairs: int


@dataclass(frozen=True)
class Silence:
    """A step that a node or worker did not finish."""

    node: str
    """NodeReport.id."""
    step: str
    why: str


@dataclass(frozen=True)
class ClusterFacts:
    """All that a survey has found."""

    versions: dict[str, str]
    """Versions on the driver."""
    backend: str
    """nccl or gloo."""
    storage: str
    nodes: tuple[NodeReport, ...]
    ranks: tuple[Rank, ...] = ()
    all_reduce: AllReduce | None = None
    links: tuple[Link, ...] = ()
    silences: tuple[Silence, ...] = ()
    model_problem: str | None = None
    """Why no node was asked for the kernels of the model's layers, if they were wanted."""

    def node(self, id: str) -> NodeReport:
        """Return the node with an id."""
        return next(node for node in self.nodes if node.id == id)


@dataclass(frozen=True)
class Requirements:
    """What a cluster must reach; None: not known, and so not judged."""

    instance: Instance | None = None
    gbit_per_s: float | None = None
    """Rate of a link in each direction that the user asks for."""
    gpus: bool | None = None
    """cluster.gpu: whether GPUs are wanted; None: use them if there are any."""


@dataclass(frozen=True)
class Finding:
    """Something that would slow a run down, or make it fail."""

    node: str
    """The node's name; two with an arrow for a link; `driver`, or `cluster` for all of it."""
    what: str
    measured: str
    wanted: str
    fix: str


def requirements_of(config: RunConfig, min_gbit_per_s: float | None = None) -> Requirements:
    """Return what the cluster of a config must reach; of a list of types no one is required.

    Raises:
        ConfigError: cluster.instance is not in the table.
    """
    gpus = {"true": True, "false": False}.get(config.cluster.gpu)
    one, several = named_instance(config), len(config.cluster.choices) > 1
    return Requirements(None if several else one, min_gbit_per_s, gpus)
